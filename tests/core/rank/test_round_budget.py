"""Cost of a round on the ranks of a large job: none grows faster than the job (R41).

testing/steps.py defines a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from paceline_api.ids import MemberId

from benchmarks.protocol import Job
from testing.steps import count_steps

SIZES = (64, 256, 1024)
PER_RANK = {"starter": 60, "head": 16, "other": 20}
"""Allowed steps per member at 1,024 members: half more than was counted."""


@pytest.fixture(scope="module")
def counted() -> dict[int, tuple[Counter[str], Job]]:
    """Return for each size the steps of starter, head and other ranks in one round, and the job."""
    result = {}
    for ranks in SIZES:
        job, spent = Job(ranks), Counter[str]()

        def count(who: str, work: Callable[[], object], spent: Counter[str] = spent) -> None:
            spent[who] = count_steps(work)

        def only(_: str, work: Callable[[], object]) -> None:
            work()

        job.round(only)  # The first round fills caches.
        job.round(count)
        result[ranks] = spent, job
    return result


@pytest.mark.parametrize("who", PER_RANK)
def test_the_cost_of_a_round_grows_no_faster_than_the_job(
    who: str, counted: dict[int, tuple[Counter[str], Job]]
) -> None:
    small, middle, large = (counted[ranks][0][who] for ranks in SIZES)
    if small:  # Without a grid there is no head.
        assert middle <= 4 * small, f"{small} at {SIZES[0]}, {middle} at {SIZES[1]}"
    assert large <= 4 * middle, f"{middle} at {SIZES[1]}, {large} at {SIZES[2]}"
    assert large <= PER_RANK[who] * SIZES[2], f"{large / SIZES[2]:.1f} steps per rank"


def test_the_step_count_detects_quadratic_work() -> None:
    """A scan of all members for each member costs 16 times as much for 4 times the members."""

    def scan(ranks: int) -> None:
        members = [MemberId(slot, 0, 0) for slot in range(ranks)]
        for slot in range(ranks):
            assert MemberId(slot, 0, 0) in members

    few, many = (count_steps(partial(scan, ranks)) for ranks in (64, 256))
    assert many > 12 * few


def test_bytes_and_messages_of_a_round_stay_below_their_limits(
    counted: dict[int, tuple[Counter[str], Job]],
) -> None:
    jobs = [counted[ranks][1] for ranks in SIZES]
    assert [job.go_bytes <= 700 + 3 * n for job, n in zip(jobs, SIZES, strict=True)] == [True] * 3
    assert jobs[2].go_bytes <= 4000
    assert [job.sent for job in jobs] == [63, 30, 62]
    assert jobs[2].messages <= 2 * 32, "one word of each head, one of each rank beside the starter"
