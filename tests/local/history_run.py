"""What runs inside the processes of a history: runner, coordinator, agent and rank.

Each function is the life of one process that a fork server has forked; it calls the product's own
entry point. Exchanged are only the two places that would execute a program: how the runner starts
its children, and how a shim becomes a rank.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import paceline.agent.__main__ as agent_entry
import paceline.coordinator.__main__ as coordinator_entry
from local import fork_server
from local.director import Director
from local.fork_server_shim import ENV_FORK_SERVER
from paceline.agent import shim
from paceline.agent.launch import LaunchPlan, plan_rank, shim_argv
from paceline.core.faults import parse_faults
from paceline.local.processes import Child, LineReader
from paceline.local.runner import Runner
from paceline.worker.checkpoint import format as checkpoint
from paceline_api.reading.load import job_from_mapping
from paceline_api.resolve import resolve

FILLING = "filling the disk"
"""In the lines that `history_script` prints only for their length."""
CHECKPOINTS = "checkpoints"
"""In the folder of the history."""
SMALL_DISK_BYTES = 4_000_000
CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
SHIM = Path(__file__).with_name("fork_server_shim.py")


class Forked:
    """A child of this process that a fork server has forked; the part of Popen that `Child`
    uses."""

    def __init__(self, pid: int, stdout: int | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = None if stdout is None else os.fdopen(stdout, "rb", buffering=0)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def start_child(below: str) -> Callable[..., Child]:
    """Stands for `Child.start`."""

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
                below, f"local.history_run:{call}", arguments=[os.getpid()], env=env, fds=fds
            )
        output = None
        if read_end is not None and write_end is not None and on_line is not None:
            os.close(write_end)
            output = LineReader(read_end, on_line)
        return Child(name, Forked(pid, read_end), log, output)  # type: ignore[arg-type]

    return start


def coordinator(runner: int) -> int:
    fork_server.die_with(runner, signal.SIGTERM)
    return coordinator_entry.main()


def agent(runner: int) -> int:
    fork_server.die_with(runner, signal.SIGTERM)
    below = fork_server.start_below()

    def plan(*given: Any, **named: Any) -> LaunchPlan:
        made = plan_rank(*given, **named)
        launcher = made.argv[: len(made.argv) - len(shim_argv())]
        argv = (*launcher, sys.executable, "-I", "-S", str(SHIM), str(shim.__file__))
        env = {**made.env, ENV_FORK_SERVER: below, shim.ENV_GUARD: "1"}
        return LaunchPlan(argv, env, guarded=True, order=made.order)

    setattr(agent_entry, "plan_rank", plan)  # noqa: B010
    return agent_entry.main()


def become_rank(name: str, key: str, agent_pid: int) -> None:
    """What `agent.shim` does in a rank, up to its exec."""
    shim._die_with_parent(agent_pid)
    line = shim._connect(name, key, "rank")
    line.settimeout(shim.ANSWER_S)
    answer, descriptors, _, _ = socket.recv_fds(line, 16, 4)
    if not answer:
        os._exit(0)
    line.settimeout(None)
    stdout, stderr, record, order = descriptors
    with os.fdopen(order, "rb") as file:
        wanted = json.load(file)
    shim._take_over(stdout, stderr, record, line)
    line.detach()
    os.environ.update(wanted["env"])
    if wanted["dir"]:
        os.chdir(wanted["dir"])
    script = wanted["argv"][1]
    sys.argv = list(wanted["argv"][1:])
    runpy.run_path(script, run_name="__main__")


def answer(function: str, order: str, folder: str, descriptor: int) -> int:
    """Call `function` ("module:name"); what it returns goes to `descriptor` as JSON."""
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(json.loads(order), Path(folder))
    with os.fdopen(descriptor, "w") as file:
        json.dump(result, file)
    return 0


def mount_small_disk(folder: Path) -> None:
    """Seen by this process and those below it, and gone with the last of them."""
    libc = ctypes.CDLL(None, use_errno=True)
    private = b"none", b"/", None, MS_REC | MS_PRIVATE, None
    small = b"none", os.fsencode(folder), b"tmpfs", 0, f"size={SMALL_DISK_BYTES}".encode()
    folder.mkdir()
    if libc.unshare(CLONE_NEWNS) or libc.mount(*private) or libc.mount(*small):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def checkpoints(folder: Path) -> list[tuple[int, bool, bool]]:
    """(version, whether the job had finished, whether each byte of it is there), oldest first."""
    found = []
    for version in checkpoint.versions(folder):
        at = checkpoint.folder_of(folder, version)
        manifest = checkpoint.read_manifest(at)
        whole = all(checkpoint.file_of(at / file.name) == file for file in manifest.files)
        found.append((version, manifest.finished, whole))
    return found


def agents(folder: Path) -> list[str]:
    """All that were ever started."""
    return sorted(path.stem for path in folder.glob("agent-*.log"))


def history(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The runner of one history."""
    if order["small_disk"]:
        try:
            mount_small_disk(folder / CHECKPOINTS)
        except PermissionError:
            return {"skip": "no right to mount a small disk"}
    below = fork_server.start_below()
    setattr(Child, "start", staticmethod(start_child(below)))  # noqa: B010
    return asyncio.run(_history(order, folder))


async def _history(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    printed: list[str] = []
    said: list[str] = []
    director = Director(order["steps"], order["at_the_end"], folder, order["slow_log"])
    runs = Runner(
        resolve(job_from_mapping(order["job"])),
        run_dir=folder,
        working_dir=folder,
        faults=tuple(parse_faults(order["inject"])),
        show=director.look,
        say=said.append,
        on_line=lambda line: None if FILLING in line else printed.append(line),
    )
    director.runner = runs
    result = await runs.run()
    director.close()
    return {
        "complete": result.outcome.complete,
        "reason": result.outcome.reason,
        "message": result.outcome.message,
        "left_over": result.left_over,
        "printed": printed,
        "said": [*said, *director.said],
        "undone": director.undone,
        "checkpoints": checkpoints(folder / CHECKPOINTS),
        "agents": agents(folder),
        "log": director.figures(result.status),
    }
