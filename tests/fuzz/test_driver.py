"""The fuzz driver finds the faults it is made for, and the same ones in each run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import islice

import msgspec
import pytest

from testing.fuzz import driver
from testing.fuzz.driver import HUNGRY, SLOW, run
from testing.fuzz.mutation import inputs
from testing.fuzz.samples import json_samples
from testing.fuzz.target import Form, Reader, Target, pure
from testing.fuzz.targets import TARGETS

SEEDS = (b'{"kind":"drain","count":3}',)


def target(read: Reader, *errors: type[Exception]) -> Target:
    return Target("small", pure(read), errors, SEEDS, Form.JSON)


@pytest.mark.long
def test_an_unexpected_error_is_a_finding_with_a_minimized_input() -> None:
    def read(data: bytes) -> object:
        return dict(json.loads(data))

    report = run(target(read, ValueError, RecursionError), 200)
    [finding] = report.findings.values()
    assert finding.problem.startswith("raises TypeError")
    assert len(finding.data) == 1


@pytest.mark.long
def test_a_recursion_error_is_a_finding() -> None:
    report = run(target(json.loads, ValueError), 200)
    assert list(report.findings) == ["raises RecursionError"]


def test_a_correct_parser_has_no_findings() -> None:
    report = run(
        target(msgspec.json.decode, msgspec.MsgspecError, RecursionError, UnicodeError), 300
    )
    assert not report.findings
    assert report.inputs == 300
    assert report.accepted


@pytest.mark.long
def test_excessive_memory_is_a_finding() -> None:
    def read(data: bytes) -> object:
        return bytearray(driver.MEMORY_BYTES_MAX * 2) if data == SEEDS[0] else None

    report = run(replace(target(read), cpu_ms=1e9), 64)
    assert list(report.findings) == [HUNGRY]
    assert report.findings[HUNGRY].data == SEEDS[0]


def test_time_that_is_excessive_each_time_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_ns = 0

    def thread_time_ns() -> int:
        return clock_ns

    def read(data: bytes) -> object:
        nonlocal clock_ns
        clock_ns += 11_000_000 if data == SEEDS[0] else 0
        return None

    monkeypatch.setattr(time, "thread_time_ns", thread_time_ns)
    report = run(target(read), 64)
    assert list(report.findings) == [SLOW]


def test_time_that_is_excessive_only_once_is_not_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    times_ns = iter([0, 50_000_000])
    last_ns = 50_000_000

    def thread_time_ns() -> int:
        return next(times_ns, last_ns)

    monkeypatch.setattr(time, "thread_time_ns", thread_time_ns)
    assert not run(target(lambda _: None), 64).findings


def test_inputs_depend_on_the_seed_only() -> None:
    small = target(lambda _: None)
    first, again, other = (list(islice(inputs(small, [], n), 300)) for n in (0, 0, 1))
    assert first == again
    assert first != other
    assert first[0] == SEEDS[0]


def test_known_inputs_are_tried_before_mutations() -> None:
    assert b"once" in list(islice(inputs(target(lambda _: None), [b"once"], 0), 2))


def test_inputs_of_the_corpus_belong_to_a_target_and_are_tried_first() -> None:
    for path in driver.CORPUS.iterdir():
        known = driver.known_inputs(TARGETS[path.stem])
        assert known
        assert all(isinstance(one, bytes) for one in known)
        assert set(known) <= set(islice(inputs(TARGETS[path.stem], known, 0), 100))


class Small(msgspec.Struct, tag="small"):
    count: int
    names: tuple[str, ...] = ()
    inner: dict[str, float] | None = None


def test_samples_generated_for_a_type_decode_as_that_type() -> None:
    full, least = (msgspec.json.decode(one, type=Small) for one in json_samples(Small))
    assert full == Small(1, ("1",), {"1": 1.5})
    assert least == Small(1)
