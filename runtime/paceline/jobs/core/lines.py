"""Lines of many replicas as one stream in order of time.

Each replica's own lines come in order, but its time may stand still, or go back by a little where
a clock was set: a line is then given the time of the one before it, so that no replica's lines
change places among themselves.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final

from paceline.core.protocol.ids import parse_member
from paceline.core.status import place_of
from paceline.jobs.interface import LogLine

_STAMPED: Final = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?(.*)", re.S
)
_OF_A_RANK: Final = re.compile(r"\[rank (\d{1,9}\.\d{1,9})(?:\.\d{1,9})?(#\d{1,9})\] ?(.*)", re.S)
"""Of the ranks of a group all but the first one add which of them they are (R50)."""
NS_PER_S: Final = 1_000_000_000


def parse_line(raw: str, *, source: str, procs: int) -> LogLine | None:
    """A line as a kubelet gives it with its time, or as a run keeps it. None: it has no time, as
    the rest of a line of which the beginning is not there any more. `procs`: ranks per replica."""
    if (found := _STAMPED.fullmatch(raw)) is None:
        return None
    second, fraction, zone, text = found.groups()
    try:
        at = datetime.fromisoformat(f"{second}{zone.replace('Z', '+00:00')}")
        wall_ns = round(at.timestamp()) * NS_PER_S + int((fraction or "").ljust(9, "0"))
    except (ValueError, OverflowError):  # the 99th of a month
        return None
    if (said := _OF_A_RANK.fullmatch(text)) is None:
        return LogLine(wall_ns, source, "", None, text)
    place, attempt, text = said.groups()
    member = place + attempt
    return LogLine(wall_ns, source, member, place_of(parse_member(member), procs), text)


def in_order(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """One replica's, with times that never go back."""
    last_ns = 0
    for line in lines:
        last_ns = max(last_ns, line.wall_ns)
        yield LogLine(last_ns, line.source, line.member, line.rank, line.text)


def merged(replicas: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    """All in order of time; at the same time by the replicas' order."""
    return heapq.merge(*map(in_order, replicas), key=lambda line: line.wall_ns)


class Shuffle:
    """Lines that come from many replicas while they are printed, put in order of time.

    What a replica says now may reach us later than what another one says after it. So a line is
    held until every open replica has said something later, or until it is `hold_ns` old by the
    clock of who reads: then whoever is silent has probably nothing to say.
    """

    def __init__(self, *, hold_ns: int) -> None:
        self._hold_ns = hold_ns
        self._held: list[tuple[int, int, int, LogLine]] = []
        """(time, number, when it came, line), a heap."""
        self._last_ns: dict[str, int] = {}
        """By open replica: the time of its latest line."""
        self._count = 0

    def opened(self, source: str) -> None:
        self._last_ns.setdefault(source, 0)

    def closed(self, source: str) -> None:
        self._last_ns.pop(source, None)

    def add(self, line: LogLine, now_ns: int) -> None:
        """`now_ns`: of a clock that never goes back."""
        at_ns = max(line.wall_ns, self._last_ns.get(line.source, 0))
        self._last_ns[line.source] = at_ns
        self._count += 1
        heapq.heappush(self._held, (at_ns, self._count, now_ns, line))

    def ready(self, now_ns: int) -> list[LogLine]:
        """Those whose turn it is, in order."""
        heard_ns = min(self._last_ns.values(), default=None)
        found = []
        while self._held:
            at_ns, _, came_ns, line = self._held[0]
            heard = heard_ns is None or at_ns <= heard_ns
            if not heard and now_ns - came_ns < self._hold_ns:
                break
            heapq.heappop(self._held)
            found.append(line)
        return found

    def next_ns(self) -> int | None:
        """When to ask again, if nothing comes before."""
        return self._held[0][2] + self._hold_ns if self._held else None
