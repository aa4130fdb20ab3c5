"""Fuzz tests: any job file yields a job or an error with a hint, never a traceback."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from paceline_api.defaults import with_defaults
from paceline_api.errors import InvalidJobError, PacelineError
from paceline_api.reading.load import job_from_mapping, parse_job, with_overrides
from paceline_api.resolve import resolve

from testing.bad_specs import GOOD

FULL = with_defaults(
    parse_job(
        GOOD,
        overrides=[
            "spec.checkpoint.path=/out",
            "spec.coordinator.nodeSelector={a: b}",
            "spec.elasticity.allowedSizes=[2, 4]",
            "spec.failurePolicy.rules=[{action: FailJob, onExitCodes: [2], onReasons: [A]}]",
        ],
    )
).to_mapping()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    paths = [path] if path else []
    for key, child in children:
        paths += places(child, (*path, key))
    return paths


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "5%", "-5ms", "1h", "Full", "TrainingJob", 0, -1, 2**40, "x" * 300]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=4,
)


@pytest.mark.long
@given(st.lists(st.tuples(st.sampled_from(places(FULL)), JUNK), min_size=1, max_size=3))
def test_random_values_in_a_job_give_a_job_or_errors_with_hints(
    edits: list[tuple[tuple[Any, ...], Any]],
) -> None:
    mapping = copy.deepcopy(FULL)
    for path, junk in edits:
        place: Any = mapping
        try:
            for part in path[:-1]:
                place = place[part]
            place[path[-1]] = junk
        except (KeyError, IndexError, TypeError):
            continue  # An earlier edit removed this place.
    try:
        job = job_from_mapping(mapping)
    except InvalidJobError as error:
        errors = error.errors
    else:
        resolve(job)
        errors = ()
    for fault in errors:
        assert fault.path
        assert fault.problem
        assert fault.hint, fault.message
        assert len(fault.render().splitlines()) == 2, fault.render()


@given(st.text(max_size=60) | st.text(alphabet="ab: -[]{}&*!|>#%@\n\t'\"<?,~0", max_size=60))
def test_random_text_is_rejected_with_an_error_and_a_hint(text: str) -> None:
    try:
        parse_job(text)
    except PacelineError as error:
        shown = error
    assert shown.render().startswith("error: ")
    assert shown.hint


@pytest.mark.long
@given(st.text(max_size=20) | st.text(alphabet="spec.relica[0]=:{}", max_size=20))
def test_a_random_override_is_applied_or_rejected_with_a_hint(text: str) -> None:
    try:
        changed = with_overrides(yaml.safe_load(GOOD), [text])
    except InvalidJobError as error:
        assert all(fault.hint for fault in error.errors)  # noqa: PT017
        return
    assert isinstance(changed, dict)
