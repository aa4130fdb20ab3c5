"""Unix sockets of `multiprocessing` work however long the path of TMPDIR is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import sys
from multiprocessing.connection import Listener
from paceline.worker import short_sockets
print(short_sockets.use_folder(sys.argv[1]))
with Listener(None, "AF_UNIX") as listener:
    print(listener.address)
short_sockets.restore(sys.argv[1])
print(short_sockets.use_folder(sys.argv[1]))
"""


@pytest.mark.parametrize("depth", [0, 3])
def test_sockets_are_made_in_a_folder_with_a_short_path(tmp_path: Path, depth: int) -> None:
    """Use a long TMPDIR.

    Loader workers used to fail to send their batches, and the script waited forever.
    """
    long = tmp_path.joinpath(*["x" * 30] * depth) if depth else Path("/tmp")
    long.mkdir(parents=True, exist_ok=True)
    short = tmp_path / "s"
    short.mkdir()
    words = [sys.executable, "-c", SCRIPT, "."]
    done = subprocess.run(
        words, env={"TMPDIR": str(long)}, cwd=short, capture_output=True, text=True, timeout=60
    )
    changed, address, again = done.stdout.split()
    assert (changed, again) == (str(depth > 0),) * 2, done.stderr
    assert address.startswith("./listener-" if depth else "/tmp/pymp-")
