"""Measure what a round costs the state machines of a large job, without network or gradients.

In each round, every rank arrives as the log expects. One machine plays the starter, one a head and
one any other rank; the messages of all others are made beforehand. `starter`: from the first
announcement until GO is packed for all who get it from there. `head`: its group's announcements,
and GO forwarded. `other`: GO unpacked, the reduction started, the log appended, leases dealt. Bars
at 1,024 ranks: 5 ms, and 2 ms for `other`. Figures are CPU time of this thread, the best of the
rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from paceline.core import messages as m
from paceline.core import wire
from paceline.core.protocol.composition import ordinary_share
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, DataPlan, Gen, Share
from paceline.core.protocol.tree import TREE_ABOVE, Grid
from paceline.core.rank import events as ev
from paceline.core.rank.gather import Collector
from paceline.core.rank.machine import Rank
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from benchmarks.harness import Report, benchmark

RANKS: Final = (64, 256, 1024, 4096)
ROUND_NS: Final = 10**9
LEASES_EACH: Final = 1000
BAR_RANKS: Final = 1024
BAR_STARTER_MS: Final = 5.0
BAR_OTHER_MS: Final = 2.0


def make_log(ranks: int) -> Log:
    """Return the log of a job of `ranks` ranks whose first generation is in force."""
    members = tuple(MemberId(slot, 0, 1000) for slot in range(ranks))
    log = Log()
    log.append(
        Gen(
            id=GenerationId(1, "3f0c2b54-7f1e-4c59-9b63-0f6f0d6a2c11", 1),
            members=members,
            with_state=members,
            active=members,
            version=0,
            lookahead=tuple((x, 2) for x in members),
            plan=DataPlan(samples=64 * LEASES_EACH * ranks, batch=64, epochs=1, seed=1),
            settings=RoundSettings(mode=Mode.QUORUM, quorum_percent=100),
        )
    )
    return log


class Player:
    """One rank's state machine, which plays another rank in each round."""

    def __init__(self, ranks: int) -> None:
        log = make_log(ranks)
        self.machine = Rank(log.active[0], pid=1, host="h", endpoints=m.Endpoints("", ""))
        state = self.state = self.machine.state
        assert log.gen is not None
        state.log, state.promise = log, log.id
        state.commit = m.Commit(log.gen, state.me, (), state.me, (), ())
        state.is_member = state.has_state = state.started = True

    def become(self, member: MemberId, seq: int) -> None:
        """Take the place of a member that has announced its gradient."""
        state = self.state
        share = ordinary(state.log, member)
        state.me, state.announced = member, True
        state.pending.grad.steps.clear()
        state.pending.seq = seq - 1
        state.pending.add(
            version=state.log.version,
            leases=share.leases,
            samples=share.samples,
            unit=share.unit,
            metrics=(),
        )

    def hear(self, data: bytes, now_ns: int) -> list[bytes]:
        """Handle an incoming message and return the packed messages that it causes."""
        effects = self.machine.handle(now_ns, wire.unpack_peer(data))
        return pack_all(e.message for e in effects if isinstance(e, ev.ToPeer))

    def commit(self, now_ns: int) -> None:
        """Report the reduction as complete, so that the round commits."""
        self.machine.handle(now_ns, ev.Reduced())


def pack_all(messages: Iterable[m.PeerMessage]) -> list[bytes]:
    """Pack messages as `PeerSockets` does: a message to many receivers is packed once."""
    packed, last = list[bytes](), None
    for message in messages:
        packed.append(packed[-1] if message is last else wire.pack_peer(message))
        last = message
    return packed


def ordinary(log: Log, member: MemberId) -> Share:
    """Return the share that the log expects of a member."""
    share = ordinary_share(log, member)
    assert share is not None
    return share


def announcement(log: Log, member: MemberId) -> m.Announce:
    """Return the announcement of a member's expected share."""
    return m.Announce(log.id, log.version, AnnounceKind.ARRIVE, ordinary(log, member))


