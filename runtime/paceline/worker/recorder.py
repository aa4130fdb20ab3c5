"""Writes a rank's journal (`core.replay.journal`) to a file. Communication thread only.

Entries are collected in memory, and all that wait are written in one call. This happens whenever
this rank is about to contribute to a round: from then on its gradient may be in the weights even if
the rank dies. It also happens when more than WAITING_BYTES_MAX wait, and at the end. A write that
fails ends the journal, never the training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from paceline_api.ids import MemberId

from paceline import private_files
from paceline.core.collectives.select import Method
from paceline.core.protocol.log import Log, LogError
from paceline.core.protocol.pending import BufferOp
from paceline.core.rank import events as ev
from paceline.core.replay.journal import (
    JOURNAL_VERSION,
    Did,
    Ended,
    Entry,
    Gave,
    Hashed,
    Let,
    Logged,
    Opened,
    Placed,
    Skipped,
    Stepped,
    pack,
)
from paceline.worker.journals import FOLDER

log = logging.getLogger("paceline.rank")

WAITING_BYTES_MAX: Final = 64 * 1024
"""Upper bound on the entries that wait in memory, in bytes."""


class Recorder:
    """The journal of one rank, open for writing."""

    def __init__(self, run_dir: Path, member: MemberId) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(private_files.FOLDER_MODE, exist_ok=True)
        path = folder / f"{str(member).replace('#', '-')}.journal"
        self._fd = private_files.create(path)
        self._path = path
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._index, self._digest = 0, ""
        self._has_hash = False
        self._add(Opened(JOURNAL_VERSION, member))

    def handled(self, event: ev.Event, log_: Log) -> None:
        """Record an event and the records that it added to the round log.

        Called after the state machine has handled the event and before its effects are carried out.
        """
        if isinstance(event, ev.Step):
            self._add(Stepped(event.leases, event.samples, event.unit, event.finite))
        elif isinstance(event, ev.Skip):
            self._add(Skipped(event.lease))
        elif isinstance(event, ev.Hashed):
            self.hashed(event.version, event.value)
        if log_.index == self._index and log_.digest == self._digest:
            return
        try:
            records = log_.missing_after(self._index, self._digest)
        except LogError:
            self._add(Placed(log_.index, log_.digest))
        else:
            ends = log_.tail[-len(records) :]
            for record, (index, digest) in zip(records, ends, strict=True):
                self._add(Logged(index, digest, record))
        self._index, self._digest = log_.index, log_.digest

    def did(self, op: BufferOp) -> None:
        """Record a change of the gradient buffers."""
        self._add(Did(op))

    def gives(
        self, effect: ev.Reduce, methods: Iterable[Method], machines: tuple[int, ...]
    ) -> None:
        """Record what this rank contributes to a round, and write the journal.

        Called before the first byte of the contribution leaves this rank.

        Args:
            effect: The reduction; its `source` is set.
            methods: Transport and algorithm of each segment.
            machines: The machine of each member where sums have two levels, else ().
        """
        assert effect.source is not None
        names = tuple(method.candidate for method in methods)
        go = effect.go
        given = Gave(go.generation, go.round, effect.source, effect.factor, names, machines)
        self._add(given)
        self._write()

    @property
    def wants_hash(self) -> bool:
        """True until a hash of the weights with which this rank begins was recorded."""
        return not self._has_hash

    def let(self, version: int) -> None:
        """Record that the main thread went on with the weights of this version."""
        self._add(Let(version))

    def hashed(self, version: int, value: int) -> None:
        """Record the hash of the weights of a version."""
        self._has_hash = True
        self._add(Hashed(version, value))

    def ended(self, log_: Log, state: str) -> None:
        """Record the end of the log and the hash of the final state, and write the journal."""
        self._add(Ended(log_.index, log_.digest, log_.version, state))
        self._write()

    def close(self) -> None:
        """Write what is left, flush it to the disk and close the file."""
        if self._fd < 0:
            return
        self._write()
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._give_up(error)
            return
        os.close(self._fd)
        self._fd = -1

    def _add(self, entry: Entry) -> None:
        if self._fd < 0:
            return
        data = pack(entry)
        self._waiting.append(data)
        self._bytes += len(data)
        if self._bytes > WAITING_BYTES_MAX:
            self._write()

    def _write(self) -> None:
        if self._fd < 0:
            return
        data, self._waiting, self._bytes = b"".join(self._waiting), [], 0
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("%s: %s; this run can not be replayed", self._path, error.strerror)
        os.close(self._fd)
        self._fd, self._waiting = -1, []
