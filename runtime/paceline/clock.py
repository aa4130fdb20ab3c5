"""The only module that reads a clock.

Decisions take `now_ns` as an argument, and drivers get it here. Durations inside the runtime are
monotonic nanoseconds (`*_ns`). Wall-clock seconds appear only where a person or Prometheus reads
them.
"""

from __future__ import annotations

import time


def now_ns() -> int:
    """Return the monotonic time in nanoseconds, comparable between processes of one machine."""
    return time.monotonic_ns()


def wall_s() -> float:
    """Return the seconds since the Unix epoch, for people and for Prometheus."""
    return time.time()


def pause(seconds: float) -> None:
    """Sleep for some seconds. Only for waits that no event can end, such as for MPI or a device."""
    time.sleep(seconds)
