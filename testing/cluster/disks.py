"""Disks of nodes and of image builds: one sparse file each, with a file system in it.

For speed at the end: to remove the 10,000 files of an unpacked image took 25 s on the disk that
this was measured on, to remove the one file that holds them 0.3 s. A node's disk is mounted inside
the node only, and outlives a power cut.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

SIZE_BYTES = 64 << 30
TIMEOUT_S = 30.0


FORGET_OTHERS = """
findmnt --list --noheadings --output TARGET | grep "^$1/" | sort --reverse |
    while read -r point; do umount --lazy "$point"; done
"""
"""Shell commands for a new mount namespace: unmount all that lies below the folder $1, the
innermost first. The namespace begins as a copy of the host's, and a disk that is mounted there
would stay mounted here until the node ends."""


class DiskBusyError(Exception):
    """The kernel has not let go of a disk whose node is off."""


def make(path: Path) -> None:
    """An empty one, unless it is there."""
    if path.exists():
        return
    with path.open("wb") as disk:
        disk.truncate(SIZE_BYTES)
    # Without a journal: what a crash of the machine would break is of no use after it.
    options = ["-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", "-m", "0"]
    subprocess.run(["mkfs.ext4", *options, str(path)], check=True, timeout=TIMEOUT_S)


def mount(path: Path, folder: Path) -> None:
    """On the host; `leftovers.remove` of a folder above takes it away again."""
    folder.mkdir()
    command = ["mount", "-o", "loop,noatime", str(path), str(folder)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)


def wait_released(path: Path) -> None:
    """Until no mount of it is left: two at once would destroy what is on it."""
    deadline = time.monotonic() + TIMEOUT_S
    while str(path) in _backing_files():
        if time.monotonic() > deadline:
            raise DiskBusyError(f"{path} is still mounted after {TIMEOUT_S} s")
        time.sleep(0.02)


def _backing_files() -> set[str]:
    found = set()
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.add(device.read_text().strip())
        except OSError:
            # It was released between the listing and the look.
            continue
    return found
