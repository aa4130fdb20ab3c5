"""The rivals: what each needs, how its processes are started, and the bytes it should carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from paceline.worker.state.flat import SEGMENT_BYTES

from benchmarks.rivals.environments import Environment


class Launch(Enum):
    """Ways to start the processes of a rival."""

    EACH = auto()
    """Each process by itself, with the environment variables that torchrun would give it."""
    WORLDS = auto()
    """Each process by itself as in EACH, but in an MPI world of its own."""
    MPIEXEC = auto()
    """All processes in one MPI world."""
    JOB = auto()
    """Ranks of a job that `paceline run` starts."""


@dataclass(frozen=True)
class Rival:
    """One row of the table."""

    name: str
    system: tuple[str, ...]
    """Module in `systems`, and its arguments."""
    environment: Environment | None
    """Environment of the rival; None uses that of the checkout."""
    launch: Launch
    carries: Callable[[int], float]
    """Function from P to the bytes that a rank sends per byte of gradients, if the rival follows
    its algorithm."""
    env: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    mpiexec: tuple[str, ...] = field(default=(), kw_only=True)
    servers: int = field(default=0, kw_only=True)
    """Number of processes beside the ranks."""
    bulk: bool = field(default=True, kw_only=True)
    trains: bool = field(default=True, kw_only=True)
    partial: bool = field(default=False, kw_only=True)
    """True if a round may end without some gradients, which come in a later one."""
    collective: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Collective settings of Paceline's job."""


def ring(ranks: int) -> float:
    """Return what an allreduce that moves the fewest bytes sends per rank and byte of gradients."""
    return 2 * (ranks - 1) / ranks


def server(_: int) -> float:
    """Return what a parameter server sends and receives per rank and byte of gradients.

    A rank sends its gradient and receives weights, so 2PS bytes pass the server for gradients of S.

    Returns:
        2, for every P.
    """
    return 2.0


MPICH, OPENMPI, INTEL, TORCH, GRPC, TORCHFT, DEEPSPEED, HOROVOD, TENSORFLOW = map(
    Environment.read,
    (
        *("mpich", "openmpi", "intel-mpi", "torch", "grpc", "torchft", "deepspeed", "horovod"),
        "tensorflow",
    ),
)
QUORUM: Final = {"mode": "Quorum", "quorum": "75%"}
UNSTREAMED: Final = {"overlap": "Never"}


def _job(name: str, **collective: Any) -> Rival:
    # The device is emulated, so a job would choose the segments of a CPU model.
    as_on_a_device = {"segmentBytes": SEGMENT_BYTES}
    mode = {"backend": "auto", "mode": "Full", **as_on_a_device, **collective}
    return Rival(
        *(f"Paceline {name}", ("paceline", "job"), None, Launch.JOB, ring),
        bulk=False,
        partial=mode["mode"] != "Full",
        collective=mode,
    )


def _transport(kind: str) -> Rival:
    return Rival(
        *(f"Paceline's {kind}", ("paceline", kind), None, Launch.WORLDS, ring), trains=False
    )


def _horovod(name: str, **env: str) -> Rival:
    return Rival(
        *(name, ("horovod",), HOROVOD, Launch.MPIEXEC, ring),
        env={"HOROVOD_CYCLE_TIME": "1", **env},
    )


def _alone(name: str, loop: str) -> Rival:
    words = ("alone", loop)
    return Rival(name, words, TORCH, Launch.EACH, lambda _: 0.0, bulk=False)


ALL: Final = (
    _alone("limit: torch's loop, no sum", "torch"),
    _alone("limit: bare loop, no sum", "bare"),
    _transport("shm"),
    _transport("mpi"),
    _job("Full"),
    _job("Full, not streamed", **UNSTREAMED),
    _job("Quorum(75%)", **QUORUM),
    _job("Quorum(75%), not streamed", **QUORUM, **UNSTREAMED),
    _job("Full over TCP", backend="mpi"),
    Rival("DDP + gloo", ("ddp",), TORCH, Launch.EACH, ring),
    Rival("MPICH", ("mpi",), MPICH, Launch.MPIEXEC, ring),
    Rival(
        *("Open MPI", ("mpi",), OPENMPI, Launch.MPIEXEC, ring),
        mpiexec=("--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    ),
    Rival("Intel MPI", ("mpi",), INTEL, Launch.MPIEXEC, ring, env={"I_MPI_FABRICS": "shm"}),
    _horovod("Horovod"),
    _horovod("Horovod, not fused", HOROVOD_FUSION_THRESHOLD="0"),
    Rival("Baidu's ring (re-make)", ("baidu",), MPICH, Launch.MPIEXEC, ring),
    Rival("gRPC server", ("grpc_ps",), GRPC, Launch.EACH, server, servers=1),
    Rival("gRPC+MPI server (re-make)", ("grpc_mpi",), GRPC, Launch.MPIEXEC, server, servers=1),
    Rival(
        *("torchft", ("torchft",), TORCHFT, Launch.EACH, ring),
        servers=1,
        bulk=False,
    ),
    Rival("DeepSpeed's shared memory", ("deepspeed",), DEEPSPEED, Launch.EACH, ring),
    Rival(
        *("TensorFlow's gRPC server", ("tensorflow",), TENSORFLOW, Launch.EACH, server),
        servers=2,
        bulk=False,
    ),
)
