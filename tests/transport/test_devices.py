"""The device of the gradients decides the transport; unreachable memory is staged on the host.

No GPU is needed: devices are names, and stand-ins define what a transport reaches.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from paceline.core.collectives.select import NATIVE
from paceline.transport.base import (
    Abort,
    Group,
    Peer,
    Transport,
    TransportAborted,
    TransportError,
)
from paceline.transport.factory import make_transport
from paceline.transport.selected import SelectedTransport
from paceline.transport.staging import Staging
from paceline.transport.torch.nccl import only_device, shared_device

from testing.memory_transport import Hub, SimTransport
from tests.transport.harness import FarTransport

CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
ABORT = Abort()


class HostTransport(SimTransport):
    name = "mpi"


class GpuTransport(SimTransport):
    """Stands in for nccl without a GPU; `card` identifies the GPU that this rank would use."""

    name = "nccl"

    def __init__(self, hub: Hub, own_name: str, card: str) -> None:
        super().__init__(hub, own_name)
        self._card = card
        self.ended = False
        self.broken = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:1/{self._card}"

    def begin(self, devices: Collection[torch.device], largest_bytes: int = 0) -> None:  # noqa: ARG002
        only_device(devices)

    def moves(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def unfit(self, addresses: Sequence[str]) -> str:
        return shared_device(addresses)

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        super().open(group, abort, timeout_s)
        if self.broken:
            raise TransportError("no connection out of this container")

    def shutdown(self) -> None:
        super().shutdown()
        self.ended = True


class CardlessTransport(SelectedTransport):
    """A selected transport whose votes lie on the host, because there is no GPU."""

    def _device_for(self, transport: Transport) -> torch.device:  # noqa: ARG002
        return CPU


class Crew:
    """Ranks with both transports, each with its parameters on some device and with a card."""

    def __init__(self, *ranks: tuple[torch.device, str]) -> None:
        hubs = Hub(), Hub()
        self.gpu = [GpuTransport(hubs[1], f"r{i}", card) for i, (_, card) in enumerate(ranks)]
        self.ranks = [
            CardlessTransport([HostTransport(hubs[0], f"r{i}"), gpu], {})
            for i, gpu in enumerate(self.gpu)
        ]
        for rank, (device, _) in zip(self.ranks, ranks, strict=True):
            rank.begin([device])
        self.open(1)

    def open(self, number: int) -> None:
        peers = tuple(Peer(f"r{i}", rank.address) for i, rank in enumerate(self.ranks))
        with ThreadPoolExecutor(len(peers)) as pool:
            groups = [Group(f"g{number}", number, peers, i) for i in range(len(peers))]
            opened = [
                pool.submit(rank.open, group, ABORT, 10.0)
                for rank, group in zip(self.ranks, groups, strict=True)
            ]
            for future in opened:
                future.result()

    def chosen(self) -> set[str]:
        return {method.transport for rank in self.ranks for method in rank.methods()}

    def close(self) -> None:
        for rank in self.ranks:
            rank.shutdown()


@pytest.fixture
def crews() -> Iterator[list[Crew]]:
    made: list[Crew] = []
    yield made
    for crew in made:
        crew.close()


@pytest.mark.parametrize(
    ("ranks", "want"),
    [
        ([(GPU, "a"), (GPU, "b")], "nccl"),
        ([(GPU, "a"), (OTHER, "b"), (GPU, "c")], "nccl"),
        ([(GPU, "a"), (GPU, "a")], "mpi"),
        ([(GPU, "a"), (CPU, "b")], "mpi"),
        ([(CPU, "a"), (CPU, "b")], "mpi"),
    ],
    ids=["own GPUs", "three of them", "a shared GPU", "one on the host", "all on the host"],
)
def test_nccl_is_chosen_if_each_rank_has_its_own_gpu(
    crews: list[Crew], ranks: list[tuple[torch.device, str]], want: str
) -> None:
    crew = Crew(*ranks)
    crews.append(crew)
    assert crew.chosen() == {want}


def test_the_reason_for_leaving_out_nccl_is_reported(crews: list[Crew]) -> None:
    crews += [Crew((GPU, "a"), (GPU, "a")), Crew((CPU, "a"), (GPU, "b"))]
    shared, mixed = crews
    assert "ranks 0 and 1 share a; hint:" in shared.ranks[1].describe()["left out.nccl"]
    assert "the parameters are on cpu; hint:" in mixed.ranks[0].describe()["left out.nccl"]
    first, second = shared.ranks[1].reasons()
    assert first == "mpi is the only candidate"
    assert second.startswith("nccl is left out: "), second
    assert mixed.gpu[0].ended, "its port is given back"
    assert "rank 0 cannot use nccl" in mixed.ranks[1].describe()["left out.nccl"]


@pytest.mark.long
def test_if_one_rank_cannot_connect_nccl_all_use_host_memory(crews: list[Crew]) -> None:
    crew = Crew((GPU, "a"), (OTHER, "b"), (GPU, "c"))
    crews.append(crew)
    crew.gpu[1].broken = True
    crew.open(2)
    assert crew.chosen() == {"mpi"}
    reasons = {rank.describe()["left out.nccl"] for rank in crew.ranks}
    assert any("no connection out of this container" in why for why in reasons)


def test_a_forced_nccl_is_refused_when_training_begins_without_one_gpu() -> None:
    transport = SelectedTransport([GpuTransport(Hub(), "r0", "a")], {})
    with pytest.raises(TransportError, match=r"one GPU per rank.*are on cpu; hint: move the model"):
        transport.begin([CPU])
    with pytest.raises(TransportError, match=r"are on cuda:0, cuda:1"):
        transport.begin([OTHER, GPU])


def test_ranks_that_share_a_gpu_cannot_use_nccl_alone() -> None:
    rank = SelectedTransport([GpuTransport(Hub(), "r0", "a")], {})
    rank.begin([GPU])
    peers = (Peer("r0", rank.address), Peer("r1", rank.address))
    with pytest.raises(TransportError, match=r"no data channel in common: .*share a; hint"):
        rank.open(Group("g", 1, peers, 0), ABORT, 1.0)


def test_auto_leaves_out_nccl_without_a_gpu() -> None:
    transport = make_transport("auto", local=True)
    transport.begin([GPU])  # gloo moves it through host memory
    assert "nccl=" not in transport.address
    assert "left out.nccl" in transport.describe()
    assert transport.moves(GPU)
    transport.shutdown()


def test_unreachable_memory_is_staged_on_the_host_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = SelectedTransport([FarTransport(Hub(), "r0")], {})
    rank.open(Group("g", 1, (Peer("r0", rank.address),), 0), ABORT, 1.0)
    with caplog.at_level(logging.WARNING, "paceline.rank"):
        for _ in range(3):
            rank.allreduce([torch.ones(3)], ABORT, NATIVE)
    (message,) = caplog.messages
    assert "sim does not reach the memory of cpu: gradients go through host memory" in message
    assert rank.describe()["through host memory"] == "cpu"
    rank.shutdown()


def test_host_buffers_are_reused_unless_a_call_was_abandoned() -> None:
    """Check promise 3: memory that an abandoned reduction may still write to is never reused."""
    staging, pointers = Staging(), []

    def double(buffers: Sequence[torch.Tensor]) -> None:
        pointers.append([buffer.data_ptr() for buffer in buffers])
        for buffer in buffers:
            buffer.mul_(2)

    left: list[torch.Tensor] = []

    def give_up(buffers: Sequence[torch.Tensor]) -> None:
        left.extend(buffers)
        raise TransportAborted("abandoned")

    far = [torch.ones(5), torch.arange(3), torch.zeros(0)]
    staging.reduce(double, [far], ABORT)
    staging.reduce(double, [far], ABORT)
    assert [buffer.tolist() for buffer in far] == [[4.0] * 5, [0, 4, 8], []]
    assert pointers[0][:2] == pointers[1][:2]
    assert not {buffer.data_ptr() for buffer in far[:2]} & set(pointers[0])

    with pytest.raises(TransportAborted):
        staging.reduce(give_up, [far], ABORT)
    staging.reduce(double, [far], ABORT)
    for buffer in left:
        buffer.fill_(99)  # a late write
    staging.reduce(double, [far], ABORT)
    assert far[0].tolist() == [16.0] * 5
    assert not {buffer.data_ptr() for buffer in left[:2]} & set(pointers[-1])


def test_host_buffers_follow_the_shapes_and_dtypes_of_the_reduction() -> None:
    staging = Staging()

    def fill(buffers: Sequence[torch.Tensor]) -> None:
        for buffer in buffers:
            buffer.fill_(7)

    for shapes in [((4,), torch.float32)], [((4,), torch.int64)], [((9,), torch.int64)] * 2:
        far = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]
        staging.reduce(fill, [far], ABORT)
        assert all(buffer.tolist() == [7] * buffer.numel() for buffer in far)
