"""Conversion between Unix times and the timestamps of Kubernetes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def seconds_of(text: Any) -> float | None:
    """Return the Unix time in seconds of a Kubernetes timestamp; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def timestamp(seconds: float) -> str:
    """Return a Unix time as the API server writes it in metadata: whole seconds, UTC."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
