"""Data of strangers on a rank's sockets is dropped and counted; messages of peers still arrive."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import pytest
import zmq
from paceline import refusals
from paceline.core import wire
from paceline.core.messages import AskState
from paceline.limits import MIB, own_bytes
from paceline.refusals import Entry, RefusalReason
from paceline.worker.peer_sockets import (
    ARRIVING_MAX,
    FRAME_MORE_BYTES,
    MESSAGE_BYTES_MAX,
    PARTS_MAX,
    PIECE_BYTES,
    SENDER_BYTES,
    Lanes,
    PeerSockets,
    ReceivedMessage,
)

from testing.makers import GEN_1, member

NOTE: Final = AskState(GEN_1, member(0), at_least=3)
PACKED: Final = wire.pack_peer(NOTE)
VERSION: Final = PACKED[:1]
RSS_BYTES_MAX: Final = 64 * MIB
OTHER_USER: Final = 54_321
WAIT_S: Final = 30.0
Pair = tuple[PeerSockets, PeerSockets]


@pytest.fixture(params=["ipc", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    directory = tmp_path if request.param == "ipc" else None
    both = [
        PeerSockets(directory=directory, name=name, host="127.0.0.1", token="t") for name in "ab"
    ]
    both[0].know(member(1), both[1].address)
    yield both[0], both[1]
    for each in both:
        each.close()


def receive(sockets: PeerSockets) -> ReceivedMessage:
    while True:
        assert sockets.wait(int(WAIT_S * 1000)), "nothing came"
        if (mail := sockets.read()) is not None:
            return mail


def refused(*reasons: RefusalReason) -> int:
    counts = refusals.PROCESS.counts()
    return sum(counts.get((Entry.PEERS, reason), 0) for reason in reasons or RefusalReason)


def until_refused(pair: Pair, count: int, *reasons: RefusalReason) -> None:
    """Wait until `count` messages were refused; only the test's own timeout bounds it."""
    while refused(*reasons) < count:
        pair[1].wait(100)
    assert refused(*reasons) == count


def lanes(sockets: PeerSockets) -> dict[str, str]:
    decoded = msgspec.json.decode(sockets.address, type=Lanes)
    return {"fast": decoded.fast, "bulk": decoded.bulk}


def sender_to(pair: Pair, lane: str) -> zmq.Socket[bytes]:
    """Open a socket with a peer's rights: this user's, and the job's key where one is needed."""
    there = pair[0]._context.socket(zmq.PUSH)
    there.set(zmq.LINGER, 0)
    if pair[0]._key is not None:
        there.set(zmq.CURVE_SERVERKEY, pair[0]._key[0])
        there.set(zmq.CURVE_PUBLICKEY, pair[0]._key[0])
        there.set(zmq.CURVE_SECRETKEY, pair[0]._key[1])
    there.connect(lanes(pair[1])[lane])
    return there


KEY: Final = b"stranger" + bytes(8)
LATER: Final = b"stranger" + bytes(7) + b"\1"
"""Key of a transfer that the stranger begins after that of KEY."""


def sizes(*numbers: int) -> bytes:
    return msgspec.msgpack.encode(numbers)


def whole(*parts: bytes, key: bytes = KEY) -> list[list[bytes]]:
    """Return the messages of zmq that are one message of the bulk lane."""
    begin = [key, sizes(len(PACKED), *map(len, parts)), PACKED]
    return [begin, *([key, part] for part in parts)]


