"""Checkpoints: which versions are written, by which rank, and when they are published (R19, C1).

The lowest active member writes every N-th version, one at a time. It copies the state right after
the update, writes it in the background, and publishes it once this rank has committed the next
version: that proves that every member had this one. The version that ends the job is published
after RELEASE. A slow disk never holds up a round.
"""

from __future__ import annotations

from typing import Final

from paceline_api.times import NS_PER_S

from paceline.core.messages import Saved
from paceline.core.rank.events import Publish, Published, Save, Unsave, WakeAt, Written
from paceline.core.rank.state import CheckpointStage, RankState

FINAL_NS: Final = 600 * NS_PER_S
"""How long a released rank stays for its last checkpoint: 10 minutes."""


def save(rank: RankState) -> None:
    """Begin or publish a checkpoint if the state of the rank, whatever changed it, calls for it."""
    s, log = rank.saving, rank.log
    if rank.ended:
        return
    if s.stage is CheckpointStage.WRITTEN and (log.version > s.version or rank.released):
        s.stage = CheckpointStage.PUBLISHING
        rank.emit(Publish(s.version))
    if s.every and rank.has_state and not rank.passive:
        _save_when_due(rank)
    _exit_when_published(rank)


def _save_when_due(rank: RankState) -> None:
    s, log = rank.saving, rank.log
    if log.active[:1] != (rank.me,):
        s.considered = log.version
    elif log.stopped:
        # The last version is never skipped: nothing changes any more until the release.
        if not s.final and s.stage is CheckpointStage.NONE:
            s.final = True
            # The job is not finished if a stop was requested before its end.
            _begin(rank, finished=log.is_worked_off)
    elif log.version != s.considered:
        s.considered = log.version
        if log.version % s.every == 0:
            if s.stage is CheckpointStage.NONE:
                _begin(rank, finished=False)
            else:
                s.skipped += 1


def _begin(rank: RankState, *, finished: bool) -> None:
    s = rank.saving
    s.stage, s.version, s.void = CheckpointStage.WRITING, rank.log.version, False
    rank.emit(Save(rank.log.snapshot(), finished))


def on_writer(rank: RankState, event: Written | Published) -> None:
    """Handle the outcome of an order to the checkpoint writer, which may be a failure."""
    s = rank.saving
    if event.problem:
        s.stage = CheckpointStage.NONE
        s.failed += 1
        rank.tell(Saved(rank.me, event.version, event.problem))
    elif isinstance(event, Published):
        s.stage = CheckpointStage.NONE
        s.written += 1
        s.published = event.version
        rank.tell(Saved(rank.me, event.version))
    elif s.void:
        s.stage = CheckpointStage.NONE
        rank.emit(Unsave())
    else:
        s.stage = CheckpointStage.WRITTEN


def replaced(rank: RankState) -> None:
    """Discard what was not published, because the committed state is another one now (R8)."""
    s = rank.saving
    s.considered, s.final = rank.log.version, False
    if s.stage is CheckpointStage.WRITTEN:
        s.stage = CheckpointStage.NONE
        rank.emit(Unsave())
    elif s.stage is CheckpointStage.WRITING:
        s.void = True


def released(rank: RankState) -> None:
    """Let the rank end as finished once its last checkpoint is published; called after RELEASE."""
    rank.saving.exit_by_ns = rank.now_ns + FINAL_NS


def _exit_when_published(rank: RankState) -> None:
    s = rank.saving
    if s.exit_by_ns is None:
        return
    under_way = s.stage is not CheckpointStage.NONE
    if under_way and rank.now_ns < s.exit_by_ns:
        rank.emit(WakeAt(s.exit_by_ns))
    else:
        rank.end(finished=True, why="released")
