"""Start the processes of a rival, send them orders, and receive their answers."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.jobs import end_all, manifest, python_path, start
from benchmarks.network import free_port
from benchmarks.rivals.rivals import Launch, Rival

START_S: Final = 180.0
ANSWER_S: Final = 120.0
END_S: Final = 8.0


class CrewError(RuntimeError):
    """Raised when a rank does not start or does not answer; the text ends with its log."""


@dataclass
class Member:
    """One process of a crew."""

    rank: int
    facts: dict[str, str]
    address: str
    line: Any
    """Both directions of the connection, as a text file."""
    socket: socket.socket


class Crew:
    """Ranks of one rival, and its servers."""

    def __init__(self, rival: Rival, ranks: int, python: Path, folder: Path) -> None:
        self.rival, self.ranks = rival, ranks
        self._python, self._folder = python, folder
        self._members: list[Member] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def facts(self) -> dict[str, str]:
        """Versions and settings that the first rank reports."""
        return self._members[0].facts

    def start(self) -> None:
        """Start all processes and wait until each has opened its system."""
        size = self.ranks + self.rival.servers
        where = self._folder / "line"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(where))
            door.listen(size)
            self._launch(size, str(where))
            for _ in range(size):
                self._members.append(self._welcome(door))
        self._members.sort(key=lambda member: member.rank)
        self.ask({"addresses": [member.address for member in self._members]})

    def _welcome(self, door: socket.socket) -> Member:
        """Accept the connection of one process, unless a process ends first."""
        ends = [os.pidfd_open(process.pid) for process in self._processes]
        try:
            waited: list[socket.socket | int] = [door, *ends]
            ready, _, _ = select.select(waited, [], [], START_S)
        finally:
            for end in ends:
                os.close(end)
        if door not in ready:
            raise self._silence("ended while it started" if ready else "did not start")
        connection, _ = door.accept()
        connection.settimeout(ANSWER_S)
        line = connection.makefile("rw")
        hello = json.loads(line.readline() or "null")
        if hello is None:
            raise self._silence("ended while it started")
        return Member(hello["rank"], hello["facts"], hello["address"], line, connection)

    def ask(self, order: Any) -> list[dict[str, Any]]:
        """Send an order to all processes and return their answers.

        A process that does not answer within ANSWER_S ends the crew with a CrewError.

        Args:
            order: Anything that JSON can hold.

        Returns:
            The answers in rank order, without the empty ones of servers.
        """
        for member in self._members:
            with suppress(BrokenPipeError):  # the missing answer below shows its end
                member.line.write(json.dumps(order) + "\n")
                member.line.flush()
        answers = []
        for member in self._members:
            try:
                answer = json.loads(member.line.readline() or "null")
            except (TimeoutError, ConnectionResetError):
                answer = None
            if answer is None:
                raise self._silence(f"rank {member.rank} did not answer")
            answers.append(answer)
        return [answer for answer in answers if answer]

    def reduce(self, elements: int, calls: int) -> tuple[list[float], bool]:
        """Sum one buffer several times.

        Args:
            elements: Length of the float32 buffer.
            calls: Number of sums.

        Returns:
            For each call, the us from the moment at which all have begun until the last one has the
            sum; and True if all ranks had the right sum in the end.
        """
        answers = self.ask({"do": "bulk", "elements": elements, "calls": calls})
        want = self.ranks * (self.ranks + 1) / 2
        begun = zip(*(one["begun"] for one in answers), strict=True)
        ended = zip(*(one["ended"] for one in answers), strict=True)
        took_us = [(max(e) - max(b)) / 1e3 for b, e in zip(begun, ended, strict=True)]
        return took_us, all(one["first"] == one["last"] == want for one in answers)

    def _silence(self, what: str) -> CrewError:
        """Return the error for a process that does not answer, with the end of the log."""
        log_tail = (self._folder / "log").read_text(errors="replace")[-4000:]
        return CrewError(f"{self.rival.name}, P={self.ranks}: {what}\n{log_tail}")

    def _launch(self, size: int, where: str) -> None:
        command = [str(self._python), "-m", "benchmarks.rivals.rank", *self.rival.system]
        own = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path(),
            "RIVALS_SOCKET": where,
            "RIVALS_RANKS": str(self.ranks),
            "RIVALS_CORES_SHARED": str(int(size > (os.cpu_count() or 1))),
            "GLOO_SOCKET_IFNAME": "lo",
            **self.rival.env,
        }
        match self.rival.launch:
            case Launch.EACH | Launch.WORLDS:
                if self.rival.launch is Launch.WORLDS:
                    command = [str(self._python.parent / "mpiexec"), "-n", "1", *command]
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
                own |= {"WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)}
                for rank in range(size):
                    self._start(command, {**own, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            case Launch.MPIEXEC:
                mpiexec = str(self._python.parent / "mpiexec")
                self._start([mpiexec, *self.rival.mpiexec, "-n", str(size), *command], own)
            case Launch.JOB:
                path = self._folder / "job.json"
                # Ranks on a loaded machine must not look frozen.
                collective = {"freezeTimeout": "120s", **self.rival.collective}
                spec = {"replicas": 1, "procsPerReplica": self.ranks, "collective": collective}
                path.write_text(json.dumps(manifest(command, env=own, **spec)))
                run = [str(self._python.parent / "paceline"), "run", str(path)]
                # Keep this run out of the list of the user's jobs.
                apart = {"XDG_RUNTIME_DIR": str(self._folder)}
                self._start([*run, "--run-dir", str(self._folder / "run")], apart)

    def _start(self, argv: list[str], env: dict[str, str]) -> None:
        path = os.pathsep.join([str(self._python.parent), os.environ["PATH"]])
        own = {**os.environ, "PATH": path, **env}
        self._processes.append(start(argv, self._folder, own))

    def end(self) -> None:
        """Ask all processes to exit, and kill what is left; none is alive afterwards."""
        # The agent would restart a rank of a job that exits by itself.
        by_itself = self.rival.launch is not Launch.JOB
        if by_itself:
            for member in self._members:
                with suppress(OSError):
                    member.line.write("null\n")
                    member.line.flush()
        end_all(self._processes, END_S if by_itself else 0.0)
        for member in self._members:
            with suppress(OSError):  # the process may have ended before it read the last order
                member.line.close()
            member.socket.close()


@contextmanager
def crew(rival: Rival, ranks: int, python: Path | None, folder: Path) -> Iterator[Crew]:
    """Start a crew that is ready for orders.

    Args:
        rival: The rival.
        ranks: World size, without servers.
        python: Interpreter of its environment; None uses this one.
        folder: New working folder of the processes.

    Yields:
        The crew.
    """
    folder.mkdir()
    made = Crew(rival, ranks, python or Path(sys.executable), folder)
    try:
        made.start()
        yield made
    finally:
        made.end()
