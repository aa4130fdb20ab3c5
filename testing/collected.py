"""pytest plugin that prints the marks of every collected test, as JSON on a line of its own.

tests/test_promises.py uses it: `pytest -p testing.collected --collect-only`.
"""

from __future__ import annotations

import json
import sys

import pytest

PREFIX = "collected: "


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write node ids with the names of their marks."""
    marks = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in session.items}
    sys.stdout.write(f"\n{PREFIX}{json.dumps(marks)}\n")
