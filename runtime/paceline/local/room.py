"""Capacity check: can this machine hold a job, as far as that is certain before the start?

Only known figures count: the limits of the kernel, and the least that the processes take. A job
that passes may still be too large, because nobody knows how large the script's model is.
"""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from paceline_api.errors import SpecError
from paceline_api.settings import ResolvedJob

from paceline.agent.launch import find_mpiexec, needs_mpi
from paceline.core.demand import local_processes, rank_files
from paceline.limits import (
    MIB,
    PORTS_TRIED,
    SPARE_FILES,
    LimitError,
    cgroup_limits,
    check_files,
    ensure_callers,
    figures_bytes,
    own_bytes,
)
from paceline.scratch import SHM

TRANSPORTS: Final = ("mpi", "gloo", "shm")
"""Transports that backend auto may use on one machine; nccl takes fewer files than gloo."""

MPI_SHM_BYTES: Final = 1_064_960
"""Bytes of shared memory that MPI_Init of MPICH takes for each rank. Measured with `statvfs` in
three ranks."""

LOOPBACK: Final = "127.0.0.1"
CONNECT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Limits of this machine for all processes of a run together."""

    processes: int
    memory_bytes: int
    own_bytes: int
    """Memory that this process holds. Each other process holds as much, because it loads the same
    interpreter; a rank loads torch and a model besides."""

    @classmethod
    def of_this_machine(cls) -> Self:
        """Read the limits of this machine and of its control group."""
        limits = [*cgroup_limits("pids.max"), int(Path("/proc/sys/kernel/pid_max").read_text())]
        allowed = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if allowed != resource.RLIM_INFINITY and os.geteuid() != 0:  # the kernel exempts root
            limits.append(allowed)
        memory = figures_bytes(Path("/proc/meminfo"), "MemTotal", "SwapTotal")
        return cls(min(limits), min([memory, *cgroup_limits("memory.max")]), own_bytes())


def check_room(job: ResolvedJob, replicas: int, room: MachineLimits) -> None:
    """Check that this machine can hold the processes of a job.

    A limit on open files that is too low raises LimitError as well.

    Args:
        job: The job.
        replicas: The largest number of replicas that the run will ask for.
        room: Limits of the machine.

    Raises:
        SpecError: There are too few ports for the metrics of all agents.
        LimitError: There would be too many processes, or too little memory.
    """
    procs = job.procs_per_replica * job.model
    ranks = replicas * procs
    backend = str(job.collective.backend)
    transports = TRANSPORTS if backend == "auto" else (backend,)
    what = f"{replicas} x {procs} ranks"
    fewer = "start fewer with --replicas, or set spec.procsPerReplica lower"
    check_files("each rank", rank_files(ranks, transports) + SPARE_FILES)
    ensure_callers("a rank", ranks - 1)
    if job.metrics_port and replicas > PORTS_TRIED + 1:
        raise SpecError(
            "spec.metrics.port",
            job.metrics_port,
            f"leaves {PORTS_TRIED + 1} ports for the agents of {replicas} replicas",
            hint="set it to 0 and each agent takes any free port",
        )
    mpi = needs_mpi(backend, find_mpiexec())
    processes = local_processes(ranks, replicas, mpi=mpi)
    if processes > room.processes:
        raise LimitError(
            f"{what} are {processes} processes on this machine, and it allows {room.processes} "
            "(ulimit -u, pids.max of the control group, kernel.pid_max)",
            hint=f"allow more; or {fewer}",
        )
    # mpiexec, its proxy and the guard are not counted, because they are small.
    bytes_min = local_processes(ranks, replicas, mpi=False) * room.own_bytes
    if bytes_min > room.memory_bytes:
        raise LimitError(
            f"{what} take {bytes_min // MIB} MiB of memory at least, without torch and any model, "
            f"and this machine has {room.memory_bytes // MIB} MiB, swap included",
            hint=fewer,
        )


def shared_memory_bytes() -> int:
    """Return the free bytes of /dev/shm; a very large number if that is unknown."""
    try:
        disk = os.statvfs(SHM)
    except OSError:
        return 1 << 62
    return disk.f_bavail * disk.f_frsize


def check_shared_memory(job: ResolvedJob, replicas: int, free_bytes: int) -> None:
    """Check that /dev/shm can hold what MPI puts there for each rank.

    A write beyond the end of /dev/shm is not an error: SIGBUS kills the process. What loaders with
    workers put there depends on the data, so it cannot be checked before the start.

    Raises:
        LimitError: Too little is free.
    """
    ranks = replicas * job.procs_per_replica * job.model
    needed = ranks * MPI_SHM_BYTES
    if needs_mpi(str(job.collective.backend), find_mpiexec()) and needed > free_bytes:
        raise LimitError(
            f"MPI takes {needed / MIB:.1f} MiB of shared memory for {ranks} ranks, and {SHM} has "
            f"{free_bytes / MIB:.1f} MiB free",
            hint="enlarge it (docker run --shm-size=1g; mount -o remount,size=1g /dev/shm), or set "
            "collective.backend to gloo",
        )


def check_loopback() -> None:
    """Check that processes of this machine can reach each other by 127.0.0.1.

    Raises:
        LimitError: They cannot.
    """
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), CONNECT_S),
        ):
            return
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise LimitError(
            f"the loopback interface of this machine does not work: no connection to {LOOPBACK}: "
            f"{reason}",
            hint="bring it up with `ip link set lo up`; in a container, see its network settings",
        ) from None
