"""Copies large tensors past the caches, with the native library if there is one."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Final

import torch

from paceline.transport.base import HOST
from paceline.transport.native import COPIES, UnavailableError, load

log = logging.getLogger("paceline.rank")

LARGE_BYTES: Final = 2 << 20
"""Size in bytes from which a copy goes past the caches: that of a second-level cache. Measured for
33 MB in seven buffers, with and without reading the target afterwards: 4.3 and 6.7 ms, by torch 5.9
and 8.8 ms."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the native library, which is compiled if needed; None if it cannot be had."""
    try:
        native = load(COPIES)
    except UnavailableError as error:
        log.info("torch copies large buckets, which takes longer: %s", error)
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    native.paceline_scale.argtypes = [pointer, pointer, count, ctypes.c_float]
    native.paceline_copy.argtypes = [pointer, pointer, count]
    return native


def scale(source: torch.Tensor, target: torch.Tensor, factor: float) -> None:
    """Write a tensor times a factor to another one, with the bits of `torch.mul`.

    Args:
        source: Tensor of a floating-point type.
        target: Tensor of the same shape, type and device. They share no memory.
        factor: Factor, which is rounded to the type.
    """
    native = _native_for(source, target)
    if native is None or source.dtype is not torch.float32:
        torch.mul(source, factor, out=target)
    else:
        native.paceline_scale(source.data_ptr(), target.data_ptr(), source.numel(), factor)


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Write a tensor to another one of the same shape and type. They share no memory."""
    native = _native_for(source, target)
    if native is None:
        target.copy_(source)
    else:
        native.paceline_copy(source.data_ptr(), target.data_ptr(), source.nbytes)


def _native_for(source: torch.Tensor, target: torch.Tensor) -> ctypes.CDLL | None:
    """Return the library if it can copy these tensors and is faster than torch."""
    if source.nbytes < LARGE_BYTES or not source.device == target.device == HOST:
        return None
    return library() if source.is_contiguous() and target.is_contiguous() else None
