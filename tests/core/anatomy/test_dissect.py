"""The parts of a step sum to the step; exposed and hidden time sum to the reduction."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core.anatomy.dissect import Part, class_of, dissect, summarise
from paceline.core.anatomy.samples import RoundSample, SegmentSample, StepSample
from paceline_api.times import NS_PER_S

from testing.anatomy_samples import MS, segment

TIMES = st.integers(1, 1000)


STEP = StepSample(
    began_ns=100 * MS,
    announced_ns=200 * MS,
    resumed_ns=300 * MS,
    loading_ns=10 * MS,
    forward_ns=30 * MS,
    backward_ns=50 * MS,
    lease_ns=0,
    version=8,
    fresh=True,
    samples=32,
)
ROUND = RoundSample(
    round=7,
    streamed=False,
    fresh=True,
    arrived_ns=201 * MS,
    last="2.0",
    last_ns=241 * MS,
    go_ns=242 * MS,
    update_begun_ns=272 * MS,
    update_ended_ns=282 * MS,
    copy_begun_ns=283 * MS,
    copy_ended_ns=288 * MS,
    segments=(segment(243, 253), segment(253, 271)),
)


def test_a_step_is_split_into_parts_and_names_the_rank_it_waited_for() -> None:
    anatomy = dissect(STEP, [ROUND])
    assert {part: ns // MS for part, ns in anatomy.parts.items()} == {
        Part.LOADING: 10,
        Part.FORWARD: 30,
        Part.BACKWARD: 50,
        Part.SCRIPT: 10,
        Part.LEASE: 0,
        Part.BLOCKED: 40,
        Part.REDUCTION: 28,
        Part.UPDATE: 10,
        Part.COPY: 5,
        Part.PROTOCOL: 17,
    }
    assert anatomy.blocked_on == {"2.0": 40 * MS}
    assert anatomy.if_nobody_were_late_ns == 160 * MS
    assert anatomy.if_the_network_were_free_ns == 172 * MS


def test_reduction_during_backward_counts_as_hidden() -> None:
    streamed = replace(ROUND, streamed=True, segments=(segment(150, 190), segment(190, 230)))
    anatomy = summarise([STEP], [streamed])
    assert sum(anatomy.exposed.values()) == pytest.approx(0.030)
    assert sum(anatomy.hidden.values()) == pytest.approx(0.050)


def test_a_round_that_a_rank_joined_without_a_gradient_blocks_no_step() -> None:
    others = replace(ROUND, fresh=False, arrived_ns=0, last="", last_ns=0)
    assert dissect(STEP, [others]).parts[Part.BLOCKED] == 0


def test_gaps_are_measured_between_consecutive_updates() -> None:
    later = replace(ROUND, round=8, update_begun_ns=382 * MS, update_ended_ns=392 * MS)
    far = replace(ROUND, round=20, update_begun_ns=5000 * MS, update_ended_ns=5001 * MS)
    anatomy = summarise([STEP], [ROUND, later, far])
    assert anatomy.gap_s == pytest.approx(0.1)
    assert anatomy.gaps == 1


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[StepSample], list[RoundSample]]:
    """Draw consecutive steps, and rounds anywhere among them, each in order within itself."""
    at = sorted(draw(st.lists(TIMES, min_size=3, max_size=13, unique=True)))
    moments = at[: len(at) - (len(at) + 1) % 2]
    steps = []
    for begin, middle, end in zip(moments[::2], moments[1::2], moments[2::2], strict=False):
        spent = draw(st.lists(st.integers(0, 200), min_size=4, max_size=4))
        one, two, three, four = spent
        made = StepSample(
            *(begin, middle, end), one, two, three, four, version=0, fresh=True, samples=32
        )
        steps.append(made)
    rounds, now = [], 0
    for number in range(draw(st.integers(0, 6))):
        arrived, last, go, *rest = (
            now + x for x in sorted(draw(st.lists(TIMES, min_size=11, max_size=11)))
        )
        if draw(st.booleans()):
            last += draw(TIMES)  # Recorded by another clock.
        segments = tuple(
            SegmentSample(draw(st.sampled_from([1, 1 << 20])), 0, 0, begun, ended, ended - begun)
            for begun, ended in pairwise(rest[:4])
        )
        rounds.append(
            RoundSample(
                *(number, False, True, arrived, "1.0", last, go),
                *(rest[4], rest[5], rest[6], rest[7], segments),
            )
        )
        now = rest[7]
    return steps, rounds


@pytest.mark.long
@given(histories())
def test_the_parts_sum_to_the_step(history: tuple[list[StepSample], list[RoundSample]]) -> None:
    steps, rounds = history
    for step in steps:
        anatomy = dissect(step, rounds)
        assert sum(anatomy.parts.values()) == anatomy.step_ns
        assert min(anatomy.parts.values()) >= 0
        assert sum(anatomy.blocked_on.values()) == anatomy.parts[Part.BLOCKED]
        assert sum(anatomy.exposed.values()) == anatomy.parts[Part.REDUCTION]
        assert 0 <= anatomy.if_nobody_were_late_ns <= anatomy.step_ns
        assert all(a.end_ns <= b.begin_ns for a, b in pairwise(anatomy.held))


@pytest.mark.long
@given(histories())
def test_exposed_and_hidden_sum_to_the_reduction(
    history: tuple[list[StepSample], list[RoundSample]],
) -> None:
    steps, rounds = history
    anatomy = summarise(steps, rounds)
    begin_ns, end_ns = (steps[0].began_ns, steps[-1].resumed_ns) if steps else (1, 0)
    whole = [
        r
        for r in rounds
        if begin_ns <= min(r.arrived_ns, r.go_ns)
        and max(r.update_ended_ns, r.copy_ended_ns) <= end_ns
    ]
    for name in {class_of(s) for r in whole for s in r.segments}:
        reduced = sum(
            s.ended_ns - s.begun_ns for r in whole for s in r.segments if class_of(s) == name
        )
        assert anatomy.exposed[name] >= 0
        assert anatomy.hidden[name] >= -1e-18
        total = (anatomy.exposed[name] + anatomy.hidden[name]) * anatomy.steps * NS_PER_S
        assert total == pytest.approx(reduced)
    assert sum(anatomy.parts.values()) == pytest.approx(anatomy.step_s)
