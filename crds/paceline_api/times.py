"""Times as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def seconds_of(text: Any) -> float | None:
    """Unix time of a Kubernetes timestamp; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def timestamp(seconds: float) -> str:
    """As the API server writes times in metadata: whole seconds, UTC."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
