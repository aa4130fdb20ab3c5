"""Code that runs inside the runner of a history, whose processes are forked (see `forked`)."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
from pathlib import Path
from typing import Any

from paceline.core.faults import parse_faults
from paceline.local.runner import Runner
from paceline.worker.checkpoint import format as checkpoint
from paceline_api.reading.load import job_from_mapping
from paceline_api.resolve import resolve

from testing.processes import fork_server, forked
from testing.processes.director import Director

FILLING = "filling the disk"
"""Mark of lines that `history_script` prints only for their length."""
CHECKPOINTS = "checkpoints"
"""Name of the checkpoint folder in the folder of the history."""
SMALL_DISK_BYTES = 4_000_000
CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


def answer(function: str, order: str, folder: str, descriptor: int) -> int:
    """Call `function` ("module:name") and write its result to `descriptor` as JSON."""
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(json.loads(order), Path(folder))
    with os.fdopen(descriptor, "w") as file:
        json.dump(result, file)
    return 0


def mount_small_disk(folder: Path) -> None:
    """Mount a small tmpfs that only this process and those below it see."""
    libc = ctypes.CDLL(None, use_errno=True)
    private = b"none", b"/", None, MS_REC | MS_PRIVATE, None
    small = b"none", os.fsencode(folder), b"tmpfs", 0, f"size={SMALL_DISK_BYTES}".encode()
    folder.mkdir()
    if libc.unshare(CLONE_NEWNS) or libc.mount(*private) or libc.mount(*small):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def checkpoints(folder: Path) -> list[tuple[int, bool, bool]]:
    """Return (version, job had finished, files are intact) of each checkpoint, oldest first."""
    result = []
    for version in checkpoint.versions(folder):
        at = checkpoint.folder_of(folder, version)
        manifest = checkpoint.read_manifest(at)
        whole = all(checkpoint.file_of(at / file.name) == file for file in manifest.files)
        result.append((version, manifest.finished, whole))
    return result


def agents(folder: Path) -> list[str]:
    """Return the names of all agents that were ever started."""
    return sorted(path.stem for path in folder.glob("agent-*.log"))


def history(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one history as its runner."""
    if order["small_disk"]:
        try:
            mount_small_disk(folder / CHECKPOINTS)
        except PermissionError:
            return {"skip": "no right to mount a small disk"}
    below = fork_server.start_below()
    forked.start_by(below)
    return asyncio.run(_history(order, folder))


async def _history(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    printed: list[str] = []
    messages: list[str] = []
    director = Director(order["steps"], order["at_the_end"], folder, order["slow_log"])
    runs = Runner(
        resolve(job_from_mapping(order["job"])),
        run_dir=folder,
        working_dir=folder,
        faults=tuple(parse_faults(order["inject"])),
        show=director.look,
        say=messages.append,
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
        "said": [*messages, *director.actions],
        "undone": director.undone,
        "checkpoints": checkpoints(folder / CHECKPOINTS),
        "agents": agents(folder),
        "transports": sorted(director.transports),
        "log": director.figures(result.status),
    }
