"""Data of strangers on the rendezvous socket is refused and counted, and the peers still meet."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import pytest
from paceline import refusals
from paceline.limits import MIB, own_bytes
from paceline.refusals import Entry, RefusalReason
from paceline.transport import rendezvous as module
from paceline.transport.base import Abort, Group, Peer, PeerLost
from paceline.transport.rendezvous import (
    GREETING,
    HELLO_BYTES_MAX,
    NONCE_BYTES,
    STRANGERS_MAX,
    Deadline,
    Hello,
    PeerClosedError,
    PeerConnection,
    Rendezvous,
    secret_of,
)
from paceline.transport.shm.rendezvous import LocalRendezvous

HOST = "127.0.0.1"
WAIT_S = 30.0
RSS_BYTES_MAX = 64 * MIB
HELD_BYTES = 1 * MIB
OTHER_USER = 54_321
DEEP = 100_000
SECRET = secret_of("token")


class Offer(msgspec.Struct, frozen=True):
    word: str


Meetings = tuple[Rendezvous, Rendezvous]


@pytest.fixture(params=["tcp", "unix"])
def meetings(request: pytest.FixtureRequest) -> Iterator[Meetings]:
    """Yield a rank that calls and one that answers."""

    def make() -> Rendezvous:
        return Rendezvous(HOST) if request.param == "tcp" else LocalRendezvous("here")

    made = make(), make()
    yield made
    for each in made:
        each.close()


def group_of(meetings: Meetings, rank: int, secret: bytes = SECRET, key: str = "g1") -> Group:
    peers = tuple(Peer(f"r{i}", each.address) for i, each in enumerate(meetings))
    return Group(key, int(key[1:]), peers, rank, secret)


def meet(meetings: Meetings, key: str = "g1", secrets: tuple[bytes, bytes] = (SECRET,) * 2) -> str:
    """Let the peers meet and return what came over the connection."""

    def call() -> None:
        dialing = group_of(meetings, 0, secrets[0], key)
        _, connection = meetings[0].dial(dialing, 1, Offer("hi"), Offer, deadline())
        connection.close()

    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        answering = group_of(meetings, 1, secrets[1], key)
        offer, connection = meetings[1].answer(answering, 0, Offer, deadline())
        connection.send(Offer("ho"))
        calling.result()
        connection.close()
    return offer.word


def deadline(timeout_s: float = WAIT_S) -> Deadline:
    return Deadline(Abort(), timeout_s)


def reach(meeting: Rendezvous) -> socket.socket:
    sock, target = meeting._target(meeting.address)
    sock.connect(target)
    sock.settimeout(WAIT_S)
    return sock


def refused(reason: RefusalReason) -> int:
    return refusals.PROCESS.counts().get((Entry.RENDEZVOUS, reason), 0)


def refused_in_all() -> int:
    counts = refusals.PROCESS.counts()
    return sum(count for (entry, _), count in counts.items() if entry is Entry.RENDEZVOUS)


def framed(body: bytes) -> bytes:
    """Frame data with a nonce and a random MAC, which nobody without the token can make."""
    return os.urandom(NONCE_BYTES) + struct.pack("!I", len(body)) + os.urandom(32) + body


def plain(body: bytes) -> bytes:
    """Frame data with its length only, as a program of another protocol might send it."""
    return struct.pack("!I", len(body)) + body


GARBAGE = {
    "nested lists in JSON": plain(b"[" * DEEP),
    "nested objects in JSON": plain(b'{"from":' * DEEP),
    "nested lists in msgpack": framed(b"\x91" * (HELLO_BYTES_MAX - 1)),
    "nested maps in msgpack": framed(b"\x81\xa1a" * 1000),
    "a number": plain(b"5"),
    "nothing": plain(b"") + framed(b""),
    "a hello with another MAC": framed(
        msgspec.msgpack.encode(Hello("g1", 1, "r0", "r1", msgspec.Raw(b"\x80")))
    ),
    "a list of four billion": framed(b"\xdd\xff\xff\xff\xff"),
    "a frame of 4 GiB": os.urandom(NONCE_BYTES) + b"\xff" * 64,
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10,
    "zeros": bytes(10_000),
    "random": random.Random(7).randbytes(10_000),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=list(GARBAGE))
def test_garbage_is_refused_and_counted_and_the_peers_still_meet(
    meetings: Meetings, data: bytes
) -> None:
    before = refused_in_all()
    with reach(meetings[1]) as stranger:
        stranger.setblocking(False)
        with suppress(OSError):
            stranger.send(data)
            stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(WAIT_S)
        assert meet(meetings) == "hi"
        meetings[1]._collect(group_of(meetings, 1))
        assert refused_in_all() == before + 1
        with suppress(ConnectionError):
            while stranger.recv(4096):
                pass


@pytest.mark.parametrize("seed", range(4))
def test_peers_meet_among_many_strangers_that_send_random_bytes(
    meetings: Meetings, seed: int
) -> None:
    dice = random.Random(seed)
    strangers = [reach(meetings[1]) for _ in range(50)]
    for stranger in strangers:
        with suppress(OSError):
            stranger.sendall(dice.randbytes(dice.choice([1, 31, 32, 68, 69, 5000])))
        if dice.random() < 0.3:
            stranger.close()
    assert meet(meetings) == "hi"
    for stranger in strangers:
        stranger.close()


@pytest.mark.long
def test_a_rank_without_the_token_is_refused(meetings: Meetings) -> None:
    """Let a rank with a guessed token call another one: both must fail."""
    before = refused(RefusalReason.UNAUTHENTICATED)
    forger = group_of(meetings, 0, secret_of("guess"))
    with ThreadPoolExecutor(1) as pool:
        abort = Abort()
        calling = pool.submit(
            meetings[0].dial, forger, 1, Offer("hi"), Offer, Deadline(abort, WAIT_S)
        )
        with pytest.raises(PeerLost, match="waiting for a call of rank 0"):
            meetings[1].answer(group_of(meetings, 1), 0, Offer, deadline(0.5))
        abort.raise_()
        assert calling.exception() is not None
    assert refused(RefusalReason.UNAUTHENTICATED) > before


class Recorder(threading.Thread):
    """A relay in front of a rank that records what a caller sends."""

    def __init__(self, target: Rendezvous) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server((HOST, 0))
        self.target, self.recorded = target, bytearray()
        self.start()

    @property
    def address(self) -> str:
        return "{}:{}".format(*self.listener.getsockname())

    def run(self) -> None:
        caller, _ = self.listener.accept()
        with caller, reach(self.target) as behind:
            back = threading.Thread(target=self._pass, args=(behind, caller, None), daemon=True)
            back.start()
            self._pass(caller, behind, self.recorded)
            back.join(WAIT_S)
        self.listener.close()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                if kept is not None:
                    kept += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.mark.long
def test_a_replayed_hello_is_refused() -> None:
    """Replay a hello in the generation in which it was recorded and in a later one."""
    meetings = Rendezvous(HOST), Rendezvous(HOST)
    relay = Recorder(meetings[1])
    peers = Peer("r0", meetings[0].address), Peer("r1", relay.address)

    def call() -> None:
        group = Group("g1", 1, peers, 0, SECRET)
        meetings[0].dial(group, 1, Offer("hi"), Offer, deadline())[1].close()

    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        _, connection = meetings[1].answer(group_of(meetings, 1), 0, Offer, deadline())
        connection.send(Offer("ho"))
        calling.result()
        connection.close()
    relay.join(WAIT_S)
    assert len(relay.recorded) > NONCE_BYTES
    before = refused(RefusalReason.UNAUTHENTICATED)
    for key in ("g1", "g2"):
        with reach(meetings[1]) as replayed:
            replayed.sendall(relay.recorded)
            with pytest.raises(PeerLost):
                meetings[1].answer(group_of(meetings, 1, key=key), 0, Offer, deadline(0.5))
    assert refused(RefusalReason.UNAUTHENTICATED) == before + 2
    for each in meetings:
        each.close()


@pytest.mark.long
def test_a_hello_for_another_rank_is_refused(meetings: Meetings) -> None:
    """Misdirect a hello: a port may have been another rank's a moment ago."""
    before = refused(RefusalReason.UNKNOWN_PEER)
    peers = Peer("r0", meetings[0].address), Peer("r7", meetings[1].address)
    with ThreadPoolExecutor(1) as pool:
        abort = Abort()
        misled = Group("g1", 1, peers, 0, SECRET)
        calling = pool.submit(
            meetings[0].dial, misled, 1, Offer("hi"), Offer, Deadline(abort, WAIT_S)
        )
        with pytest.raises(PeerLost):
            meetings[1].answer(group_of(meetings, 1), 0, Offer, deadline(0.5))
        abort.raise_()
        assert calling.exception() is not None
    assert refused(RefusalReason.UNKNOWN_PEER) > before


