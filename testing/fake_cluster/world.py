"""A whole cluster on a virtual clock, with only the decisions of a real operator.

Observations are put into the store by hand, due work is decided at once, and the status of
coordinators arrives without a connection. It is for tests of single decisions; fake_cluster.inside
has a real operator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from testing.fake_cluster.cluster import Cluster
from testing.fake_cluster.observations import read
from testing.fake_cluster.parts import KEY, NAMESPACE, START_S, job_body, place_of
from testing.fake_cluster.server import CrashError

__all__ = ["NAMESPACE", "START_S", "World", "job_body", "place_of"]
from paceline_api.crdgen import PLURAL
from paceline_api.pods.security import Level
from paceline_operator.cluster.apply import Applier
from paceline_operator.cluster.ownership import apply_own
from paceline_operator.cluster.store import Key, Store
from paceline_operator.cluster.wire import pod_from
from paceline_operator.controller import Controller
from paceline_operator.core.changes import CoordinatorMessage, SecretId
from paceline_operator.core.job import JobObject
from paceline_operator.core.pods.service import service


class World(Cluster):
    """The cluster and its operator."""

    def __init__(self) -> None:
        self.now_s = START_S
        super().__init__()
        self.delivered = 0
        self.loop = asyncio.new_event_loop()
        self.crashes = 0
        self.start_operator()

    def close(self) -> None:
        """Close the event loop."""
        self.loop.close()

    # ---- the operator -----------------------------------------------------------------------

    def start_operator(self) -> None:
        """Start an operator with an empty store, as after a crash."""
        self.dirty: dict[Key, float] = {}
        self.epoch = self.crashes + 1
        self.store = Store(lambda key: self.dirty.__setitem__(key, self.now_s))
        self.services: set[str] = set()
        self.level = Level.PRIVILEGED
        applier = Applier(
            self.server,
            self.store,
            make_secret=self._secret,
            ensure_service=self._service,
            level_of=self._level,
            clock=lambda: self.now_s,
            leads=lambda: True,
        )
        self.controller = Controller(
            self.store,
            applier,
            self,
            clock=lambda: self.now_s,
            epoch=lambda: self.epoch,
            nodes_fresh=lambda: True,
            pods_live_s=lambda: 0.0,
            key_id=lambda: KEY,
        )
        self.relist()

    def _secret(self, job: JobObject, secret: SecretId) -> Mapping[str, Any]:
        owner = [{"uid": job.uid, "controller": True}]
        name = f"{job.name}-{job.uid}-{secret.key_id}-{secret.file}"
        return {"metadata": {"name": name, "ownerReferences": owner}}

    async def _level(self, namespace: str) -> Level:
        if "namespaces" in self.server.refusing:
            raise self.server.refusing["namespaces"]
        del namespace
        return self.level

    async def _service(self, namespace: str) -> None:
        if namespace not in self.services:
            await apply_own(self.server, "services", namespace, service(namespace))
            self.services.add(namespace)

    def relist(self) -> None:
        """Restart all watches with a list."""
        self.delivered = len(self.server.log)
        for node in self.nodes.values():
            self.store.put_node(node)
        jobs = self.server.of_kind(PLURAL)
        uids = {body["metadata"]["uid"] for body in jobs}
        for key, body in list(self.store.jobs.items()):
            if body["metadata"]["uid"] not in uids:
                self.store.drop_job(key, body["metadata"]["uid"])
        for body in jobs:
            self.store.put_job(body)
        pods = (pod_from(body, self.now_s) for body in self.server.of_kind("pods"))
        self.store.keep_pods(((f[0], f[1]), f[2]) for f in pods if f is not None)

    def deliver(self, count: int | None = None, *, again: int = 0) -> None:
        """Deliver watch events to the operator.

        A watch keeps its order, but the answers to the operator's own requests do not keep it.
        `again` models that.

        Args:
            count: number of new events to deliver; None delivers all.
            again: repeat up to twice as many earlier events afterwards, newest first.
        """
        until = len(self.server.log)
        if count is not None:
            until = min(until, self.delivered + count)
        for kind, what, body in self.server.log[self.delivered : until]:
            self._event(kind, what, body)
        self.delivered = until
        for kind, what, body in reversed(self.server.log[max(0, until - 2 * again) : until]):
            if what != "DELETED":
                self._event(kind, what, body)

    def _event(self, kind: str, what: str, body: dict[str, Any]) -> None:
        metadata = body["metadata"]
        if kind == PLURAL:
            key = (metadata["namespace"], metadata["name"])
            if what == "DELETED":
                self.store.drop_job(key, metadata["uid"])
            else:
                self.store.put_job(body)
        elif kind == "pods" and (pod := pod_from(body, self.now_s)) is not None:
            key = (pod[0], pod[1])
            if what == "DELETED":
                self.store.drop_pod(key, metadata["name"], metadata["uid"])
            else:
                self.store.put_pod(key, pod[2])

    def work(self, limit: int = 50) -> int:
        """Reconcile what is due, `limit` times at most; return the number of decisions."""
        done = 0
        while done < limit:
            due = [key for key, at_s in self.dirty.items() if at_s <= self.now_s]
            if not due:
                return done
            key = due[0]
            del self.dirty[key]
            again_s = self._await(self.controller.reconcile(key))
            done += 1
            if again_s is not None:
                at_s = self.now_s + again_s
                self.dirty[key] = min(at_s, self.dirty.get(key, at_s))
        return done

    def _await(self, call: Coroutine[Any, Any, float | None]) -> float | None:
        try:
            return self.loop.run_until_complete(call)
        except CrashError:
            self.server.crash_in = None
            self.crashes += 1
            self.start_operator()
            return None

    def settle(self, seconds: float = 30.0, step_s: float = 0.5) -> None:
        """Let time pass while the cluster and the operator act by themselves."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.kubelets()
            self.server.collect_garbage()
            self.deliver()
            self.coordinators()
            self.work()
            self.deliver()
            self.work()
            self.now_s += step_s

    def node_ready(self, name: str, ready: bool) -> None:
        """Set a node's Ready condition, in the operator's store too."""
        super().node_ready(name, ready)
        self.store.put_node(self.nodes[name])

    def _tell(self, key: Key, body: dict[str, Any]) -> None:
        memory = self.controller.memories.get(key)
        if memory is None or memory.uid != body["metadata"]["uid"]:
            return
        memory.coordinator = read(self.status_of(key, body))
        memory.coordinator_heard_s = self.now_s
        self.dirty.setdefault(key, self.now_s)

    # ---- the operator's side of the connection (Coordinators) -----------------------------------

    def follow(
        self, key: Key, job: JobObject, address: str, *, key_id: str, pods: int, hurry: bool
    ) -> None:
        """Ignore the request: the status of coordinators arrives without a connection."""
        del key, job, address, key_id, pods, hurry

    def leave(self, key: Key) -> None:
        """Ignore the request: there is no connection to close."""
        del key

    def send(self, key: Key, message: CoordinatorMessage) -> None:
        """Judge and deliver a message of the operator to a coordinator."""
        inventory = message.inventory
        if inventory is not None:
            self.judge(key, inventory.pods)
        if key not in self.ranks:
            return
        if message.targets is not None:
            self.hear_targets(key, message.targets)
        if inventory is not None and self.hear_inventory(key, inventory.revision, inventory.pods):
            self.controller.inventory_arrived(key, inventory)
