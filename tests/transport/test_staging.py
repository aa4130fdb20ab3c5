"""Device memory through a ring of host buffers: the pieces, and the order of the three stages.

No GPU is needed: stand-ins for streams execute queued work only when somebody waits for it or polls
often enough. A copy that is used too early therefore has wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.collectives.select import NATIVE
from paceline.transport.base import Abort, Group, Peer, TransportAborted
from paceline.transport.selected import SelectedTransport
from paceline.transport.staging import PIECE_BYTES, STAGES, Staging, cut, cut_alike

from testing.memory_transport import Hub, SimTransport

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
NUMEL = PIECE_BYTES // 4


class LazyStream:
    """A stream that executes its queue in order, and as late as possible."""

    def __init__(self, name: str) -> None:
        self.name, self.queue = name, list[Callable[[], object]]()

    def run(self, length: int) -> None:
        while self.done < length:
            self.queue[self.done]()
            self.done += 1

    done = 0

    def wait_event(self, event: LazyEvent) -> None:
        self.queue.append(event.run)

    def synchronize(self) -> None:
        raise AssertionError("a thread waits inside the library")


class LazyEvent:
    stream: LazyStream
    length = looks = 0

    def record(self, stream: LazyStream) -> None:
        self.stream, self.length = stream, len(stream.queue)

    def run(self) -> None:
        self.stream.run(self.length)

    def query(self) -> bool:
        self.looks += 1
        if self.looks > 2:
            self.run()
        return self.stream.done >= self.length


class LazyQueues:
    """Pretends that the CPU works through queues, and queues the copies of the ring."""

    def __init__(self) -> None:
        self.main = LazyStream("main")
        self.streams: list[LazyStream] = []
        self.log: list[str] = []
        self._current = self.main

    def has(self, _: torch.device) -> bool:
        return True

    def stream(self, _: torch.device) -> LazyStream:
        self.streams.append(LazyStream("down" if not self.streams else "up"))
        return self.streams[-1]

    def event(self, _: torch.device) -> LazyEvent:
        return LazyEvent()

    def current(self, _: torch.device) -> LazyStream:
        return self._current

    @contextmanager
    def _use(self, stream: LazyStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def use(self, stream: Any) -> AbstractContextManager[None]:
        return self._use(stream)

    def queue(self, what: str, do: Callable[[], object]) -> None:
        stream = self._current

        def logged() -> None:
            self.log.append(what)
            do()

        self.log.append(f"queue {stream.name}")
        stream.queue.append(logged)


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> LazyQueues:
    made = LazyQueues()
    copy = torch.Tensor.copy_

    def copies(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        if not non_blocking:
            return copy(target, source)
        made.queue(made._current.name, lambda: copy(target, source))
        return target

    monkeypatch.setattr(torch.Tensor, "copy_", copies)
    return made


@pytest.mark.long
@given(
    st.lists(st.tuples(st.integers(0, 3 * NUMEL), st.sampled_from([1, 2, 4, 8])), max_size=4),
)
def test_pieces_cover_the_buffers_and_depend_only_on_their_sizes(
    sizes: list[tuple[int, int]],
) -> None:
    types = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    buffers = [torch.empty(numel, dtype=types[size]) for numel, size in sizes]
    pieces = list(cut(buffers))
    assert sum(t.nbytes for piece in pieces for t in piece) == sum(b.nbytes for b in buffers)
    assert all(sum(t.nbytes for t in piece) <= PIECE_BYTES for piece in pieces)
    like = [[t.shape for t in piece] for piece in cut([torch.empty_like(b) for b in buffers])]
    assert [[t.shape for t in piece] for piece in pieces] == like
    for piece in pieces:
        for part in piece:
            assert not part.numel() or any(
                b.data_ptr() <= part.data_ptr() < b.data_ptr() + b.nbytes for b in buffers
            ), "a copy would get the sum instead of the buffer"


def test_buffers_that_belong_together_are_cut_at_the_same_places() -> None:
    pair = torch.arange(2 * NUMEL, dtype=torch.float32), torch.zeros(2 * NUMEL)
    pieces = list(cut_alike(pair))
    assert len(pieces) == 4
    assert all(a.shape == b.shape and a.nbytes + b.nbytes <= PIECE_BYTES for a, b in pieces)
    assert torch.equal(torch.cat([a for a, _ in pieces]), pair[0])


@pytest.mark.parametrize("count", [1, 2, STAGES, 7])
def test_the_three_stages_overlap_and_no_data_is_used_too_early(
    queues: LazyQueues, count: int
) -> None:
    staging = Staging(queues)
    far = torch.zeros(count * NUMEL)
    kernel = torch.arange(count, dtype=torch.float32).repeat_interleave(NUMEL)
    for turn in (1, 2):  # the second turn reuses the ring of the first
        queues.log.clear()
        queues.main.queue.append(lambda: far.add_(kernel))  # queued by the caller, not executed yet

        def by(hosts: Sequence[torch.Tensor]) -> None:
            queues.log.append("sum")
            hosts[0].mul_(10)

        staging.reduce(by, cut([far]), Abort())
        downs = [i for i, what in enumerate(queues.log) if what == "queue down"]
        sums = [i for i, what in enumerate(queues.log) if what == "sum"]
        assert len(downs) == len(sums) == count
        for piece in range(count - 1):
            assert downs[piece + 1] < sums[piece], "the next one is on its way during a sum"
        if count > 2:
            ups = [i for i, what in enumerate(queues.log) if what == "up"]
            assert not ups or ups[0] > sums[0], "nobody waits for what goes back"
        queues.main.run(len(queues.main.queue))  # the caller continues
        want = kernel * 10 if turn == 1 else (kernel * 10 + kernel) * 10
        assert torch.equal(far, want)


def test_a_device_that_hangs_does_not_block_an_abort(queues: LazyQueues) -> None:
    staging, abort = Staging(queues), Abort()
    abort.raise_()
    summed: list[Any] = []
    with pytest.raises(TransportAborted, match="abandoned in a copy"):
        staging.reduce(summed.append, cut([torch.ones(8)]), abort)
    assert not summed
    assert not staging._ring, "the copy may still write to it"


class HostTransport(SimTransport):
    """Stands in for mpi and records the sizes that it is given."""

    name = "mpi"

    def __init__(self, hub: Hub, own_name: str) -> None:
        super().__init__(hub, own_name)
        self.sizes: list[int] = []

    def allreduce(self, buffers: Sequence[torch.Tensor], abort: Abort, algorithm: str) -> None:
        self.sizes.append(sum(buffer.numel() for buffer in buffers))
        super().allreduce(buffers, abort, algorithm)


@pytest.mark.parametrize(("devices", "pieces"), [([CPU, CPU], 1), ([GPU, CPU], 3)])
def test_all_ranks_cut_buffers_alike_if_one_has_a_gpu(
    devices: list[torch.device], pieces: int
) -> None:
    """Mix devices: all ranks must reduce the same number of buffers."""
    hub = Hub()
    inner = [HostTransport(hub, f"r{i}") for i in range(2)]
    ranks = [SelectedTransport([transport], {}) for transport in inner]
    for rank, device in zip(ranks, devices, strict=True):
        rank.begin([device])
    peers = tuple(Peer(f"r{i}", rank.address) for i, rank in enumerate(ranks))
    with ThreadPoolExecutor(2) as pool:
        groups = [Group("g", 1, peers, i) for i in range(2)]
        list(pool.map(lambda r, g: r.open(g, Abort(), 10.0), ranks, groups))
        for transport in inner:
            transport.sizes.clear()
        buffers = [torch.full((2 * NUMEL + 5,), float(i + 1)) for i in range(2)]
        list(pool.map(lambda r, b: r.allreduce([b], Abort(), NATIVE), ranks, buffers))
    for transport, buffer in zip(inner, buffers, strict=True):
        assert len(transport.sizes) == pieces
        assert sum(transport.sizes) == buffer.numel()
        assert set(buffer.tolist()) == {3.0}
    for rank in ranks:
        rank.shutdown()
