"""A rank takes its own GPU before anything is put on one.

A script says `cuda`, or nothing, and means the current device. Left alone all ranks of a pod have
the first one, where NCCL refuses them.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from paceline.core.gpus import own_gpu

log = logging.getLogger("paceline.rank")


class Cuda(Protocol):
    """torch's, and in tests one that keeps a record."""

    def visible(self) -> int:
        """Devices that this process may use; asking makes no use of any."""

    def in_use(self) -> bool:
        """Whether the script has begun to use one."""

    def take(self, index: int) -> None:
        """Make it the current one, of which memory is used from here on."""


class TorchCuda:
    def visible(self) -> int:
        return torch.cuda.device_count()

    def in_use(self) -> bool:
        begun: bool = torch.cuda.is_initialized()
        return begun

    def take(self, index: int) -> None:
        torch.cuda.set_device(index)


def take_own_gpu(index: int, cuda: Cuda | None = None) -> None:
    """`index` of this rank among those that see the same devices. A script that has begun to use
    one has chosen."""
    cuda = cuda or TorchCuda()
    device = None if cuda.in_use() else own_gpu(index, visible=cuda.visible())
    if device is not None:
        log.info("this rank takes cuda:%d, unless its script chooses another", device)
        cuda.take(device)
