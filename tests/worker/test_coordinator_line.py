"""A rank's connection to the coordinator; the test plays the agent's end of it (R43)."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from paceline.control import packets
from paceline.core import wire
from paceline.core.messages import (
    Ask,
    BeatEvery,
    Dismiss,
    Endpoints,
    Heartbeat,
    Introduce,
    RankEnvelope,
    RankFigures,
    Register,
    Saved,
    Stopped,
)
from paceline.core.protocol.records import Request
from paceline.worker import coordinator_line
from paceline.worker.coordinator_line import CoordinatorLine
from paceline_api.ids import NO_GENERATION, MemberId

from testing.failing import Failing

WAIT_S = 30.0
ME = MemberId(0, 0, 1000)
REGISTER = Register(
    ME, 1, "h", Endpoints("a", "b"), NO_GENERATION, NO_GENERATION, 0, False, ready=True
)
BEAT = Heartbeat(ME, NO_GENERATION, NO_GENERATION, 0)
FIGURES = RankFigures(ME, 0, {"epoch": 1.0})
STOPPED = Stopped(NO_GENERATION, ME, 3)


@dataclass
class Rank(Failing):
    """The callbacks that a connection is given; each raises as often as the test configures."""

    obeyed: list[Any] = field(default_factory=list)
    ends: list[BaseException] = field(default_factory=list)
    connections: int = 0
    news: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)

    def register(self) -> Register:
        return REGISTER

    def heartbeat(self) -> Heartbeat:
        self.may_fail("beat")
        return BEAT

    def obey(self, order: Any) -> None:
        self.may_fail("obey")
        self.obeyed.append(order)
        self.news[1].send(b"!")

    def connected(self) -> None:
        self.connections += 1

    def until_obeyed(self) -> Any:
        self.news[0].settimeout(WAIT_S)
        self.news[0].recv(1)
        return self.obeyed[-1]


@dataclass
class Agent:
    socket: socket.socket

    def tell(self, *orders: msgspec.Struct) -> None:
        for order in orders:
            packets.send(self.socket, wire.to_json(order).encode())

    def next(self) -> RankEnvelope | None:
        """Return the next message, or None at the end."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        assert poll.poll(WAIT_S * 1000), "nothing more is said"
        data = packets.receive(self.socket)
        return wire.said_by_rank(data) if data is not None else None

    def wait(self, message: msgspec.Struct) -> RankEnvelope:
        while (envelope := self.next()) is not None:
            if envelope.message == message:
                return envelope
        raise AssertionError(f"{message} was never said")


@contextmanager
def lined(rank: Rank) -> Iterator[tuple[CoordinatorLine, Agent]]:
    ours, theirs = packets.pair()
    line = CoordinatorLine(
        theirs.detach(),
        register=rank.register,
        heartbeat=rank.heartbeat,
        figures=lambda: FIGURES,
        obey=rank.obey,
        connected=rank.connected,
        failed=rank.ends.append,
    )
    line.start()
    try:
        yield line, Agent(ours)
    finally:
        ours.close()
        line.close()
        for end in rank.news:
            end.close()
        assert not line._thread.is_alive()


def test_a_rank_sends_nothing_before_its_agent_has_a_connection() -> None:
    with lined(Rank()) as (line, agent):
        line.send(STOPPED)
        agent.tell(Introduce(7))
        first = [agent.next() for _ in range(3)]
        assert first == [RankEnvelope(7, REGISTER), RankEnvelope(7, BEAT), RankEnvelope(7, FIGURES)]


def test_each_connection_begins_with_one_registration() -> None:
    rank = Rank()
    with lined(rank) as (line, agent):
        for number in (3, 9):
            agent.tell(Introduce(number))
            assert agent.wait(REGISTER) == RankEnvelope(number, REGISTER)
            line.send(REGISTER)  # the state machine sends it too
            line.send(STOPPED)
            assert agent.wait(STOPPED) == RankEnvelope(number, STOPPED)
        assert rank.connections == 2
        while (envelope := agent.next()) is not None and envelope.message != BEAT:
            assert envelope.message != REGISTER, "once is enough"


def test_an_order_of_any_size_arrives() -> None:
    rank = Rank()
    with lined(rank) as (_, agent):
        for size in (10, packets.PACKET_BYTES, 1_000_000):
            order = Dismiss("x" * size)
            agent.tell(order)
            assert rank.until_obeyed() == order


