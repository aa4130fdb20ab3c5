"""The number of threads that gloo uses for sums; see `transport.torch.gloo` for their cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from paceline.transport.base import Abort, Group, Peer
from paceline.transport.torch.gloo import GlooTransport

pytestmark = pytest.mark.processes
RANKS = 2


@pytest.fixture
def pair() -> Iterator[list[GlooTransport]]:
    transports = [GlooTransport(host="127.0.0.1") for _ in range(RANKS)]
    yield transports
    for transport in transports:
        transport.shutdown()


def summing() -> set[str]:
    """Return the threads with gloo's name, which they set soon after they have started."""
    tasks = Path("/proc/self/task")
    found = set()
    for task in tasks.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().strip() == "pt_gloo_runloop":
                found.add(task.name)
    return found


def test_gloo_has_two_summing_threads_per_rank(pair: list[GlooTransport]) -> None:
    before = summing()  # threads of other tests, which may be about to end
    peers = tuple(Peer(str(rank), t.address) for rank, t in enumerate(pair))

    def opens(rank: int) -> None:
        pair[rank].open(Group("1", 1, peers, rank), Abort(), 20.0)

    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(opens, range(RANKS)))
    deadline = time.monotonic() + 60.0
    while (made := len(summing() - before)) != 2 * RANKS:
        assert time.monotonic() < deadline, f"{made} threads for {RANKS} ranks"
        time.sleep(0.01)
