"""A disk of known rates, for the cost of a slow disk: a loop device that the kernel throttles.

Only processes in its control group (version 1, blkio) are throttled, so a test writes its own files
at full speed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

GROUPS: Final = Path("/sys/fs/cgroup/blkio")
LIMIT: Final = "blkio.throttle.{}_bps_device"
BYTES: Final = 128 << 20


@contextmanager
def slow_disk(folder: Path, *, read_bps: int, write_bps: int) -> Iterator[Path]:
    """Mount a throttled disk, or skip the test by name.

    Args:
        folder: mount point, which is made.
        read_bps: bytes per second for reads.
        write_bps: bytes per second for writes.

    Yields:
        the file into which a process writes its pid to be throttled. The process must have ended
        when the block ends.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    if not (GROUPS / LIMIT.format("read")).exists():
        pytest.skip("no control group of version 1 throttles disks here")
    image = folder.with_name(f"{folder.name}.img")
    with image.open("wb") as file:
        file.truncate(BYTES)
    # The disk has no journal, whose thread would write on behalf of throttled processes.
    _call("mkfs.ext4", "-q", "-O", "^has_journal", str(image))
    with ExitStack() as later:
        try:
            device = _call("losetup", "--find", "--show", str(image)).strip()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no loop device here: {error.stderr}")
        later.callback(_call, "losetup", "--detach", device)
        folder.mkdir()
        _call("mount", device, str(folder))
        later.callback(_call, "umount", str(folder))
        group = GROUPS / f"paceline-test-{os.getpid()}"
        group.mkdir()
        later.callback(group.rmdir)
        number = Path(device).stat().st_rdev
        for kind, bps in (("read", read_bps), ("write", write_bps)):
            rate = f"{os.major(number)}:{os.minor(number)} {bps}"
            (group / LIMIT.format(kind)).write_text(rate)
        yield group / "cgroup.procs"


def write_and_forget(path: Path, data: bytes) -> None:
    """Write a file and drop it from the page cache, so that the next reader uses the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _call(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
