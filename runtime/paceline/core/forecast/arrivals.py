"""Compute when the q-th of P members arrives, from the computing times measured for each member.

The model assumes that members draw their times independently, each from the times of one measured
member. If there are more members than were measured, the measured ones repeat in turn, so the share
of members that are always slow stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice, pairwise
from statistics import fmean
from typing import Final

POINTS: Final = 16
"""Upper bound on the times that are kept of one member, spread evenly over their sorted order.
`arrival_s` takes time proportional to this number times P² for each measured member."""


def thinned(times: Sequence[float]) -> tuple[float, ...]:
    """Return at most POINTS times that have the same mean as `times`.

    Args:
        times: Seconds, all above 0, in any order.

    Returns:
        The times in ascending order. More than POINTS are replaced by the means of POINTS runs of
        sorted neighbors, scaled so that the mean is unchanged.
    """
    ordered = sorted(times)
    if len(ordered) <= POINTS:
        return tuple(ordered)
    count = len(ordered)
    bounds = [count * i // POINTS for i in range(POINTS + 1)]
    points = [fmean(ordered[a:b]) for a, b in pairwise(bounds)]
    # The runs differ by one in length, so their means are scaled to keep the overall mean exact.
    correction = fmean(ordered) / fmean(points)
    return tuple(point * correction for point in points)


def arrival_s(times: Sequence[Sequence[float]], members: int, quorum: int) -> float:
    """Return the mean time at which the `quorum`-th of `members` members arrives.

    Args:
        times: Computing times of each measured member, in seconds. At least one member with at
            least one time.
        members: Number of members P to forecast for.
        quorum: Number of members that a round waits for, from 1 to `members`.

    Returns:
        Seconds from the beginning of the step: the expectation of the `quorum`-th smallest time.
    """
    drawn = list(islice(cycle(times), members))
    points = sorted({x for each in times for x in each})
    mean, below = 0.0, 0.0
    for x in points:
        chance = _at_least(quorum, [_share(each, x) for each in drawn])
        mean += x * (chance - below)
        below = chance
    return mean


def late_s(times: Sequence[Sequence[float]], members: int, at_s: float) -> list[float]:
    """Return by how many seconds each member arrives after `at_s` on average.

    Args:
        times: Computing times of each measured member, in seconds.
        members: Number of members to forecast for.
        at_s: Time at which the round starts, in seconds from the beginning of the step.

    Returns:
        One mean for each member. An arrival before `at_s` counts as 0.
    """
    drawn = islice(cycle(times), members)
    return [sum(max(0.0, x - at_s) for x in each) / len(each) for each in drawn]


def _share(times: Sequence[float], x: float) -> float:
    """Return the share of `times` that are at most `x`."""
    return sum(each <= x for each in times) / len(times)


def _at_least(count: int, chances: Sequence[float]) -> float:
    """Return the probability that at least `count` of these independent events happen."""
    happened = [1.0] + [0.0] * count
    """Entry i: the probability that exactly i events have happened so far. The last entry: `count`
    or more."""
    for chance in chances:
        happened[count] += happened[count - 1] * chance
        for i in range(count - 1, 0, -1):
            happened[i] += (happened[i - 1] - happened[i]) * chance
        happened[0] *= 1.0 - chance
    return happened[count]
