"""How many examples a property test draws: all of them, or a share in runs that must be fast."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

ENV_SHARE: Final = "PACELINE_TEST_EXAMPLES_PERCENT"
"""Variable that `make test-fast` and `make test` set. `make test-all` draws all examples."""


def examples(count: int) -> int:
    """Return how many examples to draw for a property.

    They are the first ones of the same sequence.

    Args:
        count: number of examples in `make test-all`.

    Returns:
        a share of `count` for this run, but at least as many as it has percent.
    """
    percent = _percent()
    return max(min(count, percent), count * percent // 100)


def some(cases: Sequence[T]) -> Sequence[T]:
    """Return all cases in `make test-all`, and in faster runs every fourth one."""
    return cases if _percent() == 100 else cases[::4]


def _percent() -> int:
    return int(os.environ.get(ENV_SHARE, "100"))
