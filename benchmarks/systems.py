"""Start and end the systems that B8 compares, as their users do, and read their progress.

Each start is a real one, without the fork server. Every process runs in a session of its own and
below a scratch folder. `Run.end` kills a system with all its descendants.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.jobs import PACELINE, SCRIPTS, end_all, manifest, python_path, script, start

WAIT_S: Final = 150.0
LOOK_S: Final = 0.05
DIE_AT: Final = 45
# With its agent's store, torchrun 2.15 gives restarted workers the addresses of dead ones.
OWN_STORE: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SNAPSHOT_EVERY: Final = 10


@dataclass(frozen=True)
class Line:
    """Progress line of one process: monotonic time in ns, step, and processes that took part."""

    ns: int
    step: int
    taking_part: int


@dataclass
class SystemRun:
    """One start of one system: its folder, its parameters and its processes."""

    folder: Path
    step_ms: int
    width: int
    ranks: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, name: str = "log"
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own, with its output in a log file.

        Args:
            argv: The command and its arguments.
            env: Additional environment variables.
            name: Name of the log file in the run's folder.

        Returns:
            The process; `end` kills it.
        """
        own = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), "RECOVERY": self.config()}
        process = start(argv, self.folder, {**own, **(env or {})}, log=name)
        self.processes.append(process)
        return process

    def config(self) -> str:
        """Return the configuration of the training script as JSON."""
        return json.dumps(
            {
                "folder": str(self.folder),
                "step_ms": self.step_ms,
                "width": self.width,
                "die_at": DIE_AT,
                "snapshot_every": SNAPSHOT_EVERY,
            }
        )

    def lines(self) -> list[Line]:
        """Return the progress lines of all processes, ordered by time."""
        lines = []
        for path in self.folder.glob("progress-*"):
            for text in path.read_text().splitlines():
                words = text.split()
                if len(words) == 3:  # the last line may be incomplete
                    lines.append(Line(*map(int, words)))
        return sorted(lines, key=lambda line: line.ns)

    def death(self) -> dict[str, Any] | None:
        """Return the times of the victim's death by both clocks, or None before it."""
        path = self.folder / "death.json"
        text = path.read_text() if path.exists() else ""
        known: dict[str, Any] | None = json.loads(text) if text else None
        return known

    def wait(self, what: Callable[[list[Line]], bool], why: str) -> None:
        """Wait until the progress lines satisfy a condition.

        Args:
            what: Predicate over the progress lines so far.
            why: Name of the condition, for the error message.

        Raises:
            TimeoutError: The condition does not hold after WAIT_S seconds.
        """
        until = time.monotonic() + WAIT_S
        while not what(self.lines()):
            if time.monotonic() > until:
                log = (self.folder / "log").read_text(errors="replace")[-3000:]
                raise TimeoutError(f"{self.folder.name}: no {why} within {WAIT_S:g} s\n{log}")
            time.sleep(LOOK_S)

    def end(self) -> None:
        """Kill all processes of the system with their descendants, and reap them."""
        end_all(self.processes)


# ---- the systems ---------------------------------------------------------------------------------


def start_paceline(run: SystemRun, backend: str) -> None:
    """Start `paceline run`, whose agents restart a dead rank."""
    job = manifest(
        script("recovery_paceline.py"),
        env={"RECOVERY": run.config(), "PYTHONPATH": python_path()},
        replicas=run.ranks,
        minReplicas=1,
        # Be as synchronous as the others: wait for all ranks.
        collective={"backend": backend, "mode": "Full"},
    )
    path = run.folder / "job.json"
    path.write_text(json.dumps(job))
    run.start(
        [
            *(str(PACELINE), "run", str(path)),
            *("--run-dir", str(run.folder / "run")),
        ]
    )


def end_paceline(run: SystemRun) -> dict[str, Any]:
    """Stop `paceline run` with SIGINT and return the status that it leaves behind.

    Args:
        run: A run that `start_paceline` started.

    Returns:
        The content of the run's `status.json`.

    Raises:
        subprocess.TimeoutExpired: The run has not ended within 15 s; it is killed.
    """
    (process,) = run.processes
    process.send_signal(signal.SIGINT)
    try:
        process.wait(15.0)
    except subprocess.TimeoutExpired:
        run.end()
        raise
    status: dict[str, Any] = json.loads((run.folder / "run" / "status.json").read_text())
    return status


def start_torchrun(run: SystemRun) -> None:
    """Start one torchrun agent for all workers, which it restarts together: its fastest form."""
    run.start(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(run.ranks), "--max-restarts", "3"),
            *("--monitor-interval", "0.1", str(SCRIPTS / "recovery_ddp.py")),
        ],
        env=OWN_STORE,
    )


def start_elastic(run: SystemRun, port: int) -> None:
    """Start one more torchrun agent with one worker, in a job of 1 to `ranks` nodes."""
    run.start(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", f"1:{run.ranks}", "--nproc-per-node", "1", "--max-restarts", "9"),
            *("--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-id", "b8"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}"),
            *("--rdzv-conf", "last_call_timeout=1,join_timeout=60"),
            *("--local-addr", "127.0.0.1", str(SCRIPTS / "recovery_ddp.py")),
        ],
        env=OWN_STORE,
    )


def start_torchft(
    run: SystemRun, python: str, place: int, lighthouse: int
) -> subprocess.Popen[bytes]:
    """Start one replica group of torchft and return its process."""
    return run.start(
        [python, str(SCRIPTS / "recovery_torchft.py")],
        env={
            "REPLICA_GROUP_ID": str(place),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{lighthouse}",
        },
    )


def start_lighthouse(run: SystemRun, python: str, port: int) -> None:
    """Start torchft's lighthouse with short timeouts.

    The benchmark measures how soon a silent replica counts as dead, so the defaults would decide
    the result.
    """
    run.start(
        [
            *(str(Path(python).parent / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}"),
            *("--min_replicas", "1", "--quorum_tick_ms", "50"),
            *("--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "500"),
        ],
        name="lighthouse.log",
    )