def test_a_message_of_any_size_arrives() -> None:
    with lined(Rank()) as (line, agent):
        agent.tell(Introduce(1))
        agent.wait(REGISTER)
        for size in (10, packets.PACKET_BYTES, 1_000_000):
            word = Saved(ME, 1, "x" * size)
            line.send(word)
            assert agent.wait(word) == RankEnvelope(1, word)


@pytest.mark.long
def test_figures_are_sent_at_the_requested_interval() -> None:
    with lined(Rank()) as (_, agent):
        agent.tell(Introduce(1), BeatEvery(ms=3_600_000, figures=1))
        first = [agent.next() for _ in range(6)]
        assert FIGURES in [x.message for x in first if x is not None], "the first time"
        later = [agent.next() for _ in range(6)]
        assert FIGURES not in [x.message for x in later if x is not None]


def test_an_invalid_order_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    with caplog.at_level(logging.WARNING), lined(rank) as (_, agent):
        packets.send(agent.socket, b'{"type": "news from a later release"}')
        agent.tell(Dismiss("over"))
        assert rank.until_obeyed() == Dismiss("over")
    assert "the coordinator sent something that is not a message" in caplog.text


def test_an_error_while_making_a_heartbeat_ends_the_rank_with_its_reason() -> None:
    """Let the heartbeat callback fail.

    It reads the state under a lock, so another attempt would fail too; the rank used to fall
    silent.
    """
    rank = Rank({"beat": 1})
    with lined(rank) as (line, agent):
        agent.tell(Introduce(1))
        while agent.next() is not None:
            pass
        line._thread.join(WAIT_S)
    [error] = rank.ends
    assert isinstance(error, RuntimeError)


def test_no_message_is_sent_twice_while_connections_are_renewed() -> None:
    """Send from another thread while the connection is renewed.

    What was accepted for one connection is sent over that connection, in order.
    """
    rank = Rank()
    words = [Saved(ME, number, "") for number in range(400)]
    with lined(rank) as (line, agent):
        agent.tell(Introduce(1))
        agent.wait(REGISTER)

        def speak() -> None:
            for word in words:
                line.send(word)

        speaker = threading.Thread(target=speak)
        speaker.start()
        for number in range(2, 40):
            agent.tell(Introduce(number))
        speaker.join(WAIT_S)
        line.send(STOPPED)
        by_connection: dict[int, list[int]] = {}
        envelope = agent.next()
        while envelope is not None and not (
            envelope.message == STOPPED and envelope.connection == 39
        ):
            if isinstance(envelope.message, Saved):
                by_connection.setdefault(envelope.connection, []).append(envelope.message.version)
            if envelope.message == REGISTER and envelope.connection == 39:
                line.send(STOPPED)
            envelope = agent.next()
    every = [version for versions in by_connection.values() for version in versions]
    assert every == sorted(set(every))


def test_a_rank_registers_again_after_an_order_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Expect a new registration: the coordinator then repeats its current orders."""
    with caplog.at_level(logging.WARNING), lined(Rank({"obey": 1})) as (_, agent):
        agent.tell(Introduce(1))
        agent.wait(REGISTER)
        agent.tell(Ask(Request(1, None, stop=True)))
        agent.wait(REGISTER)
    assert "Ask could not be followed: RuntimeError" in caplog.text


def test_a_rank_registers_again_after_its_outbox_overflowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let the agent stop reading: queued messages are dropped and the facts are sent again."""
    monkeypatch.setattr(coordinator_line, "OUTBOX_MAX", 8)
    rank = Rank()
    with lined(rank) as (line, agent):
        agent.tell(Introduce(1))
        agent.wait(REGISTER)
        word = Saved(ME, 1, "x" * 30_000)
        while rank.connections == 1:
            line.send(word)
        agent.wait(REGISTER)
        line.send(STOPPED)
        agent.wait(STOPPED)


def test_the_last_message_before_close_is_delivered() -> None:
    with lined(Rank()) as (line, agent):
        agent.tell(Introduce(1))
        agent.wait(REGISTER)
        line.send(STOPPED)
        line.close()
        agent.wait(STOPPED)
        while agent.next() is not None:
            pass


def test_the_connection_ends_with_the_agent() -> None:
    with lined(Rank()) as (line, agent):
        agent.socket.close()
        line._thread.join(WAIT_S)
        line.send(STOPPED)
