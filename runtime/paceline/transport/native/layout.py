"""What the native loops have in common with those who call them."""

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
"""What the loops can add; other types are left to those in Python."""

Fields = Sequence[tuple[str, Any]]
"""Of a structure in C, as ctypes takes them."""
