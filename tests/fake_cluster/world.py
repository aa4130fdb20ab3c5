"""A whole cluster on a virtual clock: API server, kubelets, a coordinator per job, one operator.

The coordinator is a small honest one: it counts the ranks that run, forms a membership, drains
those that are too many, loses the state with the last rank that has it. It also judges what it is
told: an inventory that leaves out a living process is a split brain, and fails the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from fake_cluster.parts import KEY, NAMESPACE, START_S, Ranks, job_body, place_of
from fake_cluster.server import CrashError, Server

__all__ = ["NAMESPACE", "START_S", "World", "job_body", "place_of"]
from msgspec import convert
from paceline_api.crdgen import PLURAL
from paceline_api.names import LABEL_JOB, LABEL_ROLE
from paceline_operator.cluster.apply import Applier
from paceline_operator.cluster.store import Key, Store
from paceline_operator.cluster.wire import NodeObject, node_of, pod_from
from paceline_operator.controller import Controller
from paceline_operator.core.changes import Message
from paceline_operator.core.coordinator_status import read_coordinator_status
from paceline_operator.core.job import Job, timestamp
from paceline_operator.core.observed import Node
from paceline_operator.core.pods.service import service


class World:
    def __init__(self) -> None:
        self.now_s = START_S
        self.server = Server(lambda: self.now_s)
        self.nodes = {f"node-{n}": Node(f"node-{n}") for n in range(3)}
        self.cut_off: set[str] = set()
        """Nodes whose kubelets cannot be reached; their processes may live on."""
        self.ranks: dict[Key, Ranks] = {}
        self.version: dict[str, int] = {}
        """Rounds by uid of the job, as the ranks that live know it."""
        self.with_state: dict[str, set[str]] = {}
        """Uids of pods that hold the weights, by uid of the job."""
        self.delivered = 0
        self.steps: dict[tuple[int, int], float] = {}
        self.loop = asyncio.new_event_loop()
        self.crashes = 0
        self.start_operator()

    def close(self) -> None:
        self.loop.close()

    # ---- the operator -----------------------------------------------------------------------

    def start_operator(self) -> None:
        self.dirty: dict[Key, float] = {}
        self.epoch = self.crashes + 1
        self.store = Store(lambda key: self.dirty.__setitem__(key, self.now_s))
        self.services: set[str] = set()
        applier = Applier(
            self.server,
            self.store,
            make_secret=self._secret,
            ensure_service=self._service,
            clock=lambda: self.now_s,
            leads=lambda: True,
        )
        self.controller = Controller(
            self.store,
            applier,
            self,
            manager="paceline.dev/operator",
            clock=lambda: self.now_s,
            epoch=lambda: self.epoch,
            nodes_fresh=lambda: True,
            key_id=lambda: KEY,
        )
        self.relist()

    def _secret(self, job: Job, key_id: str) -> Mapping[str, Any]:
        owner = [{"uid": job.uid, "controller": True}]
        return {"metadata": {"name": f"{job.name}-{job.uid}-{key_id}", "ownerReferences": owner}}

    async def _service(self, namespace: str) -> None:
        if namespace not in self.services:
            await self.server.apply("services", namespace, service(namespace))
            self.services.add(namespace)

    def relist(self) -> None:
        """A watch begins anew with a list."""
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
        found = (pod_from(body, self.now_s) for body in self.server.of_kind("pods"))
        self.store.keep_pods(((f[0], f[1]), f[2]) for f in found if f is not None)

    def deliver(self, count: int | None = None, *, again: int = 0) -> None:
        """Watch events reach the operator; `again` of the earlier ones once more, out of order.

        A watch keeps the order, but the answers to the operator's own requests do not keep it.
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
        elif kind == "pods" and (found := pod_from(body, self.now_s)) is not None:
            key = (found[0], found[1])
            if what == "DELETED":
                self.store.drop_pod(key, metadata["name"], metadata["uid"])
            else:
                self.store.put_pod(key, found[2])

    def work(self, limit: int = 50) -> int:
        """Reconcile whatever is due; returns how many decisions were made."""
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
        """Time passes, everything that can happen by itself does."""
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

    # ---- kubelets ---------------------------------------------------------------------------

    def pods(self, job: str = "digits", role: str = "worker") -> list[dict[str, Any]]:
        found = [
            body
            for body in self.server.of_kind("pods")
            if body["metadata"]["labels"].get(LABEL_JOB) == job
            and body["metadata"]["labels"].get(LABEL_ROLE) == role
        ]
        return sorted(found, key=lambda body: str(body["metadata"]["name"]))

    def kubelets(self) -> None:
        """Bind, start and end pods on the nodes that can be reached."""
        for body in self.server.of_kind("pods"):
            name = body["metadata"]["name"]
            if body["status"]["phase"] in ("Succeeded", "Failed"):
                if "deletionTimestamp" in body["metadata"]:
                    self.server.remove("pods", NAMESPACE, name, at_once=True)
            elif not body["spec"].get("nodeName"):
                self._bind(name, body)
            elif body["spec"]["nodeName"] in self.cut_off:
                continue
            elif "deletionTimestamp" in body["metadata"]:
                self.server.remove("pods", NAMESPACE, name, at_once=True)
            elif body["status"]["phase"] == "Pending":
                # A range of its own for each pod.
                ip = f"10.0.{self.server.version // 250 % 250}.{self.server.version % 250}"
                status = {"phase": "Running", "podIP": ip}
                self.server.change("pods", NAMESPACE, name, status=status)

    def _bind(self, name: str, body: dict[str, Any]) -> None:
        banned = [
            field["values"][0]
            for term in body["spec"]
            .get("affinity", {})
            .get("nodeAffinity", {})
            .get("requiredDuringSchedulingIgnoredDuringExecution", {})
            .get("nodeSelectorTerms", [])
            for field in term.get("matchFields", [])
        ]
        free = [n for n in self.nodes if n not in self.cut_off and n not in banned]
        if free:
            load = dict.fromkeys(free, 0)
            for other in self.server.of_kind("pods"):
                if (node := other["spec"].get("nodeName")) in load:
                    load[node] += 1
            node = min(free, key=lambda n: (load[n], n))
            self.server.change("pods", NAMESPACE, name, spec={"nodeName": node})

    def end_pod(
        self, name: str, code: int, *, reason: str = "", message: str = "", evicted: bool = False
    ) -> None:
        done = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "message": message,
            "finishedAt": timestamp(self.now_s),
        }
        container = {"name": "trainer", "state": {"terminated": done}}
        status: dict[str, Any] = {
            "phase": "Succeeded" if code == 0 else "Failed",
            "containerStatuses": [container],
        }
        if evicted:
            status |= {"reason": "Evicted", "message": "The node was low on resource: memory."}
        self.server.change("pods", NAMESPACE, name, status=status)

    def node_ready(self, name: str, ready: bool) -> None:
        status = {"conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}]}
        item = convert({"metadata": {"name": name}, "status": status}, NodeObject)
        self.nodes[name] = node_of(item, self.nodes[name], self.now_s)
        (self.cut_off.discard if ready else self.cut_off.add)(name)
        self.store.put_node(self.nodes[name])

    # ---- coordinators -----------------------------------------------------------------------

    def processes(self, job: str) -> dict[tuple[int, int], dict[str, Any]]:
        """Worker pods whose ranks live, wherever they are."""
        return {
            place_of(body): body for body in self.pods(job) if body["status"]["phase"] == "Running"
        }

    def coordinators(self) -> None:
        for body in self.server.of_kind(PLURAL):
            key = (NAMESPACE, body["metadata"]["name"])
            coordinators = [
                pod
                for pod in self.pods(key[1], "coordinator")
                if pod["status"]["phase"] == "Running"
                and "deletionTimestamp" not in pod["metadata"]
                and pod["spec"]["nodeName"] not in self.cut_off
            ]
            if not coordinators:
                self.ranks.pop(key, None)
                continue
            uid = coordinators[-1]["metadata"]["uid"]
            if key not in self.ranks or self.ranks[key].uid != uid:
                self.ranks[key] = Ranks(uid, body["spec"]["replicas"])
            self._train(key, body)
            self._report(key, body)

    def _train(self, key: Key, body: dict[str, Any]) -> None:
        ranks, uid = self.ranks[key], body["metadata"]["uid"]
        living = {
            place: pod
            for place, pod in self.processes(key[1]).items()
            if any(o["uid"] == uid for o in pod["metadata"]["ownerReferences"])
            and pod["spec"]["nodeName"] not in self.cut_off
        }
        if ranks.outcome is not None or not living:
            return
        if ranks.stopping:
            ranks.outcome = {"complete": True, "reason": "Complete", "message": "stopped"}
            for pod in living.values():
                self.end_pod(pod["metadata"]["name"], 0, message="finished")
            return
        ranks.dead |= ranks.members - set(living)
        state = self.with_state.setdefault(uid, set())
        uids = {pod["metadata"]["uid"] for pod in living.values()}
        if not state & uids and ranks.had_state:
            missing = f"all ranks with version {self.version[uid]} are lost"
            ranks.outcome = {"complete": False, "reason": "StateLost", "message": missing}
            return
        if not state & uids:
            state.clear()
            # A coordinator that never saw a rank with weights knows no better than to begin.
            self.version[uid] = self.version.get(uid, 0) if "checkpoint" in body["spec"] else 0
        if set(living) != ranks.members:
            if not ranks.members and 2 * len(living) <= ranks.replicas and not state & uids:
                return
            ranks.members = set(living)
            ranks.formed += 1
        state |= uids
        ranks.had_state = True
        self.version[uid] = self.version.get(uid, 0) + 1
        staying = [p for p in sorted(living) if p not in ranks.drained]
        for place in staying[ranks.replicas :]:
            ranks.drained.add(place)
            self.end_pod(living[place]["metadata"]["name"], 0)

    def _report(self, key: Key, body: dict[str, Any]) -> None:
        memory = self.controller.memories.get(key)
        ranks, uid = self.ranks[key], body["metadata"]["uid"]
        if memory is None or memory.uid != uid:
            return
        ranks.seq += 1
        found = [
            {
                "member": [slot, 0, attempt * 1000],
                "state": "active",
                "rank": index,
                "facts": {"step_seconds": self.steps.get((slot, attempt), 0.1)},
            }
            for index, (slot, attempt) in enumerate(sorted(ranks.members))
        ]
        found += [{"member": [s, 0, a * 1000], "state": "dead"} for s, a in sorted(ranks.dead)]
        memory.coordinator = read_coordinator_status(
            {
                "coordinator": ranks.uid,
                "seq": ranks.seq,
                "generation": [1, ranks.uid, ranks.formed],
                "changes": [{}] if ranks.formed else [],
                "replicas": ranks.replicas,
                "inventory": ranks.revision,
                "ranks": found,
                "version": self.version.get(uid, 0),
                "log": {"rounds": {"all": self.version.get(uid, 0)}, "round_s": 0.1},
                "stopping": ranks.stopping,
                "outcome": ranks.outcome,
            }
        )
        memory.coordinator_heard_s = self.now_s
        self.dirty.setdefault(key, self.now_s)

    def finish(self, job: str = "digits") -> None:
        """All data is applied: the ranks are released; the coordinator keeps the outcome."""
        key = (NAMESPACE, job)
        self.ranks[key].stopping = True
        for pod in self.processes(job).values():
            self.end_pod(pod["metadata"]["name"], 0, message="finished")
        self.ranks[key].outcome = {"complete": True, "reason": "Complete", "message": "done"}

    # ---- the operator's side of the connection (Coordinators) -----------------------------------

    def follow(self, key: Key, job: Job, address: str, *, key_id: str, hurry: bool) -> None:
        del key, job, address, key_id, hurry

    def leave(self, key: Key) -> None:
        del key

    def send(self, key: Key, message: Message) -> None:
        ranks = self.ranks.get(key)
        if message.inventory is not None:
            self._judge(key, message.inventory.pods)
        if ranks is None:
            return
        if message.targets is not None and "replicas" in message.targets:
            ranks.replicas = message.targets["replicas"]
        if message.stop:
            ranks.stopping = True
        if message.inventory is not None and message.inventory.revision > ranks.revision:
            ranks.revision = message.inventory.revision
            ranks.inventory = frozenset(message.inventory.pods)
            self.controller.inventory_arrived(key, message.inventory)

    def _judge(self, key: Key, pods: tuple[tuple[int, int], ...]) -> None:
        """R25: whoever lives is listed, but for nodes that have been away for so long (C4)."""
        body = self.server.objects.get((PLURAL, *key))
        if body is None:
            return
        for place, pod in self.processes(key[1]).items():
            own = any(
                o["uid"] == body["metadata"]["uid"] for o in pod["metadata"]["ownerReferences"]
            )
            away = pod["spec"]["nodeName"] in self.cut_off
            assert place in pods or away or not own, f"{place} lives and is not in {pods}"
