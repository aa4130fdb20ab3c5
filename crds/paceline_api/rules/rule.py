"""What a rule is: a condition on a job in two languages, with one text for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline_api.errors import MISSING, SpecError
from paceline_api.types.job import TrainingJob


@dataclass(frozen=True, slots=True)
class Violation:
    """One place where a job breaks a rule. Empty texts stand for those of the rule."""

    value: Any = MISSING
    path: str = ""
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that every valid job meets."""

    path: str
    """The field that is named to the user."""
    problem: str
    hint: str
    check: Callable[[TrainingJob], Iterator[Violation]]
    cel: str
    """True for a valid job; `self` is the spec, or the whole object for a path in metadata."""

    @property
    def message(self) -> str:
        """The text of the API server."""
        return f"{self.path} {self.problem}; {self.hint}"

    def errors(self, job: TrainingJob) -> list[SpecError]:
        return [
            SpecError(
                violation.path or self.path,
                violation.value,
                violation.problem or self.problem,
                hint=violation.hint or self.hint,
            )
            for violation in self.check(job)
        ]
