"""Order between the main thread's device stream and the communication thread's own (D5).

A kernel that is queued is no gradient yet, and a copy that is queued is no weight yet. What the
communication thread does with tensors goes through a stream of its own, so each crossing has its
method here:

    a segment is handed over     mark_gradients    waited for by who reads it
    the main thread parks        await_gradients   its kernels have run
    tensors, on our stream       own               queued in the order of the calls
    bytes leave the device       settled           what was queued before has run
    memory goes to a transport   complete          the same, without reading
    the main thread goes on      mark_commit, then adopt_commit on its side

On a CPU everything is done when the call returns, and each method here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, Protocol

import torch

FIRST: Final = -1
"""Priority: before the kernels of the main thread."""


class Event(Protocol):
    def record(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


class Stream(Protocol):
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class Queues(Protocol):
    """Streams and events of whatever device: torch's, and in tests those that keep a record."""

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
        event: Any = torch.Event(device)  # torch's types leave out synchronize()
        made: Event = event
        return made

    def current(self, device: torch.device) -> Stream:
        return torch.accelerator.current_stream(device)

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.Stream)
        return stream


class Streams:
    """One stream of the communication thread per device that holds parameters."""

    def __init__(self, devices: Iterable[torch.device], queues: Queues | None = None) -> None:
        self._queues = queues or TorchQueues()
        self._own = {
            device: self._queues.stream(device)
            for device in dict.fromkeys(devices)
            if self._queues.has(device)
        }
        self._committed: dict[torch.device, Event] = {}

    def await_gradients(self) -> None:
        """Main thread, before it parks: returns when what it has queued so far is complete in
        memory. Its gradients are read then, and the weights that its kernels use overwritten."""
        for event in self.mark_gradients():
            event.synchronize()

    def mark_gradients(self) -> list[Event]:
        """Any thread whose kernels make gradients: one event per device; when they have passed,
        what that thread has queued so far is in memory."""
        events = []
        for device in self._own:
            event = self._queues.event(device)
            event.record(self._queues.current(device))
            events.append(event)
        return events

    def own(self) -> AbstractContextManager[None]:
        """What is queued inside runs beside the main thread's work."""
        return self._current() if self._own else nullcontext()

    @contextmanager
    def _current(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in self._own.values():
                stack.enter_context(self._queues.use(stream))
            yield

    @contextmanager
    def settled(self) -> Iterator[None]:
        """As `own`, for reading to the host: all updates that were queued before are in memory."""
        with self.own():
            self.complete()
            yield

    def complete(self) -> None:
        """Returns when what was queued in `own` is in memory: for who reads it from elsewhere."""
        for stream in self._own.values():
            stream.synchronize()

    def mark_commit(self) -> None:
        """Communication thread, inside `own`: all that the main thread gets is queued."""
        for device, stream in self._own.items():
            event = self._queues.event(device)
            event.record(stream)
            self._committed[device] = event

    def adopt_commit(self) -> None:
        """Main thread: what it queues from now on sees what `mark_commit` marked."""
        for device, event in self._committed.items():
            self._queues.current(device).wait_event(event)
