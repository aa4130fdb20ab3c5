"""Bounded history of events and membership changes. Only the status reads it; no decision does."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace
from paceline_api.status import CHANGES_MAX, HISTORY_MAX, HistoryEntry, MembershipChange
from paceline_api.times import NS_PER_S

from paceline.core.protocol.records import Gen


@dataclass(slots=True)
class History:
    """The last events and changes of the membership, with the times that a change took."""

    entries: deque[HistoryEntry] = field(default_factory=lambda: deque(maxlen=HISTORY_MAX))
    changes: deque[MembershipChange] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    seq: int = 0
    """Number of the last event; grows by one with each."""
    cause_ns: int | None = None
    """Time of the cause of the change in progress; None if there is no change."""
    cause_why: str = ""
    """First cause of the change in progress."""
    commit_ns: int = 0
    """Time at which `commit_version` was reported."""
    commit_version: int = 0
    """Highest version that was reported."""
    gap_from_ns: int | None = None
    """Time of the last reported commit before the change whose gap is being measured."""

    def happened(self, reason: str, message: str, facts: dict[str, str], wall_s: float) -> None:
        """Append an event."""
        self.seq += 1
        self.entries.append(HistoryEntry(self.seq, wall_s, reason, message, facts))

    def cause(self, why: str, now_ns: int) -> None:
        """Note the cause of a change. The first cause since the last complete change counts."""
        if self.cause_ns is None:
            self.cause_ns, self.cause_why = now_ns, why

    def prepared(self, now_ns: int) -> None:
        """Note that PREPARE was sent: the gap without committed rounds is measured from here on."""
        if self.cause_ns is None:
            self.cause_ns = now_ns
        if self.gap_from_ns is None and self.commit_ns:
            self.gap_from_ns = self.commit_ns

    def committed(self, version: int, now_ns: int) -> None:
        """Note a reported version; complete the gap of the last change with its first new round."""
        if version <= self.commit_version:
            return
        if self.gap_from_ns is not None and self.changes and version > self.changes[-1].version:
            last = self.changes[-1]
            if last.start_s is not None:
                gap_s = (now_ns - self.gap_from_ns) / NS_PER_S
                self.changes[-1] = replace(last, gap_s=gap_s)
                self.gap_from_ns = None
        self.commit_version, self.commit_ns = version, now_ns

    def began_at(self, version: int) -> None:
        """Reset the version: the log continues from an older version than was reported before."""
        self.commit_version = version

    def committed_generation(self, gen: Gen, why: str, now_ns: int, wall_s: float) -> None:
        """Append the change that formed a generation.

        Args:
            gen: The new generation.
            why: Its reason, for people.
            now_ns: Monotonic time in nanoseconds.
            wall_s: Wall time in seconds.
        """
        cause_ns = self.cause_ns if self.cause_ns is not None else now_ns
        agree_s = (now_ns - cause_ns) / NS_PER_S
        self.changes.append(
            MembershipChange(
                generation=gen.id,
                reason=_reason(gen),
                why=why,
                members=len(gen.members),
                version=gen.version,
                wall_s=wall_s - agree_s,
                agree_s=agree_s,
            )
        )

    def all_started(self, now_ns: int) -> None:
        """Note that all members have started: the change in progress is over."""
        if self.changes and self.cause_ns is not None:
            start_s = (now_ns - self.cause_ns) / NS_PER_S
            self.changes[-1] = replace(self.changes[-1], start_s=start_s)
        self.cause_ns, self.cause_why = None, ""


def _reason(gen: Gen) -> str:
    if gen.plan is not None:
        return "First"
    why = {left.why for left in gen.left_out}
    if why - {"leave"}:
        return "Died" if "dead" in why else "Silent"
    if why:
        return "Left"
    if set(gen.members) - set(gen.with_state):
        return "Joined"
    return "Repaired"
