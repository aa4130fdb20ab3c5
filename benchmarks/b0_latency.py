"""B0: how long ranks wait in a round when rank i arrives 10 ms x i late (eager-SGD's E0).

Each P is one job whose mode is switched while it runs, five times through all modes, with grace 0.
The wait of a rank is the time that its main thread spends in `optimizer.step()`. The limit is the
closed form for that arrival pattern with rounds that cost nothing. `Majority(drawn)` is the variant
that eager-SGD published: a randomly drawn rank starts the round. Its waiting time varies nearly as
much as its mean, so this mode gets many more rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import Lab, Phase, Plan, Ran
from benchmarks.rounds import Stretch, by_name, same_weights, stretches, waits_s

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
    """One mode of the table. `limit` maps P to the mean wait in units of the stagger."""

    name: str
    collective: Callable[[int], dict[str, Any]]
    limit: Callable[[int], float]
    quorum: Callable[[int], int]
    """Function from P to the number of fresh ranks that the mode promises."""
    drawn: bool = False
    found: dict[int, Any] = field(default_factory=dict)


def wait_for(last: int, ranks: int) -> float:
    """Return the mean wait, in staggers, if all ranks continue when rank `last` arrives."""
    return sum(last - i for i in range(last + 1)) / ranks


def entries() -> list[Entry]:
    """Return the modes of the table, in order."""
    return [
        Entry("Full", lambda _: {"mode": "Full"}, lambda p: wait_for(p - 1, p), lambda p: p),
        Entry(
            "Quorum(P/2)",
            lambda p: {"mode": "Quorum", "quorum": p // 2},
            lambda p: wait_for(p // 2 - 1, p),
            lambda p: p // 2,
        ),
        Entry(
            "Quorum(3P/4)",
            lambda p: {"mode": "Quorum", "quorum": 3 * p // 4},
            lambda p: wait_for(3 * p // 4 - 1, p),
            lambda p: 3 * p // 4,
        ),
        Entry(
            "Majority(drawn)",
            lambda _: {"mode": "Majority", "randomInitiator": True},
            lambda p: sum(wait_for(i, p) for i in range(p)) / p,
            lambda _: 1,
            drawn=True,
        ),
        Entry("Solo", lambda _: {"mode": "Solo"}, lambda _: 0.0, lambda _: 1),
        Entry(
            "Deadline(P/2)",
            # The minimum is met earlier, so the deadline decides.
            lambda p: {
                "mode": "Deadline",
                "deadline": f"{STAGGER_MS * p // 2 + STAGGER_MS // 2}ms",
                "quorum": p // 4,
            },
            lambda p: wait_for(p // 2, p) + 0.5 * (p // 2 + 1) / p,
            lambda p: p // 4,
        ),
    ]


def plan(ranks: int, rounds: int, *, drawn_iterations: int) -> Plan:
    """Return the job for one number of ranks, with `rounds` passes through all modes."""
    period_ms = STAGGER_MS * ranks + SLACK_MS.get(ranks, 60)
    phases = [
        Phase(
            entry.name,
            (drawn_iterations if entry.drawn else ITERATIONS) * period_ms / 1000,
            entry.collective(ranks),
        )
        for _ in range(rounds)
        for entry in entries()
    ]
    config = {"elements": ELEMENTS, "period_ms": period_ms, "stagger_ms": STAGGER_MS}
    return Plan(
        "latency.py",
        ranks,
        phases,
        config,
        collective={"grace": "0s", "mode": "Full"},
        one_pod=True,
    )


def mean_wait_ms(ran: Ran, stretch: Stretch) -> float:
    """Return the mean wait of all ranks in the rounds of a stretch."""
    waits = waits_s(ran, stretch)
    return 1000 * sum(waits) / len(waits)


def add_rows(out: r.Report, ran: Ran, ranks: int) -> None:
    """Add the rows, bars, checks and notes for one number of ranks to the report."""
    groups = by_name(stretches(ran, skip=1))
    full = [mean_wait_ms(ran, s) for s in groups["Full"]]
    for entry in entries():
        found = groups[entry.name]
        waits = [mean_wait_ms(ran, s) for s in found]
        ratios = [a / b for a, b in zip(full, waits, strict=True)]
        fresh = [c["fresh"] for s in found for c in s.commits]
        half = sum(1 for f in fresh if f < ranks // 2) / len(fresh)
        broken = sum(1 for f in fresh if f < entry.quorum(ranks))
        limit = STAGGER_MS * entry.limit(ranks)
        out.rows.append(
            (
                ranks,
                entry.name,
                r.middle(waits),
                limit,
                r.percent(r.spread(waits)),
                r.middle(ratios),
                r.percent(r.spread(ratios)),
                sum(fresh) / len(fresh),
                r.percent(half),
                r.middle(s.gradients_per_s for s in found),
                r.middle(s.rounds_per_s for s in found),
            )
        )
        out.checks[f"P={ranks} {entry.name}: no round with less than its quorum"] = broken == 0
        if entry.drawn and not out.smoke:
            out.bars.append(
                r.Bar(
                    f"P={ranks}: spread of {entry.name}",
                    r.spread(waits),
                    BAR_SPREAD,
                    at_least=False,
                )
            )
        if ranks == 32 and entry.name == "Quorum(P/2)":
            out.bars.append(
                r.Bar("P=32: Full's mean wait over that of Quorum(16)", r.middle(ratios), BAR_RATIO)
            )
    reductions = [
        (end - begin) / 1e6 for probe in ran.probes for _, begin, end in probe["reductions"]
    ]
    memory = r.middle(p.get("own_mib", 0.0) for p in ran.probes)
    shared = r.middle(p.get("share_mib", 0.0) for p in ran.probes)
    out.notes.append(
        f"P={ranks}: {memory:.0f} MiB of own pages per rank ({shared:.0f} MiB with its share of "
        f"common ones); a reduction of {4 * ELEMENTS // 1024} KiB takes "
        f"{r.middle(reductions):.1f} ms (median over ranks)"
    )


def run(lab: Lab, given: Options) -> r.Report:
    """Run B0 and return its report."""
    sizes = (4,) if given.smoke else (8, 16, 32)
    out = r.Report(
        "b0_latency",
        "B0: waiting in a round, rank i late by 10 ms x i, grace 0",
        (
            *("P", "mode", "mean wait ms", "limit ms", "spread", "Full/mode", "its spread"),
            *("fresh", "rounds below P/2", "gradients/s", "rounds/s"),
        ),
        smoke=given.smoke,
    )
    for ranks in sizes:
        drawn = ITERATIONS if given.smoke else DRAWN_ITERATIONS
        ran = lab.run(plan(ranks, given.rounds, drawn_iterations=drawn))
        add_rows(out, ran, ranks)
        out.checks[f"P={ranks}: equal weights on all ranks"] = same_weights(ran)
        # Each gradient is one in every element, so the weights count the gradients.
        counted = {probe["applied"] for probe in ran.probes}
        out.checks[f"P={ranks}: the weights hold every applied gradient once"] = counted == {
            ran.log["gradients"]
        }
        out.hashes[f"P={ranks}"] = ran.probes[0]["hash"]
    out.notes.append(
        "gradients/s and rounds/s are those of the arrival pattern, which has a fixed period: they "
        "show that each mode applies the same work"
    )
    return out


if __name__ == "__main__":
    main(run, __doc__)
