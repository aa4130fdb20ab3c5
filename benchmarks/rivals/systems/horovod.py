"""Horovod over MPICH: its optimizer sums each tensor while backward runs.

A thread of Horovod checks every HOROVOD_CYCLE_TIME ms what is ready on all ranks. It packs that
into buffers of at most HOROVOD_FUSION_THRESHOLD bytes; 0 gives each tensor an MPI_Allreduce.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import horovod.torch as hvd  # type: ignore[import-not-found,unused-ignore]
import torch

from benchmarks.rivals.emulated import TorchTrainer
from benchmarks.rivals.rank import Array, System


class Horovod(System):
    """Rank of Horovod."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        hvd.init()
        self.rank, self.ranks = hvd.rank(), hvd.size()

    def facts(self) -> dict[str, str]:
        """Return versions and settings of the system."""
        versions = {name: version(name) for name in ("horovod", "torch", "mpich")}
        return {**versions, "cycle ms": os.environ["HOROVOD_CYCLE_TIME"]}

    def allreduce(self, buffer: Array) -> None:
        """Sum a buffer with hvd.allreduce_."""
        # Horovod caches only named tensors; a cached one needs no negotiation between the ranks.
        name = f"sum of {len(buffer)}"
        hvd.allreduce_(torch.from_numpy(buffer), name=name, op=hvd.Sum)

    def trainer(self, tensors: Sequence[int]) -> TorchTrainer:
        """Return a loop with Horovod's DistributedOptimizer."""

        def optimizer(inner: torch.optim.Optimizer, model: torch.nn.Module) -> Any:
            return hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())

        return TorchTrainer(tensors, lambda model: model, optimizer)

    def close(self) -> None:
        """Shut Horovod down."""
        hvd.shutdown()


def make(_: list[str]) -> System:
    """Return the system."""
    return Horovod()
