"""When the q-th of P members arrives, from the times that each of the measured ones has taken.

Members draw their times independently, each from what one measured member took; with more members
than were measured these repeat in turn. So one that is always slow stays one of so many.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice, pairwise
from statistics import fmean
from typing import Final

POINTS: Final = 16
"""Kept of one member's times, evenly over their order: what follows takes their number times P²."""


def thinned(times: Sequence[float]) -> tuple[float, ...]:
    """At most POINTS of them, with the same mean. `times`: all > 0."""
    ordered = sorted(times)
    if len(ordered) <= POINTS:
        return tuple(ordered)
    count = len(ordered)
    bounds = [count * i // POINTS for i in range(POINTS + 1)]
    points = [fmean(ordered[a:b]) for a, b in pairwise(bounds)]
    # They stand for one more or less of the times; the mean is what matters most.
    correction = fmean(ordered) / fmean(points)
    return tuple(point * correction for point in points)


def arrival_s(times: Sequence[Sequence[float]], members: int, quorum: int) -> float:
    """Mean of the `quorum`-th smallest of `members` times; `times`: of each measured member, at
    least one with at least one."""
    drawn = list(islice(cycle(times), members))
    points = sorted({x for each in times for x in each})
    mean, below = 0.0, 0.0
    for x in points:
        chance = _at_least(quorum, [_share(each, x) for each in drawn])
        mean += x * (chance - below)
        below = chance
    return mean


def late_s(times: Sequence[Sequence[float]], members: int, at_s: float) -> list[float]:
    """Of each member, how long after `at_s` it arrives on the mean; 0 for times before."""
    drawn = islice(cycle(times), members)
    return [sum(max(0.0, x - at_s) for x in each) / len(each) for each in drawn]


def _share(times: Sequence[float], x: float) -> float:
    return sum(each <= x for each in times) / len(times)


def _at_least(count: int, chances: Sequence[float]) -> float:
    """That so many of independent events happen."""
    happened = [1.0] + [0.0] * count
    """Of exactly i; of the last one: or more."""
    for chance in chances:
        happened[count] += happened[count - 1] * chance
        for i in range(count - 1, 0, -1):
            happened[i] += (happened[i - 1] - happened[i]) * chance
        happened[0] *= 1.0 - chance
    return happened[count]
