"""Which segments on a device are finite, found out there: nobody waits for the answer (D5).

The check of a segment is one kernel, queued behind what makes the segment in the calling thread's
current stream: the largest magnitude, which is NaN or Inf exactly if one of the numbers is. In a
streamed round it becomes the number that the segment begins with (R31), 0 or 1. The host gets the
magnitudes of all segments by one copy, and does not wait for that either: an event tells when it
has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from typing import Any

import numpy as np
import torch

from paceline.worker.state.flat import Segment, state_type


class Flags:
    """The largest magnitude in each segment that lies on one of `devices`."""

    def __init__(self, segments: Sequence[Segment], devices: Iterable[torch.device]) -> None:
        self._largest: dict[int, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copied: dict[int, np.ndarray[Any, Any]] = {}
        wanted = set(devices)
        members: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, segment in enumerate(segments):
            if segment.device in wanted:
                key = segment.device, state_type(segment.dtype)
                members.setdefault(key, []).append(index)
        for (device, dtype), indices in members.items():
            largest = torch.zeros(len(indices), dtype=dtype, device=device)
            host = torch.zeros(len(indices), dtype=dtype, pin_memory=device.type == "cuda")
            self._copies.append((host, largest))
            numbers = host.numpy()  # read without torch
            for place, index in enumerate(indices):
                self._largest[index] = largest[place]
                self._copied[index] = numbers[place : place + 1]

    def __contains__(self, segment: int) -> bool:
        """Return True if it lies on one of the devices."""
        return segment in self._largest

    def find(self, segment: int, flat: torch.Tensor) -> None:
        """Queue the check of a segment: one pass, exact in every type."""
        largest = self._largest[segment]
        torch.linalg.vector_norm(flat, inf, dtype=largest.dtype, out=largest)

    def put(self, segment: int, sums: torch.Tensor) -> None:
        """Queue the number into the last cell of what is reduced."""
        largest = self._largest[segment]
        # x - x is 0 for a finite x and NaN for any other.
        torch.ne(largest.sub(largest), 0, out=sums[-1])

    def tell(self) -> None:
        """Queue the copy to the host, of all that was found by then."""
        for host, largest in self._copies:
            host.copy_(largest, non_blocking=True)

    def told(self, segments: Iterable[int]) -> bool:
        """Return False if one of these is not finite; valid once the copy has come. Segments on the
        host do not count."""
        return all(isfinite(self._copied[s][0]) for s in segments if s in self._copied)
