"""The table of training scripts that run unchanged under torchrun and under Paceline.

The rows are in table.yaml. Tests run them, and the table of the documents is made of them.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

import msgspec
import yaml

PROGRAMS: Final = Path(__file__).resolve().parents[2] / "tests/scripts/programs"
SHARED: Final = frozenset({"figures.py"})
"""Modules in the folder of the scripts that scripts import."""
ROWS: Final = Path(__file__).with_name("table.yaml")


class Expectation(StrEnum):
    """What a run under Paceline in mode Full is expected to show."""

    EQUAL = "equal"
    """The bits of torchrun at 2 ranks, and numbers within `TOLERANCE` at more."""
    REFUSED = "refused"
    """An error that names the line of the script."""


class Elastic(StrEnum):
    """What happens when a rank of the script is killed."""

    YES = "yes"
    """A replacement joins, the job completes, and all ranks end with equal weights."""
    STEP = "pl.step"
    """A replacement needs the line `step = pl.step()`."""
    UNTRIED = "not tried"
    """No test kills a rank of this script."""


class Late(StrEnum):
    """What mode Quorum with 75 % does for a script while random ranks are late (S17)."""

    GAINS = "does not wait"
    """Steps do not wait for late ranks."""
    CALLS = "waits: calls in each step"
    """Each step waits for all ranks, because calls do."""
    KIND = "waits: several passes per step"
    """Each step waits for all ranks, because backward passes cannot be late (S17.5)."""
    SCALER = "waits: a GradScaler"
    """Each step waits for all ranks, because a late gradient has another scale (S17.5)."""
    PARTLY = "waits from some step on"
    """Each step waits for all ranks once the script makes several passes or models (S17.5)."""
    UNTRIED = "not tried"
    """No test makes a rank of this script late."""


TOLERANCE: Final = 1e-6
"""Largest difference at more than 2 ranks, where the order of a sum may differ."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One script with the arguments of its runs."""

    script: str
    habit: str
    runs: tuple[tuple[str, ...], ...] = ((),)
    """Arguments of runs that follow one another on one folder."""
    ranks: tuple[int, ...] = (2, 4)
    expect: Expectation = Expectation.EQUAL
    reason: str = ""
    """Why the script is refused, in words of the error."""
    tolerance: float = TOLERANCE
    """Largest difference from torchrun at more than 2 ranks."""
    rounding: str = ""
    """Why results at more than 2 ranks differ by more than `TOLERANCE`."""
    elastic: Elastic = Elastic.UNTRIED
    kill_ranks: int = 3
    """Number of ranks of the job in which a rank is killed."""
    kill_round: int = 2
    """Operation before which the rank is killed."""
    late: Late = Late.UNTRIED
    """While random ranks are late, one is killed too: all ranks end with equal weights."""
    once: frozenset[Literal["elastic", "late"]] = frozenset()
    """Fields that say what a run by hand showed, and that no test repeats."""
    needs: tuple[str, ...] = ()
    """Packages that the script imports and that are no dependencies of Paceline or its tests."""
    compiles: bool = False
    """True if the script uses torch.compile."""
    in_short: bool = False
    """True if `make test` runs the script too."""

    @property
    def path(self) -> Path:
        """Path of the script."""
        return PROGRAMS / self.script

    @property
    def name(self) -> str:
        """Name of the row for test ids: the script, and the arguments of its first run."""
        words = self.runs[0]
        return "".join([self.script.removesuffix(".py"), *words])

    @property
    def lacks(self) -> str:
        """Names of packages that the script needs and that are not installed, or ""."""
        return ", ".join(name for name in self.needs if find_spec(name) is None)

    def tolerance_at(self, ranks: int) -> float:
        """Return how far numbers of Paceline may be from those of torchrun."""
        return 0.0 if ranks <= 2 else self.tolerance


@cache
def rows() -> tuple[Row, ...]:
    """Return all rows of the table in its order."""
    return msgspec.convert(yaml.load(ROWS.read_text(), yaml.CSafeLoader), tuple[Row, ...])
