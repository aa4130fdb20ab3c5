"""DeepSpeed's shared memory between ranks of a machine: one sum of everything after backward.

The operator, which was compiled with the environment, is made for inference, so nothing of
DeepSpeed's training stands around it.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "extensions")

import torch
import torch.distributed as dist
from deepspeed.ops.op_builder import (  # type: ignore[import-not-found,unused-ignore]
    ShareMemCommBuilder,
)

from benchmarks.rivals.rank import Array, System


class SharedMemory(System):
    """Rank that sums with DeepSpeed's shared-memory operator."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo")
        ShareMemCommBuilder().load().initialize(self.ranks, self.rank)
        dist.barrier()  # all ranks have mapped it; the operator would leave 66 MiB behind
        place = f"{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
        Path(f"/dev/shm/deepspeed_allreduce_buffer_{place}_{self.rank}").unlink()

    def facts(self) -> dict[str, str]:
        """Return versions and settings of the system."""
        return {"deepspeed": version("deepspeed"), "torch": torch.__version__}

    def allreduce(self, buffer: Array) -> None:
        """Sum a buffer with the operator."""
        torch.ops.deepspeed.inference_all_reduce_(torch.from_numpy(buffer))


def make(_: list[str]) -> System:
    """Return the system."""
    return SharedMemory()
