"""Checks on ranks with a GPU each: wiring, bandwidth beside torch's own call, and a loss.

Each rank is a process that follows orders through a pipe. On the host, gloo stands in for NCCL.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, Final

import torch
from paceline.core.collectives.select import NATIVE
from paceline.transport.base import Abort, Group, Peer, TransportError
from paceline.transport.rendezvous import Deadline
from paceline.transport.torch.process_groups import TorchDistTransport

from benchmarks.gpu.device import MIB, seconds, settle
from benchmarks.harness import Bar, Report, middle, share

HOST: Final = "127.0.0.1"
OPEN_S: Final = 60.0
ANSWER_S: Final = 120.0
BESIDE_TORCH: Final = 0.97
LOSS_MIB: Final = 4
SEGMENT_MIB: Final = 4


class _Rank:
    """Rank inside its process; its public methods are the orders."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.transport = _make(device)
        self.transport.begin([device])
        self.group: Group | None = None

    def address(self) -> str:
        """Return the address of the transport."""
        return self.transport.address

    def open(self, number: int, addresses: Sequence[str], rank: int) -> float:
        """Return the seconds to wire a group and to compare the bits of its sums."""
        peers = tuple(Peer(str(index), where) for index, where in enumerate(addresses))
        self.group = Group(f"g{number}", number, peers, rank)
        begun = perf_counter()
        self.transport.open(self.group, Abort(), OPEN_S)
        return perf_counter() - begun

    def wire(self, number: int, addresses: Sequence[str], rank: int) -> tuple[float, float]:
        """Return the seconds of torch alone to make a group and to abort it."""
        peers = tuple(Peer(str(index), where) for index, where in enumerate(addresses))
        begun = perf_counter()
        group = Group(f"w{number}", number, peers, rank)
        made = self.transport._connect(group, Deadline(Abort(), OPEN_S))  # noqa: SLF001
        made = self.transport._adopt(made)  # noqa: SLF001
        wired = perf_counter()
        if self.device.type == "cuda":
            made.abort()
        del made
        return wired - begun, perf_counter() - wired

    def time(self, mib: int, rounds: int) -> tuple[float, float]:
        """Return the seconds of a reduction: Paceline's, and the library's through torch alone."""
        buffer = torch.ones(mib * MIB // 4, device=self.device)
        group = self.transport._process_group  # noqa: SLF001
        ours, theirs = [], []

        def alone() -> None:
            group.allreduce([buffer]).wait()

        for _ in range(rounds):
            buffer.fill_(1)
            ours.append(seconds(self.device, lambda: self._sum(buffer), 1))
            buffer.fill_(1)
            theirs.append(seconds(self.device, alone, 1))
        return middle(ours), middle(theirs)

    def _sum(self, buffer: torch.Tensor) -> None:
        self.transport.allreduce([buffer], Abort(), NATIVE)

    def in_turn(self, segments: int, rounds: int) -> tuple[float, float, bool]:
        """Time several reductions, one after the other and in turn.

        In the first form, each is waited for before the next one begins. In the second form, they
        run as in a round that is not streamed.

        Args:
            segments: Number of reductions.
            rounds: Number of repetitions.

        Returns:
            Seconds of both forms, and True if the bits are the same.
        """
        assert self.group is not None, "a group first"
        generator = torch.Generator().manual_seed(self.group.rank)
        given = torch.randn(SEGMENT_MIB * MIB // 4, generator=generator).to(self.device)
        single, several = ([given.clone() for _ in range(segments)] for _ in range(2))
        alone, together, alike = [], [], True

        def each() -> None:
            for segment in single:
                self._sum(segment)

        def all_of_them() -> None:
            self.transport.allreduce_in_turn(several, Abort(), NATIVE, lambda: None)

        for _ in range(rounds):
            for segment in (*single, *several):
                segment.copy_(given)
            alone.append(seconds(self.device, each, 1))
            together.append(seconds(self.device, all_of_them, 1))
            alike &= all(map(torch.equal, single, several))
        return middle(alone), middle(together), alike

    def sums(self) -> str:
        """Return which implementation sums."""
        return self.transport.describe()["sums"]

    def until_lost(self) -> float:
        """Reduce until a rank is gone; return the seconds from the last sum to the error."""
        buffer = torch.ones(LOSS_MIB * MIB // 4, device=self.device)
        last = perf_counter()
        abort = Abort()
        try:
            while True:
                last = perf_counter()
                self.transport.allreduce([buffer], abort, NATIVE)
        except TransportError:
            return perf_counter() - last

    def die(self) -> None:
        """End the process at once."""
        settle(self.device)
        os._exit(9)


def _make(device: torch.device) -> TorchDistTransport:
    if device.type == "cuda":
        from paceline.transport.torch.nccl import NcclTransport

        return NcclTransport(host=HOST, local=True)
    from paceline.transport.torch.gloo import GlooTransport

    return GlooTransport(host=HOST)


def _serve(orders: Connection, device: str) -> None:
    rank = _Rank(torch.device(device))
    while (order := orders.recv()) is not None:
        name, arguments = order
        try:
            orders.send(getattr(rank, name)(*arguments))
        except Exception as error:  # the caller raises it
            orders.send(error)


class Crew:
    """Ranks of one machine, in order."""

    def __init__(self, places: Sequence[torch.device]) -> None:
        context = multiprocessing.get_context("spawn")
        self.orders: list[Connection] = []
        self.processes = []
        for place in places:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, str(place)), daemon=True)
            process.start()
            there.close()
            self.orders.append(here)
            self.processes.append(process)
        self.addresses: list[str] = self.all("address")

    @property
    def size(self) -> int:
        """World size."""
        return len(self.orders)

    def tell(self, rank: int, name: str, *arguments: Any) -> None:
        """Send an order to a rank."""
        self.orders[rank].send((name, arguments))

    def answer(self, rank: int) -> Any:
        """Return the answer of a rank.

        The exception of a failed order is raised here.

        Args:
            rank: Rank to wait for.

        Returns:
            Return value of the order.

        Raises:
            TimeoutError: The rank has not answered within ANSWER_S.
        """
        if not self.orders[rank].poll(ANSWER_S):
            raise TimeoutError(f"rank {rank} has not answered for {ANSWER_S:.0f} s")
        answer = self.orders[rank].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def all(self, name: str, *arguments: Any) -> list[Any]:
        """Send the same order to all ranks and return their answers."""
        return self.each(range(len(self.orders)), lambda _: (name, *arguments))

    def each(self, ranks: Sequence[int], order: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        """Send an order to each rank before waiting for the first answer; return the answers."""
        for index, rank in enumerate(ranks):
            self.tell(rank, *order(index))
        return [self.answer(rank) for rank in ranks]

    def group(self, name: str, number: int, ranks: Sequence[int]) -> list[Any]:
        """Send an order with a new group of these ranks to each of them; return the answers."""
        addresses = [self.addresses[rank] for rank in ranks]
        return self.each(ranks, lambda index: (name, number, addresses, index))

    def end(self) -> None:
        """Kill all ranks."""
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def crew(places: Sequence[torch.device]) -> Iterator[Crew]:
    """Start a rank on each device; all are killed after the context."""
    made = Crew(places)
    try:
        yield made
    finally:
        made.end()


def wiring(ranks: Crew, *, smoke: bool) -> Report:
    """Make and abort a group again and again.

    This is what a change of membership pays to the library.

    Returns:
        The report.
    """
    times = 3 if smoke else 100
    columns = ("ranks", "times", "wire ms", "p95", "give up ms", "p95 ")
    report = Report("gpu_wiring", "A group made anew", columns)
    taken = [ranks.group("wire", number, range(ranks.size)) for number in range(times)]
    wired = [1e3 * max(each[0] for each in turn) for turn in taken]
    left = [1e3 * max(each[1] for each in turn) for turn in taken]
    report.rows.append(
        (ranks.size, times, middle(wired), share(wired, 0.95), middle(left), share(left, 0.95))
    )
    report.checks[f"{times} groups one after the other"] = len(taken) == times
    return report


def bandwidth(ranks: Crew, *, smoke: bool) -> Report:
    """Measure Paceline's reduction beside the library's own through torch, interleaved."""
    columns = ("ranks", "MiB", "Paceline GB/s", "torch GB/s", "share")
    report = Report("gpu_bandwidth", "One reduction, by bytes on the busiest link", columns)
    factor = 2 * (ranks.size - 1) / ranks.size
    ranks.group("open", 1, range(ranks.size))
    for mib in (1, 4) if smoke else (1, 4, 16, 64, 256):
        taken = ranks.all("time", mib, 2 if smoke else 10)
        slowest = [max(each) for each in zip(*taken, strict=True)]
        ours, theirs = (factor * mib * MIB / each / 1e9 for each in slowest)
        report.rows.append((ranks.size, mib, ours, theirs, ours / theirs))
    answers = ranks.all("sums")
    report.notes.append(f"sums by: {answers[0]}")
    report.checks["all ranks sum alike"] = len(set(answers)) == 1
    report.bars = [Bar("share of torch's own, largest size", report.rows[-1][-1], BESIDE_TORCH)]
    return report


def in_turn(ranks: Crew, *, smoke: bool) -> Report:
    """Measure what a round pays for the pauses between its segments."""
    columns = ("ranks", "segments", "one after the other ms", "several under way ms", "gain")
    report = Report("gpu_in_turn", f"Segments of {SEGMENT_MIB} MiB", columns)
    ranks.group("open", 4, range(ranks.size))
    for segments in (2,) if smoke else (4, 16, 64):
        taken = ranks.all("in_turn", segments, 2 if smoke else 10)
        alone, together, _ = (max(each) for each in zip(*taken, strict=True))
        report.rows.append((ranks.size, segments, 1e3 * alone, 1e3 * together, alone / together))
        report.checks[f"{segments} segments: the same bits"] = all(each[2] for each in taken)
    return report


def loss(ranks: Crew) -> Report:
    """Kill the last rank between two reductions.

    The others notice, and wire a group without it.

    Returns:
        The report.
    """
    report = Report("gpu_loss", "A rank dies", ("survivors", "noticed ms", "wired anew ms"))
    survivors = range(ranks.size - 1)
    ranks.group("open", 2, range(ranks.size))
    for rank in survivors:
        ranks.tell(rank, "until_lost")
    ranks.tell(ranks.size - 1, "die")
    noticed = [ranks.answer(rank) for rank in survivors]
    wired = ranks.group("open", 3, survivors)
    answers = ranks.each(survivors, lambda _: ("sums",))
    report.rows.append((len(survivors), 1e3 * max(noticed), 1e3 * max(wired)))
    report.checks["the survivors have a group"] = len(answers) == len(survivors)
    report.notes.append("in a job the abort flag ends the wait: the agent sees the death at once")
    return report
