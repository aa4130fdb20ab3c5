"""Units of time, and conversion between Unix times and the timestamps of Kubernetes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
US_PER_S: Final = 1_000_000
MS_PER_S: Final = 1_000


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
