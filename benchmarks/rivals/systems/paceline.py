"""Paceline itself: a rank of a job, or, to sum a buffer, its transports without a job.

`paceline job` runs below `paceline run`; `paceline shm` and `paceline mpi` are one transport alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from paceline.core.collectives.schedules import HALVING_DOUBLING, RECURSIVE_DOUBLING

from benchmarks.rivals.emulated import TorchTrainer
from benchmarks.rivals.rank import Array, Device, System

if TYPE_CHECKING:
    from paceline.transport import base

SMALL_BYTES = 64 << 10
"""Size up to which the number of messages counts, not that of bytes; a job measures this when it
starts."""
OPEN_S = 60.0


class Job(System):
    """Main thread of a rank in a job, as a user's script is."""

    def __init__(self) -> None:
        import paceline

        paceline.init()
        self.rank, self.ranks = paceline.rank(), paceline.size()

    def facts(self) -> dict[str, str]:
        """Return versions and settings of the system."""
        return {"torch": torch.__version__}

    def trainer(self, tensors: Sequence[int]) -> JobTrainer:
        """Return a loop with pl.DistributedOptimizer."""
        import paceline

        return JobTrainer(tensors, lambda model: model, paceline.DistributedOptimizer)


class JobTrainer(TorchTrainer):
    """Training loop of a rank in a job."""

    def step(self) -> None:
        """Run one step; the optimizer resets the gradients."""
        self.wrapped(self._x).sum().backward()
        self.optimizer.step()

    def train(self, device: Device, steps: int) -> None:
        """Run until `steps` rounds are over, on every rank.

        A rank that was late takes fewer steps.
        """
        self.model.device = device
        session = self.optimizer._context.session  # noqa: SLF001
        until = session.version + steps
        while session.version < until:
            self.step()


class Transport(System):
    """One transport, used as the communication thread of a rank does."""

    def __init__(self, kind: str) -> None:
        from paceline.transport.base import Abort

        torch.set_num_threads(1)
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._kind = kind
        self._abort = Abort()
        if kind == "shm":
            from paceline.transport.shm.memory import SharedMemory
            from paceline.transport.shm.transport import ShmTransport

            self._transport: base.Transport = ShmTransport(SharedMemory(), native=True)
        else:
            from paceline.transport.mpi.transport import MpiTransport

            self._transport = MpiTransport(host="127.0.0.1", native=True)
        self.address = f"{os.getpid()} {self._transport.address}"

    def open(self, addresses: list[str]) -> None:
        """Open the group of all ranks."""
        from paceline.transport.base import Group, Peer

        peers = tuple(Peer(*text.split(" ", 1)) for text in addresses)
        self._transport.open(Group("rivals", 1, peers, self.rank), self._abort, OPEN_S)
        self._one = self.zeros(1)

    def zeros(self, elements: int) -> Array:
        """Return a buffer that lies where the gradients of a job lie."""
        zeros: Array = self._transport.zeros(elements, torch.float32, torch.device("cpu")).numpy()
        return zeros

    def allreduce(self, buffer: Array) -> None:
        """Sum a buffer with the algorithm that suits its size."""
        algorithm = "shm"
        if self._kind == "mpi":
            algorithm = RECURSIVE_DOUBLING if buffer.nbytes <= SMALL_BYTES else HALVING_DOUBLING
        self._transport.allreduce([torch.from_numpy(buffer)], self._abort, algorithm)

    def barrier(self) -> None:
        """Sum one element."""
        self.allreduce(self._one)


def make(words: list[str]) -> System:
    """Return the rank of a job, or the transport that the first argument names."""
    return Job() if words[0] == "job" else Transport(words[0])
