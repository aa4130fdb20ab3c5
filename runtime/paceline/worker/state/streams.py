"""Order between the main thread's device stream and the communication thread's own (D5).

A kernel that is queued is no gradient yet, and a copy that is queued is no weight yet. On a CPU
everything is done when the call returns, and each method here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch


class Streams:
    """One stream of the communication thread per CUDA device that holds parameters."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._own = {
            device: torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for device in dict.fromkeys(devices)
            if device.type == "cuda"
        }
        self._committed: dict[torch.device, torch.cuda.Event] = {}

    def await_gradients(self) -> None:
        """Main thread: returns when the gradients queued so far are complete in memory."""
        for device in self._own:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            event.synchronize()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Communication thread: what is queued inside runs beside the main thread's work."""
        with ExitStack() as stack:
            for stream in self._own.values():
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def mark_commit(self) -> None:
        """Communication thread, inside `own`: all that the main thread gets is queued."""
        for device, stream in self._own.items():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            self._committed[device] = event

    def adopt_commit(self) -> None:
        """Main thread: what it queues from now on sees what `mark_commit` marked."""
        for device, event in self._committed.items():
            torch.cuda.current_stream(device).wait_event(event)
