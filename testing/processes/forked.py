"""The processes of a run that are forked by a fork server instead of executed (D16).

Each function is the life of one process; it calls the product's own entry point. Replaced are only
the places that would execute a program: how the runner starts its children, how a shim becomes a
rank, and how `paceline replay` starts the script.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import paceline.agent.__main__ as agent_entry
import paceline.coordinator.__main__ as coordinator_entry
import torch
from paceline.agent import shim
from paceline.agent.launch import LaunchPlan, plan_rank, shim_argv
from paceline.cli import replay
from paceline.cli.main import main as command_line
from paceline.control.client import ControlClient
from paceline.local import detached
from paceline.local.processes import Child, LineReader, adopt_orphans
from paceline_api.rules.launchers import launched_script

from testing.processes import fork_server
from testing.processes.fork_server_shim import ENV_FORK_SERVER
from testing.processes.history import START_S
from testing.processes.keeper import READY_FD, STATUS_FD

SHIM = Path(__file__).with_name("fork_server_shim.py")
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
PR_SET_NAME = 15
ENV_DETACHED = "TEST_FORK_SERVER_OF_DETACHED_RUNS"
"""Environment variable with the name of the fork server that forks detached runs, which outlive the
call of `paceline` that starts them."""


class Forked:
    """Child of this process that a fork server has forked; the part of Popen that `Child` uses."""

    def __init__(self, pid: int, stdout: int | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = None if stdout is None else os.fdopen(stdout, "rb", buffering=0)

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process was reaped."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the end and return the exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def start_by(below: str) -> None:
    """Make the runner in this process fork its children from now on."""
    setattr(Child, "start", staticmethod(_start_child(below)))  # noqa: B010


def _start_child(below: str) -> Callable[..., Child]:
    """Return a replacement of `Child.start`."""

    def start(
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        on_line: Callable[[str], None] | None = None,
        keep_fds: Sequence[int] = (),
    ) -> Child:
        call = {"paceline.agent": "agent", "paceline.coordinator": "coordinator"}[argv[2]]
        read_end, write_end = os.pipe() if on_line is not None else (None, None)
        with log.open("ab") as file:
            fds = {1: file.fileno() if write_end is None else write_end, 2: file.fileno()}
            fds |= {fd: fd for fd in keep_fds}
            pid = fork_server.ask(
                below, f"testing.processes.forked:{call}", arguments=[os.getpid()], env=env, fds=fds
            )
        output = None
        if read_end is not None and write_end is not None and on_line is not None:
            os.close(write_end)
            output = LineReader(read_end, on_line)
        return Child(name, Forked(pid, read_end), log, output)  # type: ignore[arg-type]

    return start


class DetachedRun:
    """Detached run that a fork server forks; the part of Popen that `detached.start` uses."""

    def __init__(
        self, server: str, argv: Sequence[str], *, cwd: Path, pass_fds: Sequence[int], **_: object
    ) -> None:
        """Start the run.

        Args:
            server: name of the fork server.
            argv: command of the run, with `run --ready-fd` and a descriptor in it.
            cwd: its working directory.
            pass_fds: that descriptor.
        """
        [ready] = pass_fds
        (stdin, job), (output, stdout), (self._status, status) = (os.pipe() for _ in range(3))
        at = argv.index("--ready-fd")
        words = ["run", "--ready-fd", str(READY_FD), *argv[at + 2 :]]
        fork_server.ask(
            server,
            "testing.processes.keeper:keep",
            arguments=["testing.processes.forked:call", words],
            env=os.environ,
            cwd=str(cwd.absolute()),
            fds={0: stdin, 1: stdout, 2: stdout, STATUS_FD: status, READY_FD: ready},
            limit_s=START_S,
        )
        for fd in (stdin, stdout, status):
            os.close(fd)
        self.stdin, self.stdout = os.fdopen(job, "wb"), os.fdopen(output, "rb")

    def wait(self) -> int:
        """Wait for the end and return the exit code, negative for a signal."""
        with os.fdopen(self._status, "rb") as pipe:
            _pid, status = pipe
        return os.waitstatus_to_exitcode(int(status))


def detach_by(server: str) -> SimpleNamespace:
    """Return a replacement of `subprocess` for `detached`: a fork server forks each run."""
    return SimpleNamespace(
        Popen=partial(DetachedRun, server), PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT
    )


def call_me(name: str) -> None:
    """Set the name of this process, which /proc/PID/comm shows (see `history.called`)."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def coordinator(runner: int) -> int:
    """Run a coordinator that ends with its runner."""
    call_me("coordinator")
    fork_server.die_with(runner, signal.SIGTERM)
    return coordinator_entry.main()


