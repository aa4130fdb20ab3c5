"""Measurements of a rank of a rehearsal, and their summaries per process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paceline_api.ids import GenerationId, MemberId


@dataclass
class RankRound:
    """One rank in one round. Times are those of the machine's monotonic clock."""

    collect_ns: int = 0
    """Processor time of its communication thread until GO was sent or received."""
    sent_ns: int = 0
    """Part of `collect_ns` in the sockets; the first message to a peer makes the connection."""
    heard: int = 0
    """Messages of other ranks until GO."""
    commit_ns: int = 0
    """Processor time after GO: join the reduction, append to the log, deal leases, resume the
    script."""
    figures_ns: int = 0
    """Processor time for the figures of status and metrics, computed whenever the thread is idle.
    """
    started: bool = False
    """True if it was the starter."""
    announced_ns: int = 0
    go_ns: int = 0
    applied_ns: int = 0
    fresh: bool = False
    """True if its gradient went into its own round."""
    go_bytes: int = 0
    """Size of one GO on the wire, if it sent one."""
    generation: GenerationId | None = None


@dataclass
class RankChange:
    """One rank in one change of the membership."""

    promised_ns: int = 0
    started_ns: int = 0
    """Time at which its data channel was open."""
    cpu_ns: int = 0
    parts: int = 0
    """Members that it repaired by sending the sum that they lacked (R7)."""


class Meter:
    """Measurements of one rank."""

    def __init__(self) -> None:
        self.rounds: dict[int, RankRound] = {}
        self.changes: dict[GenerationId, RankChange] = {}
        self.contacts: set[MemberId] = set()
        """Present members that it has sent messages about rounds."""
        self.contacts_max = 0
        self.sent_ns = 0
        """Processor time in the sockets since the current event arrived."""
        self.registered_ns = 0
        self.active_ns = 0
        """Time at which it was first active; `registered_ns` is that of its first registration."""
        self._last_ns = 0

    def round(self, version: int) -> RankRound:
        """Return the measurements of a round."""
        return self.rounds.setdefault(version, RankRound())

    def change(self, proposal: GenerationId) -> RankChange:
        """Return the measurements of a change of the membership."""
        return self.changes.setdefault(proposal, RankChange())

    def contact(self, member: MemberId) -> None:
        """Record a message to a member."""
        self.contacts.add(member)
        self.contacts_max = max(self.contacts_max, len(self.contacts))

    def spent_ns(self) -> int:
        """Return the processor time of this thread since the last call."""
        now_ns = time.thread_time_ns()
        spent, self._last_ns = now_ns - self._last_ns, now_ns
        return spent


@dataclass
class Account:
    """Final account of one rank: its samples (I1) and its log."""

    member: MemberId
    finished: bool
    digest: str
    version: int
    produced: int
    pending: int
    lost: int
    applied: int
    dropped: int
    """Samples dropped according to its own log, which the following fields come from as well."""
    all_applied: int
    all_dropped: int
    departed: int
    """Samples of members that are gone, applied or dropped."""
    weights: tuple[float, ...]


