"""B5: one of eight ranks always takes twice as long; Full beside Quorum(7).

One job runs all modes, which are switched while it runs. The limit is what the step times allow
with rounds that cost nothing. As published, eager-SGD gains nothing here, since every rank has to
run every step: its speed is that of Full, 1.0.
"""

from __future__ import annotations

from typing import Any

from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import Lab, Phase, Plan
from benchmarks.rounds import by_name, same_weights, stretches

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


def run(lab: Lab, given: Options) -> r.Report:
    """Run B5 and return its report."""
    ranks = 3 if given.smoke else 8
    out = r.Report(
        "b5_straggler",
        f"B5: one of {ranks} ranks takes {2 * STEP_MS} ms per step, the others {STEP_MS} ms",
        (
            *("mode", "rounds/s", "limit", "spread", "over Full", "its spread"),
            *("gradients/s", "limit", "over Full", "its spread"),
        ),
        smoke=given.smoke,
    )
    ran = lab.run(plan(ranks, given.rounds, seconds=1.6 if given.smoke else SECONDS))
    groups = by_name(stretches(ran))
    per_s = 1000 / STEP_MS
    full_limit, quorum_limit = (per_s / 2, ranks * per_s / 2), (per_s, (ranks - 0.5) * per_s)
    full = groups["Full"]
    for name, found in groups.items():
        limits = full_limit if name == "Full" else quorum_limit
        rounds = [a.rounds_per_s / b.rounds_per_s for a, b in zip(found, full, strict=True)]
        gradients = [
            a.gradients_per_s / b.gradients_per_s for a, b in zip(found, full, strict=True)
        ]
        out.rows.append(
            (
                name,
                r.middle(s.rounds_per_s for s in found),
                limits[0],
                r.percent(r.spread(s.rounds_per_s for s in found)),
                r.middle(rounds),
                r.percent(r.spread(rounds)),
                r.middle(s.gradients_per_s for s in found),
                limits[1],
                r.middle(gradients),
                r.percent(r.spread(gradients)),
            )
        )
        if name != "Full":
            out.bars.append(r.Bar(f"{name} over Full, rounds/s", r.middle(rounds), BAR_ROUNDS))
            out.bars.append(
                r.Bar(f"{name} over Full, gradients/s", r.middle(gradients), BAR_GRADIENTS)
            )
    out.checks["equal weights on all ranks"] = same_weights(ran)
    counted = {probe["applied"] for probe in ran.probes}
    if not given.smoke:  # thirds are not exact in binary
        out.checks["the weights hold every applied gradient once"] = counted == {
            ran.log["gradients"]
        }
    out.notes.append(
        "the default grace is not for a rank that is still at an older step: it costs nothing"
    )
    out.hashes["the weights"] = ran.probes[0]["hash"]
    return out


if __name__ == "__main__":
    main(run, __doc__)
