"""Write the manifest of a job that runs a script, and run it with `paceline run`."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import yaml

from testing.processes.history import descendants

ROOT: Final = Path(__file__).parent.parent
SCRIPTS: Final = Path(__file__).parent / "scripts"
PACELINE: Final = Path(sys.executable).parent / "paceline"


class JobError(RuntimeError):
    """Raised when a job did not end as planned; the message holds the end of its output."""


def manifest(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    """Return a TrainingJob with one container.

    Args:
        command: Command of the container.
        env: Environment variables of the container.
        **spec: Fields of `spec`.

    Returns:
        The manifest as a plain dict.
    """
    trainer = {
        "name": "trainer",
        "image": "none",
        "command": list(command),
        "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
    }
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "benchmark"},
        "spec": {**spec, "template": {"spec": {"containers": [trainer]}}},
    }


def example(name: str) -> Any:
    """Import `train.py` of an example and return it as a module."""
    path = ROOT / "examples" / name / "train.py"
    spec = importlib.util.spec_from_file_location(f"{name}_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name: str) -> list[str]:
    """Return the command that runs a script of `benchmarks/scripts`."""
    return [sys.executable, str(SCRIPTS / name)]


def run_job(job: Mapping[str, Any] | Path, folder: Path, *words: str, limit_s: float) -> Path:
    """Run a job with `paceline run` to its end.

    Args:
        job: The manifest, or the path of a file with it.
        folder: Existing working folder of the runner, for the manifest and the run directory.
        *words: Further arguments of `paceline run`.
        limit_s: Timeout in seconds.

    Returns:
        The run directory.

    Raises:
        JobError: The job failed.
    """
    path = job if isinstance(job, Path) else folder / "job.yaml"
    if not isinstance(job, Path):
        path.write_text(yaml.safe_dump(dict(job)))
    order = [str(PACELINE), "run", str(path), "--quiet", "--run-dir", str(folder / "run")]
    done = subprocess.run(
        [*order, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        output = (done.stdout + done.stderr)[-6000:]
        raise JobError(f"{path}: the job ended with {done.returncode}\n{output}")
    return folder / "run"


def python_path() -> str:
    """Return a PYTHONPATH from which scripts can import the package `benchmarks`."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def start(
    argv: Sequence[str], folder: Path, env: Mapping[str, str] | None = None, *, log: str = "log"
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with its output in a log file.

    Args:
        argv: The command and its arguments.
        folder: Working folder.
        env: Its environment; None is that of this process.
        log: Name of the log file in the folder.

    Returns:
        The process; `end_all` ends it.
    """
    with (folder / log).open("ab") as out:
        return subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def end_all(processes: Iterable[subprocess.Popen[bytes]], patience_s: float = 0.0) -> None:
    """Wait for processes to end, kill what is left with its descendants, and reap them.

    Args:
        processes: The processes.
        patience_s: How long they may take to end by themselves, all of them together.
    """
    until = time.monotonic() + patience_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        for pid in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
