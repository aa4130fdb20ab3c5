"""Checkpoints as the communication thread handles them: copy, hand over, load.

`core.rank.saving` decides what is saved and when. Here the committed state is copied, which is the
part of a checkpoint that delays training, and the copy is given to the writer. Here, too, a
checkpoint that COMMIT names becomes the committed state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from paceline_api.jobfile import CheckpointSpec
from paceline_api.times import NS_PER_S

from paceline.clock import now_ns
from paceline.core.rank import events as ev
from paceline.core.rank.state import Saving
from paceline.errors import CheckpointError
from paceline.telemetry.records import RankRecord
from paceline.worker.checkpoint import format as disk
from paceline.worker.checkpoint.writer import Answer, CheckpointWriter
from paceline.worker.metrics.rounds import CheckpointMetrics
from paceline.worker.state.committed import Committed

log = logging.getLogger("paceline.checkpoint")

CLOSE_S: Final = 2.0
"""Upper bound on how long `close` waits for the writer, in seconds."""

Order = ev.Save | ev.Publish | ev.Unsave


class CheckpointService:
    """The checkpoints of one rank.

    The communication thread calls this; the main thread calls `look` once, when training begins.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        identity: disk.Identity,
        committed: Committed,
        post: Callable[[Answer], None],
        record: RankRecord,
        pid: int,
    ) -> None:
        """Create the service; the writer's thread starts with the first order.

        Args:
            spec: Where checkpoints lie and how many are kept.
            identity: Job, model, data and shard that a checkpoint must match.
            committed: The state to copy and to load.
            post: Takes the writer's answers, on the writer's thread.
            record: The rank's record of metrics.
            pid: Process id of this rank, or of the first rank of its group.
        """
        self._exposed_s = 0.0
        """Seconds for which the communication thread has copied."""
        self._path, self._identity, self._committed = Path(spec.path), identity, committed
        self._metrics = CheckpointMetrics(record)
        self._writer = CheckpointWriter(self._path, identity, keep=spec.keep, post=post, pid=pid)

    def look(self) -> ev.CheckpointFound:
        """Return the newest checkpoint in the folder now, or why it cannot be used."""
        try:
            return ev.CheckpointFound(disk.find(self._path, self._identity))
        except CheckpointError as error:
            return ev.CheckpointFound(None, str(error))

    def obey(self, order: Order) -> None:
        """Carry out an order of the state machine; the writer's answer is posted later."""
        match order:
            case ev.Save(log=snapshot, finished=finished):
                begun_ns = now_ns()
                copy = self._committed.copy()
                self._exposed_s += (now_ns() - begun_ns) / NS_PER_S
                self._writer.save(copy, snapshot, finished=finished)
            case ev.Publish(version=version):
                self._writer.publish(version)
            case ev.Unsave():
                self._writer.drop()

    def count(self, saving: Saving) -> None:
        """Export what checkpoints have cost so far; call it after an answer of the writer."""
        self._metrics.follow(saving, self._exposed_s, self._writer.hidden_s)

    def restore(self, order: ev.Restore) -> ev.Restored:
        """Load a checkpoint as the committed state.

        CheckpointError or StateError is raised if the checkpoint cannot be loaded. The committed
        state is then as it was.

        Args:
            order: Names the checkpoint.

        Returns:
            The event with the checkpoint's log.
        """
        begun_ns = now_ns()
        loaded = disk.load(self._path, order.checkpoint, self._identity)
        self._committed.load_copy(loaded.header, loaded.model, loaded.buffers)
        spent_s = (now_ns() - begun_ns) / NS_PER_S
        folder = disk.folder_of(self._path, order.checkpoint.version)
        log.info("restored %s in %.2f s", folder, spent_s)
        return ev.Restored(loaded.log)

    def close(self) -> None:
        """End the writer; what is not published is removed, if the disk is fast enough."""
        self._writer.close(CLOSE_S)
