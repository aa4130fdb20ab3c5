"""Streams and events of any device: those of torch and, in tests, fakes that keep a record (D5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch
from paceline_api.times import NS_PER_S

from paceline.clock import now_ns, pause

FIRST: Final = -1
"""Stream priority: ahead of the kernels of the main thread."""
PAUSE_MIN_S: Final = 5e-5
PAUSE_MAX_S: Final = 1e-3
PAUSE_SHARE: Final = 1 / 64
"""Share of the time waited so far that the next pause takes. It bounds how much later than the
device a waiting thread goes on, since nothing can wake a thread for a device."""


class DeviceEvent(Protocol):
    """A point in a stream, as `torch.Event` provides it."""

    def record(self, stream: Any) -> None:
        """Put the event behind all work that is queued in the stream now."""

    def query(self) -> bool:
        """Return True if all work before the event is done. Does not block."""


class Stream(Protocol):
    """A queue of work of one device, as `torch.Stream` provides it."""

    def wait_event(self, event: Any) -> None:
        """Make work that is queued from now on wait for the event. Does not block the caller."""

    def synchronize(self) -> None:
        """Block until all queued work is done."""


class Queues(Protocol):
    """Factory of streams and events. `TorchQueues` and the fakes of the tests implement it."""

    def has(self, device: torch.device) -> bool:
        """Return True if a call queues work on this device, and False if it is done on return."""

    def stream(self, device: torch.device) -> Stream:
        """Return a new stream ahead of the main thread's (`FIRST`)."""

    def event(self, device: torch.device) -> DeviceEvent:
        """Return a new event of the device, not recorded yet."""

    def current(self, device: torch.device) -> Stream:
        """Return the current stream of the calling thread."""

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """Make a stream the current one of the calling thread, inside a `with` block."""


class TorchQueues:
    """Streams and events of torch. Only CUDA devices have queues."""

    def has(self, device: torch.device) -> bool:
        """Return True for a CUDA device."""
        return device.type == "cuda"

    def stream(self, device: torch.device) -> Stream:
        """Return a new `torch.Stream` of high priority."""
        return torch.Stream(device, priority=FIRST)

    def event(self, device: torch.device) -> DeviceEvent:
        """Return a new `torch.Event`."""
        event: Any = torch.Event(device)  # torch's types leave out query()
        made: DeviceEvent = event
        return made

    def current(self, device: torch.device) -> Stream:
        """Return the current stream of the calling thread."""
        return torch.accelerator.current_stream(device)

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """Return the stream, which is a context manager itself."""
        assert isinstance(stream, torch.Stream)
        return stream


def mark(queues: Queues, device: torch.device, stream: Stream) -> DeviceEvent:
    """Return an event behind all work that is queued in the stream so far."""
    event = queues.event(device)
    event.record(stream)
    return event


def until(events: Iterable[DeviceEvent], watch: Callable[[], None]) -> None:
    """Wait until all events have passed, so that the results of the work before them are in memory.

    Args:
        events: Recorded events, of one or several devices.
        watch: Called between two looks. It may raise an error to end the wait.
    """
    begun_ns = now_ns()
    for event in events:
        while not event.query():
            watch()
            waited_s = (now_ns() - begun_ns) / NS_PER_S
            pause(min(max(waited_s * PAUSE_SHARE, PAUSE_MIN_S), PAUSE_MAX_S))
