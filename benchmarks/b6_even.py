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

from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import Lab, Phase, Plan, Ran
from benchmarks.rounds import (
    Stretch,
    by_name,
    go_to_reduced_s,
    own_step_s,
    parts_ms,
    same_weights,
    stretches,
)

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


def add_rows(out: r.Report, ran: Ran, ranks: int, kinds: tuple[str, ...], quorum: object) -> None:
    """Add the rows, bars and notes of one job to the report."""
    groups = by_name(stretches(ran))
    go_ms = {
        name: [1000 * x for s in found for x in go_to_reduced_s(ran, s)]
        for name, found in groups.items()
    }
    for kind in kinds:
        full = groups[f"{kind} Full"]
        for mode in ("Full", "Quorum"):
            found = groups[f"{kind} {mode}"]
            costs = [cost(a, b) for a, b in zip(full, found, strict=True)]
            spent = go_ms[f"{kind} {mode}"]
            out.rows.append(
                (
                    ranks,
                    kind,
                    mode if mode == "Full" else f"Quorum({quorum})",
                    r.middle(s.rounds_per_s for s in found),
                    1 / r.middle(own_step_s(ran, s) for s in found),
                    r.percent(r.spread(s.rounds_per_s for s in found)),
                    r.middle(s.gradients_per_s for s in found),
                    f"{100 * r.middle(costs):.1f} %",
                    f"{100 * min(costs):.1f} to {100 * max(costs):.1f} %",
                    r.middle(spent),
                    r.share(spent, 0.95),
                )
            )
            parts = [parts_ms(ran, s) for s in found]
            middle = {part: r.middle(p[part] for p in parts) for part in parts[0]}
            out.details[f"P={ranks} {kind} {mode}: ms"] = middle
            if mode == "Quorum":
                listed = ", ".join(f"{part} {value:.2f}" for part, value in middle.items())
                out.notes.append(f"{ranks} ranks, {kind}, Quorum, ms: {listed}")
            if mode == "Quorum" and kind == "sleep":
                out.bars.append(
                    r.Bar(
                        f"{ranks} ranks, Quorum({quorum}): cost against Full in rounds/s",
                        r.middle(costs),
                        BAR_COST,
                        at_least=False,
                    )
                )
        if kind != "sleep":
            # In Full, all main threads are parked at GO. In Quorum(1), one of two is in a step.
            idle, busy = go_ms["sleep Quorum"], go_ms[f"{kind} Quorum"]
            out.bars.append(
                r.Bar(
                    f"{ranks} ranks, 1 MiB, Quorum({quorum}): ms that a {kind} main thread adds to "
                    "GO -> reduced, median",
                    r.middle(busy) - r.middle(idle),
                    BAR_ADDED_MS,
                    at_least=False,
                )
            )
            out.notes.append(
                f"{ranks} ranks, {kind}, Quorum: p95 of GO -> reduced {r.share(busy, 0.95):.2f}, "
                f"asleep {r.share(idle, 0.95):.2f} ms"
            )


def cost(full: Stretch, other: Stretch) -> float:
    """Return by which fraction Full commits more rounds per second than the other mode."""
    return full.rounds_per_s / other.rounds_per_s - 1


def run(lab: Lab, given: Options) -> r.Report:
    """Run B6 and return its report."""
    out = r.Report(
        "b6_even",
        f"B6: nobody is slow, {STEP_MS} ms per step, gradients of {4 * ELEMENTS // 1024} KiB",
        (
            *("P", "main thread", "mode", "rounds/s", "limit", "spread", "gradients/s"),
            *("cost", "its range", "GO->reduced ms", "p95"),
        ),
        smoke=given.smoke,
    )
    jobs: list[tuple[int, tuple[str, ...], object]] = [(2, KINDS, 1)]
    if not given.smoke:
        jobs.insert(0, (8, ("sleep",), "75%"))
    for ranks, kinds, quorum in jobs:
        seconds = 0.7 if given.smoke else SECONDS
        ran = lab.run(plan(ranks, kinds, given.rounds, quorum=quorum, seconds=seconds))
        add_rows(out, ran, ranks, kinds, quorum)
        out.checks[f"P={ranks}: equal weights on all ranks"] = same_weights(ran)
        counted = {probe["applied"] for probe in ran.probes}
        out.checks[f"P={ranks}: the weights hold every applied gradient once"] = counted == {
            ran.log["gradients"]
        }
        out.hashes[f"P={ranks}"] = ran.probes[0]["hash"]
    cores = os.cpu_count() or 1
    out.notes.append(
        f"{cores} cores: the busy kinds are measured with 2 ranks, "
        + ("one per core" if cores >= 2 else "which share one core")
        + "; the limit of rounds/s is what the main thread does between two calls of step()"
    )
    return out


if __name__ == "__main__":
    main(run, __doc__)
