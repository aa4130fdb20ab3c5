"""Start the ranks of B2, send them reductions, and collect when each call began and ended.

A *crew* is the ranks of one system at one P. Crews that have nothing to do wait in the kernel. So
several can be alive and take turns, and the runs that are compared are seconds apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Final

from paceline.transport.factory import LOOPBACK

from benchmarks.jobs import end_all, python_path, script, start
from benchmarks.network import MACHINES, Machine
from testing.temporary import temporary_folder

ANSWER_S: Final = 120.0
START_S: Final = 120.0
END_S: Final = 5.0


class CrewError(RuntimeError):
    """Raised when a rank of a crew does not answer in time."""


@dataclass(frozen=True)
class Calls:
    """Times and results of several calls of one reduction."""

    us: list[float]
    """Time of each call: from the moment at which all ranks have begun until the last one has the
    sum."""
    from_go_us: list[float]
    """Time of each call from GO on, before the other ranks have received it."""
    sums: list[tuple[float, float]]
    """First and last element after the last call, by rank."""


class Crew:
    """Ranks of one system, placed in turn on the machines if there are any.

    A system is `paceline`, `plain` (without the native loop), `levels` (one level and two, over a
    network) or `rivals`.
    """

    def __init__(
        self, system: str, ranks: int, folder: Path, machines: Sequence[Machine] = ()
    ) -> None:
        self.system, self.ranks = system, ranks
        self._machines = machines
        self._folder = folder / f"{system}-{ranks}"
        self._folder.mkdir()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the ranks and connect them with each other."""
        where = str(self._folder / "crew")
        with Listener(where, "AF_UNIX", backlog=self.ranks) as listener:
            # A process that cannot start must not hang the benchmark. No public name exists.
            inner: Any = listener._listener  # type: ignore[attr-defined]  # noqa: SLF001
            inner._socket.settimeout(START_S)  # noqa: SLF001
            worlds = [self.ranks] if self.system == "rivals" else [1] * self.ranks
            for number, size in enumerate(worlds):
                self._launch(size, where, number)
            introduced = []
            for _ in range(self.ranks):
                connection = listener.accept()
                self._connections.append(connection)
                introduced.append(self._hear(connection))
        if self.system != "rivals":  # MPI orders the ranks of its world itself
            order = sorted(range(self.ranks), key=lambda at: introduced[at][0])
            self._connections = [self._connections[at] for at in order]
            introduced = [introduced[at] for at in order]
        peers = [(f"{name}-{pid}", address) for name, pid, address in introduced]
        for rank, connection in enumerate(self._connections):
            connection.send((rank, peers, str(self._folder / "go")))
        for connection in self._connections:
            self._hear(connection)

    def _launch(self, size: int, where: str, number: int) -> None:
        machine = self._machines[number % len(self._machines)] if self._machines else None
        command = [*machine.enter] if machine else []
        command += [str(Path(sys.executable).parent / "mpiexec"), "-n", str(size)]
        command += [*script("reducer.py"), where, str(number), self.system]
        own = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path(),
            "B2_FOLDER": str(self._folder),
            "B2_RANKS": str(self.ranks),
            "B2_MACHINE": f"machine-{number % len(MACHINES)}",
            "B2_HOST": machine.host if machine else LOOPBACK,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._processes.append(start(command, self._folder, {**os.environ, **own}))

    def _hear(self, connection: Connection) -> Any:
        try:
            if connection.poll(ANSWER_S):
                return connection.recv()
        except EOFError:
            pass
        log_tail = (self._folder / "log").read_text(errors="replace")[-3000:]
        raise CrewError(f"a rank of {self.system}, P={self.ranks}, does not answer:\n{log_tail}")

    def ask(self, *command: Any) -> list[Any]:
        """Send a command to all ranks and return their answers."""
        for connection in self._connections:
            connection.send(command)
        return [self._hear(connection) for connection in self._connections]

    def reduce(self, how: str, numel: int, calls: int) -> Calls:
        """Run `1 + calls` reductions and return their times; the first one only warms up."""
        answers = self.ask("reduce", how, numel, 1 + calls)
        times = [answer[0][1:] for answer in answers]
        by_call = list(zip(*times, strict=True))
        ended = [max(end for _, end in one) for one in by_call]
        begun = [max(begin for begin, _ in one) for one in by_call]
        return Calls(
            [(b - a) / 1e3 for a, b in zip(begun, ended, strict=True)],
            [(end - one[0][0]) / 1e3 for one, end in zip(by_call, ended, strict=True)],
            [(first, last) for _, first, last in answers],
        )

    def end(self) -> None:
        """Ask the ranks to exit, and kill what is left after END_S."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send(None)
        end_all(self._processes, END_S)
        for connection in self._connections:
            connection.close()


def right(calls: Calls, ranks: int) -> bool:
    """Return True if the last call has the sum on every rank.

    Each rank contributes count % 5 + rank in call number `count`.

    Returns:
        False if any rank has another value in its first or last element.
    """
    count = len(calls.us)  # the first call, which warmed up, was number 0
    want = float(sum(count % 5 + rank for rank in range(ranks)))
    return all(first == last == want for first, last in calls.sums)


@contextmanager
def crews(
    systems: Sequence[str], ranks: int, machines: Sequence[Machine] = ()
) -> Iterator[list[Crew]]:
    """Start one crew of each system.

    Yields:
        The crews, ready. No process of theirs is alive after the context.
    """
    with temporary_folder() as folder:
        made = [Crew(system, ranks, folder, machines) for system in systems]
        try:
            for crew in made:
                crew.start()
            yield made
        finally:
            for crew in made:
                crew.end()
