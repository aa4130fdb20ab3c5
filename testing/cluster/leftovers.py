"""Remove what a test cluster leaves on the machine: processes, control groups, devices, files.

Everything is looked up by the cluster's own names (its control groups, its bridge, its folder), so
nothing that another program owns can be removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from testing.cluster.prerequisites import CGROUPS

KILL_TIMEOUT_S = 10.0
LOG_FOLDER = "logs"


class LeftoverError(Exception):
    """Raised when a process or control group of a cluster cannot be removed."""


def remove(name: str, folder: Path, *, keep_logs: bool) -> None:
    """Remove all traces of a cluster; with `keep_logs` its folder of logs stays."""
    if os.geteuid() == 0:
        _end_control_groups(name)
        for device in links(name):
            remove_link(device)
        unmount_below(folder)
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if keep_logs and path.name == LOG_FOLDER:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not keep_logs:
        folder.rmdir()


def control_groups(name: str) -> list[Path]:
    """Return the cluster's top control group in each hierarchy."""
    return sorted(path for path in CGROUPS.glob(f"*/{name}") if path.is_dir())


def links(name: str) -> list[str]:
    """Return the cluster's network devices on the host: the nodes' bridge and that of fake pods."""
    names = (name, f"{name}f")
    return [device for device in names if Path("/sys/class/net", device).exists()]


def remove_link(device: str) -> None:
    """Delete a network device if it exists."""
    if Path("/sys/class/net", device).exists():
        subprocess.run(["ip", "link", "delete", device], check=True, timeout=KILL_TIMEOUT_S)


def mounts_below(folder: Path) -> list[str]:
    """Return the mount points below a folder."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4] for line in lines]
    return [point for point in points if point.startswith(f"{folder}/")]


def processes(name: str) -> set[int]:
    """Return the pids of all processes in the cluster's control groups."""
    pids: set[int] = set()
    for top in control_groups(name):
        for path in top.rglob("cgroup.procs"):
            # A process outside of our pid namespace reads as 0.
            pids |= {int(pid) for pid in path.read_text().split()} - {0}
    return pids


def _end_control_groups(name: str) -> None:
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while pids := processes(name):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise LeftoverError(f"processes of {name} that SIGKILL does not end: {sorted(pids)}")
        time.sleep(0.05)
    for top in control_groups(name):
        inner = [path for path in top.rglob("*") if path.is_dir()]
        for path in [*sorted(inner, key=lambda path: -len(path.parts)), top]:
            _remove_group(path, deadline)


def _remove_group(path: Path, deadline: float) -> None:
    # The kernel holds a group for a moment after its last process has gone.
    while True:
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LeftoverError(f"control group {path}: {error}") from error
            time.sleep(0.05)
        else:
            return


def unmount_below(folder: Path) -> None:
    """Unmount everything below a folder lazily, innermost first."""
    for point in sorted(mounts_below(folder), key=len, reverse=True):
        subprocess.run(["umount", "--lazy", point], check=True, timeout=KILL_TIMEOUT_S)
