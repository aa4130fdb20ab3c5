"""The anatomy of a whole job: which rank delayed the others, and what to change."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from paceline_api.times import NS_PER_S, NS_PER_US, US_PER_S
from paceline_api.types.enums import Mode

from paceline.core.anatomy.clocks import Clock, ReductionSpan, align
from paceline.core.anatomy.dissect import Part, RankAnatomy, dissect, summarise
from paceline.core.anatomy.samples import PodSamples, RankSamples, SilentPod, place_of_member
from paceline.core.protocol.shadow import Hindsight, hindsight

WORTH: Final = 0.05
"""Smallest share of a step for which a part is mentioned in the advice."""
SLOWER: Final = 1.15
"""Factor over the median of the other ranks from which a rank counts as slow itself."""
STEPS_MIN: Final = 3
"""Steps without which a rank is not called slow: the first ones of a new rank are slower."""
OWN: Final = (Part.LOADING, Part.FORWARD, Part.BACKWARD, Part.SCRIPT)
"""The parts of a step that depend on the rank alone."""
NEARLY: Final = 0.9
"""Share of the largest saving from which a mode is advised; among those, the one with the fewest
late gradients."""


@dataclass(frozen=True, slots=True)
class RankRun:
    """The samples of one rank process, and what follows from them."""

    samples: RankSamples
    host: str
    clock: Clock | None
    """Clock of its host; None if the host has no round in common with the others."""
    anatomy: RankAnatomy

    @property
    def worker(self) -> str:
        """Place of the rank: slot.process."""
        return place_of_member(self.samples.member)


@dataclass(frozen=True, slots=True)
class Blame:
    """The time that one worker cost the others."""

    worker: str
    """Place of the worker: slot.process."""
    blocked_s: float
    """Seconds that the others were blocked by it, summed over them and over their sampled steps."""
    last: int
    """Number of rounds in which another rank waited for it."""
    per_step_s: float
    """Mean seconds that each other rank was blocked by it in each step."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A worker whose own part of a step takes longer than that of the others, in each mode."""

    worker: str
    """Place of the worker: slot.process."""
    host: str
    own_s: float
    """Median time outside step() and without leases, in seconds per step."""
    others_s: float
    """The same for the others: the median over them."""
    part: Part
    """The part that is longer than that of the others by the most."""
    more_s: float
    """Difference of the medians of that part, in seconds per step."""


@dataclass(frozen=True, slots=True)
class ModeSaving:
    """Estimated effect of another mode, in the rounds for which all arrivals are known."""

    mode: str
    saved_s: float
    """Seconds of waiting saved for each rank in each round."""
    late: float
    """Share of the gradients that would have missed their round."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One recommended change, and what the problem costs now."""

    seconds: float
    """Cost in seconds of a mean step of a rank."""
    share: float
    """The same, as a share of the step."""
    what: str
    """Name of the cost, for users."""
    change: str
    """Recommended change, for users."""


@dataclass(frozen=True, slots=True)
class JobAnatomy:
    """The anatomy of a job, computed from the samples of its pods."""

    job: str
    ranks: tuple[RankRun, ...]
    step_s: float
    """Mean duration of a step over the ranks, in seconds."""
    slow: tuple[SlowRank, ...]
    """Workers that are slow themselves, the one with the longest delay first."""
    parts: Mapping[Part, float]
    """Duration of each part, in seconds per step: the mean over the ranks."""
    blame: tuple[Blame, ...]
    """Workers that others waited for, the most expensive first."""
    savings: tuple[ModeSaving, ...]
    """Estimated effect of each partial mode; empty if pods are missing, or no round is known from
    all ranks."""
    rounds: int
    """Number of rounds for which all arrivals are known."""
    advice: tuple[Advice, ...]
    """Recommended changes, the largest cost first."""
    silent: tuple[SilentPod, ...]
    """Pods that did not report, so some workers may be missing above."""

    @property
    def hosts(self) -> int:
        """Number of hosts; each has its own clock."""
        return len({rank.host for rank in self.ranks})

    @property
    def clocks_off_s(self) -> float:
        """Upper bound on the error of the times on the time line, in seconds."""
        return max((r.clock.off_ns for r in self.ranks if r.clock), default=0) / NS_PER_S

    @property
    def if_nobody_were_late_s(self) -> float:
        """Duration of a step without waiting for late ranks."""
        return self.step_s - self.parts[Part.BLOCKED]

    @property
    def if_the_network_were_free_s(self) -> float:
        """Duration of a step without exposed reductions."""
        return self.step_s - self.parts[Part.REDUCTION]


