"""Sums with two levels: shared memory inside each machine, another transport between the machines.

The ranks of a machine sum in shared memory, one slice each. Then the l-th ranks of all machines sum
slice l over the other transport, side by side, and every rank copies the slices. So each byte
crosses the network once per machine instead of once per rank. The machine with the fewest ranks
sets the number of slices. Additional ranks on other machines contribute and copy, but have no
slice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from paceline.core.collectives.conduct import Conduct
from paceline.core.collectives.select import CLASS_BYTES, HIERARCHICAL, topology
from paceline.transport.base import HOST, Abort, Group, Peer, PeerLost, Stage, Transport
from paceline.transport.rendezvous import Deadline
from paceline.transport.shm.memory import SharedMemory
from paceline.transport.shm.plain_loop import Carry
from paceline.transport.shm.rendezvous import place_of
from paceline.transport.shm.transport import LocalSums

ADDRESSES = "|"
"""Separator between a rank's address on the machine and its address between machines."""


class HierTransport(Transport):
    """The transport of one rank. It alone uses `between`, which carries the slices."""

    sums_in_place: ClassVar[bool] = True

    def __init__(self, memory: SharedMemory, between: Transport, *, place: str = "") -> None:
        """Combine both levels.

        It raises TransportError if sums in shared memory do not work here.

        Args:
            memory: Memory of this rank, owned by the transport from now on.
            between: Transport between the machines, owned by this one from now on.
            place: Text that is equal on ranks that count as being on one machine. Empty: that of
                the machine.
        """
        self._sums = LocalSums(memory, place=place)
        self._between = between
        self.name = HIERARCHICAL + between.name  # type: ignore[misc]
        self.algorithms = between.algorithms  # type: ignore[misc]
        self.rounds = between.rounds  # type: ignore[misc]
        self._group: Group | None = None
        self._peers: Sequence[int] = ()
        """Ranks with the same slice, one per machine. Empty if this rank has no slice."""
        self._numbers: tuple[int, ...] = ()
        """Machine of each rank of the group."""

    @property
    def address(self) -> str:
        """Both addresses of this rank."""
        return f"{self._sums.address}{ADDRESSES}{self._between.address}"

    def begin(
        self, devices: Collection[torch.device], largest_bytes: int = CLASS_BYTES[-1]
    ) -> None:
        """Begin the transport between the machines."""
        self._between.begin(devices, largest_bytes)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer in shared memory, which is summed without a copy.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            device: Where the buffer lies. Memory of other devices is ordinary memory.

        Returns:
            A tensor of shape (numel,).
        """
        if device.type != HOST.type:
            return super().zeros(numel, dtype, device)
        return self._sums.memory.zeros(numel, dtype)

    def unfit(self, addresses: Sequence[str]) -> str:
        """Return the reason if the ranks do not form several machines with several ranks.

        Args:
            addresses: Address of each rank.

        Returns:
            The reason, or an empty text.
        """
        machines = machines_of(addresses)
        if len(machines) == 1:
            return f"{self.name} is for several machines, and all ranks are on one; shm is for that"
        if max(map(len, machines)) == 1:
            return (
                f"{self.name} is for several ranks on a machine, and each rank has one of its own"
            )
        return ""

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        """Wire the ranks of this machine, then those with the same slice on other machines.

        It raises PeerLost, with the rank in the whole group, if a rank cannot be reached, and
        TransportError if it fails in another way.

        Args:
            group: The members.
            abort: Ends the call when it is raised.
            timeout_s: Seconds after which it fails.
        """
        self.close()
        deadline = Deadline(abort, timeout_s)
        machines = machines_of([peer.address for peer in group.peers])
        parts = min(map(len, machines))
        own = next(ranks for ranks in machines if group.rank in ranks)
        place = own.index(group.rank)
        try:
            self._sums.open(_part(group, range(group.size), 0), own, deadline, parts)
            if place < parts:
                self._peers = [ranks[place] for ranks in machines]
                part = replace(_part(group, self._peers, 1), key=f"{group.key}/{place}")
                self._between.open(part, abort, max(deadline.left_s(), 0.0))
                self._sums.watch(
                    [(fd, self._peers[r]) for fd, r in self._between.peer_connections()]
                )
        except PeerLost as error:
            self.close()
            raise self._named(error) from error
        except BaseException:
            self.close()
            raise
        self._group, self._numbers = group, topology([machine_of(p.address) for p in group.peers])

    def allreduce(self, buffers: Sequence[torch.Tensor], abort: Abort, algorithm: str) -> None:
        """Sum the buffers one after the other, over both levels."""
        self._reduce(buffers, [None] * len(buffers), abort, algorithm)

    def allreduce_rounded(
        self,
        buffers: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,
    ) -> None:
        """Sum float32 buffers that travel as bfloat16 between machines: one rounding per slice."""
        self._reduce(buffers, residuals, abort, algorithm)

    def _reduce(
        self,
        buffers: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
        abort: Abort,
        algorithm: str,
    ) -> None:
        assert self._group is not None, "allreduce outside a group"

        def reduce(buffer: torch.Tensor, residual: torch.Tensor | None) -> None:
            def carry(part: torch.Tensor, at: int, stage: Stage) -> None:
                first = at // part.element_size()
                own = None if residual is None else residual[first : first + len(part)]
                try:
                    self._between.allreduce_staged(part, stage, abort, algorithm, own)
                except PeerLost as error:
                    raise self._named(error) from error

            carried: Carry | None = carry if max(self._numbers) else None
            self._sums.reduce(buffer, abort, carried)

        try:
            for pair in zip(buffers, residuals, strict=True):
                reduce(*pair)
        except BaseException:
            self._between.close()  # ranks that wait for this one there notice at once
            raise

    def _named(self, error: PeerLost) -> PeerLost:
        """Return the error with the rank's index in the whole group."""
        if error.rank is None or not self._peers:
            return error
        return PeerLost(str(error), self._peers[error.rank])

    def close(self) -> None:
        """Leave the group on both levels."""
        self._group, self._peers, self._numbers = None, (), ()
        self._sums.close()
        self._between.close()

    def shutdown(self) -> None:
        """Shut both levels down."""
        self.close()
        self._sums.shutdown()
        self._between.shutdown()

    def machines(self) -> tuple[int, ...]:
        """Return the machine of each rank of the present group."""
        return self._numbers

    def conducts(self) -> tuple[Conduct, ...]:
        """Return how the outer level sums, under this transport's name and with the machines."""
        [between] = self._between.conducts()
        why = self._sums.in_python or between.in_python
        own = replace(between, transport=self.name, machines=self._numbers, in_python=why)
        return (own,)

    def describe(self) -> dict[str, str]:
        """Return the loop, the number of machines and the facts of the outer transport."""
        between = {f"between.{key}": value for key, value in self._between.describe().items()}
        return {**self._sums.describe(), "machines": str(len(set(self._numbers))), **between}


def machines_of(addresses: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each machine, ascending.

    Machines are in the order of their first ranks.
    """
    by_machine: dict[str, list[int]] = {}
    for rank, address in enumerate(addresses):
        by_machine.setdefault(machine_of(address), []).append(rank)
    return list(by_machine.values())


def machine_of(address: str) -> str:
    """Return the machine's part of an address."""
    return place_of(address.partition(ADDRESSES)[0])


def _part(group: Group, ranks: Sequence[int], which: int) -> Group:
    """Return a group of these ranks with one of their two addresses."""
    peers = tuple(
        Peer(group.peers[rank].name, group.peers[rank].address.split(ADDRESSES)[which])
        for rank in ranks
    )
    return replace(group, peers=peers, rank=list(ranks).index(group.rank))
