"""B2b: what a busy main thread adds to GO -> reduced, per algorithm, with and without native loop.

There are two ranks, one per core of a small machine. Their main threads sleep, call torch or run
pure Python without ever waiting. GO is a message of the first rank's communication thread. The time
ends when the last rank has the sum, so it includes waking up the other communication thread.
`python` is the same loop in Python, which a rank uses where there is no C compiler.
"""

from __future__ import annotations

from paceline.core.collectives.schedules import ALGORITHMS

from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import Lab
from benchmarks.reducers import crews, right

RANKS = 2
KIB = (4, 64, 256, 1024)
CALLS = 30
KINDS = ("sleep", "torch", "python")
LOOPS = {"paceline": "native", "plain": "python"}
BAR_ADDED_MS = 2.0


def run(lab: Lab, given: Options) -> r.Report:  # noqa: ARG001
    """Run B2b and return its report."""
    out = r.Report(
        "b2_busy",
        "B2b: what a busy main thread adds to GO -> reduced, 2 ranks",
        (
            *("loop", "algorithm", "KiB", "idle ms", "p95", "torch adds ms", "p95"),
            *("python adds ms", "p95"),
        ),
        smoke=given.smoke,
    )
    sizes = KIB[:1] if given.smoke else KIB
    found: dict[tuple[str, str, int, str], list[float]] = {}
    sums: list[str] = []
    wrong: list[str] = []
    with crews(tuple(LOOPS), RANKS) as made:
        for _ in range(given.rounds):
            for kind in KINDS:
                for crew in made:
                    crew.ask("work", kind)
                    for algorithm in ALGORITHMS:
                        for kib in sizes:
                            calls = 3 if given.smoke else CALLS
                            took = crew.reduce(f"mpi:{algorithm}", kib << 8, calls)
                            key = LOOPS[crew.system], algorithm, kib, kind
                            found.setdefault(key, []).extend(x / 1e3 for x in took.from_go_us)
                            sums.append(f"{key} {took.sums}")
                            if not right(took, RANKS):
                                wrong.append(f"{key}: {took.sums}")
                    crew.ask("work", "sleep")
    for loop in LOOPS.values():
        for algorithm in ALGORITHMS:
            for kib in sizes:
                add_row(out, found, loop, algorithm, kib)
    out.checks["every reduction has the sum on every rank"] = not wrong
    out.hashes["sums"] = r.one_hash(sums)
    out.notes += [f"wrong: {one}" for one in wrong]
    return out


def add_row(
    out: r.Report,
    found: dict[tuple[str, str, int, str], list[float]],
    loop: str,
    algorithm: str,
    kib: int,
) -> None:
    """Add the row of one loop, algorithm and size to the report, and its bars."""
    idle, torch, python = (found[loop, algorithm, kib, kind] for kind in KINDS)
    added = [r.middle(busy) - r.middle(idle) for busy in (torch, python)]
    tails = [r.share(times, 0.95) for times in (idle, torch, python)]
    row = (r.middle(idle), tails[0], added[0], tails[1], added[1], tails[2])
    out.rows.append((loop, algorithm, kib, *row))
    if loop == LOOPS["paceline"]:
        for kind, value in zip(KINDS[1:], added, strict=True):
            text = f"{algorithm}, {kib} KiB: ms that a {kind} main thread adds, median"
            out.bars.append(r.Bar(text, value, BAR_ADDED_MS, at_least=False))


if __name__ == "__main__":
    main(run, __doc__)
