"""Checkpoints as the communication thread handles them: copy, hand over, load.

What is saved and when is decided in `core.rank.saving`. Here the committed state is copied, which
is the part of a checkpoint that training can feel, and given to the writer; and a checkpoint that
COMMIT names becomes the committed state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from paceline_api.jobfile import CheckpointSpec

from paceline.clock import NS_PER_S, now_ns
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

Order = ev.Save | ev.Publish | ev.Unsave


class CheckpointService:
    """Of one rank; for the communication thread, but for `look`."""

    def __init__(
        self,
        spec: CheckpointSpec,
        identity: disk.Identity,
        committed: Committed,
        post: Callable[[Answer], None],
        record: RankRecord,
        pid: int,
    ) -> None:
        """`pid`: of the rank, or of the first of its group."""
        self._exposed_s = 0.0
        """In which the communication thread copied."""
        self._path, self._identity, self._committed = Path(spec.path), identity, committed
        self._metrics = CheckpointMetrics(record)
        self._writer = CheckpointWriter(self._path, identity, keep=spec.keep, post=post, pid=pid)

    def look(self) -> ev.Found:
        """The newest checkpoint, as this rank sees the folder now."""
        try:
            return ev.Found(disk.find(self._path, self._identity))
        except CheckpointError as error:
            return ev.Found(None, str(error))

    def obey(self, order: Order) -> None:
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

    def figures(self, saving: Saving) -> dict[str, float]:
        """After an answer of the writer: what checkpoints have cost so far, for `status`."""
        return self._metrics.follow(saving, self._exposed_s, self._writer.hidden_s)

    def restore(self, order: ev.Restore) -> ev.Restored:
        """Raises CheckpointError or StateError."""
        begun_ns = now_ns()
        loaded = disk.load(self._path, order.checkpoint, self._identity)
        self._committed.load_copy(loaded.header, loaded.model, loaded.buffers)
        spent_s = (now_ns() - begun_ns) / NS_PER_S
        folder = disk.folder_of(self._path, order.checkpoint.version)
        log.info("restored %s in %.2f s", folder, spent_s)
        return ev.Restored(loaded.log)

    def close(self) -> None:
        self._writer.close(CLOSE_S)
