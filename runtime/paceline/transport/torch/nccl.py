"""The data channel through NCCL: CUDA buffers, with the same groups and rules as gloo.

Streams (D5): all work here runs on its own stream of high priority. So it does not queue behind the
user's kernels, but it follows what the caller has queued in its current stream, which fills the
buffers. Completion is an event on that stream, checked with pauses, since neither NCCL nor CUDA can
wake a Python thread. Whatever reads the result on another stream sees it complete, because
`allreduce` returns only then.

The device follows from the parameters when training begins, since a script may choose it after
`pl.init()`. NCCL needs one device for each rank, so its identity is part of the address.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, PrefixStore, TCPStore

from paceline.clock import pause
from paceline.core.gpus import NoGpu, why_none
from paceline.limits import LISTEN_BACKLOG
from paceline.transport.base import Abort, Group, PeerLost, TransportError
from paceline.transport.rendezvous import Deadline
from paceline.transport.torch.process_groups import TorchDistTransport
from paceline.transport.variables import set_variable

PAUSE_S: Final = 0.00005
HIGH_PRIORITY: Final = -1
UNDER_WAY_MAX: Final = 4
"""Number of sums in flight. Enough that the device has the next sum queued while the host checks,
reads and launches; few enough that a launch never waits for the device, where no abort flag is
checked."""
DEVICE: Final = "/"
"""Separator in an address, before the identity of the rank's GPU."""
DRIVER: Final = Path("/proc/driver/nvidia/version")


class NcclTransport(TorchDistTransport):
    """NCCL between CUDA buffers on one device of this process."""

    name: ClassVar[str] = "nccl"
    same_bits: ClassVar[bool] = False  # not for every algorithm and network (R23)
    under_way_max: int = UNDER_WAY_MAX

    def __init__(self, *, host: str, local: bool) -> None:
        if not dist.is_nccl_available():
            raise TransportError(
                "spec.collective.backend: nccl is not part of this torch build; "
                "hint: install the CUDA build of torch, or use backend: auto"
            )
        if not torch.cuda.is_available():
            problem, way = why_none(_look(), local=local)
            raise TransportError(
                f"spec.collective.backend: nccl needs a GPU: {problem}; "
                f"hint: {way}, or use backend: auto"
            )
        super().__init__()
        self._store: Any = _serve_store(host)
        self._address = f"{host}:{self._store.port}"
        self._device: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None

    def begin(
        self,
        devices: Collection[torch.device],
        largest_bytes: int = 0,  # noqa: ARG002
    ) -> None:
        """Take the device of the parameters and add its identity to the address.

        It raises TransportError if the parameters are not on one GPU.

        Args:
            devices: Devices of the parameters.
            largest_bytes: Unused.
        """
        self._device = only_device(devices)
        identity = torch.cuda.get_device_properties(self._device).uuid
        self._address = f"{self._address}{DEVICE}{identity}"
        self._stream = torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)
        # Errors must become exceptions; by default torch's watchdog ends the process.
        set_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        set_variable("TORCH_NCCL_ENABLE_MONITORING", "0")

    def moves(self, device: torch.device) -> bool:
        """Return True for the device of the parameters."""
        return device == self._device

    def unfit(self, addresses: Sequence[str]) -> str:
        """Return which ranks share a GPU, or an empty text if none do."""
        return shared_device(addresses)

    @property
    def address(self) -> str:
        """Address of this rank's store, with the identity of its GPU once training begins."""
        return self._address

    def _connect(self, group: Group, deadline: Deadline) -> Any:
        limit = timedelta(seconds=deadline.timeout_s)
        host, _, port = group.peers[0].address.partition(DEVICE)[0].rpartition(":")
        client = (
            self._store
            if group.rank == 0
            else TCPStore(host, int(port), timeout=limit, wait_for_workers=False)
        )
        store = PrefixStore(_prefix(group), client)
        store.set_timeout(limit)
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        options._timeout = limit  # noqa: SLF001 (no public name)
        process_group = dist.ProcessGroupNCCL(store, group.rank, group.size, options)
        with torch.cuda.device(self._device):
            process_group.eager_connect_single_device(self._device)
        return process_group

    def shutdown(self) -> None:
        """Leave the group and close this rank's store."""
        self.close()
        self._forget_completed()
        self._store = None  # the last reference: the server ends and frees the port

    def _home(self) -> torch.device:
        assert self._device is not None, "opened before training began"
        return self._device

    def _launch(self, operation: str, buffer: torch.Tensor, by: dist.ReduceOp.RedOpType) -> Any:
        if self._stream is None or buffer.device != self._device:
            raise TransportError(
                f"nccl moves memory of {self._device} only, this buffer is on {buffer.device}; "
                "hint: move the model to the device before pl.DistributedOptimizer(), "
                "or use backend: auto"
            )
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # The allocator must not hand this memory out while our stream may still use it.
            buffer.record_stream(self._stream)
            return super()._launch(operation, buffer, by)

    def _await(self, works: list[Any], abort: Abort, deadline: Deadline | None) -> None:
        with torch.cuda.stream(self._stream):
            for work in works:
                work.block_current_stream()
            reduced = torch.cuda.Event()
            reduced.record(self._stream)
        while not reduced.query():
            if abort.is_raised():
                return
            self._check()
            if deadline is not None:
                deadline.check("comparing bits")
            pause(PAUSE_S)

    def _check(self) -> None:
        """Check the group for errors.

        NCCL reports connection errors beside the work, which may then never end.

        Raises:
            PeerLost: NCCL reports an error.
        """
        error = self._process_group.get_error()
        if error != ErrorType.SUCCESS:
            raise PeerLost(f"nccl tells of an error in its connections: {error.name}")

    def _abandon(self, buffers: Any) -> None:
        abandoned = self._process_group
        super()._abandon(buffers)
        if abandoned is not None:
            self._let_go(abandoned)  # its kernels occupy the device until the abort

    def _let_go(self, process_group: Any) -> None:
        """Abort a process group in a thread, since even that may block.

        It is never destroyed: since NCCL 2.31 destroying waits for ranks of the same machine, which
        may be dead.

        Args:
            process_group: The abandoned or unused group.
        """
        threading.Thread(
            target=process_group.abort, name="paceline-nccl-abort", daemon=True
        ).start()


