"""Which ranks are slow for long, and which step of `spec.straggler.respond` is in force.

One judgement for everybody who acts on it: the coordinator (and so a local run) and the operator. A
rank is slow when its median step takes `slowdownFactor` times the median of all ranks, and at least
`GAP_MIN_S` more, for `windowRounds` rounds. The steps of the ladder follow each other, a cooldown
apart, while it stays slow. A rank that is not measured just now (it was started again, it joins)
keeps its place on the ladder: only one that was seen to be fast leaves it. Pure: what was known
comes in, what is to be remembered goes out.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from paceline_api.settings import StragglerSettings
from paceline_api.types.enums import StragglerResponse

MIN_S: Final = 1.0
"""Shortest time for which a rank must be slow, and between two steps against it."""
GAP_MIN_S: Final = 0.010
"""A step must also be longer than the median by this. Steps of a few milliseconds differ by more
than any factor where ranks share processors, and nobody gains from a replacement."""
NS_PER_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Pace:
    """One living rank."""

    key: str
    """The same as long as its ladder goes on."""
    step_s: float
    """Its median step; 0: it is not active or not measured."""


@dataclass(frozen=True, slots=True)
class Slow:
    key: str
    percent: int
    """Its median step in percent of the median of all ranks."""
    since_s: float
    step: int
    """Of the ladder: which one is in force."""
    action: StragglerResponse


@dataclass(frozen=True, slots=True)
class Verdict:
    slow: tuple[Slow, ...] = ()
    """Confirmed, the slowest first."""
    since: Mapping[str, float] = field(default_factory=dict)
    """Since when each is slow, confirmed or not: for the next judgement."""
    look_again_s: float | None = None


def judge(
    paces: Iterable[Pace],
    settings: StragglerSettings,
    *,
    round_s: float,
    since: Mapping[str, float],
    now_s: float,
    confirmed: Collection[str] = (),
) -> Verdict:
    """`since`: of the last judgement. `confirmed`: slow for long enough, whatever `since` says."""
    paces = list(paces)
    measured = [p for p in paces if p.step_s > 0]
    # The lower median: of two ranks, the faster one is the norm.
    norm_s = statistics.median_low([p.step_s for p in measured]) if len(measured) > 1 else 0.0
    window_s = max(MIN_S, settings.window_rounds * round_s)
    kept: dict[str, float] = {}
    slow: list[Slow] = []
    looks: list[float] = []
    for pace in paces:
        if pace.step_s <= 0 or not norm_s:
            if pace.key in since:
                kept[pace.key] = since[pace.key]
            continue
        if pace.step_s < max(settings.slowdown_factor * norm_s, norm_s + GAP_MIN_S):
            continue
        first_s = kept[pace.key] = since.get(pace.key, now_s)
        if now_s - first_s < window_s and pace.key not in confirmed:
            looks.append(first_s + window_s)
            continue
        step, next_s = _step(settings, now_s - first_s)
        if next_s is not None:
            looks.append(first_s + next_s)
        percent = round(100 * pace.step_s / norm_s)
        slow.append(Slow(pace.key, percent, first_s, step, settings.respond[step]))
    slow.sort(key=lambda s: -s.percent)
    return Verdict(tuple(slow), kept, min(looks, default=None))


def cooldown_s(settings: StragglerSettings) -> float:
    """Between two steps against the stragglers of a job."""
    return max(MIN_S, settings.cooldown_ns / NS_PER_S)


def _step(settings: StragglerSettings, slow_s: float) -> tuple[int, float | None]:
    """The step of the ladder that is in force, and after how long the next one is."""
    last, each_s = len(settings.respond) - 1, cooldown_s(settings)
    step = min(int(slow_s // each_s), last)
    return step, (step + 1) * each_s if step < last else None
