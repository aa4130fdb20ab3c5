"""Read the rounds of each phase of a job from the probes of its ranks.

A phase begins with the round after the GO that carried its settings. Its first rounds are left out,
because they still hold what the phase before left behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness import Report, one_hash
from benchmarks.lab import Ran

NS = 1e9


@dataclass(frozen=True)
class Stretch:
    """Rounds of one phase, as rank 0 committed them."""

    name: str
    commits: Sequence[Mapping[str, Any]]

    @property
    def numbers(self) -> set[int]:
        """Round numbers of this stretch."""
        return {c["round"] for c in self.commits}

    @property
    def seconds(self) -> float:
        """Time in seconds from the first commit to the last one."""
        return float(self.commits[-1]["at"] - self.commits[0]["at"]) / NS

    @property
    def rounds_per_s(self) -> float:
        """Committed rounds per second."""
        return float(len(self.commits) - 1) / self.seconds

    @property
    def gradients_per_s(self) -> float:
        """Applied gradients per second."""
        return float(sum(c["gradients"] for c in self.commits[1:])) / self.seconds

    @property
    def fresh(self) -> float:
        """Mean number of fresh ranks per round."""
        return float(sum(c["fresh"] for c in self.commits)) / len(self.commits)


def stretches(ran: Ran, *, skip: int = 2, warm: int = 0) -> list[Stretch]:
    """Return the rounds of each phase, in order.

    Args:
        ran: Results of a job with phases.
        skip: Number of rounds to leave out at the beginning of each phase.
        warm: Number of phases to leave out.

    Returns:
        One stretch per phase, each of at least three rounds.
    """
    commits = ran.probes[0]["commits"]
    turns = [i for i, c in enumerate(commits) if c["request"]]
    # The last request stops the job.
    assert len(turns) == len(ran.phases) + 1, (len(turns), len(ran.phases))
    measured = []
    for phase, begin, end in list(zip(ran.phases, turns, turns[1:], strict=False))[warm:]:
        inside = commits[begin + 1 + skip : end]
        assert len(inside) >= 3, f"only {len(inside)} rounds in {phase['name']}; make it longer"
        measured.append(Stretch(phase["name"], inside))
    return measured


def by_name(repeats: Sequence[Stretch]) -> dict[str, list[Stretch]]:
    """Return the repetitions of each phase by its name, in the order in which they ran."""
    groups: dict[str, list[Stretch]] = {}
    for stretch in repeats:
        groups.setdefault(stretch.name, []).append(stretch)
    return groups


def waits_s(ran: Ran, stretch: Stretch) -> list[float]:
    """Return the seconds that main threads spent in `step()` in these rounds, over all ranks."""
    numbers = stretch.numbers
    return [
        (ended - begun) / NS
        for probe in ran.probes
        for version, begun, ended, _ in probe["steps"]
        if version in numbers
    ]


def go_to_reduced_s(ran: Ran, stretch: Stretch) -> list[float]:
    """Return for each round the seconds from GO until the last rank has the sum."""
    begun: dict[int, int] = {}
    ended: dict[int, int] = {}
    for number, first, last in _reductions(ran):
        begun[number] = min(first, begun.get(number, first))
        ended[number] = max(last, ended.get(number, last))
    return [(ended[n] - begun[n]) / NS for n in sorted(stretch.numbers) if n in begun]


def own_step_s(ran: Ran, stretch: Stretch) -> float:
    """Return the median time of a main thread between two calls of `step()`.

    No round can save this work.

    Returns:
        Seconds.
    """
    numbers = stretch.numbers
    spent = [
        (after[1] - before[2]) / NS
        for probe in ran.probes
        for before, after in zip(probe["steps"], probe["steps"][1:], strict=False)
        if after[0] in numbers
    ]
    return float(median(spent))


def _reductions(ran: Ran) -> Iterator[tuple[int, int, int]]:
    for probe in ran.probes:
        yield from probe["reductions"]


def same_weights(ran: Ran, shards: int = 1) -> bool:
    """Return True if all ranks, or all that hold the same shard, ended with the same weights."""
    return len({(probe.get("shard", 0), probe["hash"]) for probe in ran.probes}) == shards


def check_job(out: Report, ran: Ran, where: str, *, counted: bool = True, shards: int = 1) -> None:
    """Add the checks and the result hash of a job to the report.

    A check of an earlier job with the same name must hold as well.

    Args:
        out: The report.
        ran: Results of the job.
        where: Name of the job in the report.
        counted: True if the gradient of each step is one in every element and the update adds it,
            so that the weights tell which gradients were applied.
        shards: Number of ranks that hold one copy of the model together.
    """
    checks = {"equal weights on all ranks": same_weights(ran, shards)}
    if counted:
        applied = {probe["applied"] for probe in ran.probes}
        # A round in Full is divided by its samples. The first one after another mode may hold late
        # gradients too, which then weigh less than one each.
        logged = round(len(ran.probes) * sum(c["weight"] for c in ran.probes[0]["commits"]))
        once = applied == {logged}
        checks["the weights hold every applied gradient once"] = once
        if not once:
            out.notes.append(f"{where}: {applied} in the weights, {logged} in the log")
    for what, holds in checks.items():
        name = f"{where}: {what}"
        out.checks[name] = out.checks.get(name, True) and holds
    before = [out.hashes[where]] if where in out.hashes else []
    out.hashes[where] = one_hash([*before, ran.probes[0]["hash"]])
