"""Parsers of untrusted bytes answer or raise their own error, in bounded memory and time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from testing.fuzz.driver import run
from testing.fuzz.targets import TARGETS

INPUTS: Final = 1_000
"""Inputs per target in every run of the tests."""
INPUTS_OF_ALL: Final = 100_000
"""Inputs of all targets together before a release."""


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_raises_only_its_own_errors_within_its_limits(name: str) -> None:
    report = run(TARGETS[name], INPUTS)
    assert not report.findings, report


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_passes_a_long_fuzz_run(name: str) -> None:
    report = run(TARGETS[name], INPUTS_OF_ALL // len(TARGETS), seed=1)
    assert not report.findings, report


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_accepts_its_seed_inputs(name: str, tmp_path: Path) -> None:
    """Mutations of an invalid seed would all fail at the first check and test nothing behind it."""
    target = TARGETS[name]
    with ExitStack() as stack:
        reader = target.start(stack, tmp_path)
        for seed in target.seeds:
            reader(seed)
