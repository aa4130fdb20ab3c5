"""The choice of a transport: fastest measured, ties broken by name, reason and regret as data."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.collectives.select import (
    CALLS,
    CLASS_BYTES,
    CLASS_NAMES,
    Method,
    calls_to_measure,
    choose,
    choose_all,
    choose_reproducible,
    classes_up_to,
    size_class,
    topology,
)

NAMES = st.sampled_from(
    ["gloo", "mpi:ring", "mpi:recursive_doubling", "nccl", "shm", "hier:gloo", "hier:mpi:ring"]
)
TIMES = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))


def test_the_fastest_candidate_is_chosen_with_its_reason() -> None:
    choice = choose({"gloo": 90e-6, "mpi:ring": 49e-6, "shm": 22e-6}, 1 << 20)
    assert choice.candidate == "shm"
    assert choice.why == "shm 22 us at 1048576 B; next: mpi:ring 49 us, gloo 90 us"


@given(NAMES)
def test_method_of_inverts_the_candidate_name(name: str) -> None:
    assert Method.of(name).candidate == name
    assert Method.of("gloo") == Method("gloo", "native") == Method("gloo")
    assert Method.of("hier:mpi:ring") == Method("hier:mpi", "ring")


def test_ties_are_broken_by_name() -> None:
    assert choose({"b": 1.0, "a": 1.0}, 1).candidate == "a"


def test_unmeasured_candidates_lose_against_measured_ones() -> None:
    assert choose({"a": 0.0, "b": 5.0}, 1).candidate == "b"
    assert choose({"b": 0.0, "a": 0.0}, 1).candidate == "a"
    assert "only candidate" in choose({"a": 0.0}, 1).why


def test_regret_compares_the_choice_with_the_best_of_one_rank() -> None:
    choice = choose({"a": 1.0, "b": 1.5}, 1)
    assert choice.regret({"a": 1.0, "b": 1.5}) == 0.0
    assert choice.regret({"a": 1.5, "b": 1.0, "c": 1.2}) == 0.5
    assert choice.regret({}) == 0.0  # A joiner takes over the table and has measured nothing.
    assert choice.regret({"a": 0.0, "b": 1.0}) == 0.0


@given(st.dictionaries(NAMES, st.floats(1e-6, 1.0), min_size=1))
def test_regret_is_zero_for_the_row_that_the_choice_was_made_from(row: dict[str, float]) -> None:
    assert choose(row, 1).regret(row) == 0.0


@given(st.dictionaries(NAMES, TIMES, min_size=1))
def test_the_order_of_the_table_does_not_matter(seconds: dict[str, float]) -> None:
    shuffled = dict(sorted(seconds.items(), reverse=True))
    assert choose(seconds, 1) == choose(shuffled, 1)


def test_size_classes_are_monotonic_and_contain_their_own_payload() -> None:
    assert [size_class(payload) for payload in CLASS_BYTES] == [0, 1, 2, 3, 4]
    limits = (0, 16383, 16384, 262143, 262144, (4 << 20) - 1, 4 << 20, (32 << 20) - 1, 32 << 20)
    assert [size_class(payload) for payload in (*limits, 1 << 40)] == [
        0, 0, 1, 1, 2, 2, 3, 3, 4, 4,
    ]  # fmt: skip


@given(st.integers(0, 1 << 40))
def test_no_class_is_measured_beyond_that_of_the_largest_payload(largest: int) -> None:
    classes = classes_up_to(largest)
    assert size_class(largest) == classes - 1
    assert classes == 1 or CLASS_BYTES[classes - 1] < max(largest, 1) * 5


def test_every_class_has_its_own_choice() -> None:
    choices = choose_all({"a": [1.0, 2.0, 3.0], "b": [3.0, 2.0, 1.0]})
    assert [choice.candidate for choice in choices] == ["a", "a", "b", "b", "b"]
    assert len(choices) == len(CLASS_NAMES)
    assert choices[3].why == choices[2].why  # Both name the payload that was measured.


@given(st.lists(st.sampled_from("abc"), max_size=6))
def test_a_topology_encodes_which_ranks_share_a_machine(machines: list[str]) -> None:
    shape = topology(machines)
    assert len(shape) == len(machines)
    for one in range(len(machines)):
        for other in range(len(machines)):
            assert (machines[one] == machines[other]) == (shape[one] == shape[other])
    renamed = [f"node {machine}, restarted" for machine in machines]
    assert topology(renamed) == shape


def test_a_much_slower_candidate_is_not_measured_in_larger_classes() -> None:
    table = {"a": [1e-4], "b": [3.9e-4], "c": [4.1e-4]}
    assert calls_to_measure({name: [] for name in table}, 0) == {"a": 5, "b": 5, "c": 5}
    assert calls_to_measure(table, 1) == {"a": 5, "b": 5, "c": 0}


def test_on_a_slow_link_larger_classes_use_the_last_measured_class() -> None:
    table = {"a": [1e-3, 1e-2, 0.1], "b": [1e-3, 2e-2, 0.2]}
    assert calls_to_measure(table, 3) == {"a": 0, "b": 0}  # 16 x 0.3 s
    choices = choose_all({name: [*row, 0.0, 0.0] for name, row in table.items()})
    assert [choice.why for choice in choices[2:]] == [
        "a 100000 us at 1048576 B; next: b 200000 us"
    ] * 3


def test_slow_candidates_get_fewer_calls_but_at_least_one() -> None:
    quick = {"a": [0, 0, 1e-3], "b": [0, 0, 1e-3]}
    slow = {"a": [0, 0, 0.08], "b": [0, 0, 0.04]}
    assert calls_to_measure(quick, 3) == {"a": 3, "b": 3}
    assert calls_to_measure(slow, 3) == {"a": 1, "b": 1}


@given(st.dictionaries(NAMES, TIMES, min_size=1))
def test_the_best_candidate_of_a_class_is_measured_in_the_next(seconds: dict[str, float]) -> None:
    calls = calls_to_measure({name: [taken] for name, taken in seconds.items()}, 1)
    assert calls[choose(seconds, 1).candidate] >= 1 or not any(calls.values())
    assert all(count <= CALLS for count in calls.values())


@given(st.lists(NAMES, min_size=1, unique=True), st.randoms(), st.integers(1, 9))
def test_a_reproducible_choice_depends_on_neither_measurements_nor_order(
    names: list[str], dice: Random, ranks: int
) -> None:
    where = (0,) * ranks
    chosen = choose_reproducible(names, where)
    dice.shuffle(names)
    assert choose_reproducible(names, where) == chosen
    assert {choice.candidate for choice in chosen} <= set(names)
    assert len({Method.of(choice.candidate).transport for choice in chosen}) == 1


MPI = ("mpi:ring", "mpi:halving_doubling", "mpi:recursive_doubling")


@pytest.mark.parametrize(
    ("names", "where", "small", "large"),
    [
        (("gloo", "shm", *MPI), (0, 0, 0), "shm", "shm"),
        (("gloo", *MPI), (0, 1, 2, 3), "mpi:recursive_doubling", "mpi:halving_doubling"),
        (("gloo", *MPI), (0, 1, 2), "mpi:recursive_doubling", "mpi:ring"),
        (("gloo", *MPI, *(f"hier:{x}" for x in MPI)), (0, 0, 0, 1, 1, 1), *(
            "hier:mpi:recursive_doubling", "hier:mpi:halving_doubling"
        )),
        (("gloo", "mpi:ring"), (0, 1), "mpi:ring", "mpi:ring"),
        (("nccl", "gloo"), (0, 0), "nccl", "nccl"),
        (("gloo",), (0, 1), "gloo", "gloo"),
    ],
)  # fmt: skip
def test_a_reproducible_choice_follows_machines_and_size(
    names: tuple[str, ...], where: tuple[int, ...], small: str, large: str
) -> None:
    chosen = choose_reproducible(names, where)
    assert [choice.candidate for choice in chosen] == [small] * 2 + [large] * 3
    why = (
        "not measured, so that each run has the same bits"
        if len(names) > 1
        else "the only candidate"
    )
    assert chosen[0].why.endswith(f"at 4096 B: {why}")
