"""Tells the marks of every test that pytest collects, as JSON on a line of its own.

A plugin, `pytest -p testing.collected --collect-only`, for tests/test_promises.py.
"""

from __future__ import annotations

import json
import sys

import pytest

PREFIX = "collected: "


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write node ids with the names of their marks."""
    found = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in session.items}
    sys.stdout.write(f"\n{PREFIX}{json.dumps(found)}\n")
