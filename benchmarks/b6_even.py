"""B6: what Quorum costs when no rank is slow, and what a busy main thread adds to a round.

The mode and the kind of work of each job are switched while it runs. Eight ranks sleep (their main
threads need no core). Two ranks, one per core of a small machine, sleep, call torch, or run pure
Python. GO -> reduced is the time from the starter's GO until the last rank has the sum. What a busy
main thread adds to it is measured in Quorum, where one rank computes while the other's GO comes; in
Full all main threads are parked by then. Two ranks use Quorum(1) with the default grace, since 75 %
of two is Full.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.harness import Report, benchmark, middle, percent, share, spread
from benchmarks.lab import Phase, Plan, Ran
from benchmarks.rounds import by_name, check_job, go_to_reduced_s, own_step_s, stretches

STEP_MS = 20
SECONDS = 1.6
ELEMENTS = 262_144
BAR_COST = 0.03
BAR_ADDED_MS = 2.0
KINDS = ("sleep", "torch", "python")


def plan(
    ranks: int, kinds: tuple[str, ...], rounds: int, *, quorum: object, seconds: float
) -> Plan:
    """Return the job, with `rounds` passes through all kinds of work and both modes."""
    modes: dict[str, dict[str, Any]] = {
        "Full": {"mode": "Full"},
        "Quorum": {"mode": "Quorum", "quorum": quorum},
    }
    phases = [
        Phase(f"{kind} {name}", seconds, how, {"work": kind})
        for _ in range(rounds)
        for kind in kinds
        for name, how in modes.items()
    ]
    config = {"elements": ELEMENTS, "step_ms": STEP_MS, "slow_ms": STEP_MS}
    return Plan("steps.py", ranks, phases, config, collective={"mode": "Full"}, one_pod=True)


def add_rows(out: Report, ran: Ran, ranks: int, kinds: tuple[str, ...], quorum: object) -> None:
    """Add the rows, bars and notes of one job to the report."""
    groups = by_name(stretches(ran))
    go_ms = {
        name: [1000 * x for s in repeats for x in go_to_reduced_s(ran, s)]
        for name, repeats in groups.items()
    }
    where = f"{ranks} ranks, Quorum({quorum})"
    for kind in kinds:
        full = [s.rounds_per_s for s in groups[f"{kind} Full"]]
        for mode in ("Full", "Quorum"):
            name = f"{kind} {mode}"
            repeats, spent_ms = groups[name], go_ms[name]
            rates = [s.rounds_per_s for s in repeats]
            costs = [a / b - 1 for a, b in zip(full, rates, strict=True)]
            out.rows.append(
                (
                    *(ranks, kind, mode if mode == "Full" else f"Quorum({quorum})"),
                    *(middle(rates), 1 / middle(own_step_s(ran, s) for s in repeats)),
                    *(percent(spread(rates)), middle(s.gradients_per_s for s in repeats)),
                    f"{100 * middle(costs):.1f} %",
                    f"{100 * min(costs):.1f} to {100 * max(costs):.1f} %",
                    *(middle(spent_ms), share(spent_ms, 0.95)),
                )
            )
            out.samples[f"P={ranks} {name}"] = {"rounds/s": rates, "cost": costs}
        if kind == "sleep":
            out.at_most(f"{where}: cost against Full in rounds/s", middle(costs), BAR_COST)
        else:
            # In Full, all main threads are parked at GO. In Quorum(1), one of two is in a step.
            added = middle(go_ms[f"{kind} Quorum"]) - middle(go_ms["sleep Quorum"])
            text = f"{where}, 1 MiB: ms that a {kind} main thread adds to GO -> reduced, median"
            out.at_most(text, added, BAR_ADDED_MS)


@benchmark(
    f"B6: nobody is slow, {STEP_MS} ms per step, gradients of {4 * ELEMENTS // 1024} KiB",
    (
        *("P", "main thread", "mode", "rounds/s", "limit", "spread", "gradients/s"),
        *("cost", "its range", "GO->reduced ms", "p95"),
    ),
)
def run(out: Report) -> None:
    """Run B6."""
    jobs: list[tuple[int, tuple[str, ...], object]] = [(8, ("sleep",), "75%"), (2, KINDS, 1)]
    for ranks, kinds, quorum in jobs[1:] if out.smoke else jobs:
        seconds = 0.7 if out.smoke else SECONDS
        ran = out.lab.run(plan(ranks, kinds, out.rounds, quorum=quorum, seconds=seconds))
        add_rows(out, ran, ranks, kinds, quorum)
        check_job(out, ran, f"P={ranks}")
    out.notes.append(
        f"{os.cpu_count()} cores: the busy kinds are measured with 2 ranks; the limit of rounds/s "
        "is what the main thread does between two calls of step()"
    )
