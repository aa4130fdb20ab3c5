"""A right that the operator lacks is named, with the verb, the resource and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from paceline_api.crdgen import PLURAL
from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.rights import HINT, asked, denied, describe, words_of
from paceline_operator.handlers import DENIED_S

from testing.fake_cluster.inside import Inside
from testing.fake_cluster.parts import NAMESPACE, job_body

SAID = 'User "system:serviceaccount:paceline:paceline" cannot do that'
FORBIDDEN = ApiError(403, "Forbidden", SAID)


@pytest.fixture
def world() -> Iterator[Inside]:
    world = Inside()
    try:
        world.server.insert(PLURAL, NAMESPACE, job_body(replicas=1))
        world.settle(5)
        yield world
    finally:
        world.close()


def take_right(world: Inside, kind: str) -> None:
    world.server.refusing[kind] = FORBIDDEN
    world.loop.network.cut(world.api.host)


@pytest.mark.parametrize(
    ("method", "target", "watch", "words"),
    [
        ("GET", "/api/v1/pods", True, "watch pods in all namespaces"),
        ("GET", "/api/v1/pods", False, "list pods in all namespaces"),
        (
            *("GET", "/apis/paceline.dev/v1alpha1/namespaces/a/trainingjobs", False),
            "list trainingjobs.paceline.dev in namespace a",
        ),
        ("GET", "/api/v1/namespaces/a/secrets/key", False, "get secrets in namespace a"),
        ("POST", "/api/v1/namespaces/a/secrets", False, "create secrets in namespace a"),
        (
            *("PATCH", "/apis/paceline.dev/v1alpha1/namespaces/a/trainingjobs/x/status", False),
            "patch trainingjobs.paceline.dev in namespace a",
        ),
        ("GET", "/version", False, "get /version"),
    ],
)
def test_a_request_is_described_by_verb_resource_and_namespace(
    method: str, target: str, watch: bool, words: str
) -> None:
    assert asked(method, target, watch=watch) == words


def test_only_a_missing_right_has_the_hint() -> None:
    missing = ApiError(403, "Forbidden", SAID, denied="list pods in all namespaces")
    assert describe(missing) == f"the operator may not list pods in all namespaces: {SAID}; {HINT}"
    assert describe(ApiError(500, "InternalError", "a bad day")) == "500 InternalError: a bad day"
    assert denied("list pods", SAID).exit_code == 2


def test_an_error_body_that_is_not_json_is_shown_as_it_is() -> None:
    assert words_of(b"<html>no</html>") == ("", "<html>no</html>")
    assert words_of(b'{"reason": "Forbidden", "message": "no"}') == ("Forbidden", "no")


@pytest.mark.long
def test_without_a_right_on_jobs_the_operator_exits_with_the_reason(world: Inside) -> None:
    take_right(world, PLURAL)
    world.settle(DENIED_S / 2)
    wrong = "the operator may not watch trainingjobs.paceline.dev in all namespaces"
    assert world.operator._health.ready() == wrong
    assert world.lives == 1, "an API server that begins knows no roles yet"
    world.settle(2 * DENIED_S)
    assert f"{wrong}: {SAID}" in world.ends
    world.server.refusing.clear()
    world.settle(30)
    world.server.change(PLURAL, NAMESPACE, "digits", spec={"replicas": 2})
    world.settle(10)
    assert len(world.pods()) == 2


@pytest.mark.long
def test_without_a_right_on_pods_the_operator_is_not_ready(world: Inside) -> None:
    take_right(world, "pods")
    world.settle(10)
    wrong = "the operator may not list pods in all namespaces"
    assert world.operator._health.ready() == wrong
    world.server.refusing.clear()
    world.settle(60)
    assert world.operator._health.ready() == ""
    assert world.lives == 1


def test_without_a_right_on_its_own_key_the_operator_does_not_start(world: Inside) -> None:
    world.crash()
    world.server.refusing["secrets"] = FORBIDDEN
    world.settle(5)
    wrong = f"the operator may not get secrets in namespace paceline: {SAID}"
    assert wrong in world.ends
