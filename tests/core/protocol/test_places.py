"""What a script does at each spot of its program, while it follows and afterwards (S3, S4, S9)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.protocol.places import BEFORE, Path, Spot, SpotAction

from testing.simulation.histories import bounded

LAST = Spot(2, 5)
"""Where the script of a donor has ended."""


def follower(here: Spot, *, done: Spot = BEFORE, state: Spot | None = None) -> Path[str]:
    """Return a path that follows and has the results of two calls at the first point."""
    kept = {Spot(0, 0): "first", Spot(0, 1): "second"}
    return Path(here=here, follows=True, done=done, kept=kept, state=state)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_even_places_are_points(place: int) -> None:
    assert Spot(place, 3).is_at_point
    assert not Spot(place + 1, 3).is_at_point


@pytest.mark.parametrize(
    ("here", "done", "state", "act"),
    [
        (Spot(0, 0), BEFORE, None, SpotAction.REPEAT),
        (Spot(0, 1), Spot(3, 7), None, SpotAction.REPEAT),
        (Spot(0, 1), Spot(3, 7), Spot(3, 8), SpotAction.REPEAT),
        (Spot(0, 2), Spot(0, 1), None, SpotAction.ASK),
        (Spot(2, 0), Spot(1, 9), None, SpotAction.ASK),
        (Spot(0, 2), Spot(0, 1), Spot(0, 2), SpotAction.LOAD),
        (Spot(0, 1), Spot(0, 0), Spot(0, 1), SpotAction.LOAD),
        (Spot(0, 2), Spot(0, 2), None, SpotAction.LOST),
        (Spot(0, 2), Spot(1, 0), None, SpotAction.LOST),
        (Spot(0, 2), Spot(0, 2), Spot(0, 3), SpotAction.LOST),
        (Spot(2, 0), Spot(2, 4), Spot(2, 5), SpotAction.LOST),
        (Spot(0, 3), Spot(0, 1), Spot(0, 2), SpotAction.LOST),
        (Spot(2, 0), Spot(2, 4), LAST, SpotAction.LOST),
        (Spot(0, 1), Spot(2, 4), LAST, SpotAction.REPEAT),
    ],
)
def test_an_operation_of_a_script_that_follows(
    here: Spot, done: Spot, state: Spot | None, act: SpotAction
) -> None:
    assert follower(here, done=done, state=state).operation() is act


@pytest.mark.parametrize(
    ("place", "done", "state", "act"),
    [
        (1, Spot(2, 0), None, SpotAction.SKIP),
        (1, Spot(3, 5), Spot(3, 6), SpotAction.SKIP),
        (1, Spot(1, 4), Spot(2, 0), SpotAction.SKIP),
        (1, Spot(2, 4), LAST, SpotAction.SKIP),
        (1, BEFORE, None, SpotAction.ASK),
        (1, Spot(0, 1), None, SpotAction.ASK),
        (1, Spot(1, 4), None, SpotAction.ASK),
        (1, Spot(1, 4), Spot(1, 5), SpotAction.LOAD),
        (1, Spot(0, 1), Spot(1, 0), SpotAction.LOAD),
        (3, Spot(1, 4), Spot(1, 5), SpotAction.LOST),
        (3, Spot(2, 0), Spot(2, 1), SpotAction.LOST),
    ],
)
def test_a_pass_of_a_script_that_follows(
    place: int, done: Spot, state: Spot | None, act: SpotAction
) -> None:
    path = follower(Spot(place - 1, 2), done=done, state=state)
    assert path.begin_pass() is act
    assert path.here == Spot(place, 0)
    assert path.in_pass() is act
    assert path.skips == (act is SpotAction.SKIP)


def test_a_script_goes_alone_through_a_pass_that_is_over() -> None:
    path = follower(Spot(0, 2), done=Spot(1, 9), state=Spot(2, 0))
    assert path.begin_pass() is SpotAction.SKIP
    for number in range(3):
        assert path.here == Spot(1, number)
        assert path.operation() is SpotAction.ALONE
        path.made()
    path.end_pass()
    assert path.here == Spot(2, 0)
    assert path.operation() is SpotAction.LOAD


def test_a_script_that_does_not_follow_takes_part_everywhere() -> None:
    path: Path[str] = Path(done=Spot(5, 5), kept={Spot(0, 0): "kept"})
    assert path.operation() is SpotAction.TAKE_PART
    path.made()
    assert path.here == Spot(0, 1)
    assert path.begin_pass() is SpotAction.TAKE_PART
    path.made()
    assert path.here == Spot(1, 1)
    path.end_pass()
    assert path.here == Spot(2, 0)


def test_only_results_at_points_are_kept_and_only_if_they_are_small() -> None:
    path: Path[str] = Path()
    for spot, keep in [(Spot(0, 0), True), (Spot(0, 1), False), (Spot(1, 0), True)]:
        path.completed(spot, str(spot), keep=keep)
        assert path.done == spot
    assert path.kept == {Spot(0, 0): str(Spot(0, 0))}


# ---- whole programs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Number of operations in each place of a script, which begins and ends with a point."""

    counts: tuple[int, ...]

    @property
    def spots(self) -> list[Spot]:
        """All operations in order, and the one that would come next."""
        here = [Spot(place, n) for place, count in enumerate(self.counts) for n in range(count)]
        return [*here, Spot(len(self.counts) - 1, self.counts[-1])]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    counts = [draw(st.integers(0, 3))]
    for _ in range(draw(st.integers(0, 3))):
        counts += [draw(st.integers(1, 3)), draw(st.integers(0, 3))]
    return Program(tuple(counts))