@pytest.mark.long
def test_a_peer_of_an_older_generation_can_call_again(meetings: Meetings) -> None:
    """Send a hello of an older generation, which is genuine: its sender is dropped, not refused."""
    before = refused_in_all()
    assert meet(meetings, "g1") == "hi"
    with ThreadPoolExecutor(1) as pool:
        abort = Abort()
        dialing, until = group_of(meetings, 0, key="g2"), Deadline(abort, WAIT_S)
        old = pool.submit(meetings[0].dial, dialing, 1, Offer("old"), Offer, until)
        with pytest.raises(PeerLost):
            meetings[1].answer(group_of(meetings, 1, key="g3"), 0, Offer, deadline(0.5))
        abort.raise_()
        assert old.exception() is not None
    assert meet(meetings, "g3") == "hi"
    assert refused_in_all() == before


@pytest.mark.parametrize("head", [plain, framed], ids=["length alone", "nonce and MAC"])
def test_incomplete_frames_use_no_memory(
    meetings: Meetings, head: Callable[[bytes], bytes]
) -> None:
    """Send 500 half frames of 1 MiB, which used to take 504 MiB before any authentication."""
    half = head(bytes(HELD_BYTES))[: HELD_BYTES // 2]
    before = own_bytes()
    strangers = []
    for _ in range(500):
        stranger = reach(meetings[1])
        stranger.setblocking(False)
        with suppress(OSError):
            stranger.send(half)
        strangers.append(stranger)
        meetings[1]._collect(group_of(meetings, 1))
    assert meet(meetings) == "hi"
    assert own_bytes() - before < RSS_BYTES_MAX
    for stranger in strangers:
        stranger.close()


@pytest.mark.long
def test_the_number_of_silent_callers_is_bounded(
    meetings: Meetings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELLO_NS", 10**12)  # a busy machine would close the first ones
    group = group_of(meetings, 1)
    strangers = []
    for _ in range(STRANGERS_MAX + 100):
        strangers.append(reach(meetings[1]))
        meetings[1]._collect(group)
    assert len(meetings[1]._strangers) <= STRANGERS_MAX + group.size
    assert refused(RefusalReason.TOO_MANY) > 0
    assert meet(meetings) == "hi"
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("begun", [b"", bytes(NONCE_BYTES), bytes(NONCE_BYTES) + b"\0\0\0\x50"])
def test_a_caller_that_does_not_finish_its_hello_in_time_is_closed(
    meetings: Meetings, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    before = refused(RefusalReason.TOO_SLOW)
    group = group_of(meetings, 1)
    with reach(meetings[1]) as stranger:
        stranger.sendall(begun)
        meetings[1]._collect(group)
        assert len(meetings[1]._strangers) == 1
        monkeypatch.setattr(module, "HELLO_NS", -1)
        meetings[1]._collect(group)
        assert meetings[1]._strangers == []
        assert len(stranger.recv(4096)) == len(GREETING) + NONCE_BYTES
        with suppress(ConnectionError):  # what it had sent was not fully read
            assert stranger.recv(1) == b""
    assert refused(RefusalReason.TOO_SLOW) == before + 1


@pytest.mark.long
def test_peers_meet_while_strangers_keep_calling(meetings: Meetings) -> None:
    stop = threading.Event()

    def flood() -> None:
        calls: list[socket.socket] = []
        while not stop.is_set():
            stranger, target = meetings[1]._target(meetings[1].address)
            calls.append(stranger)
            stranger.setblocking(False)
            with suppress(OSError):  # the backlog is full
                stranger.connect_ex(target)
                stranger.send(b"x" * 40)
            if len(calls) > 300:
                calls.pop(0).close()
        for stranger in calls:
            stranger.close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        while not refused_in_all() and not meetings[1]._strangers:
            meetings[1]._collect(group_of(meetings, 1))
        for number in range(1, 6):
            assert meet(meetings, f"g{number}") == "hi"
    finally:
        stop.set()
        flooding.join()


@pytest.mark.parametrize("body", [b"\x91" * DEEP, b"\xc1", b"\x05", b"\x81\xa4word\xc0", b""])
def test_an_invalid_message_of_a_peer_closes_only_its_connection(
    meetings: Meetings, body: bytes
) -> None:
    """Send an invalid message with the token, as a peer of another release might."""

    def call() -> None:
        dialing = group_of(meetings, 0)
        _, connection = meetings[0].dial(dialing, 1, Offer("hi"), Offer, deadline())
        mac = connection._mac(connection._own, connection._sent, body)
        connection._write(module._HEADER.pack(len(body), mac) + body)
        time.sleep(0.1)
        connection.close()

    before = refused(RefusalReason.MALFORMED)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        _, connection = meetings[1].answer(group_of(meetings, 1), 0, Offer, deadline())
        connection.send(Offer("ho"))
        with pytest.raises(PeerClosedError):
            connection.receive(Offer, deadline(), "testing", 0)
        connection.close()
        calling.result()
    assert refused(RefusalReason.MALFORMED) == before + 1


def test_a_message_cannot_be_replayed_or_reflected() -> None:
    """Check the MAC, which covers the number and the direction of each message."""
    here, there = socket.socketpair()
    one, other = PeerConnection(here, "one"), PeerConnection(there, "other")
    one._key = other._key = bytes(32)
    one._own, one._others = one._others, one._own
    one.send(Offer("first"))
    recorded = there.recv(4096, socket.MSG_PEEK)
    assert other.poll(Offer) == Offer("first")
    here.sendall(recorded)
    with pytest.raises(PeerClosedError, match="unauthenticated"):
        other.poll(Offer)
    there.sendall(recorded)  # back to its sender
    with pytest.raises(PeerClosedError, match="unauthenticated"):
        one.poll(Offer)
    one.close()
    other.close()


AS_ANOTHER_USER = """
import os, socket, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
callers = []
for _ in range(20):
    caller = socket.socket(socket.AF_UNIX)
    caller.settimeout(30)
    caller.connect("\\0" + sys.argv[2])
    try:
        caller.sendall(bytes.fromhex(sys.argv[3]))
    except OSError:
        pass
    callers.append(caller)
print("sent", flush=True)
input()
for caller in callers:
    try:
        assert caller.recv(1) == b"", "the rank greeted a stranger"
    except ConnectionError:
        pass
print("closed")
"""


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("data", [b"", b"\0\1\x86\xa0" + b"[" * 50_000], ids=["silent", "nested"])
def test_a_caller_of_another_user_is_closed_unread(data: bytes) -> None:
    """Call by the name in /proc/net/unix, which every user of the machine can read."""
    meetings = LocalRendezvous("here"), LocalRendezvous("here")
    before = refused(RefusalReason.OTHER_USER)
    name = meetings[1].address.rpartition("/")[2]
    stranger = subprocess.Popen(
        [sys.executable, "-c", AS_ANOTHER_USER, str(OTHER_USER), name, data.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "sent\n"
    assert meet(meetings) == "hi"
    assert refused(RefusalReason.OTHER_USER) == before + 20
    output, _ = stranger.communicate("\n", timeout=WAIT_S)
    assert output == "closed\n"
    for each in meetings:
        each.close()
