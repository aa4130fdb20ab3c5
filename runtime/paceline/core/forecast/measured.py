"""What the last steps and rounds of a run say, as a row to forecast from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from paceline_api.rounds import RoundSettings

from paceline.core.anatomy.dissect import NS_PER_S, Part, summarise
from paceline.core.anatomy.samples import (
    PodSamples,
    RankSamples,
    RoundSample,
    StepSample,
    place_of_member,
)
from paceline.core.forecast.efficiency import noise_scale
from paceline.core.forecast.link import Sum
from paceline.core.forecast.model import Row, Setting
from paceline.core.protocol.waits import quorum_of
from paceline.core.status import Fact, RankStatus, Status

BEGINNING: Final = 2
"""Steps and rounds that are left out: memory, threads and connections are made in them."""
ROUNDS_MIN: Final = 4
"""Without the beginning."""
EARLIER_MIN: Final = 16
"""Rounds of a membership that is known by its changes alone."""
BEHIND_MAX: Final = 16
"""Rounds that the samples of a member may lack: of one that has left there are no later ones."""
UPDATE: Final = (Part.UPDATE, Part.COPY, Part.PROTOCOL)


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a run did before its last change of the membership."""

    generation: str
    at_s: float
    """Unix time of its beginning."""
    setting: Setting
    step_s: float
    """From one round to the next."""


def row(
    pods: Sequence[PodSamples],
    settings: RoundSettings,
    model: int,
    noise_scale: float | None = None,
) -> Row | None:
    """None if too few rounds are known of those that are members now. `settings`: in force in them;
    `model`: ranks of a member."""
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
    return Row(
        # Not the mean: the last batch of an epoch is smaller, and falls among these or not.
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
    """Of the memberships before the last one, as far as they lasted. `batch`: samples of a
    gradient."""
    for change, after in pairwise(status.changes):
        rounds = after.version - change.version
        if change.start_s is None or rounds < EARLIER_MIN:
            continue
        begun_s = change.wall_s + change.start_s
        yield Earlier(
            generation=change.generation.short,
            at_s=begun_s,
            setting=_setting(status.settings, change.members, batch, model),
            step_s=(after.wall_s + after.agree_s - begun_s) / rounds,
        )


def _setting(settings: RoundSettings, members: int, batch: float, model: int) -> Setting:
    return Setting(members, quorum_of(settings.mode, settings, members), batch, model)


def _members(pods: Sequence[PodSamples]) -> list[RankSamples]:
    """Those of the last membership; of a group one rank, since its ranks step together."""
    known = [rank for pod in pods for rank in pod.ranks if rank.steps and rank.rounds]
    last = max((rank.rounds[-1].round for rank in known), default=0)
    members: dict[str, RankSamples] = {}
    for rank in known:
        if rank.rounds[-1].round >= last - BEHIND_MAX:
            members.setdefault(place_of_member(rank.member), rank)
    return list(members.values())


def _rounds(ranks: Sequence[RankSamples]) -> dict[int, list[RoundSample]]:
    """Those that all know, by number: one sample of each rank."""
    found: defaultdict[int, list[RoundSample]] = defaultdict(list)
    for rank in ranks:
        for sample in rank.rounds[BEGINNING:]:
            found[sample.round].append(sample)
    return {number: each for number, each in found.items() if len(each) == len(ranks)}


def _steps_since(rank: RankSamples, first: int) -> list[StepSample]:
    since_ns = next(sample.go_ns for sample in rank.rounds if sample.round == first)
    return [step for step in rank.steps if step.began_ns >= since_ns]


def _sums(rounds: dict[int, list[RoundSample]], members: int) -> tuple[Sum, ...]:
    """Of each segment: the median of what the rank took that came last and waited for nobody."""
    took: defaultdict[int, list[float]] = defaultdict(list)
    sizes: dict[int, int] = {}
    for by_rank in rounds.values():
        # A rank that could not bring its part of a streamed round has fewer.
        for number, each in enumerate(zip(*(s.segments for s in by_rank), strict=False)):
            took[number].append(min(s.ended_ns - s.begun_ns for s in each) / NS_PER_S)
            sizes[number] = each[0].payload_bytes
    return tuple(Sum(members, sizes[n], median(seconds)) for n, seconds in sorted(took.items()))


def noise_scale_told(ranks: Sequence[RankStatus]) -> float | None:
    """From the figures that ranks of a run have which `paceline plan` measures; None without."""
    told = [rank.facts for rank in ranks if Fact.OWN_SQUARE in rank.facts]
    if not told:
        return None
    batch, square, larger, larger_square = (
        fmean(facts[name] for facts in told)
        for name in (Fact.OWN_BATCH, Fact.OWN_SQUARE, Fact.MEAN_BATCH, Fact.MEAN_SQUARE)
    )
    if larger <= batch:
        return None
    return noise_scale(batch=batch, square=square, larger=larger, larger_square=larger_square)
