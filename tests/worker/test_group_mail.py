"""Lines between the ranks of a group, and the bound on their pending mail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from paceline.control import packets
from paceline.core import messages as m
from paceline.core.rank.within import Greeting, Key, Mail, Welcome
from paceline.refusals import RefusalReason
from paceline.worker import group
from paceline.worker.comm_thread import CommThread
from paceline.worker.group import MAIL_MAX, FollowerThread, LeadThread, PendingMail, _Received
from paceline.worker.peer_sockets import ReceivedMessage
from paceline_api.ids import GenerationId

NOW = GenerationId(1, "a", 5)


def mail(version: int, generation: GenerationId = NOW) -> ReceivedMessage:
    """Make a state message; a real one would be as large as the model."""
    log: Any = SimpleNamespace(version=version)
    return ReceivedMessage(m.StateTransfer(generation, log, ()), ())


def part(records: int, generation: GenerationId = NOW) -> ReceivedMessage:
    return ReceivedMessage(m.LogPart(generation, (None,) * records), ())  # type: ignore[arg-type]


class Group:
    """The lead and a follower of a group, without sockets; both receive any message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: list[RefusalReason] = []
        self.taken: list[Key] = []
        peers: Any = SimpleNamespace(refuse=self.refused.append)
        machine: Any = SimpleNamespace(state=SimpleNamespace(promise=NOW))
        self.messages: list[Any] = []
        line: Any = SimpleNamespace(tell=self.messages.append)
        self.lead = LeadThread.__new__(LeadThread)
        self.follower = FollowerThread.__new__(FollowerThread)
        for thread in (self.lead, self.follower):
            thread.machine, thread._peers, thread._mail = machine, peers, PendingMail()
        self.lead._lines, self.lead._arrived = [line], {}
        self.follower._lead = line
        monkeypatch.setattr(
            CommThread, "_receive", lambda _, got: self.taken.append(group._key(got.message))
        )

    def tell_lead(self) -> None:
        """Deliver to the lead what the follower has sent since the last call."""
        while self.messages:
            self.lead._take(_Received(1, self.messages.pop(0)))


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


@pytest.mark.parametrize("make", [mail, part])
def test_incomplete_messages_are_bounded_and_refusals_counted(make: Any, shards: Group) -> None:
    for number in range(10 * MAIL_MAX):
        shards.lead._receive(make(number))
        shards.follower._receive(make(1000 + number))
    shards.tell_lead()
    assert len(shards.lead._mail) == len(shards.follower._mail) == MAIL_MAX
    assert len(shards.lead._arrived) == MAIL_MAX
    assert shards.refused == [RefusalReason.TOO_MANY] * (2 * 9 * MAIL_MAX)
    assert shards.taken == []


def test_messages_of_an_older_generation_are_not_kept(shards: Group) -> None:
    old = GenerationId(1, "a", 4)
    for number in range(10):
        shards.lead._receive(mail(number, old))
        shards.follower._receive(mail(number, old))
    assert len(shards.lead._mail) == len(shards.follower._mail) == 0
    assert shards.messages == []
    shards.lead._take(_Received(1, Mail(("state", old, 1))))
    assert shards.lead._arrived == {}


def test_a_state_that_all_shards_have_is_handled_and_older_ones_are_dropped(shards: Group) -> None:
    """Let the slow shard skip states that the fast one has; those never become complete."""
    for version in (1, 2, 3):
        shards.lead._receive(mail(version))
    shards.follower._receive(mail(3))
    shards.tell_lead()
    assert shards.taken == [("state", NOW, 3)]
    assert len(shards.lead._mail) == 0
    shards.follower._receive(mail(2))
    shards.tell_lead()
    shards.lead._receive(mail(2))
    assert shards.taken == [("state", NOW, 3)]
    assert len(shards.lead._mail) == 0
    assert shards.lead._arrived == {}


def test_states_that_a_slow_shard_skips_do_not_block_later_ones(shards: Group) -> None:
    for version in range(0, 10 * MAIL_MAX, 2):
        shards.lead._receive(mail(version))
        shards.lead._receive(mail(version + 1))
        shards.follower._receive(mail(version + 1))
        shards.tell_lead()
        shards.follower._mail.take(("state", NOW, version + 1), NOW)
    assert len(shards.taken) == 5 * MAIL_MAX
    assert shards.refused == []


def test_a_line_passes_messages_larger_than_a_packet_and_reports_the_end() -> None:
    lead, other = (group.Line(end.detach()) for end in packets.pair())
    large = Welcome(1, "host", "a" * 10 * packets.PACKET_BYTES, "", 0)
    for message in (Greeting("first"), large, Greeting("last")):
        lead.tell(message)
    assert other.first(Greeting, "rank 0") == Greeting("first")
    assert [other.read(), other.read()] == [large, Greeting("last")]
    lead._socket.close()
    assert other.read() is None
    other._socket.close()
