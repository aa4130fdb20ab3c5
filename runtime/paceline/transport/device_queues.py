"""Streams and events of whatever device: torch's, and in tests those that keep a record (D5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

from paceline.clock import NS_PER_S, now_ns, pause

FIRST: Final = -1
"""Priority: before the kernels of the main thread."""
PAUSE_MIN_S: Final = 5e-5
PAUSE_MAX_S: Final = 1e-3
PAUSE_SHARE: Final = 1 / 64
"""Of what was waited so far, which bounds how much later than the device a waiting thread goes on:
nothing can wake a thread for a device."""


class Event(Protocol):
    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...


class Stream(Protocol):
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class Queues(Protocol):
    def has(self, device: torch.device) -> bool:
        """Whether work on it is queued instead of done when the call returns."""

    def stream(self, device: torch.device) -> Stream: ...
    def event(self, device: torch.device) -> Event: ...
    def current(self, device: torch.device) -> Stream:
        """That of the calling thread."""

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """Make it the current one of the calling thread, inside."""


class TorchQueues:
    def has(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def stream(self, device: torch.device) -> Stream:
        return torch.Stream(device, priority=FIRST)

    def event(self, device: torch.device) -> Event:
        event: Any = torch.Event(device)  # torch's types leave out query()
        made: Event = event
        return made

    def current(self, device: torch.device) -> Stream:
        return torch.accelerator.current_stream(device)

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.Stream)
        return stream


def mark(queues: Queues, device: torch.device, stream: Stream) -> Event:
    """An event behind all that is queued in the stream so far."""
    event = queues.event(device)
    event.record(stream)
    return event


def until(events: Iterable[Event], watch: Callable[[], None]) -> None:
    """Returns when all of them have passed: what was queued before them is in memory. `watch` is
    asked meanwhile and may raise."""
    begun_ns = now_ns()
    for event in events:
        while not event.query():
            watch()
            waited_s = (now_ns() - begun_ns) / NS_PER_S
            pause(min(max(waited_s * PAUSE_SHARE, PAUSE_MIN_S), PAUSE_MAX_S))
