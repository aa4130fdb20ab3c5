"""torchft: a replica group per rank, its DDP over gloo, quorum and vote in every step.

The lighthouse is a process of its own. There is no bulk sum: it would be gloo's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Final

import torch
import torch.distributed as dist
from torchft import (  # type: ignore[import-not-found,unused-ignore]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.coordination import (  # type: ignore[import-not-found,unused-ignore]
    LighthouseServer,
)

from benchmarks.rivals.emulated import TorchTrainer
from benchmarks.rivals.rank import System

TIMEOUT: Final = timedelta(seconds=120)


class Lighthouse(System):
    """Server that sends the managers the list of replicas that take part."""

    serves = True

    def __init__(self, ranks: int) -> None:
        self.rank = self.ranks = ranks
        self._server = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=ranks, join_timeout_ms=60_000, quorum_tick_ms=50
        )
        port = self._server.address().rpartition(":")[2].rstrip("/")
        self.address = f"http://127.0.0.1:{port}"


class Replica(System):
    """Replica group of one rank."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def facts(self) -> dict[str, str]:
        """Return versions and settings of the system."""
        return {"torch": torch.__version__, "torchft-nightly": version("torchft-nightly")}

    def open(self, addresses: list[str]) -> None:
        """Note the lighthouse's address for the manager."""
        os.environ["TORCHFT_LIGHTHOUSE"] = addresses[-1]

    def trainer(self, tensors: Sequence[int]) -> TorchTrainer:
        """Return a loop with torchft's DDP and optimizer."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined,unused-ignore]
        manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=lambda _: None,
            state_dict=dict,
            min_replica_size=self.ranks,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            connect_timeout=TIMEOUT,
            replica_id=f"replica-{self.rank}",
            store_addr="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=1,
            hostname="127.0.0.1",
            init_sync=False,
        )

        def optimizer(inner: torch.optim.Optimizer, _: torch.nn.Module) -> Any:
            return Optimizer(manager, inner)

        return TorchTrainer(
            tensors, lambda model: DistributedDataParallel(manager, model), optimizer
        )


def make(_: list[str]) -> System:
    """Return the lighthouse or a replica, by the rank of this process."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["RIVALS_RANKS"])
    return Lighthouse(ranks) if rank == ranks else Replica(rank, ranks)
