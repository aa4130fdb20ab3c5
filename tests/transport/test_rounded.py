"""Sums of float32 sent as bfloat16 have the bits of `fold`, and their residuals lose nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce

import pytest
import torch
from paceline.core.collectives.schedules import ALGORITHMS, bounds, fold, schedule
from paceline.transport.base import HOST, Abort, Group, Peer, Transport, TransportError
from paceline.transport.factory import ROUNDING, make_transport
from paceline.transport.mpi.lanes import PIECE_BYTES
from paceline.transport.mpi.transport import MpiTransport
from paceline.transport.shm.hier import HierTransport, machines_of
from paceline.transport.shm.memory import SharedMemory
from paceline.transport.shm.transport import ShmTransport
from paceline.transport.torch.gloo import GlooTransport
from paceline_api.types.enums import Wire

from testing.memory_transport import Hub, SimTransport
from tests.transport.harness import Crew, Hubs, ProcessPool, in_memory
from tests.transport.rank_body import ROUNDED, Payload, digest

pytestmark = pytest.mark.processes

SIZES = (2, 3, 4, 5)
NUMELS = (1, 7, 300_001)
"""Buffer sizes; the last one is larger than a piece."""
Summed = tuple[torch.Tensor, list[torch.Tensor]]


def by_hand(algorithm: str, parts: list[torch.Tensor]) -> Summed:
    """Compute the sum and the residual of each rank with torch's own conversions."""
    total = torch.empty_like(parts[0])
    residuals = [torch.zeros_like(part) for part in parts]
    chunks, length = schedule(algorithm, len(parts), 0).chunks, PIECE_BYTES // 4
    for low in range(0, len(total), length):
        at = bounds(min(length, len(total) - low), chunks)
        for chunk, (start, end) in enumerate(itertools.pairwise(at)):
            there = slice(low + start, low + end)

            def rounded(part: torch.Tensor, rank: int, there: slice = there) -> torch.Tensor:
                short = part.bfloat16().float()
                residuals[rank][there] += part - short
                return short

            total[there] = fold(algorithm, [p[there] for p in parts], chunk, torch.add, rounded)
    return total, residuals


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add the tensors in the order of the ranks."""
    return reduce(torch.add, parts)


@pytest.fixture
def crew(pool: ProcessPool) -> Iterator[Crew]:
    ranks = pool.take(max(SIZES))
    yield Crew("", list(ranks))
    pool.give_back(ranks)


@pytest.mark.parametrize("kind", ["mpi", "mpi-mixed"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bits_and_residuals_match_the_schedule(crew: Crew, kind: str, algorithm: str) -> None:
    """Check the loop in C, and groups in which the loops in C and in Python work together."""
    crew.kind = f"{kind}{ROUNDED}:{algorithm}"
    for size in SIZES:
        members = crew.ranks[:size]
        crew.open(members)
        payload = Payload(size, NUMELS, exact=False)
        for index, rank in enumerate(members):
            rank.start("allreduce_rounded", crew.kind, index, payload)
        outcomes = [rank.result() for rank in members]
        assert {outcome.error for outcome in outcomes} == {""}, outcomes
        parts = [payload.parts(index) for index in range(size)]
        want = [by_hand(algorithm, list(buffers)) for buffers in zip(*parts, strict=True)]
        for index, outcome in enumerate(outcomes):
            assert outcome.value[0] == digest([total for total, _ in want])
            assert outcome.value[1] == digest([residuals[index] for _, residuals in want])
    crew.all(crew.ranks, "close", crew.kind)


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sum_and_residuals_add_up_to_the_input(algorithm: str, size: int) -> None:
    """Use integers below 2^20, which float32 sums exactly and bfloat16 cannot hold."""
    draw = torch.Generator().manual_seed(size)
    parts = [
        torch.randint(-(1 << 20), 1 << 20, (997,), generator=draw).float() for _ in range(size)
    ]
    total, residuals = by_hand(algorithm, parts)
    assert torch.equal(total + torch.stack(residuals).sum(0), torch.stack(parts).sum(0))
    assert torch.equal(total, total.bfloat16().float())
    assert sum(int(residual.count_nonzero()) for residual in residuals) > len(total)


@pytest.mark.parametrize("kind", ["sim", "staged"])
def test_in_memory_sum_and_residuals_add_up_to_the_input(kind: str) -> None:
    """Sum in memory; `staged` goes through buffers that stand in for those of a device."""
    hubs, draw = Hubs(), torch.Generator().manual_seed(1)
    ranks = [in_memory(kind, hubs, f"t{index}") for index in range(3)]
    parts = [torch.randint(-(1 << 20), 1 << 20, (99,), generator=draw).float() for _ in ranks]
    sums, residuals = [part.clone() for part in parts], [torch.zeros_like(part) for part in parts]
    peers = tuple(Peer(f"t{index}", rank.address) for index, rank in enumerate(ranks))

    def reduced(index: int) -> None:
        ranks[index].open(Group("g", 1, peers, index), Abort(), 10.0)
        ranks[index].allreduce_rounded([sums[index]], [residuals[index]], Abort(), "")

    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(reduced, range(len(ranks))))
    assert all(torch.equal(total, sums[0]) for total in sums)
    assert torch.equal(sums[0], sums[0].bfloat16().float())
    assert torch.equal(sums[0] + added(residuals), added(parts))


def test_bfloat16_on_a_transport_without_rounding_is_refused() -> None:
    with pytest.raises(TransportError, match=r"spec.collective.wire: BFloat16.*gloo.*hint: set"):
        make_transport("gloo", local=True, wire=Wire.BFLOAT16)
    kinds: list[type[Transport]] = [MpiTransport, GlooTransport, ShmTransport]
    assert [kind.name for kind in kinds if kind.rounds] == list(ROUNDING[:2])


@pytest.mark.parametrize("owned", [True, False], ids=["in place", "not in place"])
@pytest.mark.parametrize("places", ["abab", "abbab"])
def test_two_levels_round_once_per_slice(places: str, owned: bool) -> None:
    """Check that only the rank that has a slice rounds it, and nothing inside a machine."""
    hub, draw = Hub(), torch.Generator().manual_seed(1)
    ranks = [
        HierTransport(SharedMemory(), SimTransport(hub, f"r{i}"), place=place)
        for i, place in enumerate(places)
    ]
    numel = 700_001
    parts = [torch.randint(-(1 << 20), 1 << 20, (numel,), generator=draw).float() for _ in ranks]
    residuals = [torch.zeros_like(part) for part in parts]
    peers = tuple(Peer(f"r{i}", rank.address) for i, rank in enumerate(ranks))

    def reduced(index: int) -> torch.Tensor:
        rank = ranks[index]
        rank.open(Group("g", 1, peers, index), Abort(), 10.0)
        buffer = rank.zeros(numel, torch.float32, HOST) if owned else torch.zeros(numel)
        buffer.copy_(parts[index])
        rank.allreduce_rounded([buffer], [residuals[index]], Abort(), "")
        return buffer.clone()

    with ThreadPoolExecutor(len(ranks)) as threads:
        sums = list(threads.map(reduced, range(len(ranks))))
    assert all(torch.equal(total, sums[0]) for total in sums)
    assert torch.equal(sums[0], sums[0].bfloat16().float())
    assert torch.equal(sums[0] + added(residuals), added(parts))
    machines = machines_of([rank.address for rank in ranks])
    for slice_of in machines:
        kept = torch.stack([residuals[rank] != 0 for rank in slice_of])
        assert int(kept.sum(0).max()) == 1, "each slice has one rank of a machine"
        assert not any(residuals[rank].any() for rank in slice_of[2:]), "only two have slices"
    for rank in ranks:
        rank.shutdown()


def test_auto_with_bfloat16_offers_shared_memory_but_not_gloo() -> None:
    rank = make_transport("auto", local=True, wire=Wire.BFLOAT16)
    assert "shm=" in rank.address
    assert "left out.gloo" in rank.describe()
    rank.shutdown()
