"""A job is parsed again only when something that it consists of has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from paceline_api.times import timestamp
from paceline_operator.core.job import read_again, read_job

from testing.fake_cluster.observations import NOW, UID
from testing.fake_cluster.parts import job_body


def body() -> dict[str, Any]:
    made = job_body()
    made["metadata"] |= {"uid": UID, "generation": 1, "resourceVersion": "1"}
    return made


def with_status(before: dict[str, Any], **fields: Any) -> dict[str, Any]:
    metadata = {**before["metadata"], "resourceVersion": "2"}
    return {**before, "metadata": metadata, "status": {**before.get("status", {}), **fields}}


def changed(part: str, **fields: Any) -> dict[str, Any]:
    made = copy.deepcopy(body())
    made[part] |= fields
    return made


def test_a_new_status_is_read_without_parsing_the_spec() -> None:
    known = read_job(body())
    new = with_status(body(), resolved=known.resolved, round=7)
    again = read_again(new, body(), known)
    assert again == read_job(new), "what it keeps is what it had resolved"
    assert again.round == 7
    assert again.spec is known.spec


@pytest.mark.parametrize(
    "new",
    [
        changed("spec", replicas=3),
        changed("spec", replicas=-1),
        changed("metadata", labels={"kueue.x-k8s.io/queue-name": "team"}),
        changed("metadata", annotations={"a": "b"}),
        changed("metadata", deletionTimestamp=timestamp(NOW)),
        changed("metadata", uid="another"),
        with_status(body(), resolved={"procsPerReplica": 1, "backoffLimit": 99}),
    ],
)
def test_any_other_change_parses_the_whole_job(new: dict[str, Any]) -> None:
    known = read_job(body())
    again = read_again(new, body(), known)
    assert again == read_job(new)
    assert again != known


def test_an_invalid_job_keeps_its_problems() -> None:
    wrong = changed("spec", replicas=-1)
    known = read_job(wrong)
    assert known.problems
    new = with_status(wrong, round=1)
    assert read_again(new, wrong, known) == read_job(new)
