"""The data channel through torch.distributed: gloo for host memory, nccl for CUDA.

A process group is made for every generation and never changed. torch.distributed cannot end a
collective that waits for a stopped peer, so nothing here blocks on one: the work's completion wakes
the communication thread, an abort leaves work and group where they are, and a new group beside them
works. An abandoned group is kept until its work has ended, because destroying it would wait.

The rendezvous goes through a small store that every rank hosts; a generation uses the one of its
rank 0. The default process group is never touched: it belongs to the user's script.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Final

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

from paceline.transport.base import (
    Abort,
    Group,
    PeerLost,
    Transport,
    TransportAborted,
    TransportError,
)
from paceline.transport.meeting import Deadline

WAIT_S: Final = 0.5
"""Longest sleep between two looks at the abort flag; completion and abort both wake earlier."""
REFERENCE: Final = 0
"""The rank that reduces where the library's own allreduce is not shown to give equal bits (R23)."""


class _Attempt(threading.Thread):
    """Makes one process group; nobody has to wait for it."""

    def __init__(self, make: Callable[[], Any], abort: Abort) -> None:
        super().__init__(name="paceline-group", daemon=True)
        self._make = make
        self._abort = abort
        self.done = False
        self.group: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.group = self._make()
        except Exception as error:
            self.error = error
        self.done = True
        self._abort.wake()


class TorchDistTransport(Transport):
    """What gloo and nccl share: store, groups, abandonment."""

    same_bits: ClassVar[bool]
    """Its own allreduce gives the same bits on all ranks, shown by tests/transport (R23)."""

    def __init__(self, *, host: str) -> None:
        self._host = host
        self._store: Any = _serve_store(host)
        self._address = f"{host}:{self._store.port}"
        self._group: Group | None = None
        self._process_group: Any = None
        self._works: list[Any] = []
        self._graves: list[tuple[Any, list[Any], Any]] = []
        self._abandoned = 0

    @property
    def address(self) -> str:
        return self._address

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        self.close()
        if group.size > 1:
            self._process_group = self._make_group(group, abort, timeout_s)
        self._group = group
        self._clean_graves()

    def _make_group(self, group: Group, abort: Abort, timeout_s: float) -> Any:
        deadline = Deadline(abort, timeout_s)
        limit = timedelta(seconds=timeout_s)
        host, _, port = group.peers[0].address.rpartition(":")

        def make() -> Any:
            client = (
                self._store
                if group.rank == 0
                else TCPStore(
                    host, int(port), timeout=limit, wait_for_workers=False, use_libuv=False
                )
            )
            store = PrefixStore(f"paceline/{group.key}", client)
            store.set_timeout(limit)
            return self._connect(store, group, limit)

        attempt = _Attempt(make, abort)
        attempt.start()
        what = f"wiring {self.name} for {group.size} ranks"
        while not attempt.done:
            deadline.pause(WAIT_S, what)
        if attempt.error is not None:
            deadline.check(what)
            raise PeerLost(f"{what} failed: {attempt.error}") from attempt.error
        return attempt.group

    def _connect(self, store: Any, group: Group, limit: timedelta) -> Any:
        raise NotImplementedError

    def allreduce(self, buffers: Sequence[torch.Tensor], abort: Abort) -> None:
        assert self._group is not None, "allreduce outside a group"
        full = [buffer.detach() for buffer in buffers if buffer.numel()]
        if self._group.size == 1 or not full:
            return
        try:
            for operation in ("allreduce",) if self.same_bits else ("reduce", "broadcast"):
                self._finish([self._launch(operation, b) for b in full], full, abort)
        except RuntimeError as error:
            raise PeerLost(f"{self.name} failed: {error}") from error

    def _launch(self, operation: str, buffer: torch.Tensor) -> Any:
        if operation == "allreduce":
            return self._process_group.allreduce([buffer])
        return getattr(self._process_group, operation)(buffer, REFERENCE)

    def _finish(self, works: list[Any], buffers: list[torch.Tensor], abort: Abort) -> None:
        """Wait for `works`, or leave them behind. Raises what a failed work raises."""
        self._works = works
        self._await(works, abort)
        if abort.is_raised() and not all(work.is_completed() for work in works):
            self._bury(buffers)
            raise TransportAborted("abandoned in a reduction")
        try:
            for work in works:
                work.wait()
        except RuntimeError:
            self._bury(buffers)
            raise
        self._works = []

    def _await(self, works: list[Any], abort: Abort) -> None:
        """Return when all works are complete or `abort` is raised."""
        raise NotImplementedError

    def _bury(self, buffers: Any) -> None:
        """Keep what the abandoned works may still write to; the group is spent."""
        if self._process_group is not None:
            self._graves.append((self._process_group, self._works, buffers))
            self._abandoned += 1
        self._process_group, self._works = None, []

    def _clean_graves(self) -> None:
        self._graves = [g for g in self._graves if not all(w.is_completed() for w in g[1])]

    def close(self) -> None:
        # The group ends only after the next one stands: a peer may still read what we sent.
        if self._process_group is not None:
            self._graves.append((self._process_group, self._works, None))
        self._group, self._process_group, self._works = None, None, []

    def shutdown(self) -> None:
        self.close()
        self._store = None  # its last reference: the server ends and gives back the port

    def describe(self) -> dict[str, str]:
        return {"provider": self.name, "abandoned": str(self._abandoned)}


def _serve_store(host: str) -> TCPStore:
    """This rank's store, listening on `host` only (by itself it would take all addresses, D13)."""
    try:
        listener = socket.create_server((host, 0), backlog=512)
    except OSError as error:
        raise TransportError(f"cannot listen on {host}: {error}") from error
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )


class GlooTransport(TorchDistTransport):
    """gloo over TCP between host buffers."""

    name: ClassVar[str] = "gloo"
    same_bits: ClassVar[bool] = True

    def __init__(self, *, host: str) -> None:
        super().__init__(host=host)
        # A device is gloo's event thread and listener; one serves all groups of this process.
        self._device = ProcessGroupGloo.create_device(hostname=host)

    def _connect(self, store: Any, group: Group, limit: timedelta) -> Any:
        # Named with underscores, but the only way to say which address gloo binds to (D13).
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        options._devices = [self._device]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001
        options._timeout = limit  # noqa: SLF001
        return ProcessGroupGloo(store, group.rank, group.size, options)

    def _await(self, works: list[Any], abort: Abort) -> None:
        # Ask the futures, not the works: a work says complete only after its callbacks have run.
        futures = [work.get_future() for work in works]
        for future in futures:
            future.add_done_callback(lambda _: abort.wake())
        while not all(future.done() for future in futures):
            if abort.wait(WAIT_S):
                return
