"""What tests of the rows of the table of scripts share."""

from __future__ import annotations

import pytest

from testing.scripts.table import Row


def skip_if_lacking(row: Row) -> None:
    """Skip the test of a script that needs a package that is not installed."""
    if row.lacks:
        pytest.skip(f"{row.lacks} is not installed: it is no dependency of the tests")
