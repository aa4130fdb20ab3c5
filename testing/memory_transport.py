"""An in-memory data channel inside one process, for the simulation and fast tests.

Ranks are threads that share a `Hub`. Each call deposits a copy of its buffers. The last rank of the
group to arrive adds them in rank order, and every rank copies the sum. The channel keeps every
promise of `base`, passes the same conformance suite as the real ones, and can lose a peer on
purpose.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar, Final

import torch
from paceline.transport.base import Abort, Group, PeerLost, Transport
from paceline.transport.rendezvous import Deadline

WAIT_S: Final = 1.0
"""Longest sleep between two checks, in seconds. News and abort both wake the thread earlier."""


class _Call:
    """One reduction of one group."""

    def __init__(self) -> None:
        self.parts: dict[int, list[torch.Tensor]] = {}
        self.sums: list[torch.Tensor] | None = None
        self.taken = 0


class Hub:
    """State that the ranks share: the members inside each group, and the reductions in flight."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: dict[str, set[str]] = {}
        self._calls: dict[tuple[str, int], _Call] = {}
        self._dead: set[str] = set()
        self._waiting: set[Abort] = set()

    def kill(self, name: str) -> None:
        """Make a rank stop answering from now on, and let its peers notice."""
        with self._lock:
            self._dead.add(name)
            self._wake()

    def enter(self, group: Group) -> None:
        """Record that this rank is inside the group."""
        with self._lock:
            self._inside.setdefault(group.key, set()).add(group.peers[group.rank].name)
            self._wake()

    def all_inside(self, group: Group) -> bool:
        """Return True if all members have entered the group."""
        with self._lock:
            return self._inside.get(group.key, set()) >= {peer.name for peer in group.peers}

    def leave(self, group: Group) -> None:
        """Take this rank and its deposits out of the group. The last one removes the group."""
        name = group.peers[group.rank].name
        with self._lock:
            self._inside.get(group.key, set()).discard(name)
            for key in [key for key in self._calls if key[0] == group.key]:
                self._calls[key].parts.pop(group.rank, None)
            if not self._inside.get(group.key):
                self._inside.pop(group.key, None)
                for key in [key for key in self._calls if key[0] == group.key]:
                    del self._calls[key]
            self._wake()

    def lost(self, group: Group) -> int | None:
        """Return the index of a rank that is dead or has left the group, or None."""
        with self._lock:
            inside = self._inside.get(group.key, set())
            for rank, peer in enumerate(group.peers):
                if peer.name in self._dead or peer.name not in inside:
                    return rank
        return None

    def deposit(self, group: Group, number: int, buffers: Sequence[torch.Tensor]) -> _Call:
        """Copy this rank's buffers into reduction `number`. The last rank makes the sum."""
        with self._lock:
            call = self._calls.setdefault((group.key, number), _Call())
            call.parts[group.rank] = [buffer.detach().clone() for buffer in buffers]
            if len(call.parts) == group.size:
                call.sums = call.parts[0]
                for rank in range(1, group.size):
                    for total, part in zip(call.sums, call.parts[rank], strict=True):
                        total += part
                self._wake()
            return call

    def taken(self, group: Group, number: int, call: _Call) -> None:
        """Record that this rank has copied the sum. The last one to do so removes the reduction."""
        with self._lock:
            call.taken += 1
            if call.taken == group.size:
                self._calls.pop((group.key, number), None)

    def watch(self, abort: Abort) -> None:
        """Wake this thread through its abort flag whenever the hub changes."""
        with self._lock:
            self._waiting.add(abort)

    def unwatch(self, abort: Abort) -> None:
        """Stop waking this thread."""
        with self._lock:
            self._waiting.discard(abort)

    def _wake(self) -> None:
        for abort in self._waiting:
            abort.wake()


class SimTransport(Transport):
    """The transport of one rank, connected to a hub."""

    name: ClassVar[str] = "sim"
    rounds: ClassVar[bool] = True

    def __init__(self, hub: Hub, own_name: str) -> None:
        self._hub = hub
        self._own_name = own_name
        self._group: Group | None = None
        self._number = 0

    @property
    def address(self) -> str:
        """The name of the rank, with the prefix `sim/`."""
        return f"sim/{self._own_name}"

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        """Enter the group and wait until all members are inside."""
        self.close()
        deadline = Deadline(abort, timeout_s)
        self._group, self._number = group, 0
        self._hub.watch(abort)
        try:
            self._hub.enter(group)
            while not self._hub.all_inside(group):
                deadline.pause(WAIT_S, f"waiting for the {group.size} ranks of {group.key}")
        except BaseException:
            self.close()
            raise
        finally:
            self._hub.unwatch(abort)

    def allreduce(
        self,
        buffers: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,  # noqa: ARG002
    ) -> None:
        """Deposit the buffers, wait for the sum and copy it.

        Args:
            buffers: Flat tensors.
            abort: Ends the wait.
            algorithm: Unused.

        Raises:
            PeerLost: A member died or left before the sum was complete.
        """
        group = self._group
        assert group is not None, "allreduce outside a group"
        deadline = Deadline(abort, float("inf"))
        self._number += 1
        self._hub.watch(abort)
        try:
            call = self._hub.deposit(group, self._number, buffers)
            while call.sums is None:
                lost = self._hub.lost(group)
                if lost is not None and call.sums is None:
                    raise PeerLost(f"rank {lost} has gone", lost)
                deadline.pause(WAIT_S, "reducing")
        finally:
            self._hub.unwatch(abort)
        for buffer, total in zip(buffers, call.sums, strict=True):
            buffer.detach().copy_(total)
        self._hub.taken(group, self._number, call)

    def allreduce_rounded(
        self,
        buffers: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,
    ) -> None:
        """Round each contribution once, sum them, and round the sum.

        Each rank keeps the error of its own contribution. Rank 0 keeps that of the sum.

        Args:
            buffers: Flat float32 tensors.
            residuals: Tensors that receive the rounding errors.
            abort: Ends the wait.
            algorithm: Unused.
        """
        assert self._group is not None, "allreduce outside a group"
        if self._group.size == 1:
            return
        for buffer, residual in zip(buffers, residuals, strict=True):
            residual += _round(buffer)
        self.allreduce(buffers, abort, algorithm)
        for buffer, residual in zip(buffers, residuals, strict=True):
            away = _round(buffer)
            if self._group.rank == 0:
                residual += away

    def close(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            self._hub.leave(group)

    def shutdown(self) -> None:
        """Leave the group. The hub belongs to the test."""
        self.close()

    def describe(self) -> dict[str, str]:
        """Return the provider, which is memory."""
        return {"provider": "memory"}


def _round(buffer: torch.Tensor) -> torch.Tensor:
    """Round a buffer to bfloat16 in place, and return the rounding error."""
    short = buffer.detach().bfloat16().float()
    away = buffer.detach() - short
    buffer.detach().copy_(short)
    return away
