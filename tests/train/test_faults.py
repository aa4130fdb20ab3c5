"""Injected faults of a rank: which ranks they hit, how often and for how long."""

from __future__ import annotations

import pytest
from paceline import clock
from paceline.core.faults import parse_faults
from paceline.train.faults import Faults
from paceline_api.times import NS_PER_MS


class Sleeps:
    """A clock that records the pauses in ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms: list[float] = []
        self.now = 0
        monkeypatch.setattr(clock, "pause", lambda seconds: self.ms.append(seconds * 1000))
        monkeypatch.setattr(clock, "now_ns", lambda: self.now)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Sleeps:
    return Sleeps(monkeypatch)


def announce(faults: Faults, version: int, *, rank: int = 0, size: int = 4) -> int:
    """Announce a batch and return how often its gradient was poisoned."""
    poisoned: list[None] = []
    faults.before_announcing(
        version=version, rank=rank, size=size, poison=lambda: poisoned.append(None)
    )
    faults.step_ended()
    return len(poisoned)


def test_a_slow_rank_sleeps_and_the_others_do_not(sleeps: Sleeps) -> None:
    faults = parse_faults("slow:rank=1,ms=20;slow:rank=1,ms=5;kill:rank=1,at=round:3")
    for place in range(3):
        announce(Faults(faults, place), 0)
    assert sleeps.ms == [25]


def test_a_slow_rank_sleeps_with_the_given_probability(sleeps: Sleeps) -> None:
    faults = Faults(parse_faults("slow:rank=1,ms=20,p=0.3"), 1)
    for version in range(1000):
        announce(faults, version)
    assert 250 < len(sleeps.ms) < 350


def test_one_random_rank_is_slow_in_each_round(sleeps: Sleeps) -> None:
    ranks = [Faults(parse_faults("slow:rank=random,ms=20"), rank) for rank in range(4)]
    struck = [0] * 4
    for version in range(200):
        for rank, faults in enumerate(ranks):
            before = len(sleeps.ms)
            announce(faults, version, rank=rank)
            struck[rank] += len(sleeps.ms) - before
        assert len(sleeps.ms) == version + 1
    assert min(struck) > 30


def test_a_slow_factor_stretches_the_step(sleeps: Sleeps) -> None:
    faults = Faults(parse_faults("slow-factor:rank=0,factor=2.5"), 0)
    for _ in range(2):
        sleeps.now += 10 * NS_PER_MS
        announce(faults, 0)
        sleeps.now += 7 * NS_PER_MS  # waiting for others is not part of the next step
        faults.step_ended()
    assert sleeps.ms == [15, 15]


def test_a_step_with_a_drawn_load_takes_the_drawn_time(sleeps: Sleeps) -> None:
    (fault,) = given = parse_faults("slow:load=lstm,scale=0.1,seed=3")
    assert fault.load is not None
    faults, steps_ms = Faults(given, 2), []
    for _ in range(200):
        began, slept = sleeps.now, len(sleeps.ms)
        sleeps.now += 80 * NS_PER_MS  # what the script computes
        announce(faults, 0, rank=2)
        steps_ms.append((sleeps.now - began) / 1e6 + sum(sleeps.ms[slept:]))
        sleeps.now += 7 * NS_PER_MS  # waiting for others is not part of the next step
        faults.step_ended()
    drawn_ms = [fault.load.draw_ns(seed=3, rank=2, step=step) / 1e7 for step in range(200)]
    assert steps_ms == pytest.approx([max(80, ms) for ms in drawn_ms], abs=1e-5)


def test_draws_are_reproducible_and_differ_between_ranks(sleeps: Sleeps) -> None:
    def run(place: int) -> list[float]:
        faults, before = Faults(parse_faults("slow:load=cloud"), place), len(sleeps.ms)
        for version in range(20):
            announce(faults, version, rank=place)
        return sleeps.ms[before:]

    assert run(0) == run(0)
    assert not set(run(0)) & set(run(1))


def test_a_shift_rotates_the_delays_over_the_ranks(sleeps: Sleeps) -> None:
    ranks = [Faults(parse_faults("shift:min=50,max=350"), rank) for rank in range(4)]
    for _ in range(3):
        for rank, faults in enumerate(ranks):
            announce(faults, 0, rank=rank)
    assert sleeps.ms == [50, 150, 250, 350, 150, 250, 350, 50, 250, 350, 50, 150]


def test_exactly_one_gradient_is_poisoned(sleeps: Sleeps) -> None:
    faults = Faults(parse_faults("nan:rank=0,at=round:3"), 0)
    assert [announce(faults, version) for version in (1, 2, 4, 5)] == [0, 0, 1, 0]
    assert not sleeps.ms
