"""Order between the main thread's device stream and the runtime's own stream (D5).

A queued kernel is not yet a gradient, and a queued copy is not yet a weight. The communication
thread and the two threads of a streamed round work on tensors in a stream of their own. Each
crossing between the streams has its method here:

    a segment is handed over     mark_gradients    followed by the thread that reads it
    tensors, on our stream       own               queued in the order of the calls
    they come from elsewhere     follow            queued after that
    the main thread parks        mark_gradients    it polls until its kernels have run
    bytes leave the device       settled           what was queued before has run
    the main thread goes on      mark_commit, then adopt_commit on its side

No step waits inside the device's library before it is announced. Order is left to the device
(`follow`), and a thread that needs to know polls (`device_queues.until`). So a device that hangs
does not hold up a rank that was ordered to end. On a CPU all work is done when the call returns,
and each method here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from paceline.transport.device_queues import DeviceEvent, Queues, TorchQueues, mark


class DeviceStreams:
    """The runtime's own stream on each device that holds parameters."""

    def __init__(self, devices: Iterable[torch.device], queues: Queues | None = None) -> None:
        """Make a stream of high priority per device.

        Args:
            devices: The devices of the parameters; those without queues, such as the CPU, are left
                out.
            queues: Access to streams and events; None for torch's.
        """
        self._queues = queues or TorchQueues()
        self._own = {
            device: self._queues.stream(device)
            for device in dict.fromkeys(devices)
            if self._queues.has(device)
        }
        self._committed: dict[torch.device, DeviceEvent] = {}

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices that have queues."""
        return tuple(self._own)

    def mark_gradients(self) -> list[DeviceEvent]:
        """Mark what the calling thread has queued so far. Any thread that makes gradients.

        Returns:
            One event per device. Once they have passed, what was queued before them is in memory.
        """
        return [mark(self._queues, device, self._queues.current(device)) for device in self._own]

    def follow(self, events: Sequence[DeviceEvent]) -> None:
        """Let what is queued in `own` from here on run after the events of `mark_gradients`."""
        for stream, event in zip(self._own.values(), events, strict=True):
            stream.wait_event(event)

    def own(self) -> AbstractContextManager[None]:
        """Return a context in which kernels are queued beside the main thread's work."""
        return self._current() if self._own else nullcontext()

    @contextmanager
    def _current(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in self._own.values():
                stack.enter_context(self._queues.use(stream))
            yield

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Enter `own` for reading to the host, after what was queued before is in memory."""
        with self.own():
            self.complete()
            yield

    def complete(self) -> None:
        """Wait until what was queued in `own` is in memory, for a reader outside of it."""
        for stream in self._own.values():
            stream.synchronize()

    def mark_own(self) -> list[DeviceEvent]:
        """Return one event per device behind what was queued in `own`."""
        return [mark(self._queues, device, stream) for device, stream in self._own.items()]

    def mark_commit(self) -> None:
        """Mark that all the main thread gets is queued. Communication thread, inside `own`."""
        self._committed = dict(zip(self._own, self.mark_own(), strict=True))

    def adopt_commit(self) -> None:
        """Let what this thread queues from now on see what `mark_commit` marked. Main thread."""
        for device, event in self._committed.items():
            self._queues.current(device).wait_event(event)
