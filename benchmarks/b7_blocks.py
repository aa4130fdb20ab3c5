"""B7: each rank alone holds the data for one block of coefficients, and one rank is always slow.

A lost gradient shows as a block that never learns. One job goes through all modes, each time with
new coefficients. The last row is a control that shows that the test can fail: gradients that arrive
more than one round late are dropped, as in a scheme that does not keep them.
"""

from __future__ import annotations

from typing import Any

from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import Lab, Phase, Plan
from benchmarks.rounds import by_name, same_weights, stretches

STEP_MS = 8
SLOW_MS = 60
RATE = 0.3
"""Share of a block's error that one gradient of its rank removes."""
SECONDS = 2.0
LEARNT = 0.05
"""Largest error of a block that counts as learned, as a share of the error at the start."""
CONTROL = "Quorum, late dropped"


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


def run(lab: Lab, given: Options) -> r.Report:
    """Run B7 and return its report."""
    ranks = 4
    out = r.Report(
        "b7_blocks",
        f"B7: each of {ranks} ranks alone holds the data of one block; one takes {SLOW_MS} ms per "
        f"step, the others {STEP_MS} ms",
        (
            *("mode", "error of the slow rank's block", "worst of the others", "worst run"),
            *("learnt", "gradients of the slow rank", "limit", "rounds/s", "gradients/s"),
        ),
        smoke=given.smoke,
    )
    ran = lab.run(plan(ranks, given.rounds, seconds=1.0 if given.smoke else SECONDS))
    found = stretches(ran)
    names = list(modes(ranks))
    by_mode = {
        name: [
            [float(probe["errors"][str(problem)]) for probe in ran.probes]
            for problem in range(i, len(ran.phases), len(names))
        ]
        for i, name in enumerate(names)
    }
    for name, group in by_name(found).items():
        slow = [e[-1] for e in by_mode[name]]
        others = [max(e[:-1]) for e in by_mode[name]]
        worst = max(*slow, *others)
        own = [sum(c["by"].get(f"0.{ranks - 1}#0", 0) for c in s.commits) for s in group]
        out.rows.append(
            (
                name,
                r.middle(slow),
                r.middle(others),
                worst,
                "yes" if worst <= LEARNT else "NO",
                r.middle(own),
                r.middle(s.seconds * 1000 / SLOW_MS for s in group),
                r.middle(s.rounds_per_s for s in group),
                r.middle(s.gradients_per_s for s in group),
            )
        )
        out.details[f"{name}: gradients of the slow rank"] = own
        out.details[f"{name}: errors"] = by_mode[name]
        if name == CONTROL:
            out.checks["the control does not learn the slow rank's block"] = r.middle(slow) > 0.5
        elif not given.smoke:
            out.checks[f"{name} learns every block"] = worst <= LEARNT
    out.notes.append(
        "limit: the gradients that the slow rank can make in the time that was looked at. A late "
        "one is computed before the one before it is applied, so errors shrink faster than by "
        f"{RATE:g} per gradient, as with momentum"
    )
    out.checks["equal weights on all ranks"] = same_weights(ran)
    out.hashes["the weights"] = ran.probes[0]["hash"]
    return out


if __name__ == "__main__":
    main(run, __doc__)
