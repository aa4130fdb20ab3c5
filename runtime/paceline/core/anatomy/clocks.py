"""One clock for the moments of several hosts, each of which counts from a moment of its own.

Nobody sees the end of a sum before everybody has begun to give to it. So each round that two hosts
know says between which bounds the difference of their clocks lies. It is taken for the median of
the differences between the ends, which come within the time of a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Sum:
    """When a host began to give to the last segment of a round, and when it had the result."""

    begun_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class Clock:
    """Of one host, against the one of which the most rounds are known."""

    shift_ns: int
    """To be added to its moments."""
    off_ns: int
    """The true difference is at most so far from it, if both clocks run at the same speed."""


@dataclass(frozen=True, slots=True)
class _Known:
    sum: Sum
    """On the common clock."""
    off_ns: int


def align(hosts: Mapping[str, Mapping[int, Sum]]) -> dict[str, Clock]:
    """`hosts`: the sums of each by round. Hosts that were asked at different moments may have no
    round in common: they come together by way of others. Those that do not are left out."""
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
            moved = Sum(own.begun_ns + clock.shift_ns, own.ended_ns + clock.shift_ns)
            known.setdefault(number, _Known(moved, clock.off_ns))
    return clocks


def _beside(own: Mapping[int, Sum], known: Mapping[int, _Known]) -> Clock:
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
