"""Connections of an HTTP server: no address can use up those of the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from paceline.core.admission import Admission, AdmissionVerdict, Bounds

BOUNDS = Bounds(connections=8, of_one_address=6)
ADMITTED = AdmissionVerdict(admitted=True)
REFUSED = AdmissionVerdict(admitted=False)


def test_an_address_is_limited_even_if_connections_are_free() -> None:
    admission = Admission(lambda: BOUNDS)
    for caller in range(6):
        assert admission.admit(caller, "a") == ADMITTED
    assert admission.admit(6, "a") == REFUSED
    assert admission.admit(7, "b") == ADMITTED


def test_a_full_server_displaces_the_oldest_unknown_caller_for_a_new_address() -> None:
    admission = Admission(lambda: BOUNDS)
    for caller in range(6):
        admission.admit(caller, "a")
    for caller in (6, 7):
        admission.admit(caller, "b")
    assert admission.admit(8, "c") == AdmissionVerdict(admitted=True, displaced=0)
    assert admission.admit(9, "c") == AdmissionVerdict(admitted=True, displaced=1)


def test_a_known_caller_is_never_displaced() -> None:
    admission = Admission(lambda: BOUNDS)
    for caller in range(8):
        admission.admit(caller, "a")
        admission.know(caller)
    assert admission.admit(8, "b") == REFUSED
    admission.release(3)
    assert admission.admit(9, "b") == ADMITTED


calls = st.lists(
    st.tuples(st.sampled_from("acceptkr"), st.integers(0, 5), st.integers(0, 60)), max_size=200
)


@given(calls)
def test_no_sequence_of_calls_breaks_a_limit_or_starves_a_new_address(
    words: list[tuple[str, int, int]],
) -> None:
    admission, strangers, known = Admission(lambda: BOUNDS), dict[int, str](), set[int]()
    for caller, (word, where, other) in enumerate(words):
        address = f"10.0.0.{where}"
        if word == "k":
            if other in strangers:
                known.add(other)
                del strangers[other]
            admission.know(other)
        elif word == "r":
            strangers.pop(other, None)
            known.discard(other)
            admission.release(other)
        else:
            shares = [list(strangers.values()).count(one) for one in set(strangers.values())]
            own = list(strangers.values()).count(address)
            full = len(strangers) + len(known) >= BOUNDS.connections
            verdict = admission.admit(caller, address)
            free = not full or max(shares, default=0) > own
            assert verdict.admitted == (own < BOUNDS.of_one_address and free)
            assert (verdict.displaced is not None) == (verdict.admitted and full)
            if verdict.displaced is not None:
                assert strangers.pop(verdict.displaced) != address
            if verdict.admitted:
                strangers[caller] = address
        assert admission.open == len(strangers) + len(known) <= BOUNDS.connections


def test_a_job_that_grows_has_more_places() -> None:
    size = [2]
    admission = Admission(lambda: Bounds(connections=size[0], of_one_address=size[0]))
    assert [admission.admit(n, "a").admitted for n in range(3)] == [True, True, False]
    for caller in range(2):
        admission.know(caller)
    assert not admission.admit(4, "b").admitted, "nobody who has authenticated is displaced"
    size[0] = 3
    assert admission.admit(5, "b").admitted
