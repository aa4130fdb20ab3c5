"""Messages between ranks over real sockets on this machine."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import zmq
from paceline.core.demand import FILES_PER_LANE, PEER_LANES
from paceline.core.messages import AskState
from paceline.worker import peer_sockets
from paceline.worker.peer_sockets import PeerSockets, ReceivedMessage

from testing.makers import GEN_1, member


@pytest.mark.long
def test_connections_to_all_peers_open_as_many_files_as_are_planned(tmp_path: Path) -> None:
    """Count files in one process, which holds both the outgoing and the incoming connections."""
    # The library opens some files once per process for zero-copy sends; they belong to no peer.
    exchange([PeerSockets(directory=tmp_path, name=n, host="", token="") for n in "yz"])
    gc.collect()  # closes files of earlier tests now rather than meanwhile
    ranks = [PeerSockets(directory=tmp_path, name=n, host="", token="") for n in "abcd"]
    wait_closed()
    before = open_files()
    opened = exchange(ranks) - before
    assert opened == len(ranks) * PEER_LANES * FILES_PER_LANE * (len(ranks) - 1)


def wait_closed() -> None:
    """Wait until the library, which closes connections in its own thread, has closed them."""
    files, until_s = -1, time.monotonic() + 10
    while files != (files := open_files()) and time.monotonic() < until_s:
        time.sleep(0.2)


def exchange(ranks: Sequence[PeerSockets]) -> int:
    """Let each rank send to each over both lanes; return the files open when all has arrived."""
    try:
        for index, rank in enumerate(ranks):
            note = AskState(GEN_1, member(index), at_least=3)
            for peer, other in enumerate(ranks):
                if peer != index:
                    rank.know(member(peer), other.address)
                    rank.send(member(peer), note)
                    rank.send_bulk(member(peer), note, [b"state"])
        for rank in ranks:
            received = 0
            while received < PEER_LANES * (len(ranks) - 1):
                rank.wait(10_000)
                while rank.read() is not None:
                    received += 1
        return open_files()
    finally:
        for rank in ranks:
            rank.close()


def test_wait_returns_whether_anything_arrived(tmp_path: Path) -> None:
    sockets = PeerSockets(directory=tmp_path, name="a", host="", token="")
    try:
        assert not sockets.wait(1)
        sockets.wake()
        assert sockets.wait(10_000)
        assert not sockets.wait(0)
        assert sockets.read() is None
    finally:
        sockets.close()


ENDS: Final = """
import atexit, pathlib, sys
from paceline.core.messages import AskState
from paceline_api.ids import GenerationId, MemberId
from paceline.worker.peer_sockets import PeerSockets

rank = PeerSockets(directory=pathlib.Path(sys.argv[1]), name="a", host="", token="")
me = MemberId(0, 0, 0)
rank.know(me, rank.address)

def state(word: str) -> None:
    rank.send_bulk(me, AskState(GenerationId(1, "a", 1), me, at_least=3), [word.encode()])
    while (received := rank.read()) is None:  # a part of it is no message yet
        rank.wait(10_000)
    print(bytes(received.payload[0]).decode())

