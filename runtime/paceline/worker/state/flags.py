"""Checks on a device which segments are finite, without waiting for the result (D5).

The check of a segment is one kernel. It is queued behind what makes the segment, in the calling
thread's current stream. It computes the largest magnitude, which is NaN or Inf exactly if one of
the numbers is. In a streamed round it becomes the number that the segment ends with (R31), 0 or 1.
The host gets the magnitudes of all segments in one copy, and does not wait for that either: an
event shows when the copy is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from typing import Any

import numpy as np
import torch

from paceline.worker.state.flat import Segment, state_type


class Flags:
    """The largest magnitude in each segment that lies on one of `devices`.

    `find`, `put` and `queue_copy` only queue work, in the current stream of the calling thread. The
    main thread calls `find` and `queue_copy`, the memory thread `find` and `put`, the data thread
    `queue_copy`. The communication thread and the data thread read the results by `are_finite`.
    """

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
            numbers = host.numpy()  # so that the host reads it without torch
            for place, index in enumerate(indices):
                self._largest[index] = largest[place]
                self._copied[index] = numbers[place : place + 1]

    def __contains__(self, segment: int) -> bool:
        """Return True if the segment lies on one of the devices."""
        return segment in self._largest

    def find(self, segment: int, flat: torch.Tensor) -> None:
        """Queue the check of a segment: one pass, exact in every type."""
        largest = self._largest[segment]
        torch.linalg.vector_norm(flat, inf, dtype=largest.dtype, out=largest)

    def put(self, segment: int, sums: torch.Tensor) -> None:
        """Queue the result of a check into the last cell of the segment that is reduced (R31).

        Args:
            segment: Index of the segment; `find` has been queued for it.
            sums: The segment's part of the reduction's scratch.
        """
        largest = self._largest[segment]
        # x - x is 0 for a finite x and NaN for any other.
        torch.ne(largest.sub(largest), 0, out=sums[-1])

    def queue_copy(self) -> None:
        """Queue the copy of all results so far to the host."""
        for host, largest in self._copies:
            host.copy_(largest, non_blocking=True)

    def are_finite(self, segments: Iterable[int]) -> bool:
        """Return True if all of these segments are finite, according to the last copy.

        Valid only once the copy that `queue_copy` has queued is complete. Segments on the host
        count as finite.

        Args:
            segments: Indices of the segments.

        Returns:
            True if none of them has a NaN or an Inf, according to the last copy.
        """
        return all(isfinite(self._copied[s][0]) for s in segments if s in self._copied)
