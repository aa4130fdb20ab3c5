"""The rehearsal as a benchmark: `python -m benchmarks rehearsal --ranks 1024`."""

from __future__ import annotations

import logging
import resource
import signal
import sys
from math import ceil, isqrt

from paceline.core.protocol.tree import TREE_ABOVE

from benchmarks.harness import Report, benchmark
from benchmarks.rehearsal import figures
from benchmarks.rehearsal.scenario import Scenario
from benchmarks.rehearsal.stage import PROCS, Stage
from testing.temporary import temporary_folder

FILES_OF_A_PEER = 3
"""Open files per peer: two of a zmq socket that connects, one of an accepted connection."""
FILES_OF_A_RANK = 24
"""All other open files of a rank: its sockets, their wake-ups, the connection to the coordinator.
"""
FILES_SHARE = 0.8
"""Share of the limit on open files that a process may use."""
STEP_MS_PER_RANK = 2.5
"""Least length of a batch per rank, so that the machine can play the round meanwhile."""


SMOKE_RANKS = 16


@benchmark(
    "A rehearsal",
    ("what", "measured", "limit at 1,024 ranks"),
    {
        "--ranks": {"type": int, "default": 1024, "help": "a multiple of 8, from 16 on"},
        "--processes": {"type": int, "default": 0, "help": "that play the ranks"},
        "--step-ms": {"type": float, "default": 0.0, "help": "of a batch"},
        "--between": {"type": int, "default": 10, "help": "rounds between two things that happen"},
        "--quiet": {"type": float, "default": 10.0, "help": "seconds of heartbeats alone"},
        "--limit": {"type": float, "default": 600.0, "help": "seconds for each thing"},
    },
)
def run(out: Report) -> None:
    """Rehearse a job; add its figures, and the checks of its ledger."""
    given, ranks = out.given, SMOKE_RANKS if out.smoke else out.given.ranks
    if ranks % PROCS or ranks < 2 * PROCS:
        sys.exit(f"error: --ranks {ranks}: a multiple of {PROCS}, from {2 * PROCS} on")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave no process behind
    rounds, quiet_s = (2, 1.0) if out.smoke else (given.between, given.quiet)
    with (
        temporary_folder() as folder,
        Stage(
            ranks,
            processes=given.processes or processes_for(ranks),
            step_s=(given.step_ms or STEP_MS_PER_RANK * ranks) / 1000,
            limit_s=given.limit,
            folder=folder,
        ) as stage,
    ):
        played = Scenario(stage, rounds=rounds, quiet_s=quiet_s).play()
    out.title += f" of {ranks} ranks in {played.pods} pods"
    out.rows += figures.table(played)
    wrong = figures.broken_promises(played)
    out.checks["every sample is accounted for, and all ranks end alike"] = not wrong
    out.notes += wrong or [figures.ledger(played)]
    out.notes.append(figures.bound_by(played))


def processes_for(ranks: int) -> int:
    """Return how many processes are needed so that none runs out of open files.

    A rank talks to its group and to its own place in the other groups (R41), and to some more peers
    while a change forms other groups.

    Returns:
        At least 2.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    peers = min(ranks - 1, max(TREE_ABOVE, 3 * isqrt(ranks)))
    files = ranks * (FILES_OF_A_PEER * peers + FILES_OF_A_RANK)
    return max(2, ceil(files / (FILES_SHARE * limit)))
