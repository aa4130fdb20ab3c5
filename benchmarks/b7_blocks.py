"""B7: each rank alone holds the data for one block of coefficients, and one rank is always slow.

A lost gradient shows as a block that never learns. One job goes through all modes, each time with
new coefficients. The last row is a control that shows that the test can fail: gradients that arrive
more than one round late are dropped, as in a scheme that does not keep them.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Report, benchmark, middle
from benchmarks.lab import Phase, Plan
from benchmarks.rounds import by_name, check_job, stretches

STEP_MS = 8
SLOW_MS = 60
RATE = 0.3
"""Share of a block's error that one gradient of its rank removes."""
SECONDS = 2.0
LEARNT = 0.05
"""Largest error of a block that counts as learned, as a share of the error at the start."""
CONTROL = "Quorum, late dropped"
RANKS = 4


def modes(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the collective settings of each row by its name."""
    most = {"mode": "Quorum", "quorum": ranks - 1}
    return {
        "Full": {"mode": "Full"},
        f"Quorum({ranks - 1})": most,
        "Quorum(P/2)": {"mode": "Quorum", "quorum": ranks // 2},
        "Majority(drawn)": {"mode": "Majority", "randomInitiator": True},
        "Solo": {"mode": "Solo"},
        "Deadline": {"mode": "Deadline", "deadline": "10ms", "quorum": 1},
        CONTROL: {**most, "maxAge": 1, "maxAgePolicy": "Drop"},
    }


def plan(ranks: int, rounds: int, *, seconds: float) -> Plan:
    """Return the job, with `rounds` passes through all modes."""
    phases, problem = [], 0
    for _ in range(rounds):
        for name, how in modes(ranks).items():
            phases.append(Phase(name, seconds, how, {"problem": problem}))
            problem += 1
    config = {
        "ranks": ranks,
        "members": [f"0.{i}#0" for i in range(ranks)],
        "lr": RATE,
        "step_ms": STEP_MS,
        "slow_ms": SLOW_MS,
    }
    return Plan("blocks.py", ranks, phases, config, collective={"mode": "Full"}, one_pod=True)


@benchmark(
    f"B7: each of {RANKS} ranks alone holds the data of one block; one takes {SLOW_MS} ms per "
    f"step, the others {STEP_MS} ms",
    (
        *("mode", "error of the slow rank's block", "worst of the others", "worst run"),
        *("learnt", "gradients of the slow rank", "limit", "rounds/s", "gradients/s"),
    ),
)
def run(out: Report) -> None:
    """Run B7."""
    ran = out.lab.run(plan(RANKS, out.rounds, seconds=1.0 if out.smoke else SECONDS))
    names = list(modes(RANKS))
    for at, (name, group) in enumerate(by_name(stretches(ran)).items()):
        errors = [
            [float(probe["errors"][str(problem)]) for probe in ran.probes]
            for problem in range(at, len(ran.phases), len(names))
        ]
        slow, others = [e[-1] for e in errors], [max(e[:-1]) for e in errors]
        worst = max(*slow, *others)
        own = [sum(c["by"].get(f"0.{RANKS - 1}#0", 0) for c in s.commits) for s in group]
        out.rows.append(
            (
                *(name, middle(slow), middle(others), worst, "yes" if worst <= LEARNT else "NO"),
                *(middle(own), middle(s.seconds * 1000 / SLOW_MS for s in group)),
                *(middle(s.rounds_per_s for s in group), middle(s.gradients_per_s for s in group)),
            )
        )
        out.samples[name] = {"gradients of the slow rank": own, "errors": errors}
        if name == CONTROL:
            out.checks["the control does not learn the slow rank's block"] = middle(slow) > 0.5
        elif not out.smoke:
            out.checks[f"{name} learns every block"] = worst <= LEARNT
    check_job(out, ran, "the job", counted=False)
    out.notes.append(
        "limit: the gradients that the slow rank can make in the time that was looked at. A late "
        "one is computed before the one before it is applied, so errors shrink faster than by "
        f"{RATE:g} per gradient, as with momentum"
    )
