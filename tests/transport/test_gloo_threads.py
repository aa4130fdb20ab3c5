"""The threads that sum for gloo, and how a rank waits for them (`transport.torch.gloo`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from paceline.transport.base import Abort, Group, Peer
from paceline.transport.torch.gloo import VAIN_MAX, GlooTransport, _ShortWait

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
    threads = set()
    for task in tasks.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().strip() == "pt_gloo_runloop":
                threads.add(task.name)
    return threads


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


class Work:
    """A reduction that ends within a short wait, or does not."""

    def __init__(self, *, is_short: bool) -> None:
        self._is_short, self._ended = is_short, False
        self.waits = 0

    def wait(self, _: object) -> None:
        self.waits += 1
        self._ended = self._is_short
        if not self._is_short:
            raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return self._ended


def test_short_waits_are_left_out_while_sums_take_longer() -> None:
    """Sum large buffers: torch used to raise an error with a stack trace for each of them."""
    short_wait = _ShortWait()
    large = [Work(is_short=False) for _ in range(10 * VAIN_MAX)]
    assert not any(short_wait.ended(work) for work in large)
    assert sum(work.waits for work in large) <= 16
    small = [Work(is_short=True) for _ in range(10 * VAIN_MAX)]
    ended = [short_wait.ended(work) for work in small]
    assert all(ended[VAIN_MAX:])
    assert all(work.waits == 1 for work in small[VAIN_MAX:])
