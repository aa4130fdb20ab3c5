"""The choice of a transport: fastest measured, names break ties, reason and regret as data."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from paceline.core.collectives.select import (
    CLASS_BYTES,
    CLASS_NAMES,
    Method,
    choose,
    choose_all,
    size_class,
)

NAMES = st.sampled_from(
    ["gloo", "mpi:ring", "mpi:recursive_doubling", "nccl", "shm", "hier:gloo", "hier:mpi:ring"]
)
TIMES = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))


def test_the_fastest_wins_and_says_why() -> None:
    choice = choose({"gloo": 90e-6, "mpi:ring": 49e-6, "shm": 22e-6}, 1 << 20)
    assert choice.candidate == "shm"
    assert choice.why == "shm 22 us at 1048576 B; next: mpi:ring 49 us, gloo 90 us"


@given(NAMES)
def test_a_candidate_is_known_by_its_name(name: str) -> None:
    assert Method.of(name).candidate == name
    assert Method.of("gloo") == Method("gloo", "native") == Method("gloo")
    assert Method.of("hier:mpi:ring") == Method("hier:mpi", "ring")


def test_ties_go_to_the_first_name() -> None:
    assert choose({"b": 1.0, "a": 1.0}, 1).candidate == "a"


def test_unmeasured_candidates_lose_against_measured_ones() -> None:
    assert choose({"a": 0.0, "b": 5.0}, 1).candidate == "b"
    assert choose({"b": 0.0, "a": 0.0}, 1).candidate == "a"
    assert "only candidate" in choose({"a": 0.0}, 1).why


def test_regret_compares_what_one_rank_measured_at_one_size() -> None:
    choice = choose({"a": 1.0, "b": 1.5}, 1)
    assert choice.regret({"a": 1.0, "b": 1.5}) == 0.0
    assert choice.regret({"a": 1.5, "b": 1.0, "c": 1.2}) == 0.5
    assert choice.regret({}) == 0.0  # a joiner takes over the table and has measured nothing
    assert choice.regret({"a": 0.0, "b": 1.0}) == 0.0


@given(st.dictionaries(NAMES, st.floats(1e-6, 1.0), min_size=1))
def test_a_rank_that_measures_the_means_regrets_nothing(row: dict[str, float]) -> None:
    assert choose(row, 1).regret(row) == 0.0


@given(st.dictionaries(NAMES, TIMES, min_size=1))
def test_the_order_of_the_table_does_not_matter(seconds: dict[str, float]) -> None:
    shuffled = dict(sorted(seconds.items(), reverse=True))
    assert choose(seconds, 1) == choose(shuffled, 1)


def test_size_classes_are_monotonic_and_hold_their_own_payload() -> None:
    assert [size_class(payload) for payload in CLASS_BYTES] == [0, 1, 2]
    assert [size_class(payload) for payload in (0, 16383, 16384, 262143, 262144, 1 << 40)] == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip


def test_every_class_has_its_own_choice() -> None:
    choices = choose_all({"a": [1.0, 2.0, 3.0], "b": [3.0, 2.0, 1.0]})
    assert [choice.candidate for choice in choices] == ["a", "a", "b"]
    assert len(choices) == len(CLASS_NAMES)
