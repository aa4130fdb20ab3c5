"""Definitions that the native loops share with their callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

KINDS: Final = {
    torch.float32: 0,
    torch.float64: 1,
    torch.int32: 2,
    torch.int64: 3,
    torch.bfloat16: 4,
}
"""Number of each type that the native loops can add. The loops in Python add the others."""

Fields = Sequence[tuple[str, Any]]
"""Fields of a C structure, as ctypes takes them."""
