"""What the coordinator tells: its diary of changes and happenings, and the status made of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from paceline.core.coordinator.roster import Seen
from paceline.core.ids import GenerationId, MemberId
from paceline.core.records import Gen
from paceline.core.status import (
    CHANGES_MAX,
    HAPPENINGS_MAX,
    Change,
    Condition,
    Happening,
    RankState,
    RankStatus,
    Status,
    log_status,
)

if TYPE_CHECKING:
    from paceline.core.coordinator.machine import Coordinator


@dataclass(slots=True)
class Diary:
    """Bounded memory of what happened; read by `status` only."""

    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=HAPPENINGS_MAX))
    changes: deque[Change] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    seq: int = 0
    waits: str = ""
    """What a change waits for (R6)."""
    released: tuple[GenerationId, int] | None = None
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

    def committed_generation(self, coordinator: Coordinator, gen: Gen) -> None:
        cause_ns = self.cause_ns if self.cause_ns is not None else coordinator.now_ns
        agree_s = (coordinator.now_ns - cause_ns) / 1e9
        self.changes.append(
            Change(
                generation=gen.id,
                reason=_reason(gen),
                why=self.cause_why,
                members=len(gen.members),
                version=gen.version,
                wall_s=coordinator.wall_s() - agree_s,
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


def status(c: Coordinator) -> Status:
    gen = c.gen
    members = gen.members if gen else ()
    ranks = [_rank(c, member, members) for member in sorted(c.roster.ranks)]
    living = [r for r in ranks if r.state is not RankState.DEAD]
    dead = [r for r in ranks if r.state is RankState.DEAD]
    furthest = max(
        (s for s in c.roster.ranks.values() if s.facts and s.member in members),
        key=lambda s: s.version,
        default=None,
    )
    return Status(
        job=c.config.job,
        coordinator=c.uid,
        wall_s=c.wall_s(),
        generation=gen.id if gen else c.proposal,
        replicas=c.replicas,
        procs=c.config.procs,
        inventory=c.roster.inventory.revision if c.roster.inventory else 0,
        settings=c.settings,
        ranks=(*living, *dead),
        version=c.version,
        log=log_status(furthest.facts if furthest else {}),
        changes=tuple(c.diary.changes),
        happenings=tuple(c.diary.happenings),
        conditions=_conditions(c),
        stopping=any(s.stopped for s in c.roster.ranks.values()) or c.diary.released is not None,
        outcome=c.outcome,
    )


def _rank(c: Coordinator, member: MemberId, members: tuple[MemberId, ...]) -> RankStatus:
    seen = c.roster.rank(member)
    return RankStatus(
        member=member,
        state=_state(c, member, seen),
        rank=members.index(member) if member in members else None,
        pid=seen.pid,
        host=seen.register.host if seen.register else "",
        version=seen.version,
        silent_ms=(c.now_ns - seen.heard_ns) // 1_000_000 if seen.heard_ns else 0,
        facts=seen.facts,
        why=seen.dead or seen.suspect,
    )


def _state(c: Coordinator, member: MemberId, seen: Seen) -> RankState:
    if seen.dead or c.roster.is_dead(member):
        return RankState.DEAD
    if seen.suspect:
        return RankState.SUSPECT
    if seen.stopped is not None:
        return RankState.FINISHED
    if seen.leaving:
        return RankState.DRAINING
    if c.gen is not None and member in c.gen.members:
        if seen.facts.get("active", 0.0):
            return RankState.ACTIVE
        if seen.facts.get("benched", 0.0):
            return RankState.BENCHED
        return RankState.JOINING
    return RankState.JOINING if seen.ready else RankState.STARTING


def _conditions(c: Coordinator) -> tuple[Condition, ...]:
    found = []
    now = c.wall_s()
    if c.gen is not None and not c.unstarted and c.outcome is None and c.due_ns is None:
        text = f"{len(c.gen.members)} ranks in generation {c.gen.id}"
        found.append(Condition("RingReady", "GenerationStarted", text, now))
    if c.diary.waits:
        found.append(Condition("Degraded", "WaitingForEvidence", c.diary.waits, now))
    k = c.settings.quorum
    active = len(c.gen.active) if c.gen else 0
    if c.gen is not None and k > active:
        text = f"quorum {k} is asked for, {active} ranks are active"
        found.append(Condition("Degraded", "QuorumReduced", text, now))
    living = sum(1 for p in c.roster.pods.values() if not p.done and not p.draining)
    if living != c.replicas:
        text = f"{living} replicas run, {c.replicas} are wanted"
        found.append(Condition("Resizing", "ReplicasDiffer", text, now))
    return tuple(found)
