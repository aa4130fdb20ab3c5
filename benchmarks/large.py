"""`make large RANKS=40`: digits in Quorum with as many torch ranks as the machine holds.

Everything is real except how a process begins: all are forked from one that has imported torch
(`lab`), so that each rank costs only its private memory. One rank is killed and restarted, and one
replica joins; once over MPI, and once over gloo. The job must be complete, with each image applied
exactly once in each epoch.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any, Final

from paceline.clock import now_ns
from paceline_api.times import NS_PER_S

from benchmarks.conductor import make_runner
from benchmarks.harness import Report, benchmark
from benchmarks.jobs import ROOT, manifest
from benchmarks.rehearsal.watch import MIB
from testing.processes import fork_server, forked
from testing.processes.history import descendants
from testing.temporary import temporary_folder

DIGITS: Final = ROOT / "examples" / "digits"
BACKENDS: Final = ("mpi", "gloo")
BATCH: Final = 4
IMAGES: Final = 1437
ROUNDS: Final = 250
KILL_AT: Final = 60
JOIN_AT: Final = 90
"""Round at which a replica joins; KILL_AT is the round at which a rank is killed."""
LOOK_S: Final = 5.0
LIMIT_S: Final = 3600.0


def epochs(ranks: int) -> int:
    """Return the number of epochs that makes about ROUNDS rounds if all ranks take part in each."""
    return max(1, round(ROUNDS * ranks * BATCH / IMAGES))


def job(ranks: int, procs: int, backend: str) -> dict[str, Any]:
    """Return the TrainingJob manifest."""
    replicas = ranks // procs
    command = [sys.executable, str(DIGITS / "train.py"), "--epochs", str(epochs(ranks))]
    return manifest(
        [*command, "--batch-size", str(BATCH)],
        replicas=replicas,
        procsPerReplica=procs,
        minReplicas=1,
        maxReplicas=replicas + 1,
        collective={
            "backend": backend,
            "mode": "Quorum",
            "quorum": "75%",
            "normalisation": "Fixed",
            "maxAge": 0,
            "freezeTimeout": "120s",  # many ranks on two cores are slow, not frozen
        },
    )


def play(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the job in a process of the fork server, and return its results.

    Args:
        order: `job` (the manifest) and `faults` (as for `--inject`).
        folder: Run directory and working directory.

    Returns:
        Outcome, rounds, epochs, membership changes and accuracy.
    """
    forked.start_by(fork_server.start_below())
    printed: list[str] = []
    runs = make_runner(order, folder, lambda *_: None, printed)
    result = asyncio.run(runs.run())
    status = result.status
    assert status is not None
    accuracy = folder / "result.json"
    return {
        "complete": result.outcome.complete,
        "message": f"{result.outcome.reason}: {result.outcome.message}",
        "printed": printed[-20:],
        "rounds": status.version,
        "round_s": status.log.round_s,
        "exact": status.log.epochs_exact,
        "dropped": sum(status.log.samples_dropped.values()),
        "changes": [(c.reason, c.gap_s) for c in status.changes],
        "accuracy": json.loads(accuracy.read_text())["accuracy"] if accuracy.exists() else 0.0,
    }


class Memory:
    """Peak memory of all descendants of a process together; shared pages count once."""

    def __init__(self, root: int) -> None:
        self.most = self.processes = 0
        self._root = root
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the sampling thread."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            pids = descendants(self._root)
            self.processes = max(self.processes, len(pids))
            self.most = max(self.most, sum(map(_proportional_bytes, pids)))


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0  # the process has ended in the meantime
    return sum(int(x.split()[1]) * 1024 for x in text.splitlines() if x.startswith("Pss:"))


@benchmark(
    "Digits with many torch ranks, one of which is killed, while a replica joins",
    (
        *("backend", "ranks", "rounds", "round ms", "epochs exact", "accuracy"),
        *("MiB at most", "processes", "seconds", "s between two commits at a death, at a join"),
    ),
    {
        "--ranks": {"type": int, "default": 40},
        "--procs": {"type": int, "default": 4, "help": "ranks of a replica"},
    },
)
def run(out: Report) -> None:
    """Run the job over each backend."""
    ranks, procs = (4, 2) if out.smoke else (out.given.ranks, out.given.procs)
    faults = f"kill:rank=1,at=round:{KILL_AT};join:at=round:{JOIN_AT}"
    for backend in BACKENDS:
        order = {"job": job(ranks, procs, backend), "faults": faults}
        memory = Memory(out.lab.pid)
        begun_ns = now_ns()
        try:
            with temporary_folder() as folder:
                result = out.lab.call("benchmarks.large:play", order, folder, limit_s=LIMIT_S)
        finally:
            memory.close()
        seconds = (now_ns() - begun_ns) / NS_PER_S
        gaps = [f"{reason} {gap_s:.2f}" for reason, gap_s in result["changes"] if gap_s is not None]
        out.rows.append(
            (
                *(backend, ranks, result["rounds"], 1000 * result["round_s"], result["exact"]),
                *(f"{result['accuracy']:.4f}", memory.most / MIB, memory.processes, seconds),
                ", ".join(gaps),
            )
        )
        reasons = [reason for reason, _ in result["changes"]]
        out.checks[f"{backend}: {result['message']}"] = result["complete"]
        exact = result["exact"] == epochs(ranks) and not result["dropped"]
        out.checks[f"{backend}: all {epochs(ranks)} epochs are exact"] = exact
        both = {"Died", "Joined"} <= set(reasons)
        out.checks[f"{backend}: a rank died and another one joined"] = both
        if not result["complete"]:
            out.notes += result["printed"]
