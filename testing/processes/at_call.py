"""For the script of a rank: something happens when its data channel is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.transport.base import Transport
from paceline.transport.selected import SelectedTransport


def at_call(method: str, call: int, happens: Callable[[], object]) -> None:
    """`happens` in front of call number `call` of `method`, on the thread that makes it. Sums that
    are taken in turn are calls of `allreduce`, one by one."""
    real, calls = getattr(SelectedTransport, method), 0

    def wrapped(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            happens()
        real(*given)

    setattr(SelectedTransport, method, wrapped)
    setattr(SelectedTransport, "allreduce_in_turn", Transport.allreduce_in_turn)  # noqa: B010
