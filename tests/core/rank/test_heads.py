"""What the head of a group does with announcements, one message at a time (R41)."""

from __future__ import annotations

import pytest
from core.makers import fresh, go, make_log
from msgspec.structs import replace
from paceline.core import messages as m
from paceline.core import wire
from paceline.core.protocol.arrivals import Arrival, Arrivals
from paceline.core.protocol.composition import compact, ordinary_share, quiet_share
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, Go
from paceline.core.protocol.tree import Grid
from paceline.core.rank import events as ev
from paceline.core.rank import rounds
from paceline.core.rank.gather import Collector, hear_all
from paceline.core.rank.state import RankState

from benchmarks.protocol import Player, announcement

RANKS, MS = 100, 10**6


def everybody(log: Log) -> Go:
    return compact(log, go(log), dict.fromkeys(log.active, (AnnounceKind.ARRIVE, 0)))


def said(player: Player, now_ns: int, event: ev.Event) -> list[m.Gathered]:
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
    """One of its group has committed round 0 and announces for round 1 while the head reduces."""
    player, peer = Player(RANKS), Player(RANKS)
    grid, number = the_head_of_round_1(player)
    log = player.state.log
    player.machine.handle(0, m.Start(everybody(log)))
    peer.state.log.append(everybody(peer.state.log))
    other = next(x for x in grid.groups[number] if x != player.state.me)
    assert said(player, MS, announcement(peer.state.log, other)) == []
    return said(player, 2 * MS, ev.Reduced())


def test_what_came_early_is_kept_until_the_head_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    [first] = early()
    assert (first.round, first.ordinary != b"") == (1, True)

    def forgets(rank: RankState, message: m.Announce | m.Gathered) -> None:
        if message.round == rank.log.version:
            rank.words.setdefault(message.round, []).append((rank.now_ns, message))

    monkeypatch.setattr(rounds, "on_announce", forgets)
    assert early() == []


def test_the_first_goes_at_once_then_as_many_as_before_then_what_completes_the_group() -> None:
    player = Player(RANKS)
    grid, number = the_head_of_round_1(player)
    player.machine.handle(0, m.Start(everybody(player.state.log)))
    player.machine.handle(0, ev.Reduced())
    log, group = player.state.log, grid.groups[number]
    sizes = []
    for member in group:
        for found in said(player, MS, announcement(log, member)):
            assert len(wire.pack_peer(found)) < 250
            sizes.append(int.from_bytes(found.ordinary, "little").bit_count())
    assert sizes == [1, 1, 2, 4, len(group) - 8]


def test_the_rest_waits_for_a_millisecond_and_the_unusual_for_nothing() -> None:
    player = Player(RANKS)
    grid, number = the_head_of_round_1(player)
    player.machine.handle(0, m.Start(everybody(player.state.log)))
    player.machine.handle(0, ev.Reduced())
    log, group = player.state.log, grid.groups[number]
    for member in group[:2]:
        assert len(said(player, MS, announcement(log, member))) == 1
    effects = player.machine.handle(2 * MS, announcement(log, group[2]))
    assert [e for e in effects if isinstance(e, ev.WakeAt)] == [ev.WakeAt(3 * MS)]
    [held] = said(player, 3 * MS, ev.Tick())
    assert len(held.ages) == 2
    late = announcement(log, group[3])
    share = wire.unpack_peer(wire.pack_peer(late)).share  # type: ignore[union-attr]
    pending = m.Announce(log.id, 1, AnnounceKind.PENDING, share)
    assert [x.words[0].kind for x in said(player, 4 * MS, pending)] == [AnnounceKind.PENDING]


def test_a_head_holds_back_for_a_small_part_of_a_round() -> None:
    log = make_log(4)
    log.round_us.append(64_000)
    collector = Collector(log, 0, log.active)
    for at_ns, who in enumerate(log.active[:3]):
        assert collector.due_ns() is None
        share = ordinary_share(log, who)
        assert share is not None
        collector.hear(at_ns, m.Announce(log.id, 0, AnnounceKind.ARRIVE, share))
        if at_ns < 2:
            assert collector.due_ns() == 0
            collector.take(at_ns)
    assert collector.due_ns() == 2 + 2 * MS, "the 32nd part"


def test_the_starter_hears_all_that_a_head_passes_on_at_its_time() -> None:
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
