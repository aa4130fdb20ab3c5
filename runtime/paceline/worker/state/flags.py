"""Whether segments on a device are finite, found out there: nobody waits for the answer (D5).

The check of a segment is queued behind what makes it, in the calling thread's current stream, and
leaves one number there: 0, or 1 if there is a NaN or an Inf. In a streamed round that number is
what the segment's own one (R31) begins with. The host learns of all of them by one copy that it
does not wait for either: an event tells when it has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class Flags:
    """One number for each segment that lies on one of `devices`."""

    def __init__(
        self, of_segments: Sequence[torch.device], devices: Iterable[torch.device]
    ) -> None:
        """`of_segments`: where each segment lies."""
        self._place: dict[int, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._told = {}
        for device in devices:
            mine = [s for s, where in enumerate(of_segments) if where == device]
            flags = torch.zeros(len(mine), device=device)
            host = torch.zeros(len(mine), pin_memory=device.type == "cuda")
            self._copies.append((host, flags))
            for index, segment in enumerate(mine):
                self._place[segment] = flags[index : index + 1]
                self._told[segment] = host.numpy()[index : index + 1]  # read without torch

    def __contains__(self, segment: int) -> bool:
        """Whether it is one of these, and not on the host."""
        return segment in self._place

    def find(self, segment: int, flat: torch.Tensor) -> None:
        """Queue the check of a segment. One pass, exact: a NaN goes before any other number."""
        low, high = torch.aminmax(flat)
        largest = torch.maximum(high, low.neg())
        self._place[segment].copy_(torch.isfinite(largest).logical_not())

    def put(self, segment: int, sums: torch.Tensor) -> None:
        """Queue the number into the last cell of what is reduced."""
        sums[-1:].copy_(self._place[segment])

    def tell(self) -> None:
        """Queue the copy to the host, of all that was found by then."""
        for host, flags in self._copies:
            host.copy_(flags, non_blocking=True)

    def told(self, segments: Iterable[int]) -> bool:
        """False if one of these is not finite, once the copy has come. Those on the host do not
        count."""
        return not any(self._told[s].any() for s in segments if s in self._told)
