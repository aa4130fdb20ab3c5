"""Parts of a manifest as a user wrote it: what has a wrong type is left out.

The API server refuses such a part in its own words, so nothing here needs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def map_of(where: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return a field that is a mapping; an empty one for anything else."""
    value = where.get(field)
    return value if isinstance(value, Mapping) else {}


def items_of(where: Mapping[str, Any], field: str) -> list[Any]:
    """Return the mappings of a list, which the caller may change; empty for anything else."""
    return [item for _, item in indexed(where, field)]


def indexed(where: Mapping[str, Any], field: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the mappings of a list with their places in it; nothing for anything else."""
    value = where.get(field)
    if isinstance(value, list | tuple):
        yield from ((index, item) for index, item in enumerate(value) if isinstance(item, Mapping))
