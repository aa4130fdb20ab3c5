"""B2b: what a busy main thread adds to GO -> reduced, per algorithm, with and without native loop.

There are two ranks, one per core of a small machine. Their main threads sleep, call torch or run
pure Python without ever waiting. GO is a message of the first rank's communication thread. The time
ends when the last rank has the sum, so it includes waking up the other communication thread.
`python` is the same loop in Python, which a rank uses where there is no C compiler.
"""

from __future__ import annotations

from itertools import product

from paceline.core.collectives.schedules import ALGORITHMS

from benchmarks.harness import Report, benchmark, middle, one_hash, share
from benchmarks.reducers import crews, right

RANKS = 2
KIB = (4, 64, 256, 1024)
CALLS = 30
KINDS = ("sleep", "torch", "python")
LOOPS = {"paceline": "native", "plain": "python"}
BAR_ADDED_MS = 2.0


@benchmark(
    "B2b: what a busy main thread adds to GO -> reduced, 2 ranks",
    (
        *("loop", "algorithm", "KiB", "idle ms", "p95", "torch adds ms", "p95"),
        *("python adds ms", "p95"),
    ),
)
def run(out: Report) -> None:
    """Run B2b."""
    sizes = KIB[:1] if out.smoke else KIB
    ms: dict[tuple[str, str, int, str], list[float]] = {}
    sums: list[str] = []
    all_right = True
    with crews(tuple(LOOPS), RANKS) as made:
        for _, kind, crew in product(range(out.rounds), KINDS, made):
            crew.ask("work", kind)
            for algorithm, kib in product(ALGORITHMS, sizes):
                took = crew.reduce(f"mpi:{algorithm}", kib << 8, 3 if out.smoke else CALLS)
                key = LOOPS[crew.system], algorithm, kib, kind
                ms.setdefault(key, []).extend(us / 1e3 for us in took.from_go_us)
                sums.append(f"{key} {took.sums}")
                all_right &= right(took, RANKS)
            crew.ask("work", "sleep")
    for loop, algorithm, kib in product(LOOPS.values(), ALGORITHMS, sizes):
        times = {kind: ms[loop, algorithm, kib, kind] for kind in KINDS}
        idle = middle(times["sleep"])
        row: list[object] = [loop, algorithm, kib]
        for kind, taken in times.items():
            added = middle(taken) - (0.0 if kind == "sleep" else idle)
            row += [added, share(taken, 0.95)]
            if kind != "sleep" and loop == LOOPS["paceline"]:
                text = f"{algorithm}, {kib} KiB: ms that a {kind} main thread adds, median"
                out.at_most(text, added, BAR_ADDED_MS)
        out.rows.append(tuple(row))
    out.checks["every reduction has the sum on every rank"] = all_right
    out.hashes["sums"] = one_hash(sums)
