"""State of the coordinator: phase, change in progress, roster and history.

Nothing here is lost with the coordinator: a new one learns all of it again from registrations and
the inventory (R1, R5, R6).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from paceline_api.ids import NO_GENERATION, GenerationId, MemberId, pod_of
from paceline_api.rounds import RoundSettings
from paceline_api.status import Outcome, StragglerStatus
from paceline_api.times import NS_PER_S
from paceline_api.types.enums import Network

from paceline.core import messages as m
from paceline.core.coordinator.events import Config, Effect, Happened, ToAgent, ToRank
from paceline.core.coordinator.history import History
from paceline.core.coordinator.roster import KnownRank, Roster
from paceline.core.coordinator.sizes import Sizes
from paceline.core.protocol.records import Gen, Request

FAILURES_MAX: Final = 64
"""Number of script failures that are kept (R55)."""


class CoordinatorPhase(StrEnum):
    """Phase of a coordinator, from its start to the end of the job."""

    RECOVER = "recover"
    """No generation was formed by this coordinator yet."""
    PREPARING = "preparing"
    """PREPARE was sent; not all asked ranks have answered."""
    WAITING = "waiting"
    """A change is needed, but evidence is missing (R6)."""
    STARTING = "starting"
    """COMMIT was sent; not all members have reported STARTED (R7)."""
    RUNNING = "running"
    """All members have started the generation."""
    RELEASED = "released"
    """RELEASE was sent to all ranks (R17)."""
    ENDED = "ended"
    """The job has an outcome, or this coordinator has retired (R3)."""


@dataclass(slots=True)
class CoordinatorState:
    """Everything that the coordinator knows. The handlers of this package read and update it.

    Fields that end in `_ns` are monotonic times or durations in nanoseconds.
    """

    config: Config
    uid: str
    """Identifier of this coordinator process; a part of every generation id (R1)."""
    now_ns: int
    """Time of the event that is being handled."""
    wall_offset_s: float
    """Wall time minus monotonic time, in seconds."""
    replicas: int
    """Number of replicas wanted now; changes with the targets."""
    settings: RoundSettings
    has_targets: bool = False
    """True once the owner of the job has sent a number of replicas to this coordinator. Before,
    `replicas` is the number from the job's specification. A scale-up may have overtaken it, so
    no replica is drained for it."""

    phase: CoordinatorPhase = CoordinatorPhase.RECOVER
    roster: Roster = field(default_factory=Roster)
    history: History = field(default_factory=History)
    incarnation: int = 0
    """Incarnation of the next generation id: above every one that a rank has reported (R1)."""
    counter: int = 0
    """Counter of the last generation id; grows with each PREPARE (R1)."""
    proposal: GenerationId = NO_GENERATION
    """Generation id of the last PREPARE."""
    asked: set[MemberId] = field(default_factory=set)
    """Ranks to which the last PREPARE was sent."""
    asked_ns: int = 0
    """Time of the last PREPARE."""
    reports: dict[MemberId, m.Prepared] = field(default_factory=dict)
    """Answers to the last PREPARE, by member."""
    commit: m.Commit | None = None
    """The last COMMIT that this coordinator formed, None before the first one."""
    channel_why: str = ""
    """Reason, for people, why the last data channel moves buffers as it does."""
    change: m.CommitChange | None = None
    """The last COMMIT as a difference, for ranks that have the one before it (R44). None if that is
    not possible."""
    index: dict[MemberId, int] = field(default_factory=dict)
    """Rank number of each member of `gen`."""
    unstarted: set[MemberId] = field(default_factory=set)
    """Members that have not reported STARTED (R7)."""
    complained: set[MemberId] = field(default_factory=set)
    """Members whose data channel failed. They wait for the next change and owe no answer."""
    why: str = ""
    """Reason for the current change."""
    complaint: str = ""
    """The last complaint about a data channel, mostly the echo of a death (`changing`)."""
    waits: str = ""
    """Evidence that the change waits for (R6); empty if it waits for none."""
    joins_ns: int | None = None
    """Time at which the ready ranks are admitted, if nothing changes the membership earlier."""
    due_ns: int | None = None
    """Latest start of a requested change; None if no change is requested."""
    request: Request | None = None
    """The last request to the ranks: other settings, or a stop (R18)."""
    request_number: int = 0
    """Highest request number that is known (R18)."""
    failures: int = 0
    """Number of processes that failed since the last committed round (C8)."""
    futile: int = 0
    """Number of generations formed in a row at the same version, without a round between them."""
    complaints: int = 0
    """Number of generations in a row whose data channel failed. They have the same members and no
    committed round."""
    late_starts: int = 0
    """Number of later coordinators that this one has overtaken (`hearing.LATE_STARTS_MAX`)."""
    script_failures: deque[m.RankDead] = field(default_factory=lambda: deque(maxlen=FAILURES_MAX))
    """The last process ends that scripts caused (R55)."""
    scripts_failed: int = 0
    """Total number of process ends that scripts caused."""
    skips: frozenset[int] = frozenset()
    """Leases that the job has given up, as far as this coordinator knows (R56)."""
    version: int = 0
    """Highest committed version that was reported. A restore sets it to the checkpoint's."""
    unsaved: str = ""
    """Reason why the last checkpoint was not written; empty if it was written."""
    starts_over: str = ""
    """Report on joiners whose self-fed script began at step 0; empty if there are none."""
    had_state: bool = False
    """True once ranks have trained: the weights may exist only on a living rank (R26)."""
    released: tuple[GenerationId, int] | None = None
    """Generation and version of the RELEASE; None before it (R17)."""
    released_ns: int = 0
    """Time at which this coordinator released the job."""
    without_slot_0_ns: int | None = None
    """Since when only slot 0 keeps a script's job from its end, and has no process; None if it is
    not so."""
    overtime_reported: bool = False
    """True once the scripts that still run after the release were named."""
    proven: bool = False
    """True once a rank or its agent has reported that this rank was released: it had its final
    weights (R17)."""
    outcome: Outcome | None = None
    """Result of the job; None while it runs."""
    carrier: Network = Network.UNKNOWN
    """Network that carries the gradients, as last written to the history."""
    carrier_of: GenerationId | None = None
    """Generation for which `carrier` was last determined."""
    stragglers: tuple[StragglerStatus, ...] = ()
    """Ranks that are slow now, by the last judgment."""
    slow_since: dict[str, float] = field(default_factory=dict)
    """Wall time in seconds since when a place has been slow. `paceline_api.slow` defines what is
    remembered."""
    slow_steps: dict[str, int] = field(default_factory=dict)
    """Last step of the straggler ladder that was taken, by place."""
    judge_ns: int = 0
    """Time of the next comparison of the ranks' steps."""
    wake_ns: int | None = None
    """Latest time of the next Tick; None if nothing follows from time alone."""
    changed: bool = True
    """True if something that decisions read has changed since they were last made."""
    sent_pace: m.BeatEvery | None = None
    """Heartbeat interval that agents get, also when they connect (R42)."""
    freeze_ns: int = 0
    """Silence after which a rank is suspect, and upper bound of every answer that it owes."""
    settled_ns: int = -(10**18)
    """Time at which decisions were last made."""
    stuck_ns: int = 0
    """Upper bound on one piece of work of a communication thread (R35)."""
    long_at_work: set[MemberId] = field(default_factory=set)
    """Members whose present piece of work has lasted for at least `freeze_ns`. `stuck_ns` is never
    lower."""
    effects: list[Effect] = field(default_factory=list)
    """Effects of the event that is being handled."""

    # ---- reading --------------------------------------------------------------------------

    @property
    def gen(self) -> Gen | None:
        """The generation that this coordinator formed last; None before the first one."""
        return self.commit.gen if self.commit else None

    @property
    def is_over(self) -> bool:
        """Return True if training is over: the ranks were released, or the job has ended."""
        return self.phase in (CoordinatorPhase.RELEASED, CoordinatorPhase.ENDED)

    @property
    def wanted_ranks(self) -> int:
        """Number of ranks wanted now: replicas times processes per replica."""
        return self.replicas * self.config.procs

    @property
    def script_ranks(self) -> int:
        """Number of ranks of a script that steps its own optimizers (S1); 0 for any other."""
        registers = (rank.register for rank in self.roster.ranks.values())
        plans = (register.plan for register in registers if register is not None)
        return next((plan.script for plan in plans if plan is not None and plan.script), 0)

    @property
    def runs_script(self) -> bool:
        """Return True if the scripts of the job step their own optimizers (S1)."""
        return bool(self.script_ranks)

    @property
    def fewest_ranks(self) -> int:
        """Minimum number of ready ranks for a generation that continues no living rank's state."""
        replicas = max(1, min(self.config.min_replicas, self.replicas))
        return self.sizes.least(replicas) * self.config.procs

    @property
    def sizes(self) -> Sizes:
        """The sizes that `elasticity.allowedSizes` and a script permit (C9, S1)."""
        return Sizes(self.config.allowed_sizes, self.config.procs, self.script_ranks)

    @property
    def possible_ranks(self) -> int:
        """Upper bound on the ranks that may exist, as far as this coordinator knows (R26).

        The bound is the largest of the wanted ranks, the ranks of the listed pods, and the living
        ones.
        """
        pods = len(self.roster.inventory.pods) if self.roster.inventory else 0
        living = sum(not self.roster.is_dead(x) for x in self.roster.ranks)
        return max(self.wanted_ranks, pods * self.config.procs, living)

    @property
    def expected(self) -> int:
        """Number of ranks for which heartbeat and decision intervals are chosen (R42)."""
        return max(self.wanted_ranks, len(self.index))

    @property
    def expected_pods(self) -> int:
        """Number of pods for which the heartbeat interval is chosen (R42)."""
        return max(self.replicas, len({pod_of(member) for member in self.index}))

    @property
    def wall_s(self) -> float:
        """Wall time of the current event, in seconds since the epoch."""
        return self.wall_offset_s + self.now_ns / NS_PER_S

    @property
    def stop_asked(self) -> bool:
        """Return True if a request ends the job before its data are used up."""
        return self.request is not None and self.request.stop

    def owes_an_answer(self, member: MemberId) -> bool:
        """Return True if the member owes an answer to PREPARE, or a STARTED after COMMIT."""
        if self.phase is CoordinatorPhase.PREPARING:
            return member in self.asked and member not in self.reports
        starting = self.phase is CoordinatorPhase.STARTING
        return starting and member in self.unstarted and member not in self.complained

    # ---- changing -------------------------------------------------------------------------

    def want_change(self, why: str, within_ns: int) -> None:
        """Request a change of the membership within a time limit. The earliest limit wins.

        Args:
            why: Reason for the change. It is kept only if this limit is the earliest one.
            within_ns: Upper bound on the delay before the change begins, from now.
        """
        due = self.now_ns + within_ns
        if self.due_ns is None or due < self.due_ns:
            self.due_ns, self.why = due, why
            self.history.cause(why, self.now_ns)

    def tell(self, member: MemberId, message: m.ToRank) -> None:
        """Queue a message to one rank."""
        self.effects.append(ToRank(member, message))

    def tell_pace(self) -> None:
        """Choose the heartbeat interval for the current size; tell all agents if it is new."""
        before, pace, pods = self.sent_pace, self.config.pace, self.expected_pods
        now = self.sent_pace = pace.to_agent(pods, self.expected)
        self.freeze_ns = pace.freeze_ns(pods, self.config.freeze_timeout_ns)
        if now == before:
            return
        for pod in self.roster.pods.values():
            if pod.connected:
                self.effects.append(ToAgent(pod.slot, pod.attempt, now))

    def dismiss(self, rank: KnownRank, why: str) -> None:
        """Order a rank to end: the job does not need it."""
        rank.dismissed = True
        self.tell(rank.member, m.Dismiss(why))

    def happened(self, reason: str, message: str, facts: dict[str, str] | None = None) -> None:
        """Record something worth an Event on the job and a line in the log.

        Args:
            reason: One word for programs.
            message: One sentence for people.
            facts: Further values, by name.
        """
        self.history.happened(reason, message, facts or {}, self.wall_s)
        self.effects.append(Happened(reason, message, facts or {}))
