"""Whatever bytes come: an answer or the parser's own error, in bounded memory and time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from testing.fuzz.driver import run
from testing.fuzz.targets import TARGETS

INPUTS: Final = 1_000
"""Of each target, in every run of the tests."""
INPUTS_OF_ALL: Final = 100_000
"""Of all targets together, before a release."""
NOT_MENDED: Final = ()
"""What they raise is known: json.loads without a bound, and fields that nobody has checked."""


def cases() -> list[object]:
    """Return all targets. One with known findings must go on having them until it is mended."""
    known = pytest.mark.xfail(reason="it raises errors that are not its own", strict=True)
    return [pytest.param(name, marks=[known] * (name in NOT_MENDED)) for name in TARGETS]


@pytest.mark.long
@pytest.mark.parametrize("name", cases())
def test_a_parser_of_foreign_bytes_raises_its_own_errors_within_its_share(name: str) -> None:
    report = run(TARGETS[name], INPUTS)
    assert not report.findings, report


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", cases())
def test_a_parser_keeps_to_that_for_many_more_inputs(name: str) -> None:
    report = run(TARGETS[name], INPUTS_OF_ALL // len(TARGETS), seed=1)
    assert not report.findings, report


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_accepts_its_seeds(name: str, tmp_path: Path) -> None:
    """Else its mutations would all fail at the first check, and nothing behind it be tried."""
    target = TARGETS[name]
    with ExitStack() as stack:
        reader = target.start(stack, tmp_path)
        for seed in target.seeds:
            reader(seed)