class Follower:
    """Runs a program in a rank that joins; the job goes on whenever the rank asks for the state."""

    def __init__(self, program: Program, job: list[int], unkept: frozenset[Spot]) -> None:
        self.program, self.job, self.unkept = program, job, unkept
        self.path: Path[Spot] = Path(follows=True)
        self.repeated: list[Spot] = []
        self.skipped: list[int] = []
        self.made: list[Spot] = []
        self.loaded: Spot | None = None
        self.at = 0
        """Number of operations that the job has completed."""
        self._advance(has_state=False)

    def _advance(self, *, has_state: bool) -> None:
        spots = self.program.spots
        target = min(len(spots) - 1, self.at + (self.job.pop() if self.job else 0))
        for spot in spots[self.at : target]:
            self.path.completed(spot, spot, keep=spot not in self.unkept)
        self.at = target
        self.path.state = spots[target] if has_state else None
        self.path.is_final = target == len(spots) - 1

    def _load(self) -> None:
        self.loaded = self.path.state
        self.path.load()

    def run(self) -> SpotAction:
        """Run to the end, or until the rank is lost; return the last act."""
        for place, count in enumerate(self.program.counts):
            act = self._run_pass(count) if place % 2 else self._run_point(count)
            if act is SpotAction.LOST:
                return act
        return SpotAction.TAKE_PART

    def _run_point(self, count: int) -> SpotAction:
        while self.path.here.number < count:
            match act := self.path.operation():
                case SpotAction.TAKE_PART:
                    self.made.append(self.path.here)
                    self.path.made()
                case SpotAction.REPEAT:
                    assert self.path.kept[self.path.here] == self.path.here
                    self.repeated.append(self.path.here)
                    self.path.made()
                case SpotAction.LOAD:
                    self._load()
                case SpotAction.ASK:
                    self._advance(has_state=True)
                case _:
                    return act
        return SpotAction.TAKE_PART

    def _run_pass(self, count: int) -> SpotAction:
        act = self.path.begin_pass()
        while act is SpotAction.ASK:
            self._advance(has_state=True)
            act = self.path.in_pass()
        if act is SpotAction.LOAD:
            self._load()
            act = SpotAction.TAKE_PART
        if act is SpotAction.SKIP:
            self.skipped.append(self.path.here.place)
            for _ in range(count):
                assert self.path.operation() is SpotAction.ALONE
                self.path.made()
        if act is SpotAction.TAKE_PART:
            while self.path.here.number < count:
                self.made.append(self.path.here)
                self.path.made()
        self.path.end_pass()
        if act is SpotAction.SKIP:
            here = self.path.here
            while (behind := self.path.behind_pass()) is SpotAction.ASK:
                self._advance(has_state=True)
            if behind is SpotAction.LOAD:
                self._load()
                self.path.repeat_from(here)
        return act