DICE: Final = random.Random(3)
NO_MESSAGES: Final[dict[str, list[bytes]]] = {
    "nothing": [b""],
    "a number": [b"5"],
    "another version": [b"\x01" + PACKED[1:]],
    "nested lists": [VERSION + b"\x91" * 60_000],
    "nested maps": [VERSION + b"\x81\xa1a" * 20_000],
    "nested lists in a field that nobody knows": [
        VERSION + b"\x82\xa4type\xa9ask-state\xa1x" + b"\x91" * 60_000
    ],
    "a list of four billion": [VERSION + b"\xdd\xff\xff\xff\xff"],
    "half of a message": [PACKED[: len(PACKED) // 2]],
    "a message and a byte": [PACKED + b"\0"],
    "text that is none": [VERSION + b"\x81\xa4type\xa3\xff\xfe\xfd"],
    "random": [VERSION + DICE.randbytes(5_000)],
    "many frames": [b"x" * 1000] * 300,
}
NO_FAST: Final = NO_MESSAGES | {"a message and a frame": [PACKED, b"more"]}
NO_BULK: Final = {name: [frames] for name, frames in NO_MESSAGES.items()} | {
    "a message of the other lane": [[PACKED]],
    "a short key": [[KEY[1:], *whole()[0][1:]]],
    "a key alone": [[KEY]],
    "sizes that are none": [[KEY, b"\x91\xa1x", PACKED]],
    "no sizes": [[KEY, sizes(), PACKED]],
    "negative sizes": [[KEY, sizes(len(PACKED), -1), PACKED]],
    "sizes beyond any memory": [[KEY, sizes(len(PACKED), 1 << 62), PACKED]],
    "a message beyond its bound": [[KEY, sizes(MESSAGE_BYTES_MAX + 1), bytes(PIECE_BYTES)]],
    "too many parts": [[KEY, sizes(len(PACKED), *[0] * PARTS_MAX), PACKED]],
    "a message without its bytes": [[KEY, sizes(len(PACKED)), b""]],
    "a message that is cut": [[KEY, sizes(len(PACKED)), PACKED[:-1]]],
    "a message and more frames": [[*whole()[0], b"y"]],
    "a message that is none": [[KEY, sizes(5), b"hello"]],
    "a piece of nothing": [[KEY, b"x"]],
    "more pieces than named": [*whole(), [KEY, b"y"]],
    "an empty piece": [whole(b"x")[0], [KEY, b""]],
    "a longer piece": [whole(bytes(10))[0], [KEY, bytes(11)]],
    "nested sizes": [[KEY, b"\x91" * 60_000, PACKED]],
}
CASES: Final = [
    *(pytest.param("fast", [frames], id=f"fast: {name}") for name, frames in NO_FAST.items()),
    *(pytest.param("bulk", messages, id=f"bulk: {name}") for name, messages in NO_BULK.items()),
]


def send_all(stranger: zmq.Socket[bytes], messages: list[list[bytes]]) -> None:
    for frames in messages:
        stranger.send_multipart(frames)


@pytest.mark.parametrize(("lane", "messages"), CASES)
def test_an_invalid_message_is_dropped_and_counted(
    pair: Pair, lane: str, messages: list[list[bytes]]
) -> None:
    before = refused(RefusalReason.MALFORMED, RefusalReason.TOO_LARGE)
    stranger = sender_to(pair, lane)
    send_all(stranger, messages)
    send_all(stranger, [[PACKED]] if lane == "fast" else whole(b"after it", key=LATER))
    mail = receive(pair[1])
    if messages == NO_BULK["more pieces than named"]:
        mail = receive(pair[1])
    assert mail.message == NOTE
    assert [bytes(part) for part in mail.payload] == ([] if lane == "fast" else [b"after it"])
    assert refused(RefusalReason.MALFORMED, RefusalReason.TOO_LARGE) == before + 1
    stranger.close(linger=0)


@pytest.mark.parametrize("lane", ["fast", "bulk"])
@pytest.mark.parametrize("seed", range(3))
def test_random_frames_never_end_a_rank(pair: Pair, lane: str, seed: int) -> None:
    dice = random.Random(seed)
    stranger, sent = sender_to(pair, lane), 200
    before = refused()
    for _ in range(sent):
        cut = bytearray(dice.choice([PACKED, sizes(len(PACKED), 3), dice.randbytes(20)]))
        cut[dice.randrange(len(cut))] ^= 0xC1
        key = [KEY] if lane == "bulk" else []
        stranger.send_multipart([*key, bytes(cut), *[dice.randbytes(3)] * dice.randrange(4)])
    send_all(stranger, [[PACKED]] if lane == "fast" else whole(b"last"))
    read = 0
    while read + refused() - before <= sent:
        read += pair[1].read() is not None or not pair[1].wait(int(WAIT_S * 1000))
    assert refused() > before
    stranger.close(linger=0)


def test_a_message_of_many_frames_arrives_whole(pair: Pair) -> None:
    """Send messages longer than a frame, like a GO of a large job or the log of a state."""
    long = AskState(GEN_1._replace(coordinator="c" * (3 * PIECE_BYTES + 5)), member(0), at_least=3)
    pair[0].send(member(1), long)
    assert receive(pair[1]).message == long
    pair[0].send_bulk(member(1), long, [b"x" * (2 * PIECE_BYTES), b"", b"y"])
    mail = receive(pair[1])
    assert mail.message == long
    assert [len(part) for part in mail.payload] == [2 * PIECE_BYTES, 0, 1]


def test_an_unfinished_message_takes_the_memory_of_what_has_come(pair: Pair) -> None:
    """Name a gigabyte, and send a piece of it.

    The sender's next message takes the place of the unfinished one, which may be read later.
    """
    before = own_bytes()
    stranger = sender_to(pair, "bulk")
    stranger.send_multipart([KEY, sizes(len(PACKED), 1 << 30), PACKED])
    stranger.send_multipart([KEY, bytes(PIECE_BYTES)])
    while not any(each.payload for each in pair[1]._arriving.values()):
        assert pair[1].wait(int(WAIT_S * 1000))
        assert pair[1].read() is None
    counted = refused()
    send_all(stranger, whole(b"state", key=LATER))
    assert receive(pair[1]).payload == (b"state",)
    assert not pair[1]._arriving
    assert own_bytes() - before < RSS_BYTES_MAX
    send_all(stranger, [[KEY, b"late"], whole()[0]])
    send_all(stranger, whole(b"last", key=b"another!" + bytes(8)))
    assert receive(pair[1]).payload == (b"last",)
    assert refused() == counted
    stranger.close(linger=0)


def test_unfinished_messages_are_few_and_end_with_their_generation(pair: Pair) -> None:
    stranger = sender_to(pair, "bulk")
    keys = [bytes([number]) * SENDER_BYTES + bytes(8) for number in range(ARRIVING_MAX + 3)]
    for key in keys:
        stranger.send_multipart([key, sizes(len(PACKED), 100), PACKED])
    while keys[-1] not in pair[1]._arriving:
        assert pair[1].wait(int(WAIT_S * 1000))
        assert pair[1].read() is None
    assert list(pair[1]._arriving) == keys[3:]
    pair[1].keep_only([])
    stranger.send_multipart([keys[-1], b"x"])
    assert pair[1].wait(int(WAIT_S * 1000))
    assert pair[1].read() is None
    pair[1].keep_only([])
    assert list(pair[1]._arriving) == keys[-1:]
    stranger.close(linger=0)


def test_a_flood_of_garbage_does_not_block_a_peer(pair: Pair) -> None:
    stranger = sender_to(pair, "fast")
    stranger.set(zmq.SNDHWM, 0)
    for _ in range(5_000):
        stranger.send(b"garbage")
    pair[0].send(member(1), NOTE)
    pair[0].send_bulk(member(1), NOTE, [b"state"])
    assert [receive(pair[1]).message for _ in range(2)] == [NOTE, NOTE]
    stranger.close(linger=0)


def greeting(mechanism: bytes) -> bytes:
    signature = b"\xff" + bytes(8) + b"\x7f"
    return signature + b"\x03\x00" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def reach(pair: Pair, lane: str) -> socket.socket:
    kind, _, where = lanes(pair[1])[lane].partition("://")
    if kind == "ipc":
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(where)
    else:
        host, _, port = where.rpartition(":")
        stranger = socket.create_connection((host, int(port)))
    stranger.settimeout(WAIT_S)
    return stranger


def greeted(pair: Pair, lane: str) -> socket.socket:
    stranger = reach(pair, lane)
    stranger.sendall(greeting(b"NULL" if pair[0]._key is None else b"CURVE"))
    got = 0
    while got < 64:
        got += len(stranger.recv(64 - got))
    return stranger


@pytest.mark.parametrize("lane", ["fast", "bulk"])
@pytest.mark.parametrize("size", [2 * MIB, 1 << 30, 1 << 62])
@pytest.mark.parametrize("flags", [2, 6], ids=["message", "command"])
def test_the_header_of_a_large_frame_closes_the_connection(
    pair: Pair, lane: str, size: int, flags: int
) -> None:
    """Send a greeting and the header of a large frame.

    A header of 1 GiB used to grow a rank from 15 to 1,037 MiB.
    """
    before, counted = own_bytes(), refused(RefusalReason.MALFORMED)
    with greeted(pair, lane) as stranger:
        chunk = bytes(1 * MIB)
        with suppress(OSError):
            stranger.sendall(struct.pack("!BQ", flags, size))
            for _ in range(256):
                stranger.sendall(chunk)
        with suppress(ConnectionError):
            while stranger.recv(4096):
                pass
    until_refused(pair, counted + 1, RefusalReason.MALFORMED)
    assert own_bytes() - before < RSS_BYTES_MAX
    pair[0].send(member(1), NOTE)
    assert receive(pair[1]).message == NOTE


def test_incomplete_frames_of_many_strangers_use_little_memory(pair: Pair) -> None:
    """Leave frames open: each costs no more than its length, so as many as fit are opened."""
    before = own_bytes()
    frame = pair[1]._piece_bytes[1] + FRAME_MORE_BYTES
    half = struct.pack("!BQ", 6, frame) + bytes(frame - 100)
    strangers = []
    for _ in range(RSS_BYTES_MAX // 2 // frame):
        stranger = greeted(pair, "bulk")
        stranger.setblocking(False)
        with suppress(OSError):
            stranger.send(half)
        strangers.append(stranger)
    pair[0].send_bulk(member(1), NOTE, [b"state"])
    assert receive(pair[1]).payload == (b"state",)
    assert own_bytes() - before < RSS_BYTES_MAX
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"\xff" * 200])
def test_a_program_that_speaks_another_protocol_is_refused(pair: Pair, data: bytes) -> None:
    counted = refused()
    strangers = [reach(pair, lane) for lane in ("fast", "bulk")]
    for stranger in strangers:
        with suppress(OSError):
            stranger.sendall(data)
    if len(data) > 64:
        until_refused(pair, counted + 2)
    pair[0].send(member(1), NOTE)
    assert receive(pair[1]).message == NOTE
    for stranger in strangers:
        stranger.close()


@pytest.mark.long
def test_unread_messages_stay_with_their_sender(pair: Pair) -> None:
    """Send without a reader.

    Otherwise one peer could fill the memory of a rank that is in a long reduction.
    """
    before = own_bytes()
    stranger = sender_to(pair, "bulk")
    stranger.set(zmq.SNDHWM, 1)
    piece = bytes(pair[1]._piece_bytes[1])
    stranger.send_multipart([KEY, sizes(len(PACKED), 320 * MIB), PACKED])
    pieces = 320 * MIB // len(piece)
    sent = 0
    for _ in range(pieces):
        if not stranger.poll(500, zmq.POLLOUT):
            break
        stranger.send_multipart([KEY, piece])
        sent += 1
    assert sent < pieces
    assert own_bytes() - before < 2 * RSS_BYTES_MAX  # both ends are in this process
    stranger.close(linger=0)


AS_USER: Final = """
import os, socket, sys
os.chdir(os.path.dirname(sys.argv[2]))  # root may enter
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
stranger = socket.socket(socket.AF_UNIX)
stranger.settimeout(30)
stranger.connect(os.path.basename(sys.argv[2]))
try:
    print(len(stranger.recv(1)))
except ConnectionError:
    print(0)
"""


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("lane", ["fast", "bulk"])
def test_a_connection_of_another_user_is_closed_without_a_greeting(lane: str) -> None:
    """Connect as another user to a socket in a folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as folder:
        Path(folder).chmod(0o777)
        rank = PeerSockets(directory=Path(folder), name="a", host="", token="t")
        try:
            for file in Path(folder).iterdir():
                file.chmod(0o777)
            counted = refused(RefusalReason.OTHER_USER)
            path = lanes(rank)[lane].removeprefix("ipc://")
            greeted_bytes = [
                subprocess.run(
                    [sys.executable, "-c", AS_USER, str(user), path],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=True,
                ).stdout
                for user in (OTHER_USER, 0)
            ]
            assert greeted_bytes == ["0\n", "1\n"]
            until_refused((rank, rank), counted + 1, RefusalReason.OTHER_USER)
        finally:
            rank.close()


def test_a_stranger_with_another_key_is_counted() -> None:
    ours, theirs = (
        PeerSockets(directory=None, name=name, host="127.0.0.1", token=name) for name in "ab"
    )
    counted = refused(RefusalReason.UNAUTHENTICATED)
    theirs.know(member(1), ours.address)
    theirs.send(member(1), NOTE)
    while refused(RefusalReason.UNAUTHENTICATED) == counted:
        ours.wait(100)
    assert ours.read() is None
    theirs.close()
    ours.close()


def test_peers_that_connect_and_leave_are_not_counted_as_refused(tmp_path: Path) -> None:
    counted = refused()
    rank = PeerSockets(directory=tmp_path, name="rank", host="", token="t")
    for number in range(5):
        peers = [
            PeerSockets(directory=tmp_path, name=f"{number}-{name}", host="", token="t")
            for name in "abc"
        ]
        for peer in peers:
            peer.know(member(1), rank.address)
            peer.send(member(1), NOTE)
            peer.send_bulk(member(1), NOTE, [b"state"])
        for _ in range(2 * len(peers)):
            assert receive(rank).message == NOTE
        for peer in peers:
            peer.close()
    while rank.wait(200):
        pass
    assert refused() == counted
    rank.close()
