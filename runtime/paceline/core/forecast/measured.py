"""Turn the last steps and rounds of a run into a row from which forecasts are made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from paceline_api.rounds import RoundSettings
from paceline_api.status import RankStatus, Status, as_number
from paceline_api.times import NS_PER_S

from paceline.core.anatomy.dissect import Part, summarise
from paceline.core.anatomy.samples import (
    PodSamples,
    RankSamples,
    RoundSample,
    StepSample,
    place_of_member,
)
from paceline.core.forecast.efficiency import noise_scale
from paceline.core.forecast.link import MeasuredSum
from paceline.core.forecast.model import RunRow, Setting
from paceline.core.protocol.waits import quorum_of
from paceline.core.status import Fact

BEGINNING: Final = 2
"""Number of steps and rounds at the start that are ignored: they allocate memory and set up threads
and connections."""
ROUNDS_MIN: Final = 4
"""Fewest rounds that make a row, not counting those that are ignored at the start."""
EARLIER_MIN: Final = 16
"""Fewest rounds of an earlier membership, of which only the times of the membership changes are
known."""
BEHIND_MAX: Final = 16
"""Upper bound on the rounds by which a member's last sample may be behind the newest one. A rank
that is further behind has left."""
UPDATE: Final = (Part.UPDATE, Part.COPY, Part.PROTOCOL)
"""Parts of a step that count as the update of a round."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """The measured speed of a run before its last membership change."""

    generation: str
    """Short name of the generation that had this membership."""
    at_s: float
    """Unix time at which all members of this membership had started."""
    setting: Setting
    step_s: float
    """Mean seconds from one round to the next."""


def row(
    pods: Sequence[PodSamples],
    settings: RoundSettings,
    model: int,
    noise_scale: float | None = None,
) -> RunRow | None:
    """Return the row of a run, from the samples of its present members.

    Args:
        pods: The samples of all pods of the job.
        settings: The round settings in force while the samples were taken.
        model: Number of ranks that share one copy of the model.
        noise_scale: The gradient noise scale in samples, or None if it is unknown.

    Returns:
        The row, or None if fewer than ROUNDS_MIN rounds are known to all present members, or if one
        of them has no step since the first of these rounds.
    """
    ranks = _members(pods)
    rounds = _rounds(ranks)
    if len(rounds) < ROUNDS_MIN:
        return None
    first = min(rounds)
    steps = [_steps_since(rank, first) for rank in ranks]
    batches = [step.samples for own in steps for step in own if step.samples]
    if not all(steps) or not batches:
        return None
    some = [by_rank[0] for _, by_rank in sorted(rounds.items())]
    step_s = (some[-1].go_ns - some[0].go_ns) / (some[-1].round - first) / NS_PER_S
    parts = [
        summarise(own, rank.rounds[BEGINNING:]).parts
        for own, rank in zip(steps, ranks, strict=True)
    ]
    return RunRow(
        # The median: the last batch of an epoch is smaller, and may or may not be among these.
        setting=_setting(settings, len(ranks), median(batches), model),
        computing_s=tuple(
            tuple(max(x.announced_ns - x.began_ns, 1) / NS_PER_S for x in own) for own in steps
        ),
        sums=_sums(rounds, len(ranks)) if len(ranks) > 1 else (),
        payload_bytes=sum(each.payload_bytes for each in some[-1].segments),
        streamed=fmean(each.streamed for each in some) >= 0.5,
        update_s=fmean(sum(own[part] for part in UPDATE) for own in parts),
        step_s=step_s,
        noise_scale=noise_scale,
    )


def earlier(status: Status, batch: float, model: int) -> Iterator[Earlier]:
    """Measure the memberships before the present one, from the membership changes in the status.

    Args:
        status: The status of the run.
        batch: Samples in one gradient of a member.
        model: Number of ranks that share one copy of the model.

    Yields:
        One entry for each membership that lasted at least EARLIER_MIN rounds, oldest first.
    """
    for change, after in pairwise(status.changes):
        rounds = after.version - change.version
        if change.start_s is None or rounds < EARLIER_MIN:
            continue
        begun_s = change.wall_s + change.start_s
        yield Earlier(
            generation=change.generation.short,
            at_s=begun_s,
            setting=_setting(status.round_settings, change.members, batch, model),
            step_s=(after.wall_s + after.agree_s - begun_s) / rounds,
        )


def _setting(settings: RoundSettings, members: int, batch: float, model: int) -> Setting:
    return Setting(members, quorum_of(settings.mode, settings, members), batch, model)


def _members(pods: Sequence[PodSamples]) -> list[RankSamples]:
    """Return one rank of each present member; the ranks of a group step together."""
    known = [rank for pod in pods for rank in pod.ranks if rank.steps and rank.rounds]
    last = max((rank.rounds[-1].round for rank in known), default=0)
    members: dict[str, RankSamples] = {}
    for rank in known:
        if rank.rounds[-1].round >= last - BEHIND_MAX:
            members.setdefault(place_of_member(rank.member), rank)
    return list(members.values())


def _rounds(ranks: Sequence[RankSamples]) -> dict[int, list[RoundSample]]:
    """Return the rounds that all ranks know, by round number: one sample of each rank."""
    by_round: defaultdict[int, list[RoundSample]] = defaultdict(list)
    for rank in ranks:
        for sample in rank.rounds[BEGINNING:]:
            by_round[sample.round].append(sample)
    return {number: each for number, each in by_round.items() if len(each) == len(ranks)}


def _steps_since(rank: RankSamples, first: int) -> list[StepSample]:
    """Return the steps of `rank` that began after GO of round `first`."""
    since_ns = next(sample.go_ns for sample in rank.rounds if sample.round == first)
    return [step for step in rank.steps if step.began_ns >= since_ns]


def _sums(rounds: dict[int, list[RoundSample]], members: int) -> tuple[MeasuredSum, ...]:
    """Return the measured time of each segment of the gradient.

    In each round the shortest time over the ranks counts: that rank arrived last and waited for
    nobody. The result is the median of these over the rounds.

    Args:
        rounds: One sample of each rank, by round number.
        members: Number of members.

    Returns:
        One entry for each segment, in order.
    """
    took: defaultdict[int, list[float]] = defaultdict(list)
    sizes: dict[int, int] = {}
    for by_rank in rounds.values():
        # A rank that could not contribute to a streamed round has fewer segments.
        for number, each in enumerate(zip(*(s.segments for s in by_rank), strict=False)):
            took[number].append(min(s.ended_ns - s.begun_ns for s in each) / NS_PER_S)
            sizes[number] = each[0].payload_bytes
    return tuple(
        MeasuredSum(members, sizes[n], median(seconds)) for n, seconds in sorted(took.items())
    )


def reported_noise_scale(ranks: Sequence[RankStatus]) -> float | None:
    """Return the noise scale from the ranks' figures; None if no rank reports them.

    Only a run that `paceline plan` measures has these figures.

    Args:
        ranks: The status of each rank of the run.

    Returns:
        The noise scale in samples, or None.
    """
    reports = [rank.facts for rank in ranks if Fact.OWN_SQUARE in rank.facts]
    if not reports:
        return None
    batch, square, larger, larger_square = (
        fmean(as_number(facts[name]) for facts in reports)
        for name in (Fact.OWN_BATCH, Fact.OWN_SQUARE, Fact.MEAN_BATCH, Fact.MEAN_SQUARE)
    )
    if larger <= batch:
        return None
    return noise_scale(batch=batch, square=square, larger=larger, larger_square=larger_square)
