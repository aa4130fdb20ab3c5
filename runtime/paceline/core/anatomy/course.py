"""The course of a job: its speed, and the means of what the script logs, over time.

Agents keep moments with sums since the start of the job, so the difference of any two of them gives
the exact mean between them, and moments can be left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Final

from paceline_api.times import MS_PER_S

from paceline.core.anatomy.samples import Moment, PodSamples

POINTS_MAX: Final = 60
"""Upper bound on the points of a line."""
ROUNDS_PER_POINT: Final = 4
"""Smallest mean number of rounds for one point. Fewer would show in which second a round happened
to end."""
SPEED: Final = "rounds per second"


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """The mean of a value over an interval."""

    at_s: float
    """End of the interval: Unix time in seconds."""
    value: float


@dataclass(frozen=True, slots=True)
class TimeSeries:
    """One value over time, in order of time."""

    name: str
    points: tuple[SeriesPoint, ...]


def course(pods: Sequence[PodSamples]) -> tuple[TimeSeries, ...]:
    """Return how a job has run so far.

    Args:
        pods: The samples of its pods.

    Returns:
        First the rounds per second, then each figure that the script logs, by name. A line with
        less than two points is left out.
    """
    lines = [TimeSeries(SPEED, tuple(_speed(pods)))]
    names = sorted({name for pod in pods for moment in pod.course for name in moment.figures})
    lines += [TimeSeries(name, tuple(_figure(pods, name))) for name in names]
    return tuple(line for line in lines if len(line.points) > 1)


def _speed(pods: Sequence[PodSamples]) -> Iterable[SeriesPoint]:
    """Yield the rounds per second, from the pod that saw most: clocks of hosts may differ."""
    longest = max(pods, key=lambda pod: _length_ms(pod.course), default=None)
    if longest is None:
        return
    moments = _rising(longest.course)
    if not any(rank.alive for rank in longest.ranks):
        # The agent was still there when its ranks had ended. That is not a pause of the job, and
        # the interval in which they ended is part of one.
        last = moments[-1].round if moments else 0
        moments = [moment for moment in moments if moment.round < last]
    for earlier, later in pairwise(_thinned(moments)):
        took_s = (later.wall_ms - earlier.wall_ms) / MS_PER_S
        yield SeriesPoint(later.wall_ms / MS_PER_S, (later.round - earlier.round) / took_s)


def _figure(pods: Sequence[PodSamples], name: str) -> Iterable[SeriesPoint]:
    """Yield the means of a figure. Only the lowest active rank reports it, so pods take turns."""
    reports = (moment for pod in pods for moment in pod.course if name in moment.figures)
    for earlier, later in pairwise(_thinned(_rising(reports))):
        (total, weight), (earlier_total, earlier_weight) = (
            later.figures[name],
            earlier.figures[name],
        )
        more = weight - earlier_weight
        if more > 0 and isfinite(mean := (total - earlier_total) / more):
            yield SeriesPoint(later.wall_ms / MS_PER_S, mean)


def _length_ms(course: Sequence[Moment]) -> int:
    return course[-1].wall_ms - course[0].wall_ms if course else -1


def _rising(moments: Iterable[Moment]) -> list[Moment]:
    """Return the moments in order of time, without those in which time or rounds went back."""
    rising: list[Moment] = []
    for moment in sorted(moments, key=lambda moment: moment.wall_ms):
        last = rising[-1] if rising else None
        if last is None or (moment.wall_ms > last.wall_ms and moment.round >= last.round):
            rising.append(moment)
    return rising


def _thinned(moments: Sequence[Moment]) -> list[Moment]:
    """Return the first moment and the last one of each of a few intervals of equal length."""
    if not moments:
        return []
    first, last = moments[0], moments[-1]
    count = max(1, min(POINTS_MAX, (last.round - first.round) // ROUNDS_PER_POINT))
    length_ms = max(1, last.wall_ms - first.wall_ms)
    latest = {
        -(-(moment.wall_ms - first.wall_ms) * count // length_ms): moment for moment in moments
    }
    return list(latest.values())
