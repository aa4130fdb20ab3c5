"""What a round costs a large job's machines, counted: no row grows faster than the job (R41).

Counted are the instructions of the interpreter, so the figures are the same on any machine and in
any company. Comparisons of names that run inside C, as in looking a rank up in a tuple, are made
visible by comparing in Python.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from paceline.core.protocol.ids import MemberId

from benchmarks.protocol import Job

SIZES = (64, 256, 1024)
PER_RANK = {"starter": 360, "head": 105, "other": 180}
"""Instructions per member of the job, at 1,024. Room for a third more than was counted."""


def instructions(work: Callable[[], None]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.fixture(scope="module")
def counted() -> dict[int, tuple[Counter[str], Job]]:
    def equal(one: tuple[int, ...], two: object) -> bool:
        return tuple.__eq__(one, two)

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemberId, "__eq__", equal)
        for ranks in SIZES:
            job, spent = Job(ranks), Counter[str]()

            def count(who: str, work: Callable[[], None], spent: Counter[str] = spent) -> None:
                spent[who] = instructions(work)

            job.round(lambda _, work: work())
            job.round(count)
            found[ranks] = spent, job
    return found


@pytest.mark.parametrize("who", PER_RANK)
def test_no_cost_of_a_round_grows_faster_than_the_job(
    who: str, counted: dict[int, tuple[Counter[str], Job]]
) -> None:
    small, middle, large = (counted[ranks][0][who] for ranks in SIZES)
    if small:  # without a grid there is no head
        assert middle <= 4 * small, f"{small} at {SIZES[0]}, {middle} at {SIZES[1]}"
    assert large <= 4 * middle, f"{middle} at {SIZES[1]}, {large} at {SIZES[2]}"
    assert large <= PER_RANK[who] * SIZES[2], f"{large / SIZES[2]:.0f} instructions per rank"


def test_bytes_and_messages_stay_small(counted: dict[int, tuple[Counter[str], Job]]) -> None:
    jobs = [counted[ranks][1] for ranks in SIZES]
    assert [job.go_bytes <= 700 + 3 * n for job, n in zip(jobs, SIZES, strict=True)] == [True] * 3
    assert jobs[2].go_bytes <= 4000
    assert [job.sent for job in jobs] == [63, 30, 62]
    assert jobs[2].messages <= 2 * 32, "one word of each head, one of each rank beside the starter"
