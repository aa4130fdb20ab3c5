"""Published loads at a tenth of their times: Full beside the modes that wait for fewer (eager-SGD).

Computing is emulated: the product's own `--inject` makes a step sleep for the time that its load
gives. Each load is one job whose mode is switched while it runs. Grace is 0 and no gradient is
dropped. The limit is what the same draws allow if rounds cost nothing (`ideal`). Gradients are 64
KiB.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from paceline.core.faults import FaultKind, parse_faults
from paceline.core.loads import shifted_ns

from benchmarks import ideal
from benchmarks.harness import Report, benchmark, middle, percent, ratios, spread
from benchmarks.lab import Phase, Plan, Ran
from benchmarks.rounds import by_name, check_job, stretches

ELEMENTS = 16_384
SECONDS = 6.0
IDEAL_ROUNDS = 4000


@dataclass(frozen=True)
class Work:
    """Step times of all ranks."""

    name: str
    ranks: int
    faults: str
    """Argument of `--inject`, at a tenth of the published times."""
    step_ms: float = 0.0
    """Length of a step without the faults."""

    def step_s(self) -> ideal.StepTime:
        """Return the step times that `faults` cause, for the computation of the limit."""
        (fault,) = parse_faults(self.faults)
        base_s = self.step_ms / 1000

        def seconds(rank: int, step: int, version: int) -> float:
            if fault.load is not None:
                return fault.scale * fault.load.draw_ns(seed=0, rank=rank, step=step) / 1e9
            if fault.kind is FaultKind.SHIFT:
                late_ns = shifted_ns(
                    fault.least_ns, fault.most_ns, rank=rank, step=step, ranks=self.ranks
                )
                return base_s + late_ns / 1e9
            struck = random.Random(version).randrange(self.ranks) == rank
            return base_s + struck * fault.delay_ns / 1e9

        return seconds


# The length of a step without its delay follows from the paper's times for Horovod, minus
# the largest delay: 0.6 s for ResNet-50, 0.2 s for ResNet-32. 4 ranks of 64 are one of 16.
WORKS = (
    Work("ResNet-50, one random rank of 16 +300 ms", 16, "slow:rank=random,ms=30", 60.0),
    Work("ResNet-50, one random rank of 16 +460 ms", 16, "slow:rank=random,ms=46", 60.0),
    Work("ResNet-32, all +50 to 400 ms, shifted", 8, "shift:min=5,max=40", 20.0),
    Work("LSTM", 8, "slow:load=lstm,scale=0.1"),
    Work("Transformer", 8, "slow:load=transformer,scale=0.1"),
    Work("cloud", 8, "slow:load=cloud,scale=0.1"),
)
SMOKE = (
    Work("shifted", 4, "shift:min=5,max=40", 20.0),
    Work("LSTM", 4, "slow:load=lstm,scale=0.03"),
)


@dataclass(frozen=True)
class Way:
    """Mode of the table.

    `quorum` is the percentage of fresh ranks that starts a round; 0 means that a drawn rank does.
    """

    collective: dict[str, Any]
    quorum: int

    def needs(self, ranks: int) -> int:
        """Return the number of fresh ranks that starts a round."""
        return -(-self.quorum * ranks // 100)


WAYS = {
    "Full": Way({"mode": "Full"}, 100),
    "Quorum(75%)": Way({"mode": "Quorum", "quorum": "75%"}, 75),
    "Majority": Way({"mode": "Majority"}, 51),
    "Majority(drawn)": Way({"mode": "Majority", "randomInitiator": True}, 0),
    "Solo": Way({"mode": "Solo"}, 1),
}


def plan(work: Work, rounds: int, *, seconds: float) -> Plan:
    """Return the job for one load, with `rounds` passes through all modes."""
    phases = [
        Phase(name, seconds, way.collective) for _ in range(rounds) for name, way in WAYS.items()
    ]
    return Plan(
        "steps.py",
        work.ranks,
        phases,
        {"elements": ELEMENTS, "step_ms": work.step_ms},
        collective={"mode": "Full", "grace": "0s"},
        faults=work.faults,
        one_pod=True,
    )


def limit(work: Work, way: Way) -> ideal.Rates:
    """Return the rates that the load allows in this mode if rounds cost nothing."""
    return ideal.rates(
        work.step_s(),
        ranks=work.ranks,
        quorum=way.needs(work.ranks),
        rounds=IDEAL_ROUNDS,
        drawn=not way.quorum,
    )


def add_rows(out: Report, ran: Ran, work: Work) -> None:
    """Add the rows and checks of one load to the report."""
    groups = by_name(stretches(ran))
    full_limit = limit(work, WAYS["Full"])
    rates = {
        name: ([s.rounds_per_s for s in repeats], [s.gradients_per_s for s in repeats])
        for name, repeats in groups.items()
    }
    for name, way in WAYS.items():
        repeats, allowed = groups[name], limit(work, way)
        rounds, gradients = rates[name]
        over = [middle(ratios(a, b)) for a, b in zip(rates[name], rates["Full"], strict=True)]
        out.rows.append(
            (
                *(work.name, name, middle(rounds), allowed.rounds_per_s, percent(spread(rounds))),
                *(over[0], allowed.rounds_per_s / full_limit.rounds_per_s),
                *(middle(gradients), allowed.gradients_per_s),
                *(over[1], allowed.gradients_per_s / full_limit.gradients_per_s),
                *(middle(s.fresh for s in repeats), allowed.fresh),
            )
        )
        out.samples[f"{work.name}, {name}"] = {"rounds/s": rounds, "gradients/s": gradients}
        fewest = min(c["fresh"] for s in repeats for c in s.commits)
        promised = max(1, way.needs(work.ranks))
        out.checks[f"{work.name}, {name}: no round with less than its quorum"] = fewest >= promised


@benchmark(
    "Loads of eager-SGD's paper at a tenth of their times, grace 0",
    (
        *("load", "mode", "rounds/s", "limit", "spread", "over Full", "limit"),
        *("gradients/s", "limit", "over Full", "limit", "fresh", "limit"),
    ),
)
def run(out: Report) -> None:
    """Run all loads."""
    for work in SMOKE if out.smoke else WORKS:
        ran = out.lab.run(plan(work, out.rounds, seconds=1.0 if out.smoke else SECONDS))
        add_rows(out, ran, work)
        check_job(out, ran, work.name)
    out.notes.append("over Full: in rounds/s, which may be thin, and in applied gradients/s")
