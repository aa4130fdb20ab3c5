"""The sums of a past run, bit by bit, in one process (I15).

Floating-point sums depend on their order, and the order on what carried them. Over MPI it is known
from the schedule and is repeated with plain additions, and so is that of shared memory; gloo's own
is repeated by gloo, between process groups that all live here. Sums of two levels are not: which
rank was on which machine is in no journal.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

from paceline.core.collectives import shared
from paceline.core.collectives.schedules import ALGORITHMS, bounds, fold, schedule
from paceline.core.collectives.select import NATIVE, Method
from paceline.transport.mpi.lanes import PIECE_BYTES


class SumAgain:
    """Sums parts, one per rank of a group in rank order, as a method did."""

    def __init__(self) -> None:
        self._gloo: list[Any] = []
        self._device: Any = None

    def sum(self, method: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parts may be used up. ValueError for a method that cannot be repeated here."""
        did = Method.of(method)
        if did.transport == "mpi":
            if did.algorithm not in ALGORITHMS:
                raise ValueError(f"no algorithm {did.algorithm!r} over MPI")
            return _folded(did.algorithm, parts)
        if did == Method("shm"):
            return shared.fold(parts, torch.add)
        if did == Method("gloo", NATIVE):
            return self._by_gloo(parts)
        raise ValueError(f"sums over {did.transport} cannot be repeated in one process")

    def _by_gloo(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(self._gloo) != len(parts):
            self._gloo = self._connect(len(parts))
        works = [g.allreduce([part]) for g, part in zip(self._gloo, parts, strict=True)]
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
    """Piece by piece and chunk by chunk, as `mpi.lanes` cuts a buffer."""
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