atexit.register(lambda: state("while the script ends"))
state("before")
"""


@pytest.mark.long
def test_a_state_can_be_sent_while_the_script_exits(tmp_path: Path) -> None:
    """Send a state from an atexit handler, as a donor does whose script failed.

    The library must not refuse before the engine has ended, which would hide the script's error.
    """
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["before", "while the script ends"], done.stderr


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("folder", ["plain", "my project", "semi;colon, 100% \N{SNOWMAN}"])
def test_sockets_work_in_a_folder_of_any_name(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    one, two = (
        PeerSockets(directory=tmp_path / folder, name=name, host="", token="") for name in "ab"
    )
    try:
        one.know(member(1), two.address)
        note = AskState(GEN_1, member(0), at_least=3)
        one.send(member(1), note)
        one.send_bulk(member(1), note, [b"state"])
        payloads: list[Any] = []
        while len(payloads) < 2:
            two.wait(10_000)
            while (mail := two.read()) is not None:
                assert mail.message == note
                payloads.append(mail.payload)
        assert sorted(payloads) == [(), (b"state",)]
    finally:
        one.close()
        two.close()


NOTE = AskState(GEN_1, member(0), at_least=3)


def test_connections_unused_for_a_whole_generation_are_closed(tmp_path: Path) -> None:
    """Use only some of the connections in a generation.

    Each change of membership gives a rank other peers, so it would end up connected to all.
    """
    ranks = [PeerSockets(directory=tmp_path, name=n, host="", token="") for n in "abc"]
    one = ranks[0]
    try:
        for slot in (1, 2):
            one.know(member(slot), ranks[slot].address)
            one.send(member(slot), NOTE)
        one.keep_only([member(1), member(2)])
        both = len(one._out)
        one.send(member(2), NOTE)
        one.keep_only([member(1), member(2)])
        assert (both, len(one._out)) == (2, 1)
        one.send(member(1), NOTE)
        ranks[1].wait(10_000)
        assert ranks[1].read() is not None
    finally:
        for rank in ranks:
            rank.close()


@pytest.fixture(params=["ipc", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[PeerSockets, ...]]:
    """Make a donor and a joiner; over tcp, as in a cluster, their messages are encrypted."""
    where = {"directory": tmp_path} if request.param == "ipc" else {"directory": None}
    both = [PeerSockets(**where, name=name, host="127.0.0.1", token="t") for name in "ab"]
    both[0].know(member(1), both[1].address)
    yield tuple(both)
    both[0].close()
    if not both[1]._closed:
        both[1].close()


def receive(sockets: PeerSockets) -> ReceivedMessage:
    while True:
        sockets.wait(10_000)
        if (mail := sockets.read()) is not None:
            return mail


def test_a_state_is_sent_in_pieces_and_arrives_unchanged(
    pair: tuple[PeerSockets, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send a state of several pieces.

    One frame of the whole size used to be encrypted and copied while holding the interpreter's
    lock.
    """
    for name in ("PIECE_BYTES", "LOCAL_PIECE_BYTES"):
        monkeypatch.setattr(peer_sockets, name, 1000)
    for rank in pair:
        monkeypatch.setattr(rank, "_piece_bytes", (1000, 1000))
    sizes: list[int] = []
    send = zmq.Socket.send

    def spy(socket: zmq.Socket, frame: bytes, *flags: Any, **options: Any) -> object:  # type: ignore[type-arg]
        sizes.append(len(frame))
        return send(socket, frame, *flags, **options)

    monkeypatch.setattr(zmq.Socket, "send", spy)
    payload: list[bytes | memoryview] = [
        b"{}",
        bytes(range(256)) * 40,
        b"",
        memoryview(b"x" * 3001),
    ]
    pair[0].send_bulk(member(1), NOTE, payload)
    mail = receive(pair[1])
    assert mail.message == NOTE
    assert [bytes(part) for part in mail.payload] == [bytes(part) for part in payload]
    assert max(sizes) <= 1000


def test_a_large_state_is_read_in_slices_and_holds_up_no_other_message(
    pair: tuple[PeerSockets, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receive GO while a state is read: a state of 0.4 GB used to hold up a round for 0.7 s."""
    monkeypatch.setattr(peer_sockets, "SLICE_BYTES", 100_000)
    state, small = bytes(range(256)) * 32_000, [b"part"] * 100
    donor, joiner = pair
    donor.send_bulk(member(1), NOTE, [state, *small])
    assert joiner.wait(10_000)
    assert joiner.read() is None
    donor.send(member(1), NOTE)
    until_s = time.monotonic() + 10
    while not joiner._has_fast and time.monotonic() < until_s:
        assert joiner.wait(10_000)
    go = joiner.read()
    assert go is not None
    assert go.payload == ()
    reads = 1
    while (mail := joiner.read()) is None:
        reads += 1
        assert joiner.wait(10_000)
    assert [bytes(part) for part in mail.payload] == [state, *small]
    assert reads >= 4


@pytest.mark.long
def test_a_state_is_put_together_while_it_arrives(pair: tuple[PeerSockets, ...]) -> None:
    """Send half of a state: pieces used to be joined only after the last one had arrived."""
    donor, joiner = pair
    state = b"x" * (64 << 20)
    donor.send_bulk(member(1), NOTE, [state])
    missing = len(state)
    while missing > len(state) // 2:
        assert joiner.wait(10_000)
        assert joiner.read() is None
        missing = min((each._missing for each in joiner._arriving.values()), default=missing)
    [arriving] = joiner._arriving.values()
    assert bytes(arriving.payload[0][: len(state) - missing]) == state[missing:]
    assert receive(joiner).payload == (state,)


class State(bytearray):
    """A bytearray that weak references can watch."""


@pytest.mark.long
def test_a_state_in_flight_is_replaced_by_a_newer_one(pair: tuple[PeerSockets, ...]) -> None:
    """Send to a joiner that reads nothing and asks again: each state used to stay in memory."""
    donor, joiner = pair
    joiner.close()
    alive = []
    for number in range(4):
        state = State(bytes([number]) * 1_000_000)
        alive.append(weakref.ref(state))
        donor.send_bulk(member(1), NOTE, [memoryview(state)])
        del state
    tries = 100
    while sum(each() is not None for each in alive) > 1 and tries:
        tries -= 1
        gc.collect()
        donor.wait(20)  # lets the I/O thread release them
    assert [each() is not None for each in alive] == [False, False, False, True]


def test_states_that_arrived_are_followed_by_the_next(pair: tuple[PeerSockets, ...]) -> None:
    for number in range(3):
        state = bytes([number]) * 2_000_000
        pair[0].send_bulk(member(1), NOTE, [state])
        assert receive(pair[1]).payload[0] == state
