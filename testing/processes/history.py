"""Histories: jobs of real processes with injected faults, and what must hold after each (D16).

A history is drawn from a seed and run by processes that a fork server forks (see `fork_server`).
Afterwards the job is complete and all ranks have the same bits. The weights show that every sample
was applied as often as the ledger states. Nothing is left over: no process, no file, no shared
memory, named or not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from paceline.core.collectives.select import HIERARCHICAL

from testing import left_files
from testing.processes import fork_server
from testing.temporary import ENV_RUN

SCRIPT = Path(__file__).with_name("history_script.py")
ROOT = Path(__file__).parent.parent.parent
PIECE = 16_384
"""Floats of a piece of ballast that is a segment by itself."""
LIMIT_S = 240.0
START_S = 120.0
ENDS_S = 30.0
"""Bound on the time in which all processes of a history have ended."""
LEFT = ("left_over", "files left", "memory left", "processes left", "sockets left")
"""Keys of a history's result that must be empty."""


@dataclass(frozen=True)
class History:
    """One job with its faults."""

    channel: str
    """A backend, or "hier:" and a backend: two levels, between two simulated machines."""
    ranks: int
    mode: str
    fault: str
    seed: int
    steps: tuple[tuple[str, int, int, int], ...] = ()
    """(action, place or number, milliseconds, random moment in ms; -1 = together with the step
    before)."""
    at_the_end: tuple[tuple[str, int, int, int], ...] = ()
    """Steps like `steps`, with times from the moment in which the first rank has made the last
    round. Steps that come too late for the job are left out."""
    linger_ms: int = 0
    """How long each script works on after its release."""
    dies: dict[str, tuple[str, int, float]] = field(default_factory=dict)
    """Slot -> (method of the data channel, call, ms into it) at which its rank kills itself."""
    hangs: dict[str, int] = field(default_factory=dict)
    """Slot -> transfer in which the data thread of its rank hangs forever."""
    inside: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """Slot -> (what happens to its rank inside backward(), step, piece of ballast): "nan",
    "discard", or the seconds for which it stops there."""
    slow_ms: dict[str, float] = field(default_factory=dict)
    collective: dict[str, Any] = field(default_factory=dict)
    ballast: int = 1000
    pieces: int = 1
    """Pieces of ballast. With several, each is a segment, and half of a step's pause is inside
    backward(), so rounds are streamed."""
    batch: int = 2
    accumulate: int = 1
    epochs: int = 2
    rounds: int = 24
    """Rounds of an epoch if every rank took part in each."""
    step_ms: float = 15.0
    freeze_ms: int = 15_000
    """`freezeTimeout`. On a busy machine many ranks need seconds to connect to each other."""
    may_lose_all: bool = False
    """True if the faults may leave no rank with the weights."""
    checkpoint: dict[str, Any] = field(default_factory=dict)
    """`spec.checkpoint`, with a path in the folder of the history."""
    inject: str = ""
    """Faults in the notation of `paceline run --inject`."""
    poisoned: bool = False
    """True if one gradient is not finite or dropped: it alone is missing in the end."""
    writes_bytes: int = 0
    """Bytes that each step prints."""
    slow_log: int | None = None
    """Slot whose first rank writes its log as slowly as the director reads it."""
    small_disk: bool = False
    """True if checkpoints go to a disk of a few megabytes that only this history sees."""
    full_logs: bool = False
    """True if nothing can be written to the logs: no space left on device."""

    @property
    def name(self) -> str:
        """Name of the history, for test ids and folders."""
        return f"{self.channel}-{self.ranks}-{self.mode}-{self.fault}-{self.seed}"

    @property
    def samples(self) -> int:
        """Number of samples of an epoch; its last step is smaller than the others."""
        # The last step of an epoch is a smaller one.
        return self.rounds * self.ranks * self.batch * self.accumulate - 1

    def config(self) -> dict[str, Any]:
        """Return the settings of the training script."""
        names = ("seed", "samples", "batch", "accumulate", "epochs", "ballast", "pieces", "rounds")
        own = ("step_ms", "slow_ms", "dies", "hangs", "inside", "writes_bytes", "linger_ms")
        config = {name: getattr(self, name) for name in (*names, *own)}
        config["two_levels"] = self.channel.startswith(HIERARCHICAL)
        return config | ({"ballast": PIECE} if self.pieces > 1 else {})

    def job(self) -> dict[str, Any]:
        """Return the manifest of the job."""
        # No sample may be dropped for its age: the test shows that each is applied exactly once.
        collective: dict[str, Any] = {"maxAge": 0, "hashEveryRounds": 20}
        collective["freezeTimeout"] = f"{self.freeze_ms}ms"
        collective |= {"backend": self.channel.removeprefix(HIERARCHICAL), "mode": self.mode}
        collective |= self.collective
        if self.mode == "Quorum":
            collective |= {"quorum": self.ranks // 2 + 1}
        if self.pieces > 1:
            collective |= {"segmentBytes": PIECE * 4}
        trainer = {
            "name": "trainer",
            "image": "none",
            "command": [sys.executable, str(SCRIPT)],
            "env": [{"name": "HISTORY", "value": json.dumps(self.config())}],
        }
        return {
            "apiVersion": "paceline.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "history"},
            "spec": {
                "replicas": self.ranks,
                "minReplicas": 1,
                "collective": collective,
                "elasticity": {"settleSeconds": 1},
                "template": {"spec": {"containers": [trainer]}},
                **({"checkpoint": self.checkpoint} if self.checkpoint else {}),
            },
        }


class ForkServer:
    """The process that has imported everything; it runs one history at a time."""

    def __init__(self, modules: Sequence[str] = fork_server.PRELOADED) -> None:
        """Prepare a fork server that imports these modules before it forks the first process."""
        self._modules = modules
        self._executed: list[subprocess.Popen[bytes]] = []
        self._gone = -1

    def __enter__(self) -> Self:
        self.name = f"{fork_server.NAME}-{os.getpid()}-{random.randbytes(4).hex()}"
        env = {n: v for n, v in os.environ.items() if not n.startswith("PACELINE_")}
        paths = [str(ROOT), *env.get("PYTHONPATH", "").split(os.pathsep)]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        env["PYTHONUNBUFFERED"] = "1"  # the runner sets this for its processes
        self.env = env
        with fork_server.listener_of(self.name) as listener:
            if self._is_shared:
                self.pid = self._fork(listener)
            else:
                self.pid = self._execute(listener)
        self._gone = os.pidfd_open(self.pid)
        return self

    def __exit__(self, *_: object) -> None:
        if self._gone < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._gone, signal.SIGKILL)
        select.select([self._gone], [], [], ENDS_S)
        os.close(self._gone)
        self._gone = -1
        for process in self._executed:
            process.kill()
            process.wait()

    @property
    def _is_shared(self) -> bool:
        """Return True if it is forked from one that all processes of this test run share."""
        return self._modules is fork_server.PRELOADED and ENV_RUN in os.environ

    def _execute(self, listener: socket.socket) -> int:
        """Start a fork server that imports the modules, and return its pid."""
        words = (fork_server.__file__, str(listener.fileno()), str(os.getpid()), *self._modules)
        process = subprocess.Popen(
            [sys.executable, *words],
            env=self.env,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        self._executed.append(process)
        return process.pid

    def _fork(self, listener: socket.socket) -> int:
        """Fork a fork server from the shared one, which the first caller of the run starts."""
        shared = f"{fork_server.NAME}-of-{os.environ[ENV_RUN]}"
        try:
            with fork_server.listener_of(shared) as first:
                self._execute(first)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        return fork_server.ask(
            shared,
            "testing.processes.fork_server:stay",
            arguments=[os.getpid()],
            env=self.env,
            fds={fork_server.LISTENER_FD: listener.fileno()},
            limit_s=START_S,
        )

    def run(self, history: History, folder: Path) -> dict[str, Any]:
        """Run a history and return its result; none of its processes lives afterwards."""
        folder.mkdir(parents=True)
        listened = self._listening()
        slow_log = prepare_logs(folder, history)
        order: dict[str, Any] = {"job": history.job(), "steps": history.steps}
        order |= {"inject": history.inject, "at_the_end": history.at_the_end}
        order |= {"slow_log": slow_log, "small_disk": history.small_disk}
        with left_files.OwnFiles(lambda: descendants(self.pid), folder) as own:
            result: dict[str, Any] = self.call(
                "testing.processes.history_run:history", order, folder
            )
        result["files left"] = left_files.folders_of(folder) + own.left()
        result["processes left"] = left_files.processes_of(folder)
        result["sockets left"] = sorted(self._listening() - listened)
        result["memory left"] = left_files.memory_of(self.pid)
        return result

    def call(self, function: str, order: object, folder: Path, *, limit_s: float = LIMIT_S) -> Any:
        """Call `function(order, folder)` in a new process and return its result, as JSON values."""
        read_end, write_end = os.pipe()
        with (folder / "runner.log").open("wb") as log:
            fork_server.ask(
                self.name,
                "testing.processes.history_run:answer",
                arguments=[function, json.dumps(order), str(folder), 3],
                env=self.env | {"TMPDIR": str(folder)},
                cwd=str(folder),
                fds={1: log.fileno(), 2: log.fileno(), 3: write_end},
                limit_s=START_S,
            )
        os.close(write_end)
        answer = read_all(read_end, limit_s)
        hung = [] if answer is not None else self._tree()
        left = self.end_all(0.0 if answer is None else ENDS_S)
        output = (folder / "runner.log").read_text()
        assert answer is not None, f"{order}: not over after {limit_s} s; {hung}\n{output}"
        assert answer, f"{order}: the process failed:\n{output}"
        assert not left, f"{order}: processes left over: {left}"
        return json.loads(answer)

    def _listening(self) -> set[str]:
        """Return what the processes that are left listen on."""
        return left_files.listening(self.pid, os.getpid(), *descendants(self.pid))

    def _tree(self) -> list[str]:
        return [command_of(pid) for pid in descendants(self.pid)]

    def end_all(self, patience_s: float) -> list[str]:
        """Kill the history's processes that have not ended by themselves, and return them."""
        until = time.monotonic() + patience_s
        while (pids := descendants(self.pid)) and time.monotonic() < until:
            time.sleep(0.02)
        left = [command_of(pid) for pid in pids]
        while pids := descendants(self.pid):
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
        return left


def check(history: History, result: dict[str, Any], *, may_drop: bool = False) -> None:
    """Check what must hold after every history."""
    story = "\n".join([str(history), *result["said"], *result["printed"][-40:]])
    if history.may_lose_all and result["reason"] == "StateLost":
        _check_nothing_left(result, story)
        return  # but the job never restarts from zero silently (R26)
    assert result["complete"], f"{result['reason']}: {result['message']}\n{story}"
    assert not result["undone"], f"the job ended before {result['undone']}\n{story}"
    results = [
        json.loads(line.partition("RESULT ")[2]) for line in result["printed"] if "RESULT " in line
    ]
    hashes = {r["hash"] for r in results}
    assert len(hashes) == 1, f"the ranks differ: {results}\n{story}"
    [counts, *others] = [r["seen"] for r in results if r["seen"] is not None]
    assert history.at_the_end or not others, f"{len(others) + 1} publishers\n{story}"
    channels = set(result["transports"]) - {"", history.channel}
    assert not channels, f"sums went over {channels}\n{story}"
    whole, log = history.samples * history.epochs, result["log"]
    if history.at_the_end and not log["applied"]:
        # The last coordinator started when no rank was left to report the figures.
        log |= {"applied": whole, "exact": history.epochs}
    dropped = sum(log["dropped"].values())
    assert log["applied"] + dropped == whole, f"{log}\n{story}"
    assert log["exact"] + log["short"] == history.epochs, f"{log}\n{story}"
    assert sum(counts) == log["applied"], f"{Counter(counts)} {log}\n{story}"
    assert max(counts) <= history.epochs, f"applied twice: {Counter(counts)}\n{story}"
    if history.collective.get("pipeline"):
        assert not log["streamed"], f"{log}\n{story}"
    elif history.mode == "Full" and history.pieces > 1 and not history.at_the_end:
        assert log["streamed"], f"no round was streamed: {log}\n{story}"
    if history.poisoned:
        assert 0 < dropped <= history.batch * history.accumulate, f"{log}\n{story}"
    else:
        assert may_drop or not dropped, f"{log}\n{story}"
    assert all(r["ballast"] == [log["applied"]] * 2 for r in results), f"{results} {log}\n{story}"
    if history.checkpoint:
        kept = result["checkpoints"]
        assert kept[-1] == [log["version"], True, True], f"{kept} {log}\n{story}"
        assert all(whole for _, _, whole in kept), f"{kept}\n{story}"
        assert len(kept) <= history.checkpoint["keep"], f"{kept}\n{story}"
    if history.at_the_end:
        first = [f"agent-{slot}-0" for slot in range(history.ranks)]
        assert result["agents"] == first, f"started after the end: {result['agents']}\n{story}"
    _check_nothing_left(result, story)


def _check_nothing_left(result: dict[str, Any], story: str) -> None:
    for what in LEFT:
        assert not result[what], f"{what}: {result[what]}\n{story}"


def prepare_logs(folder: Path, history: History) -> str:
    """Replace log files by slow or full ones; return the path of the slow one, or ""."""
    (folder / "logs").mkdir()
    first = [folder / "logs" / f"rank-{slot}.0-0.log" for slot in range(history.ranks)]
    if history.full_logs:
        names = [f"agent-{slot}-0.log" for slot in range(history.ranks)]
        for path in (*first, *(folder / name for name in (*names, "coordinator.log"))):
            path.symlink_to("/dev/full")
    if history.slow_log is None:
        return ""
    os.mkfifo(first[history.slow_log])
    return str(first[history.slow_log])


def descendants(root: int) -> list[int]:
    """Return all processes below `root`, except zombies among its own children."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if not (
                fields[0] == "Z" and int(fields[1]) == root
            ):  # a fork server reaps its children only now and then
                below.setdefault(int(fields[1]), []).append(int(entry.name))
    pids, todo = [], [root]
    while todo:
        children = below.get(todo.pop(), [])
        pids += children
        todo += children
    return pids


def called(name: str, pids: Iterable[int]) -> list[int]:
    """Return those of the processes that have this name: `coordinator`, `agent` or `rank`.

    All forked processes have the command line of their fork server, so they set their name.

    Args:
        name: the name.
        pids: the processes.
    """
    matching = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/comm").read_text().rstrip() == name:
                matching.append(pid)
        except OSError:
            continue  # gone
    return matching


def command_of(pid: int) -> str:
    """Return pid, command line and member of a process."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        member = [e.decode() for e in env if e.startswith(b"PACELINE_MEMBER=")]
        return f"{pid} {words} {member}"
    except OSError:
        return f"{pid} (gone)"


def read_all(fd: int, limit_s: float) -> bytes | None:
    """Read until the other end closes; return None if that takes longer than `limit_s`."""
    until, data = time.monotonic() + limit_s, b""
    try:
        while (left := until - time.monotonic()) > 0:
            if select.select([fd], [], [], left)[0]:
                part = os.read(fd, 65_536)
                if not part:
                    return data
                data += part
        return None
    finally:
        os.close(fd)
