"""The syntax trees of this repository's modules, each parsed once in a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the tree of a file, which must not change while this process lives."""
    return ast.parse(path.read_text())
