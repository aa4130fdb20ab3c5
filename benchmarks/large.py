"""`make large RANKS=40`: digits in Quorum with as many torch ranks as the machine holds.

Everything is real except how a process begins: all are forked from one that has imported torch
(`lab`), so that each rank costs only its private memory. One rank is killed and restarted, and one
replica joins; once over MPI, and once over gloo. The job must be complete, with each image applied
exactly once in each epoch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any, Final

from paceline.clock import now_ns
from paceline.core.faults import parse_faults
from paceline.local.runner import Runner
from paceline_api.reading.load import job_from_mapping
from paceline_api.resolve import resolve
from paceline_api.times import NS_PER_S

from benchmarks.lab import ROOT, Lab
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
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": f"digits-{backend}"},
        "spec": {
            "replicas": replicas,
            "procsPerReplica": procs,
            "minReplicas": 1,
            "maxReplicas": replicas + 1,
            "collective": {
                "backend": backend,
                "mode": "Quorum",
                "quorum": "75%",
                "normalisation": "Fixed",
                "maxAge": 0,
                "freezeTimeout": "120s",  # many ranks on two cores are slow, not frozen
            },
            "template": {
                "spec": {
                    "containers": [
                        {
                            "name": "trainer",
                            "image": "none",
                            "command": [*command, "--batch-size", str(BATCH)],
                        }
                    ]
                }
            },
        },
    }


def play(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the job in a process of the fork server, and return its results.

    Args:
        order: `job` (the manifest) and `faults` (as for `--inject`).
        folder: Run directory and working directory.

    Returns:
        Outcome, rounds, epochs, membership changes and accuracy.
    """
    below = fork_server.start_below()
    forked.start_by(below)
    printed: list[str] = []
    runs = Runner(
        resolve(job_from_mapping(order["job"])),
        run_dir=folder,
        working_dir=folder,
        faults=tuple(parse_faults(order["faults"])),
        show=lambda *_: None,
        say=printed.append,
        on_line=printed.append,
    )
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
        "changes": [
            [c.reason, c.members, *map(_seconds, (c.agree_s, c.start_s, c.gap_s))]
            for c in status.changes
        ],
        "accuracy": json.loads(accuracy.read_text())["accuracy"] if accuracy.exists() else 0.0,
    }


def _seconds(value: float | None) -> str:
    """Return a duration as text.

    It is unknown (None) for a part of a change that the next change overtook.

    Returns:
        Seconds, or `?`.
    """
    return f"{value:6.2f} s" if value is not None else "      ? "


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


def main() -> int:
    """Run the job over each backend; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description="Digits with many torch ranks on this machine.")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--procs", type=int, default=4, help="ranks of a replica")
    parser.add_argument("--backend", choices=BACKENDS, help="only this one")
    given = parser.parse_args()
    if given.ranks % given.procs:
        parser.error(f"{given.ranks} ranks are no whole number of replicas of {given.procs}")
    wrong = []
    with Lab() as lab, temporary_folder() as scratch:
        for backend in (given.backend,) if given.backend else BACKENDS:
            folder = scratch / backend
            folder.mkdir()
            wrong += run(lab, given.ranks, given.procs, backend, folder)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


def run(lab: Lab, ranks: int, procs: int, backend: str, folder: Path) -> list[str]:
    """Run one job, print its figures, and return a list of what is wrong with it."""
    faults = f"kill:rank=1,at=round:{KILL_AT};join:at=round:{JOIN_AT}"
    order = {"job": job(ranks, procs, backend), "faults": faults}
    memory = Memory(lab.pid)
    begun_ns = now_ns()
    try:
        result = lab.call("benchmarks.large:play", order, folder, limit_s=LIMIT_S)
    finally:
        memory.close()
    seconds = (now_ns() - begun_ns) / NS_PER_S
    print(f"\n{ranks} ranks of {procs} per replica over {backend}: {result['message']}")
    print(f"  {result['rounds']} rounds, median {result['round_s'] * 1000:.0f} ms; {seconds:.0f} s")
    print(f"  accuracy {result['accuracy']:.4f}; {result['exact']} of {epochs(ranks)} epochs exact")
    print(f"  {memory.most / MIB:.0f} MiB at most, in {memory.processes} processes")
    for reason, members, agree_s, start_s, gap_s in result["changes"]:
        print(
            f"  {reason:<12}{members:>4} members   agreed {agree_s}"
            f"   started {start_s}   between two commits {gap_s}"
        )
    wrong = [] if result["complete"] else [result["message"], *result["printed"]]
    if result["exact"] != epochs(ranks) or result["dropped"]:
        wrong.append(f"{result['exact']} epochs exact, {result['dropped']} samples dropped")
    reasons = [change[0] for change in result["changes"]]
    wrong += [f"nobody has {x.lower()}: {reasons}" for x in ("Died", "Joined") if x not in reasons]
    return [f"{backend}: {line}" for line in wrong]


if __name__ == "__main__":
    sys.exit(main())
