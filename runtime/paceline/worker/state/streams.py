"""Order between the main thread's device stream and the communication thread's own (D5).

A kernel that is queued is no gradient yet, and a copy that is queued is no weight yet. What the
communication thread does with tensors goes through a stream of its own, so each crossing has its
method here:

    a segment is handed over     mark_gradients    followed by who reads it
    tensors, on our stream       own               queued in the order of the calls
    they come from elsewhere     follow            queued after that
    the main thread parks        mark_gradients    its kernels have run: it looks until then
    bytes leave the device       settled           what was queued before has run
    the main thread goes on      mark_commit, then adopt_commit on its side

Nothing of a step waits inside the device's library before the step is announced: order is the
device's business (`follow`), and who has to know looks (`device_queues.until`), so that a device
that hangs holds up nobody who has been told to end. On a CPU everything is done when the call
returns, and each method here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from paceline.transport.device_queues import Event, Queues, TorchQueues, mark


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

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Those with queues."""
        return tuple(self._own)

    def mark_gradients(self) -> list[Event]:
        """Any thread whose kernels make gradients: one event per device; when they have passed,
        what that thread has queued so far is in memory."""
        return [mark(self._queues, device, self._queues.current(device)) for device in self._own]

    def follow(self, events: Sequence[Event]) -> None:
        """What is queued in `own` from here on runs after these, as `mark_gradients` made them."""
        for stream, event in zip(self._own.values(), events, strict=True):
            stream.wait_event(event)

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

    def mark_own(self) -> list[Event]:
        """As `mark_gradients`, of what was queued in `own`."""
        return [mark(self._queues, device, stream) for device, stream in self._own.items()]

    def mark_commit(self) -> None:
        """Communication thread, inside `own`: all that the main thread gets is queued."""
        self._committed = dict(zip(self._own, self.mark_own(), strict=True))

    def adopt_commit(self) -> None:
        """Main thread: what it queues from now on sees what `mark_commit` marked."""
        for device, event in self._committed.items():
            self._queues.current(device).wait_event(event)
