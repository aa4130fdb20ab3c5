"""The threads that sum for gloo, and how a rank waits for them (`transport.torch.gloo`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from paceline.core.collectives.select import NATIVE
from paceline.transport.base import Abort, Group, Peer, TransportAborted
from paceline.transport.torch.gloo import THREADS, VAIN_MAX, GlooTransport, _ShortWait

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


def opened(pair: list[GlooTransport]) -> None:
    peers = tuple(Peer(str(rank), t.address) for rank, t in enumerate(pair))

    def opens(rank: int) -> None:
        pair[rank].open(Group("1", 1, peers, rank), Abort(), 20.0)

    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(opens, range(RANKS)))


def test_gloo_has_two_summing_threads_per_rank(pair: list[GlooTransport]) -> None:
    before = summing()  # threads of other tests, which may be about to end
    opened(pair)
    deadline = time.monotonic() + 60.0
    while (made := len(summing() - before)) != 2 * RANKS:
        assert time.monotonic() < deadline, f"{made} threads for {RANKS} ranks"
        time.sleep(0.01)


@pytest.mark.parametrize("flagged", range(5))
def test_sums_end_behind_the_same_buffer_on_all_ranks(
    pair: list[GlooTransport], flagged: int
) -> None:
    opened(pair)

    def sums(rank: int) -> tuple[list[float], list[float]]:
        buffers = [torch.zeros(3) for _ in range(5)]
        seen: list[float] = []

        def make(number: int) -> bool:
            if any(value >= 100.0 for value in seen):
                return False
            buffers[number] += 100.0 if number == flagged and rank == 1 else 1.0 + number
            return True

        def summed() -> None:
            seen.append(float(buffers[len(seen)][0]))

        pair[rank].allreduce_in_turn(buffers, Abort(), NATIVE, summed, make)
        return seen, [float(buffer[-1]) for buffer in buffers]

    with ThreadPoolExecutor(RANKS) as threads:
        first, second = threads.map(sums, range(RANKS))
    assert first == second
    want = [2.0 * (1 + number) for number in range(5)]
    want[flagged] = 101.0 + flagged
    assert first[0] == want[: flagged + THREADS]  # those in flight are completed


def test_an_aborted_rank_leaves_sums_in_flight_while_it_makes_the_next_buffer(
    pair: list[GlooTransport],
) -> None:
    opened(pair)
    abort = Abort()

    def make(number: int) -> bool:
        if number == 1:
            abort.raise_()
        return number == 0

    with pytest.raises(TransportAborted):  # rank 1 never sums
        pair[0].allreduce_in_turn([torch.ones(3), torch.ones(3)], abort, NATIVE, lambda: None, make)
    assert pair[0].describe()["abandoned"] == "1"


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