steps = st.lists(st.integers(0, 6), max_size=4)


@bounded(300)
@given(programs(), steps)
def test_a_follower_makes_what_the_job_has_not_completed_and_nothing_twice(
    program: Program, job: list[int]
) -> None:
    rank = Follower(program, job, frozenset())
    assert rank.run() is not SpotAction.LOST
    over = program.spots[: rank.at]
    assert rank.repeated == [spot for spot in over if spot.is_at_point]
    assert rank.made == program.spots[rank.at : -1]
    if rank.made:
        assert rank.loaded == rank.made[0]
    elif len(program.counts) > 1:
        assert rank.loaded == program.spots[-1], "what it saves is not the last state"
    whole = {spot.place for spot in rank.made if not spot.is_at_point}
    assert not whole & set(rank.skipped)


@bounded(200)
@given(programs(), steps, st.data())
def test_a_follower_is_lost_at_the_first_result_that_was_not_kept(
    program: Program, job: list[int], data: st.DataObject
) -> None:
    at_points = [spot for spot in program.spots[:-1] if spot.is_at_point]
    unkept = frozenset(data.draw(st.sets(st.sampled_from(at_points))) if at_points else ())
    rank = Follower(program, job, unkept)
    act = rank.run()
    missing = [spot for spot in program.spots[: rank.at] if spot in unkept]
    if act is SpotAction.LOST:
        assert rank.path.here == missing[0]
        assert not rank.made
    else:
        assert not missing


def test_a_script_loads_the_last_state_behind_the_last_pass_and_repeats_what_follows() -> None:
    """What it writes there would otherwise be the weights of its first copy (S14)."""
    path = follower(Spot(0, 2), done=Spot(2, 1))
    path.kept |= {Spot(2, 0): "third", Spot(2, 1): "fourth"}
    assert path.begin_pass() is SpotAction.SKIP
    path.end_pass()
    assert path.behind_pass() is SpotAction.ASK
    path.state, path.is_final = Spot(2, 2), True
    assert path.behind_pass() is SpotAction.LOAD
    path.load()
    path.repeat_from(Spot(2, 0))
    for _ in range(2):
        assert path.operation() is SpotAction.REPEAT
        path.made()
    assert path.operation() is SpotAction.TAKE_PART


@pytest.mark.parametrize(
    ("done", "state", "is_final", "act"),
    [
        (Spot(3, 0), None, False, SpotAction.GO_ON),
        (Spot(2, 0), Spot(3, 0), False, SpotAction.GO_ON),
        (Spot(2, 0), Spot(2, 1), False, SpotAction.GO_ON),
        (Spot(4, 0), Spot(4, 1), True, SpotAction.GO_ON),
        (Spot(2, 0), None, False, SpotAction.ASK),
        (Spot(2, 0), Spot(2, 1), True, SpotAction.LOAD),
    ],
)
def test_a_script_asks_behind_a_pass_only_if_the_pass_may_be_the_last(
    done: Spot, state: Spot | None, *, is_final: bool, act: SpotAction
) -> None:
    path = follower(Spot(2, 0), done=done, state=state)
    path.is_final = is_final
    assert path.behind_pass() is act
