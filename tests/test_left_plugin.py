"""A test run that leaves something fails, whatever its tests say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing.left_plugin import ENV_RUN

ROOT = Path(__file__).parent.parent
CASES = {
    "nothing": "",
    "a folder of a run": "import tempfile; tempfile.mkdtemp(prefix='paceline-run-')",
    "an old name": "import tempfile; tempfile.mkdtemp(prefix='paceline-')",
    "a process": "import subprocess; p = subprocess.Popen(['sleep', '77']); print('pid', p.pid)",
    "a process of another parent": "import os; os.system('setsid sleep 78 & echo pid $!')",
    "memory": "open(f'/dev/shm/mpich_shm_{os.getpid():x}_0', 'w').close()",
}


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("what", CASES)
def test_what_is_left_fails_the_run(tmp_path: Path, what: str, workers: str) -> None:
    (tmp_path / "test_it.py").write_text(
        f"import os\ndef test_it():\n    {CASES[what] or 'pass'}\n"
    )
    words = ["-p", "testing.left_plugin", "-s", "-q", "--numprocesses", workers, "test_it.py"]
    env = {name: text for name, text in os.environ.items() if name != ENV_RUN}
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), *words],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": f"{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=120,
    )
    try:
        assert "1 passed" in run.stdout, run.stdout
        assert run.returncode == (0 if what == "nothing" else 1), run.stdout
        assert ("left behind" in run.stdout) is (what != "nothing"), run.stdout
    finally:
        for line in run.stdout.splitlines():
            if line.startswith("process "):
                os.kill(int(line.split()[1]), signal.SIGKILL)
            elif line.startswith("file /dev/shm/mpich_shm_") and what == "memory":
                path = Path(line.split()[1])
                if path not in before:
                    path.unlink()