def cut_when_asked() -> None:
    """Make SIGUSR1 cut the pod's connection to the coordinator for the time in a file."""
    real, until = ControlClient._connect, [0.0]
    folder = Path(os.environ["PACELINE_RUN_DIR"])
    ports = [url.rpartition(":")[2] for url in os.environ["PACELINE_COORDINATOR"].split(",")]

    async def connect(client: ControlClient[Any], *given: Any) -> None:
        if time.monotonic() < until[0]:
            raise ConnectionError("the control channel is cut")
        await real(client, *given)

    def cut(*_: object) -> None:
        until[0] = time.monotonic() + float((folder / f"cut-{os.getpid()}").read_text()) / 1000
        for entry in list(Path("/proc/self/fd").iterdir()):
            if not entry.is_socket():
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family == socket.AF_INET and str(one.getpeername()[1]) in ports:
                    one.shutdown(socket.SHUT_RDWR)

    setattr(ControlClient, "_connect", connect)  # noqa: B010
    signal.signal(signal.SIGUSR1, cut)


def agent(runner: int) -> int:
    """Run an agent whose ranks are forked, and that ends with its runner."""
    fork_server.die_with(runner, signal.SIGTERM)
    below = fork_server.start_below()
    call_me("agent")
    cut_when_asked()

    def plan(*given: Any, **named: Any) -> LaunchPlan:
        made = plan_rank(*given, **named)
        launcher = made.argv[: len(made.argv) - len(shim_argv())]
        argv = (*launcher, sys.executable, "-I", "-S", str(SHIM), str(shim.__file__))
        env = {**made.env, ENV_FORK_SERVER: below, shim.ENV_GUARD: "1"}
        return replace(made, argv=argv, env=env, guarded=True)

    setattr(agent_entry, "plan_rank", plan)  # noqa: B010
    return agent_entry.main()


def become_rank(name: str, key: str, agent_pid: int) -> int:
    """Do the work of `agent.shim` in a rank; only commands other than a script are executed."""
    call_me("rank")
    shim._die_with_parent(agent_pid)
    line = shim._connect(name, key, "rank")
    line.settimeout(shim.ANSWER_S)
    answer, descriptors, _, _ = socket.recv_fds(line, 16, shim.DESCRIPTORS_MAX)
    if not answer:
        os._exit(0)
    line.settimeout(None)
    stdout, stderr, record, talk, order, *group = descriptors
    with os.fdopen(order, "rb") as file:
        wanted = json.load(file)
    shim._take_over(stdout, stderr, record, talk, line)
    shim._join_group(group)
    os.environ.update(wanted["env"])
    shim._enter(line, wanted["dir"], wanted["umask"])
    launched = launched_script(wanted["argv"])
    if not launched and not _is_script(wanted["argv"]):
        shim._execute(line, wanted["argv"])
    line.detach()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # any Python does this at its start
        signal.signal(number, signal.SIG_IGN)
    if launched:
        from paceline.train.script import launch  # only ranks with such a script need all of it

        return launch.main(launched)
    return script(wanted["argv"])


def _is_script(argv: Sequence[str]) -> bool:
    return Path(argv[0]).name.startswith("python") and not argv[1].startswith("-")


def script(argv: Sequence[str]) -> int:
    """Run a script as `python SCRIPT WORDS` does; tracebacks begin in the script."""
    _, path, *words = argv
    sys.argv = [path, *words]
    sys.path[0] = str(Path(path).absolute().parent)
    try:
        runpy.run_path(path, run_name="__main__")
    except Exception as error:
        at = error.__traceback__
        while at is not None and at.tb_frame.f_code.co_filename != path:
            at = at.tb_next
        sys.excepthook(type(error), error, at)
        return 1
    return 0


def python(*words: str) -> int:
    """Run `python SCRIPT WORDS` without a job."""
    # Each Python starts from a random state of its own, so this one does not keep its parent's.
    random.seed()
    numpy.random.seed()
    torch.seed()
    return script(["python", *words])


def call(*words: str) -> int:
    """Run the command line of `paceline`."""
    ready = [READY_FD] if "--ready-fd" in words else []  # its end says that the run cannot start
    below = fork_server.start_below(without=ready)
    start_by(below)
    setattr(replay, "subprocess", SimpleNamespace(run=_run_by(below)))  # noqa: B010
    if server := os.environ.get(ENV_DETACHED):
        setattr(detached, "subprocess", detach_by(server))  # noqa: B010
    sys.argv = ["paceline", *words]
    command_line()
    return 0


def call_inside(commands: str, *words: str) -> int:
    """Run the command line after shell commands in a mount namespace of its own.

    Args:
        commands: shell commands; only processes of this call see what they mount.
        words: arguments of `paceline`.

    Returns:
        the exit code.

    Raises:
        PermissionError: this user may not create the namespace.
    """
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None).unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)) != 0:
        raise PermissionError("no right to mount")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    subprocess.run(["sh", "-ec", f"mount --make-rprivate /; {commands}"], check=True)
    return call(*words)


def _run_by(below: str) -> Callable[..., Forked]:
    """Return a replacement of `subprocess.run` that runs a script."""

    def run(argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, check: bool) -> Forked:
        assert not check
        adopt_orphans(True)
        pid = fork_server.ask(
            *(below, "testing.processes.forked:script"),
            arguments=[list(argv)],
            env=env,
            cwd=cwd or "",
            fds={1: 1, 2: 2},
            leader=False,
        )
        forked = Forked(pid, None)
        forked.wait()
        return forked

    return run