def analyse(pods: Sequence[PodSamples], silent: Sequence[SilentPod] = ()) -> JobAnatomy:
    """Analyze a job from the samples of its pods.

    Args:
        pods: The samples; at least one rank has made a step.
        silent: Pods that did not report. If there are any, savings are not computed, because they
            need the arrivals of all ranks.

    Returns:
        The anatomy of the job.
    """
    placed = [(pod.host, rank) for pod in pods for rank in pod.ranks if rank.steps]
    clocks = align(_sums(placed))
    ranks = tuple(
        RankRun(rank, host, clocks.get(host), summarise(rank.steps, rank.rounds))
        for host, rank in placed
    )
    parts = {part: fmean(rank.anatomy.parts[part] for rank in ranks) for part in Part}
    blame = _blame(ranks)
    savings, rounds = ((), 0) if silent else _savings(ranks)
    step_s = fmean(rank.anatomy.step_s for rank in ranks)
    advice = _advice(ranks, parts, step_s, blame, savings)
    slow = _slow(ranks, step_s)
    return JobAnatomy(
        pods[0].job, ranks, step_s, slow, parts, blame, savings, rounds, advice, tuple(silent)
    )


def _sums(placed: Sequence[tuple[str, RankSamples]]) -> dict[str, dict[int, ReductionSpan]]:
    """Return the last reduction of each round, by host and round.

    A living rank overrides one that died in its place: it comes later.

    Args:
        placed: Each rank with the name of its host.

    Returns:
        The reductions.
    """
    sums: dict[str, dict[int, ReductionSpan]] = {host: {} for host, _ in placed}
    for host, rank in placed:
        for sample in rank.rounds:
            if sample.segments:
                last = sample.segments[-1]
                sums[host][sample.round] = ReductionSpan(last.begun_ns, last.ended_ns)
    return sums


def _slow(ranks: Sequence[RankRun], step_s: float) -> tuple[SlowRank, ...]:
    """Return the workers that are slow, whether or not the mode lets others wait for them.

    Medians decide, so a single long step makes no rank slow.

    Args:
        ranks: All ranks of the job. Of each place the one that was started last counts.
        step_s: Mean duration of a step, in seconds.

    Returns:
        The slow workers, the one with the longest delay first.
    """
    latest = {rank.worker: rank for rank in ranks}
    own = {worker: _own_s(rank.samples) for worker, rank in latest.items()}
    slow_ranks = []
    for worker, rank in latest.items():
        others = [parts for other, parts in own.items() if other != worker]
        if not others or len(rank.samples.steps) < STEPS_MIN:
            continue
        own_s = sum(own[worker].values())
        others_s = median(sum(parts.values()) for parts in others)
        if own_s >= SLOWER * others_s and own_s - others_s >= WORTH * step_s > 0:
            more = {p: own[worker][p] - median(parts[p] for parts in others) for p in OWN}
            part = max(OWN, key=lambda part: more[part])
            slow_ranks.append(SlowRank(worker, rank.host, own_s, others_s, part, more[part]))
    return tuple(sorted(slow_ranks, key=lambda slow: slow.others_s - slow.own_s))


def _own_s(rank: RankSamples) -> dict[Part, float]:
    """Return the median duration of each part that depends on the rank alone, in seconds."""
    parts = [dissect(step, ()).parts for step in rank.steps]
    return {part: median(each[part] for each in parts) / NS_PER_S for part in OWN}


def _blame(ranks: Sequence[RankRun]) -> tuple[Blame, ...]:
    """Return the cost that each worker caused, the most expensive first."""
    cost_s: defaultdict[str, float] = defaultdict(float)
    per_step_s: defaultdict[str, list[float]] = defaultdict(list)
    rounds: defaultdict[str, set[int]] = defaultdict(set)
    for rank in ranks:
        for peer, mean_s in rank.anatomy.blocked_on.items():
            cost_s[peer] += mean_s * rank.anatomy.steps
            per_step_s[peer].append(mean_s)
        for sample in rank.samples.rounds:
            if sample.last:
                rounds[sample.last].add(sample.round)
    others = {worker: max(1, sum(rank.worker != worker for rank in ranks)) for worker in cost_s}
    return tuple(
        Blame(worker, seconds, len(rounds[worker]), sum(per_step_s[worker]) / others[worker])
        for worker, seconds in sorted(cost_s.items(), key=lambda cost: -cost[1])
    )


def arrivals(ranks: Sequence[RankRun]) -> dict[int, list[int]]:
    """Return the sorted arrival times of each round in which every worker had a fresh gradient."""
    latest = {rank.worker: rank for rank in ranks}.values()
    came: defaultdict[int, list[int]] = defaultdict(list)
    for rank in latest:
        for sample in rank.samples.rounds:
            if sample.arrived_ns and rank.clock is not None:
                came[sample.round].append(sample.arrived_ns + rank.clock.shift_ns)
    return {number: sorted(ns) for number, ns in came.items() if len(ns) == len(latest)}


