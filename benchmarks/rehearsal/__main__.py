"""`python -m benchmarks.rehearsal 1024`: rehearse a job of 1,024 ranks on this machine.

The exit code is 1 if a promise was broken or the rehearsal failed, for example by a timeout.
"""

from __future__ import annotations

import argparse
import logging
import resource
import signal
import sys
from math import ceil, isqrt
from pathlib import Path

from paceline.core.protocol.tree import TREE_ABOVE

from benchmarks.rehearsal import figures
from benchmarks.rehearsal.scenario import Played, Scenario
from benchmarks.rehearsal.stage import PROCS, RehearsalError, Stage
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


def main() -> int:
    """Rehearse a job as the command line asks; print its figures and its ledger."""
    given = _parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave no process behind
    ranks = given.ranks
    step_s = (given.step_ms or STEP_MS_PER_RANK * ranks) / 1000
    processes = given.processes or processes_for(ranks)
    with temporary_folder() as folder:
        try:
            played = rehearse(
                ranks,
                processes=processes,
                step_s=step_s,
                rounds=given.rounds,
                quiet_s=given.quiet,
                limit_s=given.limit,
                folder=folder,
            )
        except RehearsalError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    for line in figures.lines(played):
        print(line)
    if wrong := figures.broken_promises(played):
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    print(f"\n{figures.ledger(played)}")
    return 0


def rehearse(
    ranks: int,
    *,
    processes: int,
    step_s: float,
    rounds: int,
    quiet_s: float,
    limit_s: float,
    folder: Path,
) -> Played:
    """Play the whole scenario on a new stage and return what was measured."""
    with Stage(ranks, processes=processes, step_s=step_s, limit_s=limit_s, folder=folder) as stage:
        return Scenario(stage, rounds=rounds, quiet_s=quiet_s).play()


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


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rehearse a job of many ranks on this machine.")
    parser.add_argument("ranks", type=int, help=f"a multiple of {PROCS}, two pods at least")
    parser.add_argument("--processes", type=int, default=0, help="that play the ranks")
    parser.add_argument("--step-ms", type=float, default=0.0, help="of a batch")
    parser.add_argument("--rounds", type=int, default=10, help="between two things that happen")
    parser.add_argument("--quiet", type=float, default=10.0, help="seconds of heartbeats alone")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each thing")
    given = parser.parse_args()
    if given.ranks % PROCS or given.ranks < 2 * PROCS:
        parser.error(f"{given.ranks} ranks: a multiple of {PROCS}, from {2 * PROCS} on")
    return given


if __name__ == "__main__":
    sys.exit(main())
