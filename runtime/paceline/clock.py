"""The only module that reads a clock.

Decisions take `now_ns` as an argument; drivers get it here. Durations inside the runtime are
monotonic nanoseconds (`*_ns`); wall-clock seconds appear only where a person or Prometheus reads
them.
"""

from __future__ import annotations

import time
from typing import Final

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000


def now_ns() -> int:
    """Monotonic time in nanoseconds, comparable between the processes of one machine."""
    return time.monotonic_ns()


def wall_s() -> float:
    """Seconds since the Unix epoch, for people and for Prometheus."""
    return time.time()


def pause(seconds: float) -> None:
    """Sleep in a test loop that the kernel cannot wake (MPI requests); never for anything else."""
    time.sleep(seconds)
