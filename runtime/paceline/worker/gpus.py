"""Assigns each rank a GPU of its own before the script uses one.

A script that asks for `cuda`, or for no device, gets the current one. Without this assignment all
ranks of a pod would use the first GPU, which NCCL refuses.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from paceline.core.gpus import own_gpu

log = logging.getLogger("paceline.rank")


class Cuda(Protocol):
    """The calls to `torch.cuda` that this module needs; tests use one that keeps a record."""

    def visible(self) -> int:
        """Return the number of devices that this process may use, without initializing CUDA."""

    def in_use(self) -> bool:
        """Return True if the script has already initialized a device."""

    def take(self, index: int) -> None:
        """Make this device the current one of the process, so that memory is allocated on it."""


class TorchCuda:
    """`Cuda` by means of torch."""

    def visible(self) -> int:
        """Return `torch.cuda.device_count()`."""
        return torch.cuda.device_count()

    def in_use(self) -> bool:
        """Return True if CUDA is initialized in this process."""
        begun: bool = torch.cuda.is_initialized()
        return begun

    def take(self, index: int) -> None:
        """Set the current CUDA device."""
        torch.cuda.set_device(index)


def take_own_gpu(index: int, cuda: Cuda | None = None) -> None:
    """Choose this rank's GPU, unless the script has already used one: then it has chosen.

    Args:
        index: Index of this rank among the ranks that see the same devices.
        cuda: Access to the devices; None for torch's.
    """
    cuda = cuda or TorchCuda()
    device = None if cuda.in_use() else own_gpu(index, visible=cuda.visible())
    if device is not None:
        log.info("this rank takes cuda:%d, unless its script chooses another", device)
        cuda.take(device)
