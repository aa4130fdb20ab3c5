"""B5: one of eight ranks always takes twice as long; Full beside Quorum(7).

One job runs all modes, which are switched while it runs. The limit is what the step times allow
with rounds that cost nothing. As published, eager-SGD gains nothing here, since every rank has to
run every step: its speed is that of Full, 1.0.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Report, benchmark, middle, percent, ratios, spread, with_spread
from benchmarks.lab import Phase, Plan
from benchmarks.rounds import by_name, check_job, stretches

STEP_MS = 100
SECONDS = 5.0
ELEMENTS = 16_384
BAR_ROUNDS = 1.8
BAR_GRADIENTS = 1.75


def plan(ranks: int, rounds: int, *, seconds: float) -> Plan:
    """Return the job, with `rounds` passes through all modes."""
    most = {"mode": "Quorum", "quorum": ranks - 1}
    quorums: dict[str, dict[str, Any]] = {
        "Full": {"mode": "Full"},
        f"Quorum({ranks - 1})": most,
        f"Quorum({ranks - 1}), grace 0": {**most, "grace": "0s"},
    }
    phases = [Phase(name, seconds, how) for _ in range(rounds) for name, how in quorums.items()]
    config = {
        "elements": ELEMENTS,
        "step_ms": STEP_MS,
        "slow_ms": 2 * STEP_MS,
        "slow_rank": ranks - 1,
    }
    return Plan("steps.py", ranks, phases, config, collective={"mode": "Full"}, one_pod=True)


@benchmark(
    f"B5: one of eight ranks takes {2 * STEP_MS} ms per step, the others {STEP_MS} ms",
    (
        *("mode", "rounds/s", "limit", "spread", "over Full", "its spread"),
        *("gradients/s", "limit", "over Full", "its spread"),
    ),
)
def run(out: Report) -> None:
    """Run B5."""
    ranks = 3 if out.smoke else 8
    ran = out.lab.run(plan(ranks, out.rounds, seconds=1.6 if out.smoke else SECONDS))
    groups = by_name(stretches(ran))
    per_s = 1000 / STEP_MS
    limits = {"Full": (per_s / 2, ranks * per_s / 2)}
    bars = {"rounds/s": BAR_ROUNDS, "gradients/s": BAR_GRADIENTS}
    full: dict[str, list[float]] = {}
    for name, repeats in groups.items():
        figures = {
            "rounds/s": [s.rounds_per_s for s in repeats],
            "gradients/s": [s.gradients_per_s for s in repeats],
        }
        full = full or figures
        row: list[object] = [name]
        for limit, (what, values) in zip(
            limits.get(name, (per_s, (ranks - 0.5) * per_s)), figures.items(), strict=True
        ):
            over = ratios(values, full[what])
            row += [middle(values), limit]
            row += [percent(spread(values))] if what == "rounds/s" else []
            row += with_spread(over)
            if name != "Full":
                out.at_least(f"{name} over Full, {what}", middle(over), bars[what])
        out.rows.append(tuple(row))
        out.samples[name] = figures
    check_job(out, ran, "the job", counted=not out.smoke)  # thirds are not exact in binary
    out.notes.append(
        "the default grace is not for a rank that is still at an older step: it costs nothing"
    )
