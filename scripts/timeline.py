"""A few ranks on a virtual clock, whose rounds the runtime's own trigger table starts.

So a picture of a mode shows what the code does: `Log` gives the quorum, and `decide` gives the time
and the reason. Both are called as a starter calls them. The durations of steps and of a reduction
are made up, and announcements take no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec.structs import replace as changed
from paceline.core.protocol.arrivals import Arrival, Arrivals
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, Gen, Go, Share
from paceline.core.protocol.trigger import Decision, decide
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings

MS: Final = 10**6


@dataclass(frozen=True)
class Step:
    """One backward pass of a rank, and the round in which its gradient counted."""

    rank: int
    start_ns: int
    end_ns: int
    version: int
    """Version of the weights that it was computed on."""
    applied_in: int | None = None
    """Number of the round that applied the gradient; None if it is still pending at the end."""

    @property
    def age(self) -> int | None:
        """Number of rounds by which the gradient was late; None if it is still pending."""
        return None if self.applied_in is None else self.applied_in - self.version


@dataclass(frozen=True)
class Round:
    """One round, from its start to its commit."""

    number: int
    go_ns: int
    done_ns: int


@dataclass
class Timeline:
    """Steps and rounds of a run."""

    steps: list[Step] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    also: list[tuple[int, str]] = field(default_factory=list)
    """Times at which a round would have started under other settings, and their name (Shadow)."""


@dataclass
class _Rank:
    """A rank that computes, or waits in step().

    While it computes, `busy` holds its current step.
    """

    number: int
    busy: Step | None = None
    pending: list[int] = field(default_factory=list)
    """Steps, as indices of Timeline.steps, that no round has taken yet."""
    fresh: bool = False
    at_ns: int = 0


class Play:
    """Runs the ranks until `until_ms`; rank i's n-th step takes `step_ms[i][n % len]`."""

    def __init__(
        self,
        settings: RoundSettings,
        step_ms: list[list[int]],
        *,
        reduce_ms: int,
        until_ms: int,
        others: Mapping[str, RoundSettings] | None = None,
    ) -> None:
        """Prepare the ranks.

        Args:
            settings: Settings of the rounds.
            step_ms: Lengths of the steps of each rank.
            reduce_ms: Length of a reduction.
            until_ms: End of the timeline.
            others: Settings under which the start of each round is evaluated too, without effect.
        """
        self.others = dict(others or {})
        self.recorded: set[tuple[int, str]] = set()
        self.step_ms, self.reduce_ns, self.until_ns = step_ms, reduce_ms * MS, until_ms * MS
        self.members = tuple(MemberId(slot, 0, 0) for slot in range(len(step_ms)))
        self.ranks = [_Rank(number) for number in range(len(step_ms))]
        self.taken = [0] * len(step_ms)
        self.line = Timeline()
        self.log = Log()
        self.log.append(
            Gen(
                id=GenerationId(1, "a", 1),
                members=self.members,
                with_state=self.members[:1],
                active=self.members,
                version=0,
                settings=settings,
            )
        )
        self.events: list[tuple[int, int, str]] = []
        self.opened_ns = 0
        self.reducing: Go | None = None

    def run(self) -> Timeline:
        """Run all ranks to the end and return the timeline."""
        for rank in self.ranks:
            self._compute(rank, 0)
        while self.events and self.events[0][0] <= self.until_ns:
            now_ns, number, what = heapq.heappop(self.events)
            if what == "step":
                self._finish(self.ranks[number], now_ns)
            elif what == "commit":
                self._commit(now_ns)
            if self.reducing is None:
                self._ask(now_ns)
        busy = [rank.busy for rank in self.ranks if rank.busy is not None]
        self.line.steps += [replace(step, end_ns=self.until_ns) for step in busy]
        return self.line

    def _arrivals(self) -> dict[MemberId, Arrival]:
        """Return what the starter knows about the ranks.

        A rank that computes and has nothing pending has sent nothing.

        Returns:
            Arrivals by member.
        """
        arrivals = {}
        for member, rank in zip(self.members, self.ranks, strict=True):
            if not rank.pending:
                continue
            oldest = min(self.line.steps[place].version for place in rank.pending)
            share = Share(
                member,
                upto=self.taken[rank.number],
                count=len(rank.pending),
                oldest=oldest,
                fresh=rank.fresh,
                samples=len(rank.pending),
                unit=1,
            )
            kind = AnnounceKind.ARRIVE if rank.fresh else AnnounceKind.PENDING
            arrivals[member] = Arrival(kind, rank.at_ns, share)
        return arrivals

    def _compute(self, rank: _Rank, now_ns: int) -> None:
        durations = self.step_ms[rank.number]
        end_ns = now_ns + durations[self.taken[rank.number] % len(durations)] * MS
        self.taken[rank.number] += 1
        rank.fresh = False
        rank.busy = Step(rank.number, now_ns, end_ns, self.log.version)
        heapq.heappush(self.events, (end_ns, rank.number, "step"))

    def _finish(self, rank: _Rank, now_ns: int) -> None:
        """Finish a step: its gradient is fresh or late.

        After a late one, the next step begins at once (a jump).
        """
        assert rank.busy is not None
        rank.pending.append(len(self.line.steps))
        self.line.steps.append(rank.busy)
        rank.fresh = rank.busy.version == self.log.version
        rank.busy, rank.at_ns = None, now_ns
        if not rank.fresh and self.reducing is None:
            self._compute(rank, now_ns)

    def _ask(self, now_ns: int) -> None:
        """Let the starter decide, and start a round if it does."""
        arrivals = self._arrivals()
        self._ask_others(now_ns, arrivals)
        answer = self._decide(self.log, arrivals, now_ns)
        if answer.trigger is None:
            if answer.wake_ns is not None:
                heapq.heappush(self.events, (answer.wake_ns, -1, "wake"))
            return
        fresh = [a.at_ns for a in arrivals.values() if a.kind is AnnounceKind.ARRIVE]
        shares = tuple(
            changed(share, offset_us=(at_ns - min(fresh)) // 1000 if share.fresh else 0)
            for _, at_ns, share in arrivals.values()
            if share is not None
        )
        self.reducing = Go(
            generation=self.log.id,
            round=self.log.version,
            trigger=answer.trigger,
            listed=shares,
            round_us=(now_ns - self.opened_ns) // 1000,
        )
        done_ns = now_ns + self.reduce_ns
        self.line.rounds.append(Round(self.log.version, now_ns, done_ns))
        heapq.heappush(self.events, (done_ns, -1, "commit"))

    def _decide(self, log: Log, arrivals: Mapping[MemberId, Arrival], now_ns: int) -> Decision:
        table = Arrivals(log, self.opened_ns)
        for kind, at_ns, share in arrivals.values():
            assert share is not None
            table.hear(kind, at_ns, share)
        return decide(table, now_ns=now_ns, has_request=False)

    def _ask_others(self, now_ns: int, arrivals: Mapping[MemberId, Arrival]) -> None:
        """Record when a round would start under the other settings."""
        for name, settings in self.others.items():
            log = Log.restore(changed(self.log.snapshot(), settings=settings))
            answer = self._decide(log, arrivals, now_ns)
            if answer.trigger is None and answer.wake_ns is not None:
                heapq.heappush(self.events, (answer.wake_ns, -1, "wake"))
            elif answer.trigger is not None and (log.version, name) not in self.recorded:
                self.recorded.add((log.version, name))
                self.line.also.append((now_ns, name))

    def _commit(self, now_ns: int) -> None:
        """Apply the round in flight and let the waiting ranks compute."""
        go = self.reducing
        assert go is not None
        for share in go.listed:
            rank = self.ranks[share.member.slot]
            for place in rank.pending[: share.count]:
                self.line.steps[place] = replace(self.line.steps[place], applied_in=go.round)
            del rank.pending[: share.count]
        self.log.append(go)
        self.opened_ns, self.reducing = now_ns, None
        for rank in self.ranks:
            if rank.busy is None:
                self._compute(rank, now_ns)
