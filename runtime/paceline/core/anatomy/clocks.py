"""Align the monotonic clocks of several hosts, each of which counts from its own start.

No rank sees the end of a reduction before every rank has begun to contribute to it. So each round
that two hosts know gives bounds for the difference of their clocks. The estimate is the median of
the differences between the ends, which come within the time of one message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class ReductionSpan:
    """Start and end of a host's reduction of the last segment of a round."""

    begun_ns: int
    """Time at which the host began to contribute, on its own clock."""
    ended_ns: int
    """Time at which the host had the result, on its own clock."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of one host relative to the reference: the host that knows the most rounds."""

    shift_ns: int
    """Nanoseconds to add to a time of this host."""
    off_ns: int
    """Upper bound on the error of `shift_ns`, provided that both clocks run at the same speed."""


@dataclass(frozen=True, slots=True)
class _Known:
    sum: ReductionSpan
    """The reduction, on the reference clock."""
    off_ns: int
    """Upper bound on the error of its times."""


def align(hosts: Mapping[str, Mapping[int, ReductionSpan]]) -> dict[str, Clock]:
    """Return the clock of each host that can be aligned.

    Hosts whose samples were collected at different times may have no round in common. They are
    aligned through other hosts.

    Args:
        hosts: For each host, the reduction of each round that it knows, by round number.

    Returns:
        The clocks by host. A host that shares no round with the others, even indirectly, is left
        out.
    """
    if not hosts:
        return {}
    first = max(hosts, key=lambda host: len(hosts[host]))
    clocks = {first: Clock(0, 0)}
    known = {number: _Known(own, 0) for number, own in hosts[first].items()}
    while left := [host for host in hosts if host not in clocks]:
        nearest = max(left, key=lambda host: len(hosts[host].keys() & known.keys()))
        if not hosts[nearest].keys() & known.keys():
            break
        clock = clocks[nearest] = _beside(hosts[nearest], known)
        for number, own in hosts[nearest].items():
            moved = ReductionSpan(own.begun_ns + clock.shift_ns, own.ended_ns + clock.shift_ns)
            known.setdefault(number, _Known(moved, clock.off_ns))
    return clocks


def _beside(own: Mapping[int, ReductionSpan], known: Mapping[int, _Known]) -> Clock:
    """Return the clock of a host that shares at least one round with the known ones."""
    pairs = [(known[number], own[number]) for number in own.keys() & known.keys()]
    shift_ns = round(median(one.sum.ended_ns - other.ended_ns for one, other in pairs))
    off_ns = min(
        one.off_ns
        + max(
            one.sum.ended_ns - other.begun_ns - shift_ns,
            shift_ns - (one.sum.begun_ns - other.ended_ns),
        )
        for one, other in pairs
    )
    return Clock(shift_ns, off_ns)
