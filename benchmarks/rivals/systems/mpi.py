"""An MPI library through mpi4py: one MPI_Allreduce of the whole gradient after backward.

The environment decides which library it is: MPICH, Open MPI or Intel MPI.
"""

from __future__ import annotations

import os

import mpi4py

# This is the fastest level where each rank has a core. Where cores are shared, MPICH yields
# while it waits only with several threads.
mpi4py.rc.thread_level = "multiple" if os.environ["RIVALS_CORES_SHARED"] == "1" else "single"

from mpi4py import MPI  # noqa: E402

from benchmarks.rivals.rank import Array, System  # noqa: E402


class Mpi(System):
    """Rank of MPI's world."""

    def __init__(self) -> None:
        self.world = MPI.COMM_WORLD
        self.rank, self.ranks = self.world.Get_rank(), self.world.Get_size()

    def facts(self) -> dict[str, str]:
        """Return versions and settings of the system."""
        return {"library": " ".join(MPI.Get_library_version().split("\n", 1)[0].split())}

    def allreduce(self, buffer: Array) -> None:
        """Sum a buffer with MPI_Allreduce."""
        self.world.Allreduce(MPI.IN_PLACE, buffer)

    def barrier(self) -> None:
        """Wait for all ranks with MPI_Barrier."""
        self.world.Barrier()

    def close(self) -> None:
        """Finalize MPI."""
        MPI.Finalize()  # otherwise its shared memory would stay


def make(_: list[str]) -> System:
    """Return the system."""
    return Mpi()
