"""The rendezvous of ranks: messages of any total size, and any number of open descriptors."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from paceline.transport.base import Abort, Group, Peer, TransportError
from paceline.transport.rendezvous import FRAME_BYTES_MAX, Deadline, Rendezvous
from paceline.transport.torch.gloo import Nothing, _Exchange

HOST = "127.0.0.1"


@pytest.fixture
def meetings() -> Iterator[list[Rendezvous]]:
    made = [Rendezvous(HOST) for _ in range(3)]
    yield made
    for rendezvous in made:
        rendezvous.close()


def exchange(rendezvous: Rendezvous, group: Group, value: bytes) -> dict[str, bytes]:
    store = _Exchange(rendezvous, threading.Lock(), group, Deadline(Abort(), 10.0))
    store.set(f"0/{group.rank}", value)
    keys = [f"0/{rank}" for rank in range(group.size)]
    try:
        return {key: store.get(key) for key in keys}
    finally:
        store.connections.close()


@pytest.mark.parametrize("value_bytes", [100, 600_000])
def test_the_addresses_of_all_ranks_can_exceed_a_message(
    meetings: list[Rendezvous], value_bytes: int
) -> None:
    """Use values as large as those of some 450 ranks, which used to end rank 0 by an assertion."""
    peers = tuple(Peer(f"r{rank}", meeting.address) for rank, meeting in enumerate(meetings))
    values = [os.urandom(value_bytes) for _ in peers]
    with ThreadPoolExecutor(len(peers)) as pool:
        stores = [
            pool.submit(exchange, meeting, Group("g", 1, peers, rank), values[rank])
            for rank, meeting in enumerate(meetings)
        ]
        for store in stores:
            assert list(store.result().values()) == values
    assert FRAME_BYTES_MAX < 3 * 600_000


@pytest.fixture
def many_files() -> Iterator[None]:
    """Open more descriptors than select() supports, as a rank of a large job does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    null = os.open(os.devnull, os.O_RDONLY)
    files = [os.dup(null) for _ in range(1100)]
    yield
    for file in [null, *files]:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_rank_with_a_thousand_open_files_meets_the_others() -> None:
    meetings = [Rendezvous(HOST) for _ in range(2)]
    peers = tuple(Peer(f"r{rank}", meeting.address) for rank, meeting in enumerate(meetings))
    with ThreadPoolExecutor(2) as pool:
        stores = [
            pool.submit(exchange, meeting, Group("g", 1, peers, rank), b"v")
            for rank, meeting in enumerate(meetings)
        ]
        assert [store.result() for store in stores] == [{"0/0": b"v", "0/1": b"v"}] * 2
    for meeting in meetings:
        meeting.close()


def test_running_out_of_files_is_an_error_with_a_hint(
    meetings: list[Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run out of descriptors; the rank used to retry to accept the same caller forever."""
    caller, answerer, _ = meetings
    peers = (Peer("r0", caller.address), Peer("r1", answerer.address))

    def full() -> None:
        raise OSError(24, "Too many open files")

    class Full:
        accept = staticmethod(full)

    listener = answerer._listener
    monkeypatch.setattr(answerer, "_listener", Full())
    with pytest.raises(TransportError, match="Too many open files; hint: raise the limit"):
        answerer.answer(Group("g", 1, peers, 1), 0, Nothing, Deadline(Abort(), 10.0))
    monkeypatch.setattr(answerer, "_listener", listener)
