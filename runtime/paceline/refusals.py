"""Counts of what a process refused at its entry points, with rate-limited log lines.

An entry point is a place where a process reads bytes from others: a socket, a pipe, an HTTP server.
Anybody who can reach it can also send garbage, so a refusal must cost little. The counts have a
fixed number of keys, and a flood makes one line per minute and entry point, however long it lasts.
The counts are exported as paceline_refused_total.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from paceline_api.errors import printable
from paceline_api.times import NS_PER_S

from paceline.clock import now_ns

log = logging.getLogger("paceline.refusals")

LINE_EVERY_NS: Final = 60 * NS_PER_S
"""Shortest time between two lines about the same entry point."""
CALLER_CHARACTERS_MAX: Final = 120


class Entry(StrEnum):
    """A place where a process reads bytes from others."""

    RENDEZVOUS = "rendezvous"
    """Sockets where two ranks meet before they wire a data channel."""
    PEERS = "peers"
    """The zmq sockets on which a rank receives announcements, GO and states of other ranks."""
    RANK_PIPE = "rank_pipe"
    """The pipe on which an agent receives reports of the ranks that it started."""
    COORDINATOR = "coordinator"
    """The HTTP server of a job's coordinator."""
    AGENT_HTTP = "agent_http"
    """The HTTP server of an agent: metrics and steps."""


class RefusalReason(StrEnum):
    """Reason for which a message or a connection was refused."""

    OTHER_USER = "other_user"
    """The kernel reports another user at the other end. Nothing was read."""
    UNAUTHENTICATED = "unauthenticated"
    """The caller's proof that it knows the job's token is missing or wrong."""
    UNKNOWN_PEER = "unknown_peer"
    """The caller names a member that is not in the group."""
    TOO_LARGE = "too_large"
    """The message is longer than any that this entry point expects. It was not read."""
    MALFORMED = "malformed"
    """The bytes are not a message of a kind that this entry point expects."""
    TOO_SLOW = "too_slow"
    """The message was not complete in time."""
    TOO_MANY = "too_many"
    """There were more unauthenticated callers than allowed. The one that waited longest was closed.
    """


class Refusals:
    """Counts refusals and decides which ones to log. Any thread may call it."""

    def __init__(self) -> None:
        self.total = 0
        """Sum over all entry points and reasons. A cheap way to see if `counts` has changed."""
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Entry, RefusalReason]] = Counter()
        self._since_line: Counter[Entry] = Counter()
        self._next_line_ns: dict[Entry, int] = {}

    def refuse(self, entry: Entry, reason: RefusalReason, caller: str, now_ns: int) -> str | None:
        """Count one refusal and return the line to log, or None if it is too early for a line.

        The first refusal at an entry point has a line at once. After that there is at most one in
        LINE_EVERY_NS. It says how many were refused since the line before it.

        Args:
            entry: Where it was refused.
            reason: Why it was refused.
            caller: Who it was, from the kernel and not from the refused bytes: an address, or a
                user and a process. Control characters are escaped and a long text is cut.
            now_ns: Monotonic time in nanoseconds.

        Returns:
            One line without control characters, or None.
        """
        with self._lock:
            self.total += 1
            self._counts[entry, reason] += 1
            self._since_line[entry] += 1
            if now_ns < self._next_line_ns.get(entry, now_ns):
                return None
            self._next_line_ns[entry] = now_ns + LINE_EVERY_NS
            refused = self._since_line.pop(entry)
        who = printable(caller[:CALLER_CHARACTERS_MAX])
        others = f"; {refused} refused since the last such line" if refused > 1 else ""
        return f"{entry}: refused a message of {who}: {reason}{others}"

    def counts(self) -> Mapping[tuple[Entry, RefusalReason], int]:
        """Return the number of refusals by entry point and reason. An absent key means none."""
        with self._lock:
            return dict(self._counts)


PROCESS: Final = Refusals()
"""The refusals of this process, for its metrics."""


def refuse(entry: Entry, reason: RefusalReason, caller: str) -> None:
    """Count a refusal of this process, and log it if a line is due (`Refusals.refuse`)."""
    line = PROCESS.refuse(entry, reason, caller, now_ns())
    if line is not None:
        log.warning("%s", line)