def only_device(devices: Collection[torch.device]) -> torch.device:
    """Return the one GPU that a rank can use.

    Args:
        devices: Devices of its parameters.

    Returns:
        The device.

    Raises:
        TransportError: The parameters are not all on one GPU.
    """
    if len(devices) == 1 and all(device.type == "cuda" for device in devices):
        return next(iter(devices))
    raise TransportError(
        "spec.collective.backend: nccl moves the memory of one GPU per rank, and the parameters "
        f"are on {', '.join(sorted(map(str, devices)))}; hint: move the model to the rank's GPU "
        "before pl.DistributedOptimizer(), or use backend: auto"
    )


def shared_device(addresses: Sequence[str]) -> str:
    """Return which ranks share a GPU, or an empty text if each has its own."""
    rank_of: dict[str, int] = {}
    for rank, address in enumerate(addresses):
        device = address.partition(DEVICE)[2]
        if device in rank_of:
            return (
                f"nccl needs a GPU for each rank, and ranks {rank_of[device]} and {rank} share "
                f"{device}; hint: request as many GPUs as procsPerReplica, call pl.init() before "
                "anything is put on a GPU, say `cuda` and no number, or use backend: auto"
            )
        rank_of[device] = rank
    return ""


def _look() -> NoGpu:
    reason = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
    return NoGpu(os.environ.get("CUDA_VISIBLE_DEVICES"), DRIVER.exists(), reason)


def _prefix(group: Group) -> str:
    """Return the prefix of a generation's keys in its store.

    A store of torch authenticates nobody. So a stranger must not be able to guess the key under
    which ranks look for NCCL's id.

    Args:
        group: The generation.

    Returns:
        Text with a MAC of the group's key.
    """
    return f"paceline/{hmac.new(group.secret, group.key.encode(), 'sha256').hexdigest()}"


def _serve_store(host: str) -> TCPStore:
    """Return this rank's store, which listens on `host` only (D13).

    By itself it would take all addresses. Every rank hosts one. A generation uses the one of its
    rank 0.

    Args:
        host: Address to listen on.

    Returns:
        The store, with a port of its own.

    Raises:
        TransportError: The port cannot be opened.
    """
    try:
        listener = socket.create_server((host, 0), backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise TransportError(f"cannot listen on {host}: {error}") from error
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
