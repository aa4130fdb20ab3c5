"""Reader of the API server's audit log: which user sent which requests, and how many."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def entries(log: Path, *, offset: int = 0) -> Iterator[dict[str, Any]]:
    """Yield each audited request after `offset` bytes; a watch appears once, when it ends."""
    return (entry for _, entry in read_on(log, offset))


def read_on(log: Path, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each entry after `offset` with the position behind it, where a call may resume."""
    with log.open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            # The server is still writing this line; the next read must begin with it.
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield offset, json.loads(line)


def requests_of(log: Path, *, user: str, offset: int = 0) -> Counter[tuple[str, str]]:
    """Count the requests of one user by (verb, resource or resource/subresource)."""
    counts: Counter[tuple[str, str]] = Counter()
    for entry in entries(log, offset=offset):
        if entry["user"].get("username") == user and entry["stage"] == "ResponseComplete":
            what = entry.get("objectRef", {})
            resource = what.get("resource", entry["requestURI"])
            if "subresource" in what:
                resource += f"/{what['subresource']}"
            counts[entry["verb"], resource] += 1
    return counts
