"""The head of a group handles announcements, one message at a time (R41)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core import messages as m
from paceline.core import wire
from paceline.core.protocol.arrivals import Arrival, Arrivals
from paceline.core.protocol.bits import pack_offsets
from paceline.core.protocol.composition import compact, ordinary_share, quiet_share
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, Go
from paceline.core.protocol.tree import Grid
from paceline.core.protocol.trigger import initiator
from paceline.core.rank import events as ev
from paceline.core.rank import rounds
from paceline.core.rank.gather import Collector, hear_all
from paceline.core.rank.state import RankState
from paceline_api.ids import MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import MaxAgePolicy, Mode

from benchmarks.protocol import Player, announcement
from testing.examples import examples
from testing.makers import fresh, go, make_log

RANKS, MS = 100, 10**6
BENCH = 60_000 * MS
"""The time after which a silent rank is benched (R13)."""


def everybody(log: Log) -> Go:
    return compact(log, go(log), dict.fromkeys(log.active, (AnnounceKind.ARRIVE, 0)))


def gathered(player: Player, now_ns: int, event: ev.Event) -> list[m.Gathered]:
    effects = player.machine.handle(now_ns, event)
    sent = [e.message for e in effects if isinstance(e, ev.ToPeer)]
    return [x for x in sent if isinstance(x, m.Gathered)]


def the_head_of_round_1(player: Player) -> tuple[Grid, int]:
    log = player.state.log
    grid = Grid(log.members, log.places)
    number = 1 + grid.number[grid.starter(1)]
    head = grid.head(number, 1)
    assert head is not None
    player.become(head, 1)
    return grid, number


def early() -> list[m.Gathered]:
    """Return what a head sends about an announcement that arrived while it still reduced.

    A rank of its group has committed round 0 and announces for round 1.
    """
    player, peer = Player(RANKS), Player(RANKS)
    grid, number = the_head_of_round_1(player)
    log = player.state.log
    player.machine.handle(0, m.Start(everybody(log)))
    peer.state.log.append(everybody(peer.state.log))
    other = next(x for x in grid.groups[number] if x != player.state.me)
    assert gathered(player, MS, announcement(peer.state.log, other)) == []
    assert gathered(player, 2 * MS, ev.Reduced()) == []
    return gathered(player, BENCH, ev.Tick())


def test_an_early_announcement_is_kept_until_the_head_reaches_its_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [first] = early()
    assert (first.round, first.ordinary != b"") == (1, True)

    def forgets(rank: RankState, message: m.Announce | m.Gathered) -> None:
        if message.round == rank.log.version:
            rank.words.setdefault(message.round, []).append((rank.now_ns, message))

    monkeypatch.setattr(rounds, "on_announce", forgets)
    assert early() == []


def test_if_every_rank_is_needed_a_head_sends_one_message() -> None:
    player = Player(RANKS)
    grid, number = the_head_of_round_1(player)
    player.machine.handle(0, m.Start(everybody(player.state.log)))
    player.machine.handle(0, ev.Reduced())
    log, group = player.state.log, grid.groups[number]
    for member in group[:-1]:
        assert gathered(player, MS, announcement(log, member)) == []
    [word] = gathered(player, 2 * MS, announcement(log, group[-1]))
    assert len(wire.pack_peer(word)) < 250
    assert word.ordinary == bytes([255, 3])
    assert word.ages == pack_offsets([1000] * (len(group) - 1) + [0])


def test_if_every_rank_is_needed_an_incomplete_group_is_sent_before_the_bench() -> None:
    player = Player(RANKS)
    grid, number = the_head_of_round_1(player)
    player.machine.handle(0, m.Start(everybody(player.state.log)))
    player.machine.handle(0, ev.Reduced())
    log, group = player.state.log, grid.groups[number]
    effects = player.machine.handle(2 * MS, announcement(log, group[0]))
    due = 2 * MS + BENCH // 32
    assert [e for e in effects if isinstance(e, ev.WakeAt)] == [ev.WakeAt(due)]
    assert gathered(player, due - 1, ev.Tick()) == []
    assert len(gathered(player, due, ev.Tick())) == 1


def partial(ranks: int, settings: RoundSettings | None = None) -> Log:
    """Build the log of a job with slow rounds, none of which needs every rank."""
    log = make_log(ranks, settings or RoundSettings(mode=Mode.QUORUM, quorum_percent=75))
    log.append(everybody(log))
    log.round_us.clear()
    log.round_us.append(1_600_000)
    log.offsets_us.extend([80_000] * 128)
    return log


def arrives(log: Log, who: MemberId) -> m.Announce:
    share = ordinary_share(log, who)
    assert share is not None
    return m.Announce(log.id, log.version, AnnounceKind.ARRIVE, share)


def test_a_head_waits_less_the_nearer_its_share_of_the_quorum_is() -> None:
    log = partial(16)
    collector = Collector(log, 0, log.active[:8])
    assert collector.due_ns() is None
    due = []
    for who in log.active[:6]:
        collector.hear(5, arrives(log, who))
        due.append(collector.due_ns())
    patience = 40 * MS  # Half of 80 ms.
    assert due == [5 + patience * left // 6 for left in (5, 4, 3, 2)] + [5 + patience // 4, 0]
    collector.take(6)
    collector.hear(7, arrives(log, log.active[6]))
    assert collector.due_ns() == 7 + patience // 4, "more than its part"
    collector.hear(8, arrives(log, log.active[7]))
    assert collector.due_ns() == 0, "all of them"


def test_a_head_does_not_wait_for_ranks_that_began_late() -> None:
    log = partial(16)
    late = log.active[7]
    log.heard[late] -= 1
    collector = Collector(log, 0, log.active[:8])
    for who in log.active[:7]:
        collector.hear(5, arrives(log, who))
    collector.take(5)
    pending = replace(fresh(log, 7, 2), fresh=False, base=log.version)
    collector.hear(6, m.Announce(log.id, log.version, AnnounceKind.PENDING, pending))
    assert collector.due_ns() == 6 + 10 * MS, "it has begun this step meanwhile"


@pytest.mark.parametrize("why", ["too old", "drawn"])
def test_an_announcement_that_the_round_requires_is_forwarded_at_once(why: str) -> None:
    if why == "drawn":
        settings = RoundSettings(mode=Mode.MAJORITY, random_initiator=True)
    else:
        settings = RoundSettings(
            mode=Mode.QUORUM, quorum_percent=75, max_age=2, late=MaxAgePolicy.WAIT
        )
    log = partial(16, settings)
    log.append(everybody(log))
    awaited = initiator(log) if why == "drawn" else log.active[3]
    if why == "too old":
        log.heard[awaited] = log.version - 2
    collector = Collector(log, 0, log.active)
    collector.hear(5, arrives(log, next(x for x in log.active if x != awaited)))
    due = collector.due_ns()
    assert due is not None
    assert due > 5
    collector.hear(6, arrives(log, awaited))
    assert collector.due_ns() == 0


@given(
    median_us=st.integers(0, 10**8),
    offsets_us=st.lists(st.integers(0, 10**9), max_size=9),
    who=st.permutations(range(12)),
    taken=st.sets(st.integers(0, 11)),
)
@hypothesis_settings(max_examples=examples(200), derandomize=True, deadline=None, database=None)
def test_the_latency_that_a_head_adds_is_bounded(
    median_us: int, offsets_us: list[int], who: list[int], taken: set[int]
) -> None:
    """The limit is 1/16 of the median round or 1 ms, whichever is greater (R41)."""
    log = partial(24)
    log.round_us[-1] = median_us
    log.offsets_us.clear()
    log.offsets_us.extend(offsets_us)
    collector, first_ns = Collector(log, 0, log.active[:12]), None
    for at_ns, slot in enumerate(who):
        collector.hear(at_ns, arrives(log, log.active[slot]))
        first_ns = at_ns if first_ns is None else first_ns
        due = collector.due_ns()
        assert due is not None
        assert due <= first_ns + max(MS, median_us * 1000 // 16)
        if at_ns in taken:
            collector.take(at_ns)
            first_ns = None


def test_the_starter_receives_forwarded_announcements_with_their_times() -> None:
    log = make_log(3)
    first, second, third = log.active
    collector = Collector(log, 0, log.active)
    usual = ordinary_share(log, first)
    assert usual is not None
    collector.hear(1 * MS, m.Announce(log.id, 0, AnnounceKind.ARRIVE, usual))
    late = replace(fresh(log, 1), fresh=False)
    collector.hear(2 * MS, m.Announce(log.id, 0, AnnounceKind.PENDING, late))
    quiet = quiet_share(log, third)
    collector.hear(3 * MS, m.Announce(log.id, 0, AnnounceKind.IDLE, quiet))
    arrivals = Arrivals(log, 0)
    hear_all(arrivals, collector.take(4 * MS), log.active, 10 * MS)
    assert arrivals.last == {
        first: Arrival(AnnounceKind.ARRIVE, 7 * MS, None),
        second: Arrival(AnnounceKind.PENDING, 8 * MS, late),
        third: Arrival(AnnounceKind.IDLE, 9 * MS, None),
    }
