"""Ranks that tests control, as processes (mpi, gloo) or as threads (sim), with one interface.

Importing torch costs seconds of CPU, so one pool of processes serves all modules, and they are
forked from one that has imported it. A rank that a test kills is replaced by a fresh process when
one is needed. Every wait has a deadline.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
from paceline.agent.launch import ENV_HWLOC
from paceline.transport.base import Abort, Group, Transport, TransportError
from paceline.transport.selected import SelectedTransport

from testing import left_files
from testing.memory_transport import Hub, SimTransport
from testing.processes import forked_call
from tests.transport.rank_body import ROUNDED, Entered, Outcome, RankBody

FAILED = pytest.StashKey[bool]()
"""Key on a test item: True if the test has failed."""
ANSWER_S = 150.0
START_S = 240.0
"""Longest wait for a rank to start; below the timeout of a test."""
ROOT = Path(__file__).parents[2]


class Rank(ABC):
    """One rank that carries out commands one after another."""

    name: str

    @abstractmethod
    def start(self, command: str, *arguments: Any) -> None:
        """Send a command, whose end `result` awaits."""

    @abstractmethod
    def _hear(self, timeout_s: float) -> Outcome | Entered:
        """Return the next message of the rank, or raise AssertionError if it times out."""

    def result(self, timeout_s: float = ANSWER_S) -> Outcome:
        """Wait until the command has ended and return its outcome."""
        while isinstance(answer := self._hear(timeout_s), Entered):
            pass
        return answer

    def wait_entered(self, number: int = 1, timeout_s: float = ANSWER_S) -> None:
        """Wait until a command that `tells` is about to make its `number`th transport call."""
        answer: Outcome | Entered = Entered(0)
        while isinstance(answer, Entered) and answer.number < number:
            answer = self._hear(timeout_s)
        assert isinstance(answer, Entered), f"{self.name} never entered call {number}: {answer}"

    @abstractmethod
    def raise_abort(self) -> None: ...

    @abstractmethod
    def kill(self) -> None:
        """End the rank at once, whatever it is doing."""

    def call(self, command: str, *arguments: Any) -> Outcome:
        self.start(command, *arguments)
        return self.result()


class RankEndedError(AssertionError):
    """A process ended that no test killed; the message has its last output."""


class ProcessRank(Rank):
    """A process under its own `mpiexec -n 1`.

    `inside` is a command that runs it on another machine, where there is no fork server; its
    address there is `host`.
    """

    def __init__(
        self, pool: ProcessPool, name: str, inside: Sequence[str] = (), host: str = "127.0.0.1"
    ) -> None:
        self.name = name
        self._held = pool.held
        self._log = (pool.folder / f"{name}.log").open("wb")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "RANK_HOST": host,
            ENV_HWLOC: str(pool.folder / "no-hwloc.xml"),  # otherwise hydra writes into /tmp
        }
        command = [*inside, str(Path(sys.executable).parent / "mpiexec"), "-n", "1", sys.executable]
        if inside:
            command += [str(Path(__file__).with_name("rank_main.py"))]
        else:
            guard = str(Path(__file__).with_name("rank_guard.py"))
            command += ["-I", "-S", guard, forked_call.the_fork_server("ranks").name]
        command += [pool.address, name]
        self._launcher = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.pid = 0
        self.connection: Connection | None = None

    def start(self, command: str, *arguments: Any) -> None:
        assert self.connection is not None
        self.connection.send((command, *arguments))

    def _hear(self, timeout_s: float) -> Outcome | Entered:
        assert self.connection is not None
        if not self.connection.poll(timeout_s):
            raise AssertionError(f"{self.name} gave no answer in {timeout_s} s")
        try:
            answer = self.connection.recv()
        except EOFError as error:
            log = Path(self._log.name).read_text()[-2000:]
            raise RankEndedError(f"{self.name} has ended; it said:\n{log}") from error
        assert isinstance(answer, Outcome | Entered)
        return answer

    def has_answered(self, within_s: float) -> bool:
        assert self.connection is not None
        return self.connection.poll(within_s)

    def raise_abort(self) -> None:
        assert self.connection is not None
        self.connection.send(("raise_abort",))

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.pid:
            self._held |= left_files.held_by(self.pid, self._launcher.pid)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.pid = 0
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        try:
            self._launcher.wait(5)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait(5)
        self._log.close()


class ProcessPool:
    """Live rank processes, shared by all tests of the session."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-test-"))
        self.held: set[str] = set()
        """Shared memory and temporary files that ranks had when they were killed."""
        self.address = str(self.folder / "ranks")
        self._listener = Listener(self.address, "AF_UNIX", backlog=32)
        # A process that cannot start must fail the test, not hang it. There is no public attribute.
        inner: Any = self._listener._listener  # type: ignore[attr-defined]
        inner._socket.settimeout(START_S)
        self._idle: list[ProcessRank] = []
        self._all: list[ProcessRank] = []
        """All ranks that were started; a failed test returns none."""

    def take(self, count: int) -> list[ProcessRank]:
        """Return `count` ranks that are in no group, starting the missing ones concurrently."""
        self._idle += self.started([self._launch() for _ in range(count - len(self._idle))])
        taken, self._idle = self._idle[:count], self._idle[count:]
        return taken

    def started(self, fresh: list[ProcessRank]) -> list[ProcessRank]:
        """Return the same ranks once they have connected."""
        by_name = {rank.name: rank for rank in fresh}
        for _ in fresh:
            connection = self._listener.accept()
            name, pid = connection.recv()
            by_name[name].connection, by_name[name].pid = connection, pid
        return fresh

    def give_back(self, ranks: Sequence[ProcessRank]) -> None:
        self._idle += ranks

    def _launch(self) -> ProcessRank:
        self._all.append(ProcessRank(self, f"w{len(self._all) + 1}"))
        return self._all[-1]

    def end(self) -> None:
        for rank in self._all:
            rank.kill()
        self._listener.close()
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()


