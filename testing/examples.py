"""How many examples a property is shown: all of them, or a share where people wait for each run."""

from __future__ import annotations

import os
from typing import Final

ENV_SHARE: Final = "PACELINE_TEST_EXAMPLES_PERCENT"
"""Set by `make test-fast` and `make test`. `make test-all` draws all examples."""
LEAST: Final = 10


def examples(count: int) -> int:
    """Return how many examples to draw of a property that has `count` of them in `make test-all`.

    The first ones are the same: they are drawn in one order.
    """
    percent = int(os.environ.get(ENV_SHARE, "100"))
    return max(min(count, LEAST), count * percent // 100)