def gathered(log: Log, grid: Grid, number: int, now_ns: int) -> list[bytes]:
    """Return the packed messages of a head while its ranks arrive one after the other."""
    group, packed = grid.groups[number], []
    collector = Collector(log, number, group)
    for member in group:
        collector.hear(now_ns, announcement(log, member))
        due_ns = collector.due_ns()
        if due_ns is not None and due_ns <= now_ns:
            packed.append(wire.pack_peer(collector.take(now_ns)))
    return packed


class Job:
    """Rounds of a job, of which three ranks are played."""

    def __init__(self, ranks: int) -> None:
        self.starter, self.head, self.other = (Player(ranks) for _ in range(3))
        self.rounds = 0
        self.messages = self.go_bytes = self.sent = 0
        """Messages to the starter in the last round; `go_bytes`: size of GO; `sent`: messages from
        the starter."""

    def round(self, measure: Callable[[str, Callable[[], object]], None]) -> None:
        """Run one round.

        Args:
            measure: Function that is called with the name of a role and the work to run and time.
        """
        log = self.starter.state.log
        now_ns, seq = ROUND_NS * log.version + 10**6, log.version + 1
        if len(log.members) > TREE_ABOVE:
            grid = Grid(log.members, log.places)
            me = grid.starter(log.version)
            mine = grid.number[me]
            words = [wire.pack_peer(announcement(log, x)) for x in grid.groups[mine]]
            others = [n for n in range(len(grid.groups)) if n != mine]
            for number in others:
                words += gathered(log, grid, number, now_ns)
            head = grid.head(others[0], log.version)
            to_head = [wire.pack_peer(announcement(log, x)) for x in grid.groups[others[0]]]
        else:
            me, head, to_head = log.starter, None, []
            words = [wire.pack_peer(announcement(log, x)) for x in log.active]
        self.starter.become(me, seq)
        out: list[bytes] = []
        measure(
            "starter", lambda: out.extend(x for w in words for x in self.starter.hear(w, now_ns))
        )
        self.messages, self.sent = len(words), len(out)
        go = max(out, key=len)
        self.go_bytes = len(go)
        if head is not None:
            self.head.become(head, seq)
            measure("head", lambda: [self.head.hear(x, now_ns) for x in (*to_head, go)])
        other = next(x for x in reversed(log.active) if x not in (me, head))
        self.other.become(other, seq)

        def joins_and_commits() -> None:
            self.other.hear(go, now_ns)
            self.other.commit(now_ns)

        measure("other", joins_and_commits)
        self.starter.commit(now_ns)
        if head is not None:
            self.head.commit(now_ns)
        else:
            self.head.state.log.append(self.starter.state.log.recent[-1])
        digests = {p.state.log.digest for p in (self.starter, self.head, self.other)}
        assert len(digests) == 1, digests


def measure(ranks: int, rounds: int) -> dict[str, float]:
    """Return the best time of each role over the rounds, and message counts."""
    job, best = Job(ranks), dict[str, float]()

    def timed(who: str, work: Callable[[], object]) -> None:
        before = time.thread_time_ns()
        work()
        spent_ms = (time.thread_time_ns() - before) / 1e6
        best[who] = min(best.get(who, spent_ms), spent_ms)

    for _ in range(rounds):
        job.round(timed)
    counts = {"messages": job.messages, "sent": job.sent, "GO": job.go_bytes / 1000}
    return {**best, **counts}


@benchmark(
    "Cost of a round for the state machines",
    (
        *("ranks", "starter ms", "head ms", "other ranks ms"),
        *("messages to the starter", "messages from it", "GO kB"),
    ),
    {"--ranks": {"type": int, "nargs": "+", "default": RANKS}},
)
def run(out: Report) -> None:
    """Measure each number of ranks."""
    for ranks in RANKS[:2] if out.smoke else out.given.ranks:
        costs = measure(ranks, out.rounds)
        names = ("starter", "head", "other", "messages", "sent", "GO")
        out.rows.append((ranks, *(costs.get(name, "-") for name in names)))
        if ranks == BAR_RANKS:
            out.at_most(f"{ranks} ranks: starter, ms", costs["starter"], BAR_STARTER_MS)
            out.at_most(f"{ranks} ranks: other ranks, ms", costs["other"], BAR_OTHER_MS)
