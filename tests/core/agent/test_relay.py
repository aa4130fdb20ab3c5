"""One connection per pod (R43): what the relay forwards, what it drops, and its heartbeats."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from paceline.core import messages as m
from paceline.core.agent.relay import Relay
from paceline_api.ids import NO_GENERATION, GenerationId, MemberId
from paceline_api.types.enums import Network

A, B, C = (MemberId(4, local, 1000) for local in range(3))
GEN = GenerationId(1, "c", 7)
LATER = GenerationId(1, "c", 8)


def register(who: MemberId, *, ready: bool = True) -> m.Register:
    ends = m.Endpoints("t", "d")
    return m.Register(who, 1, "h", ends, NO_GENERATION, NO_GENERATION, 0, False, ready)


def beat(who: MemberId, version: int = 5, at: GenerationId = GEN, **facts: Any) -> m.Heartbeat:
    given: dict[str, Any] = {"doing": m.Doing(3, version, 12, 400), "active": True, **facts}
    return m.Heartbeat(who, at, at, version, **given)


class Pod:
    """A relay whose ranks answer as real ones do, unless they are stopped."""

    def __init__(self, *ranks: MemberId) -> None:
        self.relay = Relay(4, 1)
        self.numbers: dict[MemberId, int] = {}
        self.stopped: set[MemberId] = set()
        for who in ranks:
            self.open(who)

    def open(self, who: MemberId) -> list[object]:
        return self.introduce(who, self.relay.open(who))

    def introduce(self, who: MemberId, word: m.Introduce | None) -> list[object]:
        if word is None or who in self.stopped:
            return []
        self.numbers[who] = word.connection
        return self.say(register(who))

    def connect(self) -> None:
        for who, word in self.relay.connect():
            self.introduce(who, word)

    def say(self, message: m.RankMessage | m.Heartbeat, number: int | None = None) -> list[object]:
        who = message.member
        number = self.numbers.get(who, 0) if number is None else number
        return list(self.relay.hear(who, m.RankEnvelope(number, message)))

    def greeted(self) -> tuple[m.Register, ...]:
        self.connect()
        return self.relay.greet()


def test_one_greeting_contains_all_registered_ranks() -> None:
    pod = Pod(B, A)
    assert pod.greeted() == (register(A), register(B))


def test_a_late_registration_is_forwarded_and_not_awaited_at_first() -> None:
    """A script that has not called `pl.init()` does not read messages yet."""
    pod = Pod(A)
    pod.stopped.add(B)
    pod.open(B)
    pod.connect()
    assert not pod.relay.awaits
    assert pod.relay.greet() == (register(A),)
    pod.numbers[B] = 2
    assert pod.say(register(B)) == [register(B)]


def test_a_reconnect_waits_for_ranks_that_took_part_before() -> None:
    pod = Pod(A, B)
    pod.greeted()
    pod.relay.disconnect()
    pod.stopped.add(B)
    pod.connect()
    assert pod.relay.awaits
    pod.relay.close(B)
    assert not pod.relay.awaits, "it will never answer"


def test_messages_for_an_older_connection_are_dropped() -> None:
    pod = Pod(A)
    pod.greeted()
    old = pod.numbers[A]
    pod.relay.disconnect()
    stale = m.Stopped(GEN, A, 5)
    assert pod.say(stale, old) == []
    pod.connect()
    assert pod.say(stale, old) == []
    assert pod.say(stale) == [stale]


def test_messages_reach_only_ranks_that_this_coordinator_knows() -> None:
    """A message may be an order of the previous coordinator.

    The rank registers and is asked again.
    """
    pod = Pod(A, B)
    pod.greeted()
    assert pod.relay.listeners((A, B, C)) == [A, B]
    pod.relay.disconnect()
    pod.stopped.add(B)
    pod.connect()
    assert pod.relay.listeners((A, B)) == [A]


def test_a_rank_that_stopped_reading_registers_again() -> None:
    pod = Pod(A)
    pod.greeted()
    old = pod.numbers[A]
    word = pod.relay.anew(A)
    assert word is not None
    assert pod.relay.listeners((A,)) == []
    assert pod.say(m.Stopped(GEN, A, 5), old) == []
    assert pod.introduce(A, word) == [register(A)]
    assert pod.relay.listeners((A,)) == [A]


def test_a_closed_connection_is_reported_if_the_rank_was_known() -> None:
    pod = Pod(A)
    pod.greeted()
    assert pod.relay.close(A) == [m.RankGone(A)]
    assert pod.relay.close(A) == []
    pod.stopped.add(B)
    pod.open(B)
    assert pod.relay.close(B) == []


def test_a_rank_must_register_first_and_send_only_its_own_messages() -> None:
    pod = Pod(A)
    pod.connect()
    with pytest.raises(ValueError, match="in the name of"):
        pod.relay.hear(A, m.RankEnvelope(1, register(B)))
    other = Relay(4, 1)
    other.open(A)
    [(_, word)] = other.connect()
    with pytest.raises(ValueError, match="has not introduced itself"):
        other.hear(A, m.RankEnvelope(word.connection, m.Stopped(GEN, A, 5)))


# ---- beats -----------------------------------------------------------------------------------


def test_a_pod_heartbeat_contains_common_values_once() -> None:
    pod = Pod(A, B)
    pod.greeted()
    for who in (A, B):
        pod.say(beat(who))
    first = pod.relay.beat()
    assert first.heard == ((0, 1000), (1, 1000))
    assert [x.member for x in first.changed] == [A, B], "a new coordinator knows nothing of them"
    for version in range(6, 9):
        pod.say(beat(A, version))
        pod.say(beat(B, version - 1, doing=m.Doing(900, version, 13, 400), step_s=0.0))
        later = pod.relay.beat()
        assert (later.promise, later.last, later.version) == (GEN, GEN, version)
        assert later.changed == ()


def test_a_pod_heartbeat_lists_only_ranks_with_a_heartbeat_since_the_last_one() -> None:
    """The heartbeats of an agent cannot hide a rank that sends none."""
    pod = Pod(A, B)
    pod.greeted()
    for who in (A, B):
        pod.say(beat(who))
    pod.relay.beat()
    pod.say(beat(A))
    assert pod.relay.beat().heard == ((0, 1000),)
    assert pod.relay.beat().heard == ()


CHANGES: dict[str, dict[str, object]] = {
    "leaves": {"leaving": True},
    "benched": {"active": False, "benched": True},
    "done": {"done": True},
    "slower": {"step_s": 0.058},
    "longer reductions": {"doing": m.Doing(3, 5, 200, 400)},
    "long at work": {"doing": m.Doing(1501, 5, 12, 400)},
    "another generation": {"at": LATER},
}


@pytest.mark.parametrize("facts", CHANGES.values(), ids=CHANGES)
def test_changed_values_of_a_rank_are_reported(facts: dict[str, object]) -> None:
    pod = Pod(A, B, C)
    pod.greeted()
    for who in (A, B, C):
        pod.say(beat(who, step_s=0.050))
    pod.relay.beat()
    for who in (A, C):
        pod.say(beat(who, step_s=0.052))
    figures: dict[str, Any] = {"step_s": 0.050, **facts}
    changed = beat(B, **figures)
    pod.say(changed)
    pod_beat = pod.relay.beat()
    assert [x.member for x in pod_beat.changed] == [B]
    assert (pod_beat.promise, pod_beat.last) == (GEN, GEN)
    [reported] = pod_beat.changed
    assert replace(reported, doing=None) == replace(changed, doing=None)


def test_the_end_of_a_long_reduction_is_reported_once() -> None:
    pod = Pod(A)
    pod.greeted()
    for for_ms in (1501, 1701):
        pod.say(beat(A, doing=m.Doing(for_ms, 5, 12, 400)))
        [reported] = pod.relay.beat().changed
        assert reported.doing == m.Doing(for_ms, 5, 12, 400)
    pod.say(beat(A, doing=m.Doing(20, 6, 12, 400)))
    [reported] = pod.relay.beat().changed
    assert reported.doing == m.Doing(0, -1, 12, 400)
    pod.say(beat(A, doing=m.Doing(20, 6, 12, 400)))
    assert pod.relay.beat().changed == ()


def test_a_new_connection_reports_all_values_again() -> None:
    pod = Pod(A)
    pod.greeted()
    carriers = ((A, Network.TCP),)
    for _ in range(2):
        pod.say(beat(A))
        pod_beat = pod.relay.beat(carriers)
        assert [x.member for x in pod_beat.changed] == [A]
        assert pod_beat.carriers == carriers
        pod.say(beat(A))
        pod_beat = pod.relay.beat(carriers)
        assert (pod_beat.changed, pod_beat.carriers) == ((), None)
        pod.relay.disconnect()
        pod.greeted()


def test_figures_are_coalesced_and_flushed_before_the_end() -> None:
    pod = Pod(A)
    pod.greeted()
    for version in range(3):
        assert pod.say(m.RankFigures(A, version, {})) == []
    assert pod.relay.figures() == [m.RankFigures(A, 2, {})]
    assert pod.relay.figures() == []
    pod.say(m.RankFigures(A, 3, {}))
    last = m.Stopped(GEN, A, 3)
    assert pod.say(last) == [m.RankFigures(A, 3, {}), last]
    pod.say(m.RankFigures(A, 4, {}))
    assert pod.relay.close(A) == [m.RankFigures(A, 4, {}), m.RankGone(A)]
