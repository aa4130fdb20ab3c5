"""Repeats the sums of a past run in one process, bit by bit (I15).

A floating-point sum depends on the order of the additions, and the order on the transport. For MPI
the schedule gives the order, so plain additions repeat it. The same holds for shared memory. gloo's
order is repeated by gloo itself, between process groups that all live in this process. Sums with
two levels are made of these.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

from paceline.core.collectives import shared
from paceline.core.collectives.schedules import ALGORITHMS, bounds, fold, schedule
from paceline.core.collectives.select import HIERARCHICAL, Method
from paceline.transport.mpi.lanes import PIECE_BYTES
from paceline.transport.torch.gloo import STAGE_BYTES

GLOO: Final = Method("gloo")


class SumAgain:
    """Sums parts, one for each rank of a group in rank order, in the order that a method used."""

    def __init__(self) -> None:
        self._gloo: dict[int, list[Any]] = {}
        """gloo process groups by number of ranks: one for each rank, all in this process."""
        self._device: Any = None

    def sum(
        self, method: str, parts: Sequence[torch.Tensor], machines: Sequence[int] = ()
    ) -> torch.Tensor:
        """Return the sum of the parts with the bits that a method gave.

        Args:
            method: Name of a candidate, such as `mpi:ring` or `gloo` (`core.collectives.select`).
            parts: Flat tensors of equal size and dtype, one for each rank in rank order. They may
                be overwritten.
            machines: Machine of each rank, for a method with two levels.

        Returns:
            A flat tensor of the parts' size. It may be one of the parts.

        Raises:
            ValueError: The method cannot be repeated in one process.
        """
        if method.startswith(HIERARCHICAL):
            return self._by_levels(method.removeprefix(HIERARCHICAL), parts, machines)
        did = Method.of(method)
        if did.transport == "mpi":
            if did.algorithm not in ALGORITHMS:
                raise ValueError(f"no algorithm {did.algorithm!r} over MPI")
            return _folded(did.algorithm, parts)
        if did == Method("shm"):
            return shared.fold(parts, torch.add)
        if did == GLOO:
            return self._by_gloo(parts)
        raise ValueError(f"sums over {did.transport} cannot be repeated in one process")

    def _by_levels(
        self, method: str, parts: Sequence[torch.Tensor], machines: Sequence[int]
    ) -> torch.Tensor:
        """Return a sum with two levels: each slice inside the machines first, then between them.

        The order is that of buffers in shared memory, which gradients lie in.

        Args:
            method: Candidate that sums between the machines.
            parts: Flat tensors, one for each rank.
            machines: Machine of each rank.

        Returns:
            A flat tensor of the parts' size.

        Raises:
            ValueError: The journals do not place every rank on a machine.
        """
        if len(machines) != len(parts):
            raise ValueError(
                f"of {len(parts)} ranks the journals place {len(machines)} on a machine"
            )
        inside = [
            [part for part, on in zip(parts, machines, strict=True) if on == machine]
            for machine in range(max(machines) + 1)
        ]
        if len(inside) == 1:
            return shared.fold(parts, torch.add)
        total = torch.empty_like(parts[0])
        at = shared.slices(0, total.nbytes, min(map(len, inside)))
        for low, high in pairwise(edge // total.element_size() for edge in at):
            own = [shared.fold([part[low:high] for part in there], torch.add) for there in inside]
            # gloo sums each piece of a staged buffer separately; mpi cuts the whole by itself.
            length = max(1, high - low)
            if Method.of(method) == GLOO:
                length = STAGE_BYTES // total.element_size()
            for start in range(0, high - low, length):
                pieces = [slice_[start : start + length] for slice_ in own]
                total[low + start : low + start + len(pieces[0])] = self.sum(method, pieces)
        return total

    def _by_gloo(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(parts) not in self._gloo:
            self._gloo[len(parts)] = self._connect(len(parts))
        groups = self._gloo[len(parts)]
        works = [g.allreduce([part]) for g, part in zip(groups, parts, strict=True)]
        for work in works:
            work.wait()
        return parts[0]

    def _connect(self, size: int) -> list[Any]:
        self._device = self._device or ProcessGroupGloo.create_device(hostname="127.0.0.1")
        store, made = HashStore(), [None] * size

        def connect(rank: int) -> None:
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
            options._devices = [self._device]  # noqa: SLF001
            options._threads = 1  # noqa: SLF001
            made[rank] = ProcessGroupGloo(store, rank, size, options)  # type: ignore[call-overload]

        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made


def _folded(algorithm: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum piece by piece and chunk by chunk, as `mpi.lanes` cuts a buffer."""
    total = torch.empty_like(parts[0])
    chunks = schedule(algorithm, len(parts), 0).chunks
    length = PIECE_BYTES // total.element_size()
    for low in range(0, total.numel(), length):
        at = bounds(min(length, total.numel() - low), chunks)
        for chunk in range(chunks):
            start, end = low + at[chunk], low + at[chunk + 1]
            pieces = [part[start:end] for part in parts]
            total[start:end] = fold(algorithm, pieces, chunk, torch.add)
    return total
