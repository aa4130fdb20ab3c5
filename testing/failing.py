"""What a test's part raises now and then, as code does that another thread gets in the way of."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Failing:
    failures: dict[str, int] = field(default_factory=dict)
    """How often each of its calls fails before it works."""

    def may_fail(self, what: str) -> None:
        left = self.failures.get(what, 0)
        if left:
            self.failures[what] = left - 1
            raise RuntimeError("dictionary changed size during iteration")
