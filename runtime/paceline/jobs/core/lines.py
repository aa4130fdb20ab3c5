"""Merging of the log lines of many replicas into one stream in order of time.

The lines of one replica arrive in their order. Their times may be equal, or go back a little where
a clock was set. Such a line is given the time of the line before it, so that the lines of one
replica never change their order.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final

from paceline_api.ids import parse_member
from paceline_api.status import place_of
from paceline_api.times import NS_PER_S

from paceline.jobs.interface import LogLine

_STAMPED: Final = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?(.*)", re.S
)
_OF_A_RANK: Final = re.compile(r"\[rank (\d{1,9}\.\d{1,9})(?:\.\d{1,9})?(#\d{1,9})\] ?(.*)", re.S)
"""Prefix of a line that a rank printed. In a group of ranks, all but the first add their number in
the group (R50)."""


def parse_line(raw: str, *, source: str, procs: int) -> LogLine | None:
    """Parse a line with a timestamp, from a kubelet or from the file of a run.

    Args:
        raw: The line.
        source: Name of the pod or agent that the line is from.
        procs: Members in each replica.

    Returns:
        The line; None if it has no timestamp, as the rest of a line whose beginning was rotated
        away.
    """
    if (match := _STAMPED.fullmatch(raw)) is None:
        return None
    second, fraction, zone, text = match.groups()
    try:
        at = datetime.fromisoformat(f"{second}{zone.replace('Z', '+00:00')}")
        wall_ns = round(at.timestamp()) * NS_PER_S + int((fraction or "").ljust(9, "0"))
    except (ValueError, OverflowError):  # no valid date, such as the 99th of a month
        return None
    if (match := _OF_A_RANK.fullmatch(text)) is None:
        return LogLine(wall_ns, source, "", None, text)
    place, attempt, text = match.groups()
    member = place + attempt
    return LogLine(wall_ns, source, member, place_of(parse_member(member), procs), text)


def in_order(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Yield the lines of one replica with times that never go back."""
    last_ns = 0
    for line in lines:
        last_ns = max(last_ns, line.wall_ns)
        yield LogLine(last_ns, line.source, line.member, line.rank, line.text)


def merged(replicas: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    """Yield the lines of all replicas in order of time; ties are in the order of `replicas`."""
    return heapq.merge(*map(in_order, replicas), key=lambda line: line.wall_ns)


class Shuffle:
    """Sorts lines by time while they arrive from many replicas.

    A line of one replica may arrive later than a newer line of another replica. A line is therefore
    held until every open replica has sent a line that is as new, or until it was held for `hold_ns`
    on the reader's clock. After that time a silent replica has probably nothing older to send.
    """

    def __init__(self, *, hold_ns: int) -> None:
        self._hold_ns = hold_ns
        self._held: list[tuple[int, int, int, LogLine]] = []
        """Heap of (time, sequence number, arrival on the reader's clock, line)."""
        self._last_ns: dict[str, int] = {}
        """Time of the latest line of each open replica."""
        self._count = 0

    def opened(self, source: str) -> None:
        """Add a replica, for whose lines the others are held back from now on."""
        self._last_ns.setdefault(source, 0)

    def closed(self, source: str) -> None:
        """Remove a replica that will send no more lines."""
        self._last_ns.pop(source, None)

    def add(self, line: LogLine, now_ns: int) -> None:
        """Add a line that arrived at `now_ns`, on a monotonic clock of the reader."""
        at_ns = max(line.wall_ns, self._last_ns.get(line.source, 0))
        self._last_ns[line.source] = at_ns
        self._count += 1
        heapq.heappush(self._held, (at_ns, self._count, now_ns, line))

    def ready(self, now_ns: int) -> list[LogLine]:
        """Remove and return the lines that may be printed now, in order of time.

        Args:
            now_ns: Current time on the reader's monotonic clock.

        Returns:
            Lines that every open replica has passed, or that were held for `hold_ns`.
        """
        heard_ns = min(self._last_ns.values(), default=None)
        lines = []
        while self._held:
            at_ns, _, came_ns, line = self._held[0]
            is_passed = heard_ns is None or at_ns <= heard_ns
            if not is_passed and now_ns - came_ns < self._hold_ns:
                break
            heapq.heappop(self._held)
            lines.append(line)
        return lines

    def next_ns(self) -> int | None:
        """Return when to call `ready` again if no line arrives before; None if none is held."""
        return self._held[0][2] + self._hold_ns if self._held else None
