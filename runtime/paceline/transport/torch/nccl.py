"""The data channel through NCCL: CUDA buffers, the same groups and the same rules as gloo.

Streams (D5): everything here runs on an own stream of high priority, so that it does not queue
behind the user's kernels, but behind what the caller has queued in its current stream, which fills
the buffers. Completion is an event on that stream, looked at with a pause, since neither NCCL nor
CUDA can wake a Python thread. What reads the result on another stream sees it complete, because
`allreduce` returns only then.

The device is known when training begins, from the parameters: a script may choose it after
`pl.init()`. NCCL needs one for each rank, so its identity is part of the address.
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
"""Enough that the device finds the next sum queued while the host looks, reads and launches; few
enough that launching one never waits for the device, where no abort flag is looked at."""
DEVICE: Final = "/"
"""In an address, before the identity of the rank's GPU."""
DRIVER: Final = Path("/proc/driver/nvidia/version")


class NcclTransport(TorchDistTransport):
    """NCCL between CUDA buffers on the current device of this process."""

    name: ClassVar[str] = "nccl"
    same_bits: ClassVar[bool] = False  # some algorithms of some networks may not (R23)
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
        self._device = only_device(devices)
        identity = torch.cuda.get_device_properties(self._device).uuid
        self._address = f"{self._address}{DEVICE}{identity}"
        self._stream = torch.cuda.Stream(self._device, priority=HIGH_PRIORITY)
        # An error must come back to us; by default the watchdog of torch ends the process.
        set_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        set_variable("TORCH_NCCL_ENABLE_MONITORING", "0")

    def moves(self, device: torch.device) -> bool:
        return device == self._device

    def unfit(self, addresses: Sequence[str]) -> str:
        return shared_device(addresses)

    @property
    def address(self) -> str:
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
        self.close()
        self._forget_completed()
        self._store = None  # its last reference: the server ends and gives back the port

    def _home(self) -> torch.device:
        assert self._device is not None, "opened before training began"
        return self._device

    def _launch(self, operation: str, buffer: torch.Tensor, by: dist.ReduceOp.RedOpType) -> Any:
        if self._stream is None or buffer.device != self._device:
            raise TransportError(
                f"nccl moves memory of {self._device} only, this buffer is on {buffer.device}; "
                "hint: move the model to the device before pl.DistributedOptimizer() or pl.ddp(), "
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
        """NCCL tells errors of its connections beside the work, which may never end then."""
        error = self._process_group.get_error()
        if error != ErrorType.SUCCESS:
            raise PeerLost(f"nccl tells of an error in its connections: {error.name}")

    def _abandon(self, buffers: Any) -> None:
        abandoned = self._process_group
        super()._abandon(buffers)
        if abandoned is not None:
            self._let_go(abandoned)  # its kernels occupy the device until they are told to stop

    def _let_go(self, process_group: Any) -> None:
        """Aborted, never destroyed: since NCCL 2.31 destroying waits for ranks of the same machine,
        which may be dead. Even this may block."""
        threading.Thread(
            target=process_group.abort, name="paceline-nccl-abort", daemon=True
        ).start()


def only_device(devices: Collection[torch.device]) -> torch.device:
    """The one that a rank can use. TransportError if its parameters are not on one GPU."""
    if len(devices) == 1 and all(device.type == "cuda" for device in devices):
        return next(iter(devices))
    raise TransportError(
        "spec.collective.backend: nccl moves the memory of one GPU per rank, and the parameters "
        f"are on {', '.join(sorted(map(str, devices)))}; hint: move the model to the rank's GPU "
        "before pl.DistributedOptimizer() or pl.ddp(), or use backend: auto"
    )


def shared_device(addresses: Sequence[str]) -> str:
    """Which ranks have the same GPU; empty if each has one of its own."""
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
    told = ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        told = str(error).partition("\n")[0]
    return NoGpu(os.environ.get("CUDA_VISIBLE_DEVICES"), DRIVER.exists(), told)


def _prefix(group: Group) -> str:
    """Return what the keys of a generation begin with in its store.

    A store of torch asks nobody who he is, so a stranger must not be able to guess the key under
    which ranks look for NCCL's id."""
    return f"paceline/{hmac.new(group.secret, group.key.encode(), 'sha256').hexdigest()}"


def _serve_store(host: str) -> TCPStore:
    """This rank's store, listening on `host` only (by itself it would take all addresses, D13).

    Every rank hosts one; a generation uses the one of its rank 0.
    """
    try:
        listener = socket.create_server((host, 0), backlog=LISTEN_BACKLOG)
    except OSError as error:
        raise TransportError(f"cannot listen on {host}: {error}") from error
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
