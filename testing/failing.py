"""Errors that a part of a test raises now and then, like code that races with another thread."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Failing:
    """Base of parts whose calls fail a few times before they work."""

    failures: dict[str, int] = field(default_factory=dict)
    """Name of a call -> how often it still fails."""

    def may_fail(self, what: str) -> None:
        """Raise RuntimeError if the call has failures left."""
        left = self.failures.get(what, 0)
        if left:
            self.failures[what] = left - 1
            raise RuntimeError("dictionary changed size during iteration")
