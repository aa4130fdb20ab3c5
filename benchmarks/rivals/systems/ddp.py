"""torch DDP on gloo, with its default buckets; a bulk sum is one dist.all_reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rivals.emulated import TorchTrainer
from benchmarks.rivals.rank import Array, System


class Ddp(System):
    """Rank of torch.distributed with DDP."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def facts(self) -> dict[str, str]:
        """Return versions and settings of the system."""
        return {"torch": torch.__version__}

    def allreduce(self, buffer: Array) -> None:
        """Sum a buffer with dist.all_reduce."""
        dist.all_reduce(torch.from_numpy(buffer))

    def trainer(self, tensors: Sequence[int]) -> TorchTrainer:
        """Return a loop whose model DDP wraps."""
        return TorchTrainer(
            tensors, lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True)
        )


def make(_: list[str]) -> System:
    """Return the system."""
    return Ddp()
