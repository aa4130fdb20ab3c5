"""Injected faults that act on processes from outside (`paceline run --inject`).

A fault whose place has no living process when it is due waits until there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from typing import Protocol, assert_never

from paceline_api.status import RankPhase, RankStatus, Status, place_of
from paceline_api.times import NS_PER_S

from paceline.core.faults import INSIDE_A_RANK, Fault, FaultKind, format_faults


class FaultTarget(Protocol):
    """Objects that faults act on besides ranks: the replicas and the coordinator."""

    def grow(self, replicas: int) -> None:
        """Start this many more replicas."""

    def terminate(self, slot: int) -> bool:
        """Send SIGTERM to the agent of a replica; return False if the slot has no agent now."""

    def kill_coordinator(self) -> None:
        """Send SIGKILL to the coordinator."""


class Injector:
    """Carries out faults when they are due.

    Args:
        faults: All faults of the run; those that a rank injects into itself are ignored.
        target: The replicas and the coordinator.
        say: Shows the user one line for each fault that was injected.
    """

    def __init__(
        self, faults: Iterable[Fault], target: FaultTarget, say: Callable[[str], None]
    ) -> None:
        self._waiting = [fault for fault in faults if fault.kind not in INSIDE_A_RANK]
        self._target = target
        self._say = say

    def next_ns(self) -> int | None:
        """Return when the next timed fault is due, in ns since the start; None if there is none."""
        times = [f.at.after_ns for f in self._waiting if f.at and f.at.after_ns is not None]
        return min(times, default=None)

    def look(self, status: Status, elapsed_ns: int) -> None:
        """Inject every fault that is due; called with each new status.

        Args:
            status: The newest status of the job.
            elapsed_ns: Time in ns since the first generation started.
        """
        for fault in list(self._waiting):
            assert fault.at is not None, fault
            due = fault.at.reached(version=status.version, elapsed_ns=elapsed_ns)
            if due and self._do(fault, status):
                self._waiting.remove(fault)

    def _do(self, fault: Fault, status: Status) -> bool:
        match fault.kind:
            case FaultKind.KILL:
                done = self._signal(fault, status, signal.SIGKILL)
            case FaultKind.SIGTERM:
                # Like an eviction: the signal goes to the agent, which then drains its ranks.
                rank = _living(status, fault.rank)
                done = rank is not None and self._target.terminate(rank.member.slot)
            case FaultKind.FREEZE:
                done = self._signal(fault, status, signal.SIGSTOP)
            case FaultKind.JOIN:
                self._target.grow(fault.count)
                done = True
            case FaultKind.COORDINATOR_KILL:
                self._target.kill_coordinator()
                done = True
            case FaultKind.SLOW | FaultKind.SLOW_FACTOR | FaultKind.SHIFT | FaultKind.NAN:
                raise AssertionError(fault)
            case _:
                assert_never(fault.kind)
        if done:
            self._say(f"injected {format_faults([fault])} at round {status.version}")
        return done

    def _signal(self, fault: Fault, status: Status, number: signal.Signals) -> bool:
        rank = _living(status, fault.rank)
        if rank is None:
            return False
        try:
            os.kill(rank.pid, number)
        except ProcessLookupError:
            return False  # it has just died; retry with its successor
        if number is signal.SIGSTOP and fault.duration_ns:
            asyncio.get_running_loop().call_later(fault.duration_ns / NS_PER_S, _go_on, rank.pid)
        return True


def _go_on(pid: int) -> None:
    # The process may have been killed in the meantime.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _living(status: Status, place: int | None) -> RankStatus | None:
    for rank in status.ranks:
        ended = rank.state in (RankPhase.DEAD, RankPhase.FINISHED)
        if not ended and rank.pid and place_of(rank.member, status.procs) == place:
            return rank
    return None
