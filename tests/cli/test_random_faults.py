"""Random faults of a job run from the command line: verdict, first cause, and no leftovers.

The faults are scripts that hang, raise, exit, crash or ignore signals, on one rank or on all, at
every moment of a script, and signals from outside. docs/faults.md lists the meaning of each;
`testing.processes.faulty` implements them. test_explain_scripts covers ten more kinds of failing
scripts.
"""

from __future__ import annotations

from pathlib import Path
from signal import SIGTERM

import pytest

from testing.processes.faulty import (
    CELLS,
    SEEDS,
    How,
    Outside,
    Plan,
    Script,
    When,
    expected,
    plan_of,
    script_of,
)
from testing.processes.faulty_run import carry_out
from tests.layers import exhaustive_except

EACH_KIND = {
    "deaf after the loop": Plan(2, "Full", when=When.AFTER_LOOP, how=How.IS_DEAF),
    "SIGTERM, which ranks ignore": Plan(
        2, "Full", outside=Outside("runner", SIGTERM, Script.IGNORES_SIGTERM)
    ),
}


def test_the_seeds_cover_all_cells_and_are_deterministic() -> None:
    plans = [plan_of(seed) for seed in range(SEEDS)]
    assert len({plan.outside or (plan.when, plan.how) for plan in plans}) == len(CELLS) >= 60
    assert plans == [plan_of(seed) for seed in range(SEEDS)]
    for plan in plans:
        compile(script_of(plan), "train.py", "exec")
        assert expected(plan).verdicts


@pytest.mark.processes
@pytest.mark.parametrize("name", exhaustive_except(["deaf after the loop"], EACH_KIND))
def test_a_fault_of_each_kind_gets_the_expected_verdict_and_leaves_nothing(
    tmp_path: Path, name: str
) -> None:
    ended = carry_out(tmp_path, EACH_KIND[name])
    assert not ended.wrong, ended


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_fault_gets_the_expected_verdict_and_leaves_nothing(
    tmp_path: Path, seed: int
) -> None:
    ended = carry_out(tmp_path, plan_of(seed))
    assert not ended.wrong, f"seed {seed}: {plan_of(seed)}\n{ended}"