class FarTransport(SimTransport):
    """A transport that reaches only host memory of its own, as mpi reaches no GPU's."""

    def moves(self, device: torch.device) -> bool:  # noqa: ARG002
        return False


INSIDE_S = 0.05
"""The time for the others to see that all are inside; otherwise they would time out."""


class FirstTransport(SimTransport):
    name = "first"


class SecondTransport(SimTransport):
    name = "second"


class BrokenFirst(FirstTransport):
    """A transport that fails after the others are inside, like one at a limit of its machine."""

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        super().open(group, abort, timeout_s)
        time.sleep(INSIDE_S)
        raise TransportError("first does not work here")


class BrokenSecond(SecondTransport):
    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        super().open(group, abort, timeout_s)
        time.sleep(INSIDE_S)
        raise TransportError("second does not work here")


class Hubs:
    """A hub for each in-memory transport of a rank that has two."""

    def __init__(self) -> None:
        self.one, self.first, self.second = Hub(), Hub(), Hub()

    def kill(self, name: str) -> None:
        for hub in (self.one, self.first, self.second):
            hub.kill(name)


BROKEN = "t1"
"""The thread rank that cannot connect one of two transports."""


def in_memory(kind: str, hubs: Hubs, name: str) -> Transport:
    kind = kind.removesuffix(ROUNDED)
    if kind == "staged":
        return SelectedTransport([FarTransport(hubs.one, name)], {})
    if kind == "sim":
        return SimTransport(hubs.one, name)
    broken = kind if name == BROKEN else ""
    first = BrokenFirst if broken == "without-first" else FirstTransport
    second = BrokenSecond if broken == "without-second" else SecondTransport
    return SelectedTransport([first(hubs.first, name), second(hubs.second, name)], {})


class ThreadRank(Rank):
    """A rank of an in-memory transport in a thread.

    Kind `staged` is a transport that needs host buffers; `without-...` are two transports, one of
    which the rank BROKEN cannot connect.
    """

    def __init__(self, hubs: Hubs, name: str) -> None:
        self.name = name
        self._hubs = hubs
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome | Entered] = queue.SimpleQueue()
        self._body = RankBody(lambda kind: in_memory(kind, hubs, name), tell=self._outcomes.put)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (command := self._commands.get()) is not None:
            self._outcomes.put(self._body.run(*command))

    def start(self, command: str, *arguments: Any) -> None:
        self._commands.put((command, *arguments))

    def _hear(self, timeout_s: float) -> Outcome | Entered:
        try:
            return self._outcomes.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"{self.name} gave no answer in {timeout_s} s") from None

    def raise_abort(self) -> None:
        self._body.raise_abort()

    def kill(self) -> None:
        self._hubs.kill(self.name)
        self._body.raise_abort()
        self.end()

    def end(self) -> None:
        self._commands.put(None)
        self._thread.join(ANSWER_S)
        assert not self._thread.is_alive(), f"{self.name} does not end"


@dataclass
class Crew:
    """The ranks of one test and the groups that they form."""

    kind: str
    ranks: list[Rank]
    open_s: float = 10.0
    """The time within which a group must be connected."""
    _addresses: dict[str, str] = field(default_factory=dict)
    _number: int = 0

    def peers(self, members: Sequence[Rank]) -> list[tuple[str, str]]:
        for rank in members:
            if rank.name not in self._addresses:
                rank.start("address", self.kind)
        for rank in members:
            if rank.name not in self._addresses:
                outcome = rank.result()
                assert not outcome.error, outcome
                self._addresses[rank.name] = outcome.value
        return [(rank.name, self._addresses[rank.name]) for rank in members]

    def start_open(
        self,
        members: Sequence[Rank],
        only: Sequence[Rank] | None = None,
        timeout_s: float | None = None,
        tells: bool = False,
    ) -> None:
        """Begin a new generation of `members`, of whom only those in `only` take part.

        They report to `Rank.wait_entered` if `tells` is set.
        """
        peers = self.peers(members)
        self._number += 1
        key = f"{self.kind}-{id(self)}-{self._number}"
        for index, rank in enumerate(members):
            if only is None or rank in only:
                limit_s = self.open_s if timeout_s is None else timeout_s
                rank.start("open", self.kind, key, self._number, peers, index, limit_s, tells)

    def open(self, members: Sequence[Rank], timeout_s: float | None = None) -> list[Outcome]:
        self.start_open(members, timeout_s=timeout_s)
        outcomes = [rank.result() for rank in members]
        assert [o.error for o in outcomes] == [""] * len(members), outcomes
        return outcomes

    def all(self, members: Sequence[Rank], command: str, *arguments: Any) -> list[Outcome]:
        for rank in members:
            rank.start(command, *arguments)
        return [rank.result() for rank in members]
