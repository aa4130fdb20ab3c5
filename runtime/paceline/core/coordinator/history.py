"""The coordinator's bounded memory of what happened; read by `status` only, never a reason."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from paceline.core.protocol.records import Gen
from paceline.core.status import CHANGES_MAX, HAPPENINGS_MAX, Change, Happening


@dataclass(slots=True)
class History:
    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=HAPPENINGS_MAX))
    changes: deque[Change] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    seq: int = 0
    cause_ns: int | None = None
    cause_why: str = ""
    commit_ns: int = 0
    commit_version: int = 0
    """Last new version that a heartbeat showed, and when."""
    gap_from_ns: int | None = None
    """The last commit before the change whose gap is being measured."""

    def happened(self, reason: str, message: str, facts: dict[str, str], wall_s: float) -> None:
        self.seq += 1
        self.happenings.append(Happening(self.seq, wall_s, reason, message, facts))

    def cause(self, why: str, now_ns: int) -> None:
        if self.cause_ns is None:
            self.cause_ns, self.cause_why = now_ns, why

    def prepared(self, now_ns: int) -> None:
        if self.cause_ns is None:
            self.cause_ns = now_ns
        if self.gap_from_ns is None and self.commit_ns:
            self.gap_from_ns = self.commit_ns

    def committed(self, version: int, now_ns: int) -> None:
        """A heartbeat shows a version."""
        if version <= self.commit_version:
            return
        if self.gap_from_ns is not None and self.changes and version > self.changes[-1].version:
            last = self.changes[-1]
            if last.start_s is not None:
                gap_s = (now_ns - self.gap_from_ns) / 1e9
                self.changes[-1] = replace(last, gap_s=gap_s)
                self.gap_from_ns = None
        self.commit_version, self.commit_ns = version, now_ns

    def began_at(self, version: int) -> None:
        """The log goes on from an older version than was seen before."""
        self.commit_version = version

    def committed_generation(self, gen: Gen, why: str, now_ns: int, wall_s: float) -> None:
        cause_ns = self.cause_ns if self.cause_ns is not None else now_ns
        agree_s = (now_ns - cause_ns) / 1e9
        self.changes.append(
            Change(
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
        if self.changes and self.cause_ns is not None:
            start_s = (now_ns - self.cause_ns) / 1e9
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
