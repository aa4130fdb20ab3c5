"""A library whose allreduce may give unequal bits is tested when a group is formed (R23).

gloo stands in for NCCL, so that the sums are real; one rank's allreduce is made to differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paceline.core.collectives.conduct import Bits
from paceline.core.collectives.same_bits import PROBE_BYTES, PROBE_NAMES
from paceline.core.collectives.select import NATIVE
from paceline.transport.base import Abort, Group, Peer, PeerLost, TransportAborted
from paceline.transport.torch.gloo import GlooTransport
from paceline.transport.torch.probe import digest, make_probes

CPU = torch.device("cpu")
RANKS = 3

pytestmark = pytest.mark.processes


class _Changed:
    """A work whose result differs from the library's in one bit."""

    def __init__(self, work: Any, buffer: torch.Tensor) -> None:
        self._work, self._buffer = work, buffer

    def wait(self, *limit: Any) -> Any:
        done = self._work.wait(*limit)
        if not limit:  # the last wait, after which the sum is read
            self._buffer.view(torch.int32)[-1] ^= 1
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Doubted(GlooTransport):
    """The gloo transport, as if nobody had shown that its sums have equal bits."""

    same_bits = False

    def __init__(self, changed_bytes: int = 0) -> None:
        super().__init__(host="127.0.0.1")
        self.under_way_max = 1
        self.changed_bytes = changed_bytes
        self.operations: list[str] = []

    def _launch(self, operation: str, buffer: torch.Tensor, by: dist.ReduceOp.RedOpType) -> Any:
        self.operations.append(operation)
        work = super()._launch(operation, buffer, by)
        changed = operation == "allreduce" and buffer.nbytes == self.changed_bytes
        return _Changed(work, buffer) if changed else work


@pytest.fixture
def crew() -> Iterator[list[Doubted]]:
    ranks = [Doubted() for _ in range(RANKS)]
    yield ranks
    for rank in ranks:
        rank.shutdown()


def open_all(ranks: Sequence[Doubted], number: int) -> None:
    peers = tuple(Peer(f"r{i}", rank.address) for i, rank in enumerate(ranks))
    with ThreadPoolExecutor(len(ranks)) as pool:
        for opened in [
            pool.submit(rank.open, Group(f"g{number}", number, peers, i), Abort(), 20.0)
            for i, rank in enumerate(ranks)
        ]:
            opened.result()


def sums(ranks: Sequence[Doubted], numel: int) -> list[list[float]]:
    buffers = [torch.full((numel,), float(i)) for i in range(len(ranks))]
    with ThreadPoolExecutor(len(ranks)) as pool:
        for reduced in [
            pool.submit(rank.allreduce, [buffer], Abort(), NATIVE)
            for rank, buffer in zip(ranks, buffers, strict=True)
        ]:
            reduced.result()
    return [buffer.tolist() for buffer in buffers]


def test_with_equal_bits_the_librarys_allreduce_is_used(crew: list[Doubted]) -> None:
    open_all(crew, 1)
    for rank in crew:
        rank.operations.clear()
    assert sums(crew, 5) == [[3.0] * 5] * RANKS
    assert [rank.operations for rank in crew] == [["allreduce"]] * RANKS
    assert {rank.describe()["sums"] for rank in crew} == {"allreduce"}


@pytest.mark.parametrize(("size", "name"), [*zip(PROBE_BYTES, PROBE_NAMES, strict=True)])
def test_one_different_bit_selects_reduce_and_broadcast_for_this_group(
    crew: list[Doubted], size: int, name: str
) -> None:
    crew[1].changed_bytes = size
    open_all(crew, 1)
    for rank in crew:
        rank.operations.clear()
    assert sums(crew, 5) == [[3.0] * 5] * RANKS
    assert [rank.operations for rank in crew] == [["reduce", "broadcast"]] * RANKS
    descriptions = {rank.describe()["sums"] for rank in crew}
    assert descriptions == {f"reduce and broadcast: its allreduce gave ranks other bits at {name}"}
    assert [c.bits for rank in crew for c in rank.conducts()] == [Bits.ONE_RANK] * RANKS

    crew[1].changed_bytes = 0
    open_all(crew, 2)
    assert {rank.describe()["sums"] for rank in crew} == {"allreduce"}
    assert [c.bits for rank in crew for c in rank.conducts()] == [Bits.COMPARED] * RANKS


def test_the_number_of_sums_in_flight_changes_no_bit(crew: list[Doubted]) -> None:
    """Let the ranks differ in the number, too (R27)."""
    open_all(crew, 1)
    given = [make_probes(rank, CPU) * 3 for rank in range(RANKS)]
    digests = set()
    for numbers in [(1, 1, 1), (1, 3, 4), (4, 4, 4)]:
        parts = [[probe.clone() for probe in probes] for probes in given]
        reported: list[int] = []
        with ThreadPoolExecutor(RANKS) as pool:
            sums = []
            for rank, number, mine in zip(crew, numbers, parts, strict=True):
                rank.under_way_max = number
                hears = partial(reported.append, number)
                sums.append(pool.submit(rank.allreduce_in_turn, mine, Abort(), NATIVE, hears))
            for summed in sums:
                summed.result()
        assert len(reported) == RANKS * len(given[0])
        digests |= {tuple(digest(buffer) for buffer in mine) for mine in parts}
    assert len(digests) == 1


def test_a_peer_that_never_compares_blocks_nobody(crew: list[Doubted]) -> None:
    """Check promise 2: wait until the timeout or the abort flag."""
    peers = tuple(Peer(f"r{i}", rank.address) for i, rank in enumerate(crew[:2]))
    setattr(crew[1], "_compare", lambda *_: None)  # noqa: B010
    for number, abort_after_s, error in [(1, None, PeerLost), (2, 0.5, TransportAborted)]:
        flag = Abort()
        with ThreadPoolExecutor(2) as pool:
            groups = [Group(f"g{number}", number, peers, i) for i in range(2)]
            waits = pool.submit(crew[0].open, groups[0], flag, 2.0 if abort_after_s is None else 60)
            pool.submit(crew[1].open, groups[1], Abort(), 20.0).result()
            if abort_after_s is not None:
                flag.wait(abort_after_s)
                flag.raise_()
            with pytest.raises(error):
                waits.result(timeout=30)


def test_one_changed_bit_changes_the_digest_of_a_probe() -> None:
    first, other = make_probes(0, CPU), make_probes(1, CPU)
    assert [probe.nbytes for probe in first] == list(PROBE_BYTES)
    assert all(digest(a) != digest(b) for a, b in zip(first, other, strict=True))
    probe = first[0]
    before = digest(probe)
    for place in (0, 7, probe.numel() - 1):
        for bit in (0, 13, 30):
            probe.view(torch.int32)[place] ^= 1 << bit
            assert digest(probe) != before
            probe.view(torch.int32)[place] ^= 1 << bit
    swapped = probe.clone()
    swapped[0], swapped[1] = probe[1], probe[0]
    assert digest(swapped) != before


def test_the_sum_of_the_probes_depends_on_the_order() -> None:
    columns = [make_probes(rank, CPU)[0] for rank in range(3)]
    a, b, c = columns
    assert digest((a + b) + c) != digest(a + (b + c))
