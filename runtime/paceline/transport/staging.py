"""Memory that a transport cannot reach, by way of memory that it can: slow, and correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Staging:
    """Host buffers that stand in for device buffers during a reduction; pinned for CUDA.

    They are kept between the calls, but not after one that failed: what it left behind may still
    write to them.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def reduce(
        self, by: Callable[[Sequence[torch.Tensor]], None], buffers: Sequence[torch.Tensor]
    ) -> None:
        """Let `by` sum stand-ins for `buffers`. The copies wait for what the caller has queued on
        the device, and are complete on return."""
        hosts = [self._host(index, buffer) for index, buffer in enumerate(buffers)]
        self._kept = []
        for host, buffer in zip(hosts, buffers, strict=True):
            host.copy_(buffer.detach())
        by(hosts)
        for host, buffer in zip(hosts, buffers, strict=True):
            buffer.detach().copy_(host)
        self._kept = hosts

    def _host(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        if index < len(self._kept):
            kept = self._kept[index]
            if kept.shape == buffer.shape and kept.dtype is buffer.dtype:
                return kept
        return torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=buffer.is_cuda)
