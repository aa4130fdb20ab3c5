"""Hook for the script of a rank: run something when its data channel is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.transport.base import Transport
from paceline.transport.selected import SelectedTransport


def at_call(method: str, call: int, happens: Callable[[], object]) -> None:
    """Run `happens` before one call of a method of the data channel.

    Sums that are taken in turn become single calls of `allreduce`.

    Args:
        method: name of a method of SelectedTransport.
        call: number of the call, from 1.
        happens: runs on the thread that makes the call.
    """
    real, calls = getattr(SelectedTransport, method), 0

    def wrapped(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            happens()
        real(*given)

    setattr(SelectedTransport, method, wrapped)
    setattr(SelectedTransport, "allreduce_in_turn", Transport.allreduce_in_turn)  # noqa: B010
