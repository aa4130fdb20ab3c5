"""The surroundings of an operator: an API server, nodes with kubelets, a coordinator per job.

The coordinator is small and honest. It counts the ranks that run, forms a membership, drains
surplus ranks, and loses the state with the last rank that has it. It also judges the inventories
that it receives: one that omits a living process is a split brain, and fails the test. Nothing
happens by itself; each call is one step of one participant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import convert
from paceline_api.crdgen import PLURAL
from paceline_api.names import LABEL_JOB, LABEL_ROLE
from paceline_api.times import timestamp
from paceline_operator.cluster.store import Key
from paceline_operator.cluster.wire import NodeObject, node_of
from paceline_operator.core.observed import Node

from testing.fake_cluster.parts import NAMESPACE, Ranks, place_of
from testing.fake_cluster.server import Server

Places = Iterable[tuple[int, int]]


class Cluster:
    """A cluster in memory; subclasses provide the clock and the operator."""

    now_s: float
    """Current time in seconds since the epoch; set by the subclass that has the clock."""

    def __init__(self) -> None:
        self.server = Server(lambda: self.now_s)
        self.nodes = {f"node-{n}": Node(f"node-{n}") for n in range(3)}
        self.cut_off: set[str] = set()
        """Nodes whose kubelets cannot be reached; their processes may live on."""
        self.ranks: dict[Key, Ranks] = {}
        self.version: dict[str, int] = {}
        """Job uid -> rounds that the living ranks have committed."""
        self.with_state: dict[str, set[str]] = {}
        """Job uid -> uids of pods that hold the weights."""
        self.steps: dict[tuple[int, int], float] = {}

    # ---- kubelets ---------------------------------------------------------------------------

    def pods(self, job: str = "digits", role: str = "worker") -> list[dict[str, Any]]:
        """Return the pods of a job and role, by name."""
        pods = [
            body
            for body in self.server.of_kind("pods")
            if body["metadata"]["labels"].get(LABEL_JOB) == job
            and body["metadata"]["labels"].get(LABEL_ROLE) == role
        ]
        return sorted(pods, key=lambda body: str(body["metadata"]["name"]))

    def kubelets(self) -> None:
        """Bind pods, and start and end those on nodes that can be reached."""
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
                # The address follows from the server's version, so each pod gets its own.
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
        """End a pod's container with an exit code, or evict the pod."""
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
        """Set a node's Ready condition; a node that is not ready is cut off."""
        status = {"conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}]}
        item = convert({"metadata": {"name": name}, "status": status}, NodeObject)
        self.nodes[name] = node_of(item, self.nodes[name], self.now_s)
        (self.cut_off.discard if ready else self.cut_off.add)(name)

    # ---- coordinators -----------------------------------------------------------------------

    def processes(self, job: str) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the worker pods whose ranks live, on any node, by (slot, attempt)."""
        return {
            place_of(body): body for body in self.pods(job) if body["status"]["phase"] == "Running"
        }

    def coordinators(self) -> None:
        """Let each reachable coordinator take one step."""
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
            self.ranks[key].seq += 1
            self._tell(key, body)

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
            # No rank with weights has ever registered with this coordinator, so it starts anew.
            self.version[uid] = self.version.get(uid, 0) if "checkpoint" in body["spec"] else 0
        if set(living) != ranks.members:
            if not ranks.members and 2 * len(living) <= ranks.replicas and not state & uids:
                return
            ranks.members = set(living)
            ranks.formed += 1
        state |= uids
        ranks.had_state = True
        self.version[uid] = self.version.get(uid, 0) + 1
        self._drain(key)

    def _drain(self, key: Key) -> None:
        """Drain surplus ranks; a pod that no inventory lists is not considered."""
        ranks, living = self.ranks[key], self.processes(key[1])
        listed = ranks.inventory or ranks.members
        staying = sorted((ranks.members & listed & set(living)) - ranks.drained)
        for place in staying[ranks.replicas :]:
            ranks.drained.add(place)
            self.end_pod(living[place]["metadata"]["name"], 0)

    def _tell(self, key: Key, body: dict[str, Any]) -> None:
        """Report that a coordinator has news; overridden by subclasses."""

    def status_of(self, key: Key, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the coordinator's answer to GET /v1/status."""
        ranks, uid = self.ranks[key], body["metadata"]["uid"]
        entries = [
            {
                "member": [slot, 0, attempt * 1000],
                "state": "active",
                "rank": index,
                "facts": {"step_seconds": self.steps.get((slot, attempt), 0.1)},
            }
            for index, (slot, attempt) in enumerate(sorted(ranks.members))
        ]
        entries += [
            {"member": [s, 0, a * 1000], "state": "dead", "finished": ranks.stopping}
            for s, a in sorted(ranks.dead)
        ]
        return {
            "coordinator": ranks.uid,
            "seq": ranks.seq,
            "generation": [1, ranks.uid, ranks.formed],
            "changes": [{}] if ranks.formed else [],
            "replicas": ranks.replicas,
            "inventory": ranks.revision,
            "ranks": entries,
            "version": self.version.get(uid, 0),
            "log": {"rounds": {"all": self.version.get(uid, 0)}, "round_s": 0.1},
            "stopping": ranks.stopping,
            "outcome": ranks.outcome,
        }

    def finish(self, job: str = "digits") -> None:
        """Finish a job: all ranks are released, and the coordinator keeps the outcome."""
        key = (NAMESPACE, job)
        self.ranks[key].stopping = True
        for pod in self.processes(job).values():
            self.end_pod(pod["metadata"]["name"], 0, message="finished")
        self.ranks[key].outcome = {"complete": True, "reason": "Complete", "message": "done"}

    def hear_targets(self, key: Key, targets: Mapping[str, Any]) -> None:
        """Handle POST /v1/targets."""
        ranks = self.ranks[key]
        ranks.replicas = targets.get("replicas", ranks.replicas)
        ranks.stopping |= bool(targets.get("stop"))
        self._drain(key)

    def hear_inventory(self, key: Key, revision: int, pods: Places) -> bool:
        """Handle POST /v1/inventory; return False if it is not newer than the last one."""
        ranks = self.ranks[key]
        if revision <= ranks.revision:
            return False
        ranks.revision, ranks.inventory = revision, frozenset(pods)
        self._drain(key)
        return True

    def judge(self, key: Key, pods: Places) -> None:
        """Check that all living ranks are listed, except on nodes that are cut off (R25, C4)."""
        listed = set(pods)
        body = self.server.objects.get((PLURAL, *key))
        if body is None:
            return
        for place, pod in self.processes(key[1]).items():
            own = any(
                o["uid"] == body["metadata"]["uid"] for o in pod["metadata"]["ownerReferences"]
            )
            away = pod["spec"]["nodeName"] in self.cut_off
            assert place in listed or away or not own, (
                f"{place} lives and is not in {sorted(listed)}"
            )
