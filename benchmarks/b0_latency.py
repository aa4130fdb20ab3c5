"""B0: how long ranks wait in a round when rank i arrives 10 ms x i late (eager-SGD's E0).

Each P is one job whose mode is switched while it runs, five times through all modes, with grace 0.
The wait of a rank is the time that its main thread spends in `optimizer.step()`. The limit is the
closed form for that arrival pattern with rounds that cost nothing. `Majority(drawn)` is the variant
that eager-SGD published: a randomly drawn rank starts the round. Its waiting time varies nearly as
much as its mean, so this mode gets many more rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.harness import (
    Report,
    benchmark,
    middle,
    percent,
    ratios,
    spread,
    with_spread,
)
from benchmarks.lab import Phase, Plan, Ran
from benchmarks.rounds import by_name, check_job, stretches, waits_s

STAGGER_MS = 10
ELEMENTS = 1024
ITERATIONS = 7
DRAWN_ITERATIONS = 400
"""Iterations of a block of a drawn majority. One wait deviates by 0.9 of its mean, so the mean of
this many deviates by 0.045; five of them are 10 % apart from the least to the largest."""
SLACK_MS = {8: 60, 16: 90, 32: 150}
"""Time from the last arrival to the next iteration, by number of ranks."""
BAR_RATIO = 3.5
BAR_SPREAD = 0.15


@dataclass(frozen=True)
class Entry:
    """One mode of the table at one number of ranks."""

    collective: dict[str, Any]
    limit: float
    """Mean wait in staggers if rounds cost nothing."""
    quorum: int
    """Number of fresh ranks that the mode promises."""
    drawn: bool = False


def wait_for(last: int, ranks: int) -> float:
    """Return the mean wait, in staggers, if all ranks continue when rank `last` arrives."""
    return sum(last - i for i in range(last + 1)) / ranks


def entries(p: int) -> dict[str, Entry]:
    """Return the modes of the table for P ranks by name."""
    quorum = {"mode": "Quorum"}
    drawn = {"mode": "Majority", "randomInitiator": True}
    # The minimum of the deadline is met earlier, so the deadline decides.
    deadline_ms = STAGGER_MS * p // 2 + STAGGER_MS // 2
    deadline = {"mode": "Deadline", "deadline": f"{deadline_ms}ms", "quorum": p // 4}
    return {
        "Full": Entry({"mode": "Full"}, wait_for(p - 1, p), p),
        "Quorum(P/2)": Entry({**quorum, "quorum": p // 2}, wait_for(p // 2 - 1, p), p // 2),
        "Quorum(3P/4)": Entry(
            {**quorum, "quorum": 3 * p // 4}, wait_for(3 * p // 4 - 1, p), 3 * p // 4
        ),
        "Majority(drawn)": Entry(drawn, fmean(wait_for(i, p) for i in range(p)), 1, drawn=True),
        "Solo": Entry({"mode": "Solo"}, 0.0, 1),
        "Deadline(P/2)": Entry(deadline, wait_for(p // 2, p) + 0.5 * (p // 2 + 1) / p, p // 4),
    }


def plan(ranks: int, rounds: int, *, drawn_iterations: int) -> Plan:
    """Return the job for one number of ranks, with `rounds` passes through all modes."""
    period_ms = STAGGER_MS * ranks + SLACK_MS.get(ranks, 60)
    phases = [
        Phase(name, (drawn_iterations if e.drawn else ITERATIONS) * period_ms / 1000, e.collective)
        for _ in range(rounds)
        for name, e in entries(ranks).items()
    ]
    config = {"elements": ELEMENTS, "period_ms": period_ms, "stagger_ms": STAGGER_MS}
    collective = {"grace": "0s", "mode": "Full"}
    return Plan("steps.py", ranks, phases, config, collective=collective, one_pod=True)


def add_rows(out: Report, ran: Ran, ranks: int) -> None:
    """Add the rows, bars, checks and notes for one number of ranks to the report."""
    groups = by_name(stretches(ran, skip=1))
    waits_ms = {
        name: [1000 * fmean(waits_s(ran, stretch)) for stretch in repeats]
        for name, repeats in groups.items()
    }
    for name, entry in entries(ranks).items():
        repeats, waits = groups[name], waits_ms[name]
        over = ratios(waits_ms["Full"], waits)
        fresh = [c["fresh"] for s in repeats for c in s.commits]
        out.rows.append(
            (
                *(ranks, name, middle(waits), STAGGER_MS * entry.limit, percent(spread(waits))),
                *(*with_spread(over), fmean(fresh)),
                percent(sum(f < ranks // 2 for f in fresh) / len(fresh)),
                middle(s.gradients_per_s for s in repeats),
                middle(s.rounds_per_s for s in repeats),
            )
        )
        out.samples[f"P={ranks} {name}: mean wait ms"] = waits
        promised = all(f >= entry.quorum for f in fresh)
        out.checks[f"P={ranks} {name}: no round with less than its quorum"] = promised
        if entry.drawn and not out.smoke:
            out.at_most(f"P={ranks}: spread of {name}", spread(waits), BAR_SPREAD)
        if ranks == 32 and name == "Quorum(P/2)":
            text = "P=32: Full's mean wait over that of Quorum(16)"
            out.at_least(text, middle(over), BAR_RATIO)
    reductions_ms = [(end - begin) / 1e6 for p in ran.probes for _, begin, end in p["reductions"]]
    out.notes.append(
        f"P={ranks}: {middle(p.get('own_mib', 0.0) for p in ran.probes):.0f} MiB of own pages per "
        f"rank; a reduction of {4 * ELEMENTS // 1024} KiB takes {middle(reductions_ms):.1f} ms"
    )


@benchmark(
    "B0: waiting in a round, rank i late by 10 ms x i, grace 0",
    (
        *("P", "mode", "mean wait ms", "limit ms", "spread", "Full/mode", "its spread"),
        *("fresh", "rounds below P/2", "gradients/s", "rounds/s"),
    ),
)
def run(out: Report) -> None:
    """Run B0."""
    for ranks in (4,) if out.smoke else (8, 16, 32):
        drawn = ITERATIONS if out.smoke else DRAWN_ITERATIONS
        ran = out.lab.run(plan(ranks, out.rounds, drawn_iterations=drawn))
        add_rows(out, ran, ranks)
        check_job(out, ran, f"P={ranks}")
    out.notes.append(
        "gradients/s and rounds/s are those of the arrival pattern, which has a fixed period: they "
        "show that each mode applies the same work"
    )
