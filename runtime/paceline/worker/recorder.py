"""Writes a rank's journal (`core.replay.journal`) to a file, from the communication thread.

Entries gather in memory and go to the kernel in one write: whenever this rank is about to give
something to a round, since from then on its gradient may be in the weights although the rank dies,
and when there are many. A write that fails ends the journal, never the training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from paceline import private_files
from paceline.core.collectives.select import Method
from paceline.core.protocol.ids import MemberId
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


class Recorder:
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
        """After the state machine, before its effects are carried out."""
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
        self._add(Did(op))

    def gives(
        self, effect: ev.Reduce, methods: Iterable[Method], machines: tuple[int, ...]
    ) -> None:
        """Before the first byte of it leaves this rank."""
        assert effect.source is not None
        names = tuple(method.candidate for method in methods)
        go = effect.go
        given = Gave(go.generation, go.round, effect.source, effect.factor, names, machines)
        self._add(given)
        self._write()

    @property
    def wants_hash(self) -> bool:
        """Once, for the weights that this rank begins with."""
        return not self._has_hash

    def let(self, version: int) -> None:
        self._add(Let(version))

    def hashed(self, version: int, value: int) -> None:
        self._has_hash = True
        self._add(Hashed(version, value))

    def ended(self, log_: Log, state: str) -> None:
        self._add(Ended(log_.index, log_.digest, log_.version, state))
        self._write()

    def close(self) -> None:
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
