"""The agent's pipe: messages of its ranks, and arbitrary other data that they may send."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from paceline import refusals
from paceline.agent.rank_pipe import MESSAGE_BYTES_MAX, PipeMessage, RankPipe, RankPipeListener
from paceline.limits import MIB, own_bytes
from paceline.refusals import Entry, RefusalReason
from paceline.telemetry.collector import PodRecords
from paceline.worker.agent_pipe import AgentOrder, AgentPipe

OTHER_USER: Final = 54_321
DICE: Final = random.Random(5)
NO_MESSAGES: Final = {
    "a number": b"5",
    "a text": b'"present"',
    "a list": b"[1, 2]",
    "pairs": b'[["kind", "present"]]',
    "null": b"null",
    "true": b"true",
    "no number": b"NaN",
    "nested lists": b"[" * 20_000,
    "nested objects": b'{"kind":' * 3_000,
    "nested lists in a field that nobody knows": b'{"kind": "present", "x": ' + b"[" * 20_000,
    "a kind that is a number": b'{"kind": 5}',
    "no kind": b"{}",
    "a message that is a list": b'{"kind": "failed", "message": []}',
    "a release of nothing": b'{"kind": "finished", "released": [1, 2, 3]}',
    "an error that is a text": b'{"kind": "failed", "error": "boom"}',
    "no UTF-8": b'{"kind": "\xff\xfe"}',
    "half of a message": b'{"kind": "pres',
    "longer than a packet": json.dumps({"kind": "x" * MESSAGE_BYTES_MAX}).encode(),
    "random": DICE.randbytes(1000),
    "zeros": bytes(1000),
}


@contextmanager
def listening() -> Iterator[tuple[asyncio.AbstractEventLoop, str, list[PipeMessage | None]]]:
    """Yield an event loop, the name of an agent's listener, and all messages from its pipes."""
    loop = asyncio.new_event_loop()
    messages: list[PipeMessage | None] = []
    pipes: list[RankPipe] = []

    def on_message(pipe: RankPipe, message: PipeMessage | None) -> None:
        pipes.append(pipe)
        messages.append(message)

    listener = RankPipeListener(loop, on_message)
    try:
        yield loop, listener.name, messages
    finally:
        for pipe in pipes:
            pipe.close()
        listener.close()
        loop.close()


def settle(loop: asyncio.AbstractEventLoop, messages: list[PipeMessage | None], count: int) -> None:
    """Run the agent until `count` messages have arrived; only the test's own timeout bounds it."""
    while len(messages) < count:
        loop.run_until_complete(asyncio.sleep(0.001))


def call(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(f"\0{name}")
    return sock


def refused(reason: RefusalReason) -> int:
    return refusals.PROCESS.counts().get((Entry.RANK_PIPE, reason), 0)


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=list(NO_MESSAGES))
def test_an_invalid_message_is_refused_and_the_pipe_stays_open(data: bytes) -> None:
    before = refused(RefusalReason.MALFORMED)
    with listening() as (loop, name, messages), call(name) as rank:
        rank.send(data)
        rank.send(b'{"kind": "present", "key": "k"}')
        settle(loop, messages, 1)
        assert messages == [PipeMessage("present", "k")]
    assert refused(RefusalReason.MALFORMED) == before + 1
    records = PodRecords(0, 1)
    shown = 'paceline_agent_refused_total{entry="rank_pipe",refusal="malformed"}'
    assert f"{shown} {before + 1}" in records.page().decode()
    records.close()


@pytest.mark.long
def test_thousands_of_random_packets_use_no_memory_and_end_no_pipe() -> None:
    dice = random.Random(1)
    whole = json.dumps({"kind": "failed", "message": "m", "error": None, "released": None}).encode()
    before = own_bytes()
    with listening() as (loop, name, messages), call(name) as rank:
        for _ in range(20_000):
            cut = bytearray(whole)
            for _ in range(dice.randrange(1, 4)):
                cut[dice.randrange(len(cut))] = dice.randrange(256)
            rank.send(cut)
            loop.run_until_complete(asyncio.sleep(0))  # lets the agent read
        messages.clear()
        rank.send(b'{"kind": "last"}')
        settle(loop, messages, 1)
        while messages[-1] != PipeMessage("last"):
            settle(loop, messages, len(messages) + 1)
    assert own_bytes() - before < 64 * MIB


AS_ANOTHER_USER: Final = """
import os, socket, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect("\\0" + sys.argv[2])
try:
    sock.send(b'{"kind": "present", "key": "k"}')
except OSError:
    pass
"""


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_message_from_another_user_is_never_read() -> None:
    before = refused(RefusalReason.OTHER_USER)
    with listening() as (loop, name, messages):
        subprocess.run(
            [sys.executable, "-c", AS_ANOTHER_USER, str(OTHER_USER), name], check=True, timeout=60
        )
        with call(name) as rank:
            rank.send(b'{"kind": "present", "key": "own"}')
            settle(loop, messages, 1)
        assert messages == [PipeMessage("present", "own")]
    assert refused(RefusalReason.OTHER_USER) == before + 1


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=list(NO_MESSAGES))
def test_a_rank_keeps_reading_after_an_invalid_order(data: bytes) -> None:
    """Send the rank invalid data before an order.

    A thread that ended with an exception would never learn that the agent is dead.
    """
    agent, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipe = AgentPipe(rank.detach())
    agent.send(data)
    agent.send(b'{"kind": "drain", "why": "a test"}')
    orders = [pipe.read()]
    if orders[0] != AgentOrder("drain", "a test"):
        orders.append(pipe.read())  # an order that this rank does not know
    assert orders[-1] == AgentOrder("drain", "a test")
    agent.close()
    assert pipe.read() is None
    pipe.close()
