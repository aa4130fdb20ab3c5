"""Cost of the coordinator per heartbeat, status and membership change, counted in steps, not time.

testing/steps.py defines a step.
"""

from __future__ import annotations

from typing import Any

import pytest
from paceline.core import messages as m
from paceline.core import wire

from testing.steps import count_steps
from tests.core.coordinator.crowd import PROCS, Crowd

SIZES = (64, 256, 1024)
LINEAR = 1.3
"""Allowed growth of the cost per rank for four times the ranks; it includes sorting."""
FRAME_BYTES = 35
"""Overhead of a message on the network: WebSocket header and mask, and the TLS record."""


@pytest.fixture(scope="module")
def crowds() -> dict[int, Crowd]:
    made = {ranks: Crowd(ranks) for ranks in SIZES}
    for crowd in made.values():
        crowd.start()
        crowd.beat(1, crowd.pods)
    return made


def per_rank(counts: dict[int, int]) -> list[float]:
    return [counts[ranks] / ranks for ranks in SIZES]


@pytest.mark.long
def test_the_cost_of_a_pod_heartbeat_is_independent_of_the_number_of_pods(
    crowds: dict[int, Crowd],
) -> None:
    counts = {}
    for ranks, crowd in crowds.items():
        beat = crowd.said_by((0, 0), 2)
        counts[ranks] = count_steps(lambda c=crowd, beat=beat: c.hear(beat))  # type: ignore[misc]
    assert max(counts.values()) < 100 * PROCS, f"all alike but for chance: {counts}"


@pytest.mark.long
def test_the_cost_per_heartbeat_over_time_stays_bounded(crowds: dict[int, Crowd]) -> None:
    """The count includes the scans of all ranks that the passing of time triggers.

    Without heartbeats, every rank would be silent for too long in this span.
    """
    counts = {}
    for ranks, crowd in crowds.items():
        state = crowd.coordinator.state
        every_ns = state.config.pace.beat_ns(state.expected_pods)
        span_ns = state.freeze_ns + 2 * every_ns
        by_version = [
            [crowd.said_by(pod, version) for pod in crowd.pods]
            for version in range(3, 3 + span_ns // every_ns)
        ]

        def span(
            crowd: Crowd = crowd, every_ns: int = every_ns, by_version: Any = by_version
        ) -> None:
            begin = crowd.now
            for n, beats in enumerate(by_version):
                crowd.at(begin + n * every_ns)
                for beat in beats:
                    crowd.hear(beat)

        beats = len(by_version) * len(crowd.pods)
        counts[ranks] = count_steps(span) // beats
        assert beats * 10**9 <= span_ns * state.config.pace.beats_per_s
    assert counts[256] < 1.5 * counts[64], counts
    assert counts[1024] < 1.5 * counts[64], counts


def test_the_cost_of_a_status_per_rank_is_bounded(crowds: dict[int, Crowd]) -> None:
    counts = {
        ranks: count_steps(lambda c=crowd: c.coordinator.status(c.now))  # type: ignore[misc]
        for ranks, crowd in crowds.items()
    }
    cost = per_rank(counts)
    assert cost[1] < LINEAR * cost[0], counts
    assert cost[2] < LINEAR * cost[1], counts


@pytest.mark.long
def test_the_cost_of_a_membership_change_per_rank_is_bounded(
    crowds: dict[int, Crowd],
) -> None:
    counts = {}
    for ranks, crowd in crowds.items():
        before = crowd.gen
        counts[ranks] = count_steps(lambda c=crowd: c.lose(c.members[1]))  # type: ignore[misc]
        assert crowd.gen > before
        assert len(crowd.coordinator.state.index) == ranks - 1
    cost = per_rank(counts)
    assert cost[1] < LINEAR * cost[0], counts
    assert cost[2] < LINEAR * cost[1], counts


@pytest.mark.long
def test_the_cost_of_a_start_per_rank_is_bounded() -> None:
    """All ranks register within a second.

    That takes a fixed number of scans of all ranks (R42), each linear.
    """
    counts = {ranks: count_steps(Crowd(ranks).start) for ranks in SIZES}
    cost = per_rank(counts)
    # Up to 64 ranks each registration triggers a scan, which is quadratic but small.
    assert cost[2] < LINEAR * cost[1], counts


@pytest.mark.long
def test_1024_ranks_send_less_than_100_kb_per_second() -> None:
    crowd = Crowd(1024)
    crowd.start()
    state = crowd.coordinator.state
    rhythm = state.config.pace.to_agent(128, 1024)
    crowd.beat(99_999, crowd.pods)
    crowd.heard_bytes = 0
    crowd.beat(100_000, crowd.pods)
    beats = crowd.heard_bytes + FRAME_BYTES * 128
    names = [f"a_figure_with_a_long_name_{n}" for n in range(16)]
    figures = m.RankFigures(crowd.members[-1], 100_000, dict.fromkeys(names, 12345.678912))
    of_figures = 1024 * (len(wire.to_json(figures)) + FRAME_BYTES) / rhythm.figures
    per_s = (beats + of_figures) * 1000 / rhythm.ms
    assert per_s < 100_000, per_s
    assert state.freeze_ns >= 5 * rhythm.ms * 10**6
