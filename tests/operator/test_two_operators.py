"""Two operators with different `spec.managedBy` in one cluster ignore each other's jobs (C15)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from paceline_api.crdgen import PLURAL
from paceline_api.names import DEFAULT_MANAGER, LABEL_MANAGER, LABEL_VALUE, manager_label
from paceline_operator.cluster.apply import Applier
from paceline_operator.cluster.levels import Levels
from paceline_operator.cluster.observe import pod_source
from paceline_operator.cluster.services import Services
from paceline_operator.cluster.store import Key, Store
from paceline_operator.cluster.wire import PodObject
from paceline_operator.controller import Controller
from paceline_operator.core.changes import CoordinatorMessage, SecretId
from paceline_operator.core.job import JobObject
from paceline_operator.core.pods.service import KEEP_S

from testing.fake_cluster.parts import KEY, NAMESPACE, START_S, job_body
from testing.fake_cluster.server import Server

OTHER = "example.org/second"


class Cluster:
    def __init__(self) -> None:
        self.now_s = START_S
        self.server = Server(lambda: self.now_s)
        self.sides = Side(self, DEFAULT_MANAGER), Side(self, OTHER)

    def submit(self, name: str, manager: str = "", **spec: Any) -> None:
        chosen = {"managedBy": manager} if manager else {}
        self.server.insert(PLURAL, NAMESPACE, job_body(name, **chosen, **spec))

    def settle(self) -> None:
        for _ in range(10):
            for side in self.sides:
                side.look()
            self.now_s += 1.0

    def pods_of(self, name: str) -> list[dict[str, Any]]:
        return [
            body
            for body in self.server.of_kind("pods")
            if body["metadata"]["name"].startswith(f"{name}-")
        ]


class Side:
    """One operator, with the watches that it requests."""

    def __init__(self, cluster: Cluster, manager: str) -> None:
        self.cluster, self.server = cluster, cluster.server
        self.due: dict[Key, float] = {}
        self.read = 0
        self.pod_events = 0
        self.store = Store(lambda key: self.due.__setitem__(key, 0.0), manager)
        self.source = pod_source(self.store, lambda: cluster.now_s, "")
        self.services = Services(
            self.server, lambda: cluster.now_s, self.store.namespaces_in_use, ""
        )
        applier = Applier(
            self.server,
            self.store,
            make_secret=self._secret,
            ensure_service=self.services.ensure,
            level_of=Levels(self.server, lambda: cluster.now_s).of,
            clock=lambda: cluster.now_s,
            leads=lambda: True,
        )
        self.controller = Controller(
            self.store,
            applier,
            self,
            clock=lambda: cluster.now_s,
            epoch=lambda: 1,
            nodes_fresh=lambda: True,
            pods_live_s=lambda: 0.0,
            key_id=lambda: KEY,
        )

    def _secret(self, job: JobObject, secret: SecretId) -> Mapping[str, Any]:
        return {"metadata": {"name": f"{job.name}-{job.uid}-{secret.key_id}-{secret.file}"}}

    def follow(
        self, key: Key, job: JobObject, address: str, *, key_id: str, pods: int, hurry: bool
    ) -> None:
        del key, job, address, key_id, pods, hurry

    def send(self, key: Key, message: CoordinatorMessage) -> None:
        del key, message

    def leave(self, key: Key) -> None:
        del key

    def look(self) -> None:
        label, _, wanted = self.source.selector.partition("=")
        for kind, what, body in self.server.log[self.read :]:
            metadata = body["metadata"]
            if kind == PLURAL and what == "DELETED":
                self.store.drop_job((metadata["namespace"], metadata["name"]), metadata["uid"])
            elif kind == PLURAL:
                self.store.put_job(body)
            elif kind == "pods" and metadata["labels"].get(label) == wanted:
                self.pod_events += 1
                take = self.source.drop if what == "DELETED" else self.source.put
                take(msgspec.convert(body, PodObject))
        self.read = len(self.server.log)
        for key in [key for key, at_s in self.due.items() if at_s <= self.cluster.now_s]:
            del self.due[key]
            again_s = asyncio.run(self.controller.reconcile(key))
            if again_s is not None:
                self.due.setdefault(key, self.cluster.now_s + again_s)

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.store.jobs}


def test_each_operator_sees_creates_and_counts_its_own_objects() -> None:
    cluster = Cluster()
    first, second = cluster.sides
    cluster.submit("mine", replicas=3)
    cluster.submit("theirs", OTHER, replicas=2)
    cluster.submit("nobodys", "example.org/third")
    cluster.settle()
    assert (first.names, second.names) == ({"mine"}, {"theirs"})
    assert len(cluster.pods_of("mine")) == first.store.pod_count() == 4
    assert len(cluster.pods_of("theirs")) == second.store.pod_count() == 3
    assert cluster.pods_of("nobodys") == []
    assert (first.pod_events, second.pod_events) == (4, 3), "the API server sends no more"
    labels = {pod["metadata"]["labels"][LABEL_MANAGER] for pod in cluster.pods_of("theirs")}
    assert labels == {manager_label(OTHER)}


def test_deleting_a_job_of_one_operator_does_not_affect_the_other() -> None:
    cluster = Cluster()
    first, second = cluster.sides
    cluster.submit("mine")
    cluster.submit("theirs", OTHER)
    cluster.settle()
    cluster.server.remove(PLURAL, NAMESPACE, "theirs")
    cluster.server.collect_garbage()
    cluster.settle()
    assert (first.names, second.names) == ({"mine"}, set())
    assert second.store.pod_count() == 0
    assert len(cluster.pods_of("mine")) == 3


def test_a_job_name_can_move_to_the_other_operator() -> None:
    """The old pods still exist, and the other operator adopts none of them."""
    cluster = Cluster()
    first, second = cluster.sides
    cluster.submit("digits")
    cluster.settle()
    old = {pod["metadata"]["uid"] for pod in cluster.pods_of("digits")}
    cluster.server.remove(PLURAL, NAMESPACE, "digits")
    cluster.submit("digits", OTHER)
    cluster.settle()
    (body,) = cluster.server.of_kind(PLURAL)
    made = [pod for pod in cluster.pods_of("digits") if pod["metadata"]["uid"] not in old]
    assert len(made) == 3
    assert {p["metadata"]["ownerReferences"][0]["uid"] for p in made} == {body["metadata"]["uid"]}
    assert {pod.uid for pod in second.store.pods((NAMESPACE, "digits"))}.isdisjoint(old)
    assert first.names == set()


def test_a_missed_deletion_is_inferred_from_a_job_of_the_other_operator() -> None:
    cluster = Cluster()
    first, _ = cluster.sides
    cluster.submit("digits")
    first.look()
    (own,) = first.store.jobs.values()
    cluster.server.remove(PLURAL, NAMESPACE, "digits")
    cluster.submit("digits", OTHER)
    first.store.put_job(cluster.server.of_kind(PLURAL)[0])
    assert first.names == set()
    first.store.put_job(own)
    assert first.names == set(), "an old event does not bring it back"


def test_the_shared_service_is_kept_while_the_other_operator_has_jobs() -> None:
    cluster = Cluster()
    first, _ = cluster.sides
    cluster.submit("mine")
    cluster.submit("theirs", OTHER)
    cluster.settle()
    cluster.server.remove(PLURAL, NAMESPACE, "mine")
    cluster.settle()

    def after_a_while() -> int:
        for _ in range(3):
            asyncio.run(first.services.look(lambda: True))
            cluster.now_s += KEEP_S
        return len(cluster.server.of_kind("services"))

    assert after_a_while() == 1
    ended = {"conditions": [{"type": "Complete", "status": "True"}]}
    cluster.server.change(PLURAL, NAMESPACE, "theirs", status=ended)
    cluster.settle()
    assert after_a_while() == 0


def test_a_new_list_forgets_jobs_of_the_other_operator() -> None:
    cluster = Cluster()
    first, _ = cluster.sides
    cluster.submit("theirs", OTHER)
    first.look()
    assert first.store.namespaces_in_use() == {NAMESPACE}
    first.store.keep_jobs([], first.store.uids())
    assert first.store.namespaces_in_use() == set()


@pytest.mark.parametrize(
    "manager", [DEFAULT_MANAGER, OTHER, "second", "///", "é", "a b", "x" * 253, "-a-", "Ünder_7."]
)
def test_every_manager_has_a_valid_label(manager: str) -> None:
    label = manager_label(manager)
    assert re.fullmatch(LABEL_VALUE, label)
    assert label == manager_label(manager)


def test_similar_manager_names_have_distinct_labels() -> None:
    alike = ["a/b", "a//b", "a-b", "a/b/", "a b", "x" * 64, "x" * 65]
    assert len({manager_label(manager) for manager in alike}) == len(alike)
