"""All objects that the watches have shown, in memory, by job.

Answers to the operator's own requests are stored at once, so that the next decision knows of them
before their event arrives. An event that is older than the stored version of its object is ignored.

Jobs of other operators (`spec.managedBy`) are not kept. Only their uids are, until they have ended,
since all of them share the Service of a namespace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from paceline_api.names import DEFAULT_MANAGER, LABEL_ATTEMPT, LABEL_SLOT
from paceline_api.types.fabric import FabricSpec

from paceline_operator.cluster.wire import kept
from paceline_operator.core.job import has_ended, manager_of
from paceline_operator.core.observed import NO_SLOT, Node, Pod
from paceline_operator.core.runtime import RuntimeKey, SeenRuntime
from paceline_operator.fabrics import built_in

Key = tuple[str, str]
"""Namespace and name of a job."""
TOMBSTONES: Final = 20_000
"""Number of uids of deleted objects that are remembered."""


class Store:
    """Objects by job, and the callbacks that start decisions; used on one event loop.

    `changed` is called with the key of each job whose facts have changed. `pods_changed` is called
    instead when a pod was added or changed; deletions use `changed`. `manager` is the operator
    whose jobs are kept.
    """

    def __init__(
        self,
        changed: Callable[[Key], None],
        manager: str = DEFAULT_MANAGER,
        *,
        pods_changed: Callable[[Key], None] | None = None,
    ) -> None:
        self._changed, self.manager = changed, manager
        self._pods_changed = pods_changed or changed
        self.jobs: dict[Key, Mapping[str, Any]] = {}
        self._elsewhere: dict[Key, str] = {}
        """Uids of the jobs of other operators that have not ended."""
        self._pods: dict[Key, dict[str, Pod]] = {}
        self.nodes: dict[str, Node] = {}
        self.fabrics: dict[str, FabricSpec] = dict(built_in())
        self.runtimes: dict[RuntimeKey, SeenRuntime] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Uids of deleted objects: a late answer must not bring them back."""
        self.used: dict[Key, dict[int, int]] = {}
        """Highest attempt of each slot, as long as the job or a pod of it exists."""

    # ---- jobs -----------------------------------------------------------------------------

    def put_job(self, body: Mapping[str, Any]) -> None:
        """Store a job, unless the same or a newer version is known or the job was deleted."""
        metadata = body["metadata"]
        key = (metadata.get("namespace") or "default", metadata["name"])
        if manager_of(body) != self.manager:
            self._leave(key, body)
            return
        known = self.jobs.get(key)
        if metadata["uid"] in self._gone or (known is not None and not _newer(body, known)):
            return
        if known is not None and known["metadata"]["uid"] != metadata["uid"]:
            self._note_gone(known["metadata"]["uid"])
        self._elsewhere.pop(key, None)
        self.jobs[key] = _without_owners(body)
        self._changed(key)

    def _leave(self, key: Key, body: Mapping[str, Any]) -> None:
        """Leave a job to another operator.

        A job never changes its manager, so an own job of this name is gone.
        """
        known = self.jobs.get(key)
        uid = body["metadata"]["uid"]
        if uid in self._gone or (known is not None and not _newer(body, known)):
            return
        if known is not None:
            self.drop_job(key, known["metadata"]["uid"])
        if has_ended(body):
            self._elsewhere.pop(key, None)
        else:
            self._elsewhere[key] = uid

    def keep_jobs(self, jobs: Iterable[Mapping[str, Any]], before: Mapping[Key, str]) -> None:
        """Store a complete list of jobs, and drop those that it lacks.

        Args:
            jobs: The list.
            before: Uids that were known when the list was requested; others may be newer than the
                list.
        """
        uids = set()
        for body in jobs:
            uids.add(body["metadata"]["uid"])
            self.put_job(body)
        for key, uid in before.items():
            if uid not in uids:
                self.drop_job(key, uid)

    def uids(self) -> dict[Key, str]:
        """Return the uids of all known jobs, including those of other operators."""
        own = {key: str(body["metadata"]["uid"]) for key, body in self.jobs.items()}
        return self._elsewhere | own

    def namespaces_in_use(self) -> set[str]:
        """Return the namespaces with jobs of any operator that have not ended."""
        own = {key[0] for key, body in self.jobs.items() if not has_ended(body)}
        return own | {key[0] for key in self._elsewhere}

    def drop_job(self, key: Key, uid: str) -> None:
        """Drop the job with this uid; another job may already have its name."""
        self._note_gone(uid)
        if self._elsewhere.get(key) == uid:
            del self._elsewhere[key]
        known = self.jobs.get(key)
        if known is not None and known["metadata"]["uid"] == uid:
            del self.jobs[key]
            self._forget_names(key)
            self._changed(key)

    # ---- pods -----------------------------------------------------------------------------

    def pods(self, key: Key) -> tuple[Pod, ...]:
        """Return the pods whose label names this job."""
        return tuple(self._pods.get(key, {}).values())

    def put_pod(self, key: Key, pod: Pod) -> None:
        """Store a pod, unless the same or a newer version is known or it was deleted."""
        if pod.uid in self._gone:
            return
        pods = self._pods.setdefault(key, {})
        known = pods.get(pod.name)
        used = self.used.setdefault(key, {})
        used[pod.slot] = max(used.get(pod.slot, 0), pod.attempt)
        if known is not None and known.uid == pod.uid and pod.version <= known.version:
            return
        pods[pod.name] = kept(pod, known)
        self._pods_changed(key)

    def drop_pod(self, key: Key, name: str, uid: str) -> None:
        """Drop the pod with this uid; another pod may already have its name."""
        self._note_gone(uid)
        pods = self._pods.get(key, {})
        known = pods.get(name)
        if known is not None and known.uid == uid:
            del pods[name]
            if not pods:
                self._pods.pop(key, None)
                self._forget_names(key)
            self._changed(key)

    def mark_deleting(self, key: Key, name: str, uid: str) -> None:
        """Mark a pod whose deletion was accepted, so that it is not requested again."""
        known = self._pods.get(key, {}).get(name)
        if known is not None and known.uid == uid and not known.deleting:
            self._pods[key][name] = replace(known, deleting=True)
            self._changed(key)

    def reserve(self, key: Key, labels: Mapping[str, str]) -> None:
        """Record a name that another owner has; the next attempt is above it (C3)."""
        slot = int(labels.get(LABEL_SLOT, NO_SLOT))
        used = self.used.setdefault(key, {})
        used[slot] = max(used.get(slot, 0), int(labels[LABEL_ATTEMPT]))
        self._changed(key)

    def keep_pods(self, present: Iterable[tuple[Key, Pod]]) -> None:
        """Store a complete list of pods, and drop those that it lacks."""
        listed = list(present)
        uids = {pod.uid for _, pod in listed}
        for key, pods in list(self._pods.items()):
            for pod in list(pods.values()):
                if pod.uid not in uids:
                    self.drop_pod(key, pod.name, pod.uid)
        for key, pod in listed:
            self.put_pod(key, pod)

    def pod_count(self) -> int:
        """Return the number of pods of all jobs."""
        return sum(map(len, self._pods.values()))

    def _forget_names(self, key: Key) -> None:
        """Forget the attempts of a job that is gone with all its pods."""
        if key not in self.jobs and key not in self._pods:
            self.used.pop(key, None)

    # ---- nodes ----------------------------------------------------------------------------

    def put_node(self, node: Node) -> None:
        """Store a node, and wake the jobs that it concerns."""
        before = self.nodes.get(node.name)
        self.nodes[node.name] = node
        if before is not None and before != node:
            self._wake_jobs_on(node.name)
        if before is None or (before.labels, before.offers) != (node.labels, node.offers):
            self._wake_jobs_without_pods()

    def drop_node(self, name: str) -> None:
        """Drop a node, and wake the jobs with pods on it."""
        if self.nodes.pop(name, None) is not None:
            self._wake_jobs_on(name)

    # ---- fabric profiles ------------------------------------------------------------------

    def put_fabric(self, name: str, spec: FabricSpec) -> None:
        """Store a fabric profile of the cluster; it replaces a built-in one with its name."""
        if self.fabrics.get(name) != spec:
            self.fabrics[name] = spec
            self._wake_jobs_without_pods()

    def drop_fabric(self, name: str) -> None:
        """Drop a fabric profile of the cluster; a built-in one with its name returns."""
        if name in built_in():
            self.put_fabric(name, built_in()[name])
        elif self.fabrics.pop(name, None) is not None:
            self._wake_jobs_without_pods()

    # ---- runtimes -------------------------------------------------------------------------

    def put_runtime(self, runtime: SeenRuntime) -> None:
        """Store a runtime, and wake the jobs that may wait for it."""
        before = self.runtimes.get(runtime.key)
        if before is not None and before.uid == runtime.uid:
            if runtime.generation < before.generation:
                return  # an answer that was overtaken by the watch
            self.runtimes[runtime.key] = runtime
            if runtime.generation == before.generation:
                return
        self.runtimes[runtime.key] = runtime
        self._wake_jobs_without_pods()

    def drop_runtime(self, key: RuntimeKey) -> None:
        """Drop a runtime; jobs that were merged with it keep their copy."""
        self.runtimes.pop(key, None)

    # ---- jobs to wake ------------------------------------------------------------------------

    def _wake_jobs_without_pods(self) -> None:
        for key in self.jobs:
            if key not in self._pods:
                self._changed(key)

    def _wake_jobs_on(self, node: str) -> None:
        for key, pods in self._pods.items():
            if any(pod.node == node for pod in pods.values()):
                self._changed(key)

    def _note_gone(self, uid: str) -> None:
        self._gone[uid] = None
        while len(self._gone) > TOMBSTONES:
            self._gone.popitem(last=False)


def _without_owners(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an object without `managedFields`, which are longer than the job itself."""
    if "managedFields" not in body["metadata"]:
        return body
    metadata = {name: each for name, each in body["metadata"].items() if name != "managedFields"}
    return {**body, "metadata": metadata}


def _newer(body: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return True if `body` is newer; versions stay ordered even if a name is reused."""
    return _version(body["metadata"]) > _version(known["metadata"])


def _version(metadata: Mapping[str, Any]) -> int:
    text = str(metadata.get("resourceVersion") or "0")
    return int(text) if text.isdecimal() else 0
