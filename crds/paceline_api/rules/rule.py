"""`Rule`: a condition on a job, written in Python and in CEL, with one error text for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline_api.errors import MISSING, SpecError
from paceline_api.types.job import TrainingJob


@dataclass(frozen=True, slots=True)
class Violation:
    """One place where a job breaks a rule; an empty text stands for that of the rule."""

    value: Any = MISSING
    path: str = ""
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that every valid job meets."""

    path: str
    """The field that the error names."""
    problem: str
    hint: str
    check: Callable[[TrainingJob], Iterator[Violation]]
    cel: str
    """True for a valid job; `self` is the spec, or the whole object for a path in metadata."""
    of_parts: bool = False
    """True if the rule holds for each part of a job that is merged with a runtime, and for the
    runtime itself. The other rules hold for the result of the merge only."""
    of_template: bool = False
    """True if the rule is about the template, and holds where there is none."""

    @property
    def cel_of_job(self) -> str:
        """The condition in CEL for a job, which need not be whole if it names a runtime."""
        if not self.path.startswith("spec."):
            return self.cel
        if not self.of_parts:
            return f"has(self.runtimeRef) || {self.cel_of_part}"
        return self.cel_of_part

    @property
    def cel_of_part(self) -> str:
        """The condition in CEL for a part of a job, which may lack a template."""
        return f"{'!has(self.template) || ' if self.of_template else ''}({self.cel})"

    @property
    def message(self) -> str:
        """The error text of the API server."""
        return f"{self.path} {self.problem}; {self.hint}"

    def errors(self, job: TrainingJob) -> list[SpecError]:
        """Return the errors of a job that breaks the rule; empty if it does not."""
        return [
            SpecError(
                violation.path or self.path,
                violation.value,
                violation.problem or self.problem,
                hint=violation.hint or self.hint,
            )
            for violation in self.check(job)
        ]
