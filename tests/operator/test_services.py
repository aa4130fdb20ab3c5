"""The shared Service of a namespace: kept while jobs exist, removed later, never forgotten."""

from __future__ import annotations

import asyncio

import pytest
from paceline_api.names import COORDINATOR_SERVICE
from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.services import Services
from paceline_operator.core.pods.service import KEEP_S, REFRESH_S

from testing.fake_cluster.server import Server


class Desk:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.server = Server(lambda: self.now_s)
        self.in_use: set[str] = set()
        self.start()

    def start(self, scope: str = "") -> None:
        """Start an operator, or its successor."""
        self.services = Services(self.server, lambda: self.now_s, lambda: self.in_use, scope)

    def ensure(self, namespace: str) -> None:
        self.in_use.add(namespace)
        asyncio.run(self.services.ensure(namespace))

    def look(self, *, leads: bool = True) -> None:
        asyncio.run(self.services.look(lambda: leads))

    @property
    def there(self) -> set[str]:
        return {namespace for (kind, namespace, _) in self.server.objects if kind == "services"}


def test_the_service_is_removed_some_time_after_the_last_job() -> None:
    desk = Desk()
    desk.ensure("a")
    desk.look()
    desk.in_use.clear()
    desk.look()
    desk.now_s += KEEP_S - 1
    desk.look()
    assert desk.there == {"a"}
    desk.now_s += 1
    desk.look(leads=False)
    assert desk.there == {"a"}
    desk.look()
    assert desk.there == set()


def test_a_job_in_between_restarts_the_delay() -> None:
    desk = Desk()
    desk.ensure("a")
    desk.in_use.clear()
    desk.look()
    desk.now_s += KEEP_S - 1
    desk.ensure("a")
    desk.look()
    desk.in_use.clear()
    desk.now_s += KEEP_S - 1
    desk.look()
    assert desk.there == {"a"}


def test_a_deleted_service_is_recreated() -> None:
    desk = Desk()
    desk.ensure("a")
    desk.server.remove("services", "a", COORDINATOR_SERVICE)
    desk.now_s += REFRESH_S
    desk.look()
    assert desk.there == {"a"}


def test_a_new_operator_removes_unused_services() -> None:
    desk = Desk()
    for namespace in ("a", "b"):
        desk.ensure(namespace)
    desk.in_use.remove("a")
    desk.start()
    desk.look()
    desk.now_s += KEEP_S
    desk.look()
    assert desk.there == {"b"}


def test_a_failed_list_is_retried() -> None:
    desk = Desk()
    desk.ensure("a")
    desk.in_use.clear()
    desk.start()
    desk.server.refusing["services"] = ApiError(403, "Forbidden", "no")
    desk.look()
    desk.server.refusing.clear()
    desk.look()
    desk.now_s += KEEP_S
    desk.look()
    assert desk.there == set()


@pytest.mark.parametrize(("scope", "left"), [("a", {"b"}), ("", set())])
def test_a_namespaced_operator_removes_only_its_own_service(scope: str, left: set[str]) -> None:
    desk = Desk()
    for namespace in ("a", "b"):
        desk.ensure(namespace)
    desk.in_use.clear()
    desk.start(scope)
    desk.look()
    desk.now_s += KEEP_S
    desk.look()
    assert desk.there == left