@dataclass
class RoundSummary:
    """One round on all ranks of one process, or of all processes."""

    generation: GenerationId | None = None
    starter_ns: int = 0
    starter_sent_ns: int = 0
    starter_heard: int = 0
    go_bytes: int = 0
    others_ns: list[int] = field(default_factory=list)
    """Processor time of each rank that was not the starter."""
    figures_ns: int = 0
    """Largest `figures_ns` of any rank."""
    last_fresh_ns: int = 0
    last_go_ns: int = 0
    first_applied_ns: int = 0
    last_applied_ns: int = 0

    def add(self, one: RankRound) -> None:
        """Add the measurements of one rank; a rank that never applied the round does not count."""
        if not one.applied_ns:
            return
        self.generation = one.generation
        if one.started:
            self.starter_ns, self.starter_sent_ns = one.collect_ns, one.sent_ns
            self.starter_heard, self.go_bytes = one.heard, one.go_bytes
        else:
            self.others_ns.append(one.collect_ns + one.commit_ns)
        self.figures_ns = max(self.figures_ns, one.figures_ns)
        if one.fresh:
            self.last_fresh_ns = max(self.last_fresh_ns, one.announced_ns)
        self.last_go_ns = max(self.last_go_ns, one.go_ns)
        self.last_applied_ns = max(self.last_applied_ns, one.applied_ns)
        first = self.first_applied_ns or one.applied_ns
        self.first_applied_ns = min(first, one.applied_ns)

    def merge(self, other: RoundSummary) -> None:
        """Add the summary of another process."""
        self.generation = other.generation or self.generation
        self.starter_ns = self.starter_ns or other.starter_ns
        self.starter_sent_ns = self.starter_sent_ns or other.starter_sent_ns
        self.starter_heard = self.starter_heard or other.starter_heard
        self.go_bytes = self.go_bytes or other.go_bytes
        self.others_ns += other.others_ns
        self.figures_ns = max(self.figures_ns, other.figures_ns)
        self.last_fresh_ns = max(self.last_fresh_ns, other.last_fresh_ns)
        self.last_go_ns = max(self.last_go_ns, other.last_go_ns)
        self.last_applied_ns = max(self.last_applied_ns, other.last_applied_ns)
        firsts = [x for x in (self.first_applied_ns, other.first_applied_ns) if x]
        self.first_applied_ns = min(firsts, default=0)


@dataclass
class ChangeSummary:
    """One generation on all ranks of one process, or of all processes."""

    first_promised_ns: int = 0
    last_started_ns: int = 0
    cpu_ns: list[int] = field(default_factory=list)
    parts: int = 0
    """Largest number of parts that one rank sent."""

    def add(self, one: RankChange) -> None:
        """Add the measurements of one rank."""
        promised = [x for x in (self.first_promised_ns, one.promised_ns) if x]
        self.first_promised_ns = min(promised, default=0)
        self.last_started_ns = max(self.last_started_ns, one.started_ns)
        self.cpu_ns.append(one.cpu_ns)
        self.parts = max(self.parts, one.parts)

    def merge(self, other: ChangeSummary) -> None:
        """Add the summary of another process."""
        self.add(RankChange(other.first_promised_ns, other.last_started_ns, 0, parts=other.parts))
        self.cpu_ns[-1:] = other.cpu_ns


@dataclass
class Summary:
    """All measurements of one process."""

    rounds: dict[int, RoundSummary] = field(default_factory=dict)
    changes: dict[GenerationId, ChangeSummary] = field(default_factory=dict)
    accounts: list[Account] = field(default_factory=list)
    contacts_max: int = 0
    last_registered_ns: int = 0
    """Latest first registration of the ranks that were there from the beginning."""
    last_active_ns: int = 0

    def add(self, meter: Meter, *, first: bool) -> None:
        """Add one rank; `first` is True if it was there from the beginning."""
        if first:
            self.last_registered_ns = max(self.last_registered_ns, meter.registered_ns)
            self.last_active_ns = max(self.last_active_ns, meter.active_ns)
        for version, one in meter.rounds.items():
            self.rounds.setdefault(version, RoundSummary()).add(one)
        for proposal, change in meter.changes.items():
            self.changes.setdefault(proposal, ChangeSummary()).add(change)
        self.contacts_max = max(self.contacts_max, meter.contacts_max)

    def merge(self, other: Summary) -> None:
        """Add the summary of another process."""
        for version, one in other.rounds.items():
            self.rounds.setdefault(version, RoundSummary()).merge(one)
        for proposal, change in other.changes.items():
            self.changes.setdefault(proposal, ChangeSummary()).merge(change)
        self.accounts += other.accounts
        self.contacts_max = max(self.contacts_max, other.contacts_max)
        self.last_registered_ns = max(self.last_registered_ns, other.last_registered_ns)
        self.last_active_ns = max(self.last_active_ns, other.last_active_ns)