def _savings(ranks: Sequence[RankRun]) -> tuple[tuple[ModeSaving, ...], int]:
    """Return what each partial mode would have saved, and the number of rounds used.

    Grace and deadline are ignored: they follow from settings and from earlier rounds.

    Args:
        ranks: All ranks of the job.

    Returns:
        (savings, rounds).
    """
    known = arrivals(ranks)
    if not known:
        return (), 0
    count = len(next(iter(known.values())))
    waits = {str(Mode.QUORUM): count - 1, str(Mode.MAJORITY): count // 2 + 1, str(Mode.SOLO): 1}
    savings = []
    for mode, quorum in waits.items():
        total = Hindsight()
        for ns in known.values():
            us = [(x - ns[0]) // NS_PER_US for x in ns]
            total += hindsight(us, us[-1], us[max(0, quorum - 1)])
        each = count * len(known)
        name = f"{mode} of {quorum}" if mode == Mode.QUORUM else mode
        savings.append(ModeSaving(name, total.saved_us / US_PER_S / each, total.late / each))
    return tuple(savings), len(known)


def _advice(
    ranks: Sequence[RankRun],
    parts: Mapping[Part, float],
    step_s: float,
    blame: Sequence[Blame],
    savings: Sequence[ModeSaving],
) -> tuple[Advice, ...]:
    all_advice = []
    for part, text in CHANGES.items():
        if step_s and parts[part] >= WORTH * step_s:
            all_advice.append(Advice(parts[part], parts[part] / step_s, WHAT[part], text))
    if step_s and blame and parts[Part.BLOCKED] >= WORTH * step_s:
        worst = blame[0]
        change = _about(worst.worker, ranks)
        enough_s = NEARLY * max((s.saved_s for s in savings), default=0.0)
        near = [s for s in savings if s.saved_s >= enough_s > 0]
        if best := min(near, key=lambda s: s.late, default=None):
            change += (
                f" Or let nobody wait for it: {best.mode} would have saved {best.saved_s * 1e3:.0f}"
                f" ms of each step, with {best.late:.0%} of the gradients late."
            )
        what = f"waiting for the last rank, mostly worker {worst.worker}"
        all_advice.append(Advice(parts[Part.BLOCKED], parts[Part.BLOCKED] / step_s, what, change))
    return tuple(sorted(all_advice, key=lambda advice: -advice.seconds))


def _about(worker: str, ranks: Sequence[RankRun]) -> str:
    """Explain why others wait for this worker: which part of its step is longer than theirs."""
    own = [rank.anatomy for rank in ranks if rank.worker == worker]
    others = [rank.anatomy for rank in ranks if rank.worker != worker]
    if not own or not others:
        return f"See what worker {worker} does: it is the last one to arrive."
    more = {
        part: own[-1].parts[part] - median(other.parts[part] for other in others) for part in OWN
    }
    part = max(more, key=lambda part: more[part])
    theirs_s = median(other.parts[part] for other in others)
    if own[-1].parts[part] < SLOWER * theirs_s or more[part] < WORTH * own[-1].step_s:
        return (
            f"Worker {worker} does not compute longer than the others: look at its network and its "
            "node."
        )
    return (
        f"Worker {worker} spends {own[-1].parts[part] * 1e3:.0f} ms of a step on {part}, the others"
        f" {theirs_s * 1e3:.0f} ms: look at {LOOK[part]}."
    )


LOOK: Final = {
    Part.LOADING: "where its data come from",
    Part.FORWARD: "its processor and who shares it",
    Part.BACKWARD: "its processor and who shares it",
    Part.SCRIPT: "what its script does between the batches, its processor and who shares it",
}
"""Advice on where to look if a rank spends longer on this part than the others."""
WHAT: Final = {
    Part.LOADING: "loading data",
    Part.LEASE: "waiting for data to be dealt",
    Part.REDUCTION: "exposed reduction of gradients",
    Part.UPDATE: "the optimizer's update",
    Part.COPY: "copying weights into the model",
    Part.PROTOCOL: "messages, waking threads, a grace or a deadline",
}
"""Name of each part in the advice."""
CHANGES: Final = {
    Part.LOADING: "Set num_workers of the loader, or use faster storage.",
    Part.LEASE: "Use smaller batches, or fewer ranks for so little data.",
    Part.REDUCTION: (
        "Use a faster network, spec.collective.wire: BFloat16, or larger batches. If there is only "
        "one segment, a smaller spec.collective.segmentBytes lets backward() hide it."
    ),
    Part.UPDATE: "Use a fused optimizer (fused=True), or more threads (OMP_NUM_THREADS).",
    Part.COPY: "Only a device with faster memory helps; no setting of the job does.",
    Part.PROTOCOL: "Give the ranks more CPU, for which their threads wait, or set a shorter grace.",
}
"""Advice for each part that is a large share of the step."""


def known_rounds(ranks: Sequence[RankRun]) -> range:
    """Return the range from the first to the last round that any rank knows."""
    numbers = _known_by(ranks)
    return range(min(numbers), max(numbers) + 1) if numbers else range(0)


def latest_rounds(ranks: Sequence[RankRun], count: int) -> range:
    """Return at most `count` rounds that end with the last round known to the most ranks.

    Agents are not all asked at the same time, so some ranks know later rounds than others.

    Args:
        ranks: All ranks of the job.
        count: Upper bound on the number of rounds.

    Returns:
        The rounds; empty if no rank knows any.
    """
    numbers = _known_by(ranks)
    if not numbers:
        return range(0)
    most = max(numbers.values())
    end = 1 + max(number for number, by in numbers.items() if by == most)
    return range(max(min(numbers), end - count), end)


def _known_by(ranks: Sequence[RankRun]) -> Counter[int]:
    """Return how many ranks know each round."""
    return Counter(sample.round for rank in ranks for sample in rank.samples.rounds)
