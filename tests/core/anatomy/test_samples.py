"""Validation of the samples a pod sends: every value has a limit, and names are checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.anatomy.course import course
from paceline.core.anatomy.job import analyse, known_rounds, latest_rounds
from paceline.core.anatomy.samples import (
    COURSE_BYTES_MAX,
    MOMENTS_MAX,
    RANK_BYTES_MAX,
    ROUNDS,
    SEGMENTS_MAX,
    STEPS,
    SamplesError,
    bytes_max,
    read_samples,
)
from paceline.report.page import About, page
from paceline.report.trace import trace
from paceline_api.ids import PROCS_MAX

from testing.anatomy_samples import pods

Change = Callable[[dict[str, Any]], object]


def encoded(change: Change) -> bytes:
    """Return the samples of a pod as JSON, after applying `change`."""
    plain = json.loads(msgspec.json.encode(pods()[0]))
    change(plain)
    return json.dumps(plain).encode()


def rank(changes: dict[str, Any]) -> Change:
    return lambda pod: pod["ranks"][0].update(changes)


def first(ring: str, changes: dict[str, Any]) -> Change:
    return lambda pod: pod["ranks"][0][ring][0].update(changes)


def moment(changes: dict[str, Any]) -> Change:
    return lambda pod: pod["course"][0].update(changes)


def longer(ring: str, count: int) -> Change:
    def change(pod: dict[str, Any]) -> None:
        pod["ranks"][0][ring] = pod["ranks"][0][ring][:1] * count

    return change


NO_MEMBERS = [
    "",
    "0.0",
    "0.0#",
    "0.0#0 ",
    "0.0#0\n",
    " 0.0#0",
    "+0.0#0",
    "-1.0#0",
    "0.0#1_0",
    "\u0660.0#0",
    "0.0#0<img src=x onerror=alert(1)>",
    "0.0#\x1b[31m0",
    f"{'9' * 5000}.0#0",
]
BAD: list[Change] = [
    *(rank({"member": text}) for text in NO_MEMBERS),
    *(first("rounds", {"last": text}) for text in NO_MEMBERS if text not in ("", "0.0")),
    lambda pod: pod.update(job="x" * 254),
    lambda pod: pod.update(host="x" * 254),
    lambda pod: pod.update(slot=-1),
    lambda pod: pod.update(slot=2**70),
    lambda pod: pod.update(ranks=pod["ranks"] * (2 * PROCS_MAX + 1)),
    longer("steps", STEPS + 1),
    longer("rounds", ROUNDS + 1),
    first("rounds", {"round": 2**63}),
    first("rounds", {"go_ns": -1}),
    first("steps", {"began_ns": 1e300}),
    first("steps", {"version": True}),
    lambda pod: pod["ranks"][0]["rounds"][0].update(
        segments=pod["ranks"][0]["rounds"][0]["segments"] * (SEGMENTS_MAX + 1)
    ),
    rank({"member": "1.0#0"}),
    lambda pod: pod.update(course=pod["course"] * MOMENTS_MAX),
    moment({"round": -1}),
    moment({"wall_ms": 2**63}),
    moment({"figures": {"x" * 33: [1.0, 1.0]}}),
    moment({"figures": {str(number): [1.0, 1.0] for number in range(17)}}),
    moment({"figures": {"loss": [1.0, "NaN"]}}),
]


@pytest.mark.parametrize("change", BAD)
def test_samples_beyond_a_limit_are_rejected(change: Change) -> None:
    with pytest.raises(SamplesError):
        read_samples(encoded(change))


@pytest.mark.parametrize(
    "answer",
    [b"", b"5", b"null", b"[" * 100_000, b'{"job":' * 50_000, b'"\xff"', b'{"job":"\\ud800"}'],
)
def test_an_answer_that_is_not_samples_is_rejected(answer: bytes) -> None:
    with pytest.raises(SamplesError):
        read_samples(answer)


@given(st.binary(max_size=200))
def test_random_bytes_raise_a_samples_error(answer: bytes) -> None:
    with pytest.raises(SamplesError):
        read_samples(answer)


def test_the_largest_valid_samples_fit_into_the_size_limit() -> None:
    big = 2**63 - 1
    segment = dict.fromkeys(
        ["payload_bytes", "ready_ns", "opened_ns", "begun_ns", "ended_ns", "busy_ns"], 10**15
    )

    def change(pod: dict[str, Any]) -> None:
        own = pod["ranks"][0]
        own["member"] = f"{pod['slot']}.0#999999999"
        own["steps"] = [dict.fromkeys(own["steps"][0], big) | {"fresh": False}] * STEPS
        own["rounds"] = [own["rounds"][0] | {"segments": [segment] * SEGMENTS_MAX}] * ROUNDS
        pod["ranks"] = [own] * 2

    whole = msgspec.json.encode(read_samples(encoded(change)))
    assert len(whole) <= 2 * RANK_BYTES_MAX
    assert bytes_max(1) == 2 * RANK_BYTES_MAX + COURSE_BYTES_MAX
    assert bytes_max(10**9) == bytes_max(PROCS_MAX)
    assert bytes_max(-1) == bytes_max(1)


NUMBERS = st.integers(0, 2**63 - 1) | st.integers(0, 5)


@pytest.mark.long
@given(st.data())
def test_a_report_is_built_from_any_samples_within_the_limits(data: st.DataObject) -> None:
    """Impossible numbers give a strange page, but no endless work and no traceback."""

    def change(pod: dict[str, Any]) -> None:
        for own in pod["ranks"]:
            for one in (*own["steps"], *own["rounds"]):
                for name in data.draw(st.sets(st.sampled_from(sorted(one)), max_size=4)):
                    if type(one[name]) is int:
                        one[name] = data.draw(NUMBERS)
        for moment in pod["course"]:
            moment["wall_ms"], moment["round"] = data.draw(NUMBERS), data.draw(NUMBERS)

    samples = [read_samples(encoded(change)), *pods()[1:]]
    job = analyse(samples)
    about = About(0.0, "team", "Training", "Full")
    assert page(job, about, course(samples), latest_rounds(job.ranks, 12))
    assert trace(job, known_rounds(job.ranks))
