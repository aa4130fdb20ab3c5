"""Tensors and arrays that a script carries in variables of its own, on a rank that joins (S9).

A class center, a memory of features or a running mean is in no module and no optimizer. The source
says which of them it makes from themselves (`array_updates`); a rank that joins gets those of its
donor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.nn.parameter import is_lazy

COPIED_BYTES: Final = 1 << 18
"""Upper bound in bytes of an array that is copied with each batch. A larger one is kept itself: if
the script has changed its memory since the batch, it goes to a rank that joins as it is then."""
DTYPES: Final = {
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
"""Types of the numbers in an array of numpy that torch has, too."""
Array = Any
"""A torch.Tensor or a numpy.ndarray."""
Sent = tuple[bool, torch.Tensor]
"""True if it is an array of numpy, and its values."""
HeldArrays = dict[str, dict[str, Array]]
"""Arrays as they were at one moment, by the place that holds them and by their name there."""
SentArrays = dict[str, dict[str, Sent]]


def is_array(value: Any) -> bool:
    """Return True for a tensor or an array of numbers that no gradient flows through."""
    kind = type(value)
    if kind is torch.Tensor:
        has_memory = value.layout is torch.strided and not is_lazy(value) and not value.is_meta
        return has_memory and not value.requires_grad
    return kind is np.ndarray and value.dtype.name in DTYPES and value.dtype.isnative


def noted(value: Array) -> Array:
    """Return what keeps the present value: a copy if it is small, and the array itself if not."""
    if value.nbytes > COPIED_BYTES:
        return value
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def sent(value: Array) -> Sent:
    """Return an array in the form in which it goes to another rank."""
    if isinstance(value, np.ndarray):
        values = np.asarray(value, order="C")
        return True, torch.from_numpy(values if values.flags.writeable else values.copy())
    return False, value


def settled_arrays(
    now: HeldArrays, before: HeldArrays, after: HeldArrays, resets: Mapping[str, Collection[str]]
) -> HeldArrays:
    """Return arrays without those that a rank which joins between two passes has by itself.

    Args:
        now: The present ones.
        before: Those with the first batch of the last pass.
        after: Those at its end.
        resets: Names by place that the script sets anew, perhaps in each epoch.

    Returns:
        Those that live longer than an epoch, and those that the last pass has changed and nothing
        since. What an evaluation sums is right by itself.
    """
    kept: HeldArrays = {}
    for path, arrays in now.items():
        first, last = before.get(path, {}), after.get(path, {})
        for name, value in arrays.items():
            lives = name in first and name not in resets.get(path, ())
            if lives or (_same(value, last.get(name)) and not _same(value, first.get(name))):
                kept.setdefault(path, {})[name] = value
    return kept


def _same(one: Array, other: Array) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, torch.Tensor):  # torch.equal() fails for two devices
        return one.device == other.device and torch.equal(one, other)
    return np.array_equal(one, other)


def fill(own: Array, new: Sent) -> bool:
    """Copy the values of another rank into an array of this one.

    Args:
        own: The array of this rank.
        new: That of the other.

    Returns:
        False if it has another form, or memory that cannot be written.
    """
    is_numpy, values = new
    if not is_array(own) or own.shape != values.shape:
        return False
    try:
        if isinstance(own, torch.Tensor) and not is_numpy:
            with torch.no_grad():
                own.copy_(values)
        elif isinstance(own, np.ndarray) and is_numpy:
            own[...] = values.cpu().numpy()
        else:
            return False
    except (RuntimeError, ValueError):
        return False
    return True


def like(own: Any, new: Sent) -> Array:
    """Return the array of another rank as a new one, where this rank has its own.

    Args:
        own: What this rank has in its place, perhaps None.
        new: The array of the other rank.
    """
    is_numpy, values = new
    if is_numpy:
        return values.cpu().numpy().copy()
    return values.to(own.device if isinstance(own, torch.Tensor) else values.device, copy=True)
