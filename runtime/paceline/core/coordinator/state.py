"""What the coordinator knows: phase, the change under way, the roster, its history.

It owns nothing that it could not lose: a new coordinator finds all of it again from registrations
and the inventory (R1, R5, R6).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from paceline_api.rounds import RoundSettings

from paceline.core import messages as m
from paceline.core.coordinator.events import Config, Effect, Happened, ToAgent, ToRank
from paceline.core.coordinator.history import History
from paceline.core.coordinator.roster import KnownRank, Roster
from paceline.core.coordinator.sizes import Sizes
from paceline.core.messages import Network
from paceline.core.protocol.ids import NO_GENERATION, GenerationId, MemberId
from paceline.core.protocol.records import Gen, Request
from paceline.core.status import Outcome, StragglerStatus

FAILURES_MAX: Final = 64


class Phase(StrEnum):
    RECOVER = "recover"
    """Nothing formed yet by this coordinator."""
    PREPARING = "preparing"
    WAITING = "waiting"
    """A change is needed, but evidence is missing (R6)."""
    STARTING = "starting"
    """COMMIT is out, not everybody has STARTED."""
    RUNNING = "running"
    RELEASED = "released"
    """RELEASE is out (R17)."""
    ENDED = "ended"


@dataclass(slots=True)
class CoordinatorState:
    config: Config
    uid: str
    now_ns: int
    wall_offset_s: float
    replicas: int
    """Wanted; changes with the targets."""
    settings: RoundSettings
    told: bool = False
    """`replicas` was pushed to this coordinator. Until then it is what the job began with, which a
    scale-up may have overtaken, and nobody has to leave for it."""

    phase: Phase = Phase.RECOVER
    roster: Roster = field(default_factory=Roster)
    history: History = field(default_factory=History)
    incarnation: int = 0
    counter: int = 0
    proposal: GenerationId = NO_GENERATION
    asked: set[MemberId] = field(default_factory=set)
    asked_ns: int = 0
    reports: dict[MemberId, m.Prepared] = field(default_factory=dict)
    commit: m.Commit | None = None
    channel_why: str = ""
    """Why the last data channel moved buffers as it did, for people."""
    change: m.CommitChange | None = None
    """The same for those who have the COMMIT before (R44); None if it cannot be told so."""
    index: dict[MemberId, int] = field(default_factory=dict)
    """Rank numbers of the members of `gen`."""
    unstarted: set[MemberId] = field(default_factory=set)
    """Members that have not reported STARTED (R7)."""
    complained: set[MemberId] = field(default_factory=set)
    """Members whose data channel failed: they wait for the next change and owe nothing."""
    why: str = ""
    """What the current change is about."""
    complaint: str = ""
    """The last complaint about a data channel: mostly the echo of a death (`changing`)."""
    waits: str = ""
    """What evidence it waits for (R6)."""
    joins_ns: int | None = None
    """When those who are ready are admitted if nothing changes the membership before."""
    due_ns: int | None = None
    """When a change that was asked for begins at the latest."""
    request: Request | None = None
    request_number: int = 0
    failures: int = 0
    """Processes that failed since the last committed round (C8)."""
    futile: int = 0
    """Generations formed since the last committed round."""
    complaints: int = 0
    """Generations of the same members, one after the other, whose data channel failed before a
    round was committed."""
    late_starts: int = 0
    script_failures: deque[m.RankDead] = field(default_factory=lambda: deque(maxlen=FAILURES_MAX))
    """The last ends that scripts have caused (R55)."""
    scripts_failed: int = 0
    """All of them."""
    skips: frozenset[int] = frozenset()
    """Leases that the job has given up, as far as this coordinator knows (R56)."""
    version: int = 0
    unsaved: str = ""
    """Why the last checkpoint was not written; empty if it was."""
    starts_over: str = ""
    """Which ranks of a script that feeds itself have begun it anew; empty if none has."""
    had_state: bool = False
    """Ranks of this job have trained: weights may exist that only a living rank holds (R26)."""
    released: tuple[GenerationId, int] | None = None
    released_ns: int = 0
    """When that was found out."""
    overtime_told: bool = False
    """Whose scripts still run after the release was said."""
    proven: bool = False
    """A released rank has ended, after it had its final weights."""
    outcome: Outcome | None = None
    carrier: Network = Network.UNKNOWN
    """The last one of the job that the history has."""
    carrier_of: GenerationId | None = None
    """The generation for which that was looked up last."""
    stragglers: tuple[StragglerStatus, ...] = ()
    slow_since: dict[str, float] = field(default_factory=dict)
    """Wall time by place; `paceline_api.slow` says what is remembered."""
    slow_steps: dict[str, int] = field(default_factory=dict)
    """Step of the ladder that was taken last, by place."""
    judge_ns: int = 0
    """When the ranks' steps are compared again."""
    wake_ns: int | None = None
    """When the next Tick comes at the latest; nothing follows from time alone before."""
    changed: bool = True
    """Something that a decision is made from, since they were made last."""
    pace_told: m.BeatEvery | None = None
    """What agents are told when they say hello (R42)."""
    freeze_ns: int = 0
    """Silence after which a rank is suspect; also the bound of every answer that it owes."""
    settled_ns: int = -(10**18)
    """When decisions were made last."""
    stuck_ns: int = 0
    """Bound of a piece of work (R35), as heartbeats tell it now."""
    long_at_work: set[MemberId] = field(default_factory=set)
    """Members beyond the least that this bound can be."""
    effects: list[Effect] = field(default_factory=list)

    # ---- reading --------------------------------------------------------------------------

    @property
    def gen(self) -> Gen | None:
        """The generation that this coordinator formed last."""
        return self.commit.gen if self.commit else None

    @property
    def wanted_ranks(self) -> int:
        return self.replicas * self.config.procs

    @property
    def fewest_ranks(self) -> int:
        """Without weights anywhere, fewer do not begin."""
        replicas = max(1, min(self.config.min_replicas, self.replicas))
        return self.sizes.least(replicas) * self.config.procs

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.config.allowed_sizes, self.config.procs)

    @property
    def possible_ranks(self) -> int:
        """As many as may take part in a first generation, as far as anybody here knows (R26)."""
        pods = len(self.roster.inventory.pods) if self.roster.inventory else 0
        living = sum(not self.roster.is_dead(x) for x in self.roster.ranks)
        return max(self.wanted_ranks, pods * self.config.procs, living)

    @property
    def expected(self) -> int:
        """Ranks that the pace is made for."""
        return max(self.wanted_ranks, len(self.index))

    @property
    def expected_pods(self) -> int:
        return max(self.replicas, len({m.pod_of(member) for member in self.index}))

    @property
    def wall_s(self) -> float:
        return self.wall_offset_s + self.now_ns / 1e9

    @property
    def stop_asked(self) -> bool:
        """By a request, so the job ends before its data are through."""
        return self.request is not None and self.request.stop

    def owes_an_answer(self, member: MemberId) -> bool:
        """To PREPARE, or a STARTED."""
        if self.phase is Phase.PREPARING:
            return member in self.asked and member not in self.reports
        starting = self.phase is Phase.STARTING
        return starting and member in self.unstarted and member not in self.complained

    # ---- changing -------------------------------------------------------------------------

    def want_change(self, why: str, within_ns: int) -> None:
        due = self.now_ns + within_ns
        if self.due_ns is None or due < self.due_ns:
            self.due_ns, self.why = due, why
            self.history.cause(why, self.now_ns)

    def tell(self, member: MemberId, message: m.ToRank) -> None:
        self.effects.append(ToRank(member, message))

    def tell_pace(self) -> None:
        """To everybody who is there, if it is another one now."""
        told, pace, pods = self.pace_told, self.config.pace, self.expected_pods
        now = self.pace_told = pace.to_agent(pods, self.expected)
        self.freeze_ns = pace.freeze_ns(pods, self.config.freeze_timeout_ns)
        if now == told:
            return
        for pod in self.roster.pods.values():
            if pod.connected:
                self.effects.append(ToAgent(pod.slot, pod.attempt, now))

    def dismiss(self, seen: KnownRank, why: str) -> None:
        seen.dismissed = True
        self.tell(seen.member, m.Dismiss(why))

    def happened(self, reason: str, message: str, facts: dict[str, str] | None = None) -> None:
        self.history.happened(reason, message, facts or {}, self.wall_s)
        self.effects.append(Happened(reason, message, facts or {}))
