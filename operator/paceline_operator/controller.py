"""The reconcile loop for one job: observe, decide, carry out, remember.

`reconcile` may be called at any time for any job. It never raises because of the cluster's state.
The queue makes sure that only one call per job runs at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from paceline_api.names import COORDINATOR_PORT, NOTE_KEY

from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.apply import Applier, DeposedError, JobGoneError
from paceline_operator.cluster.memory import Memory
from paceline_operator.cluster.store import Key, Store
from paceline_operator.core.changes import Changes, CoordinatorMessage
from paceline_operator.core.job import JobObject, read_again, read_job
from paceline_operator.core.observed import PodInventory
from paceline_operator.core.reconcile import reconcile

log = logging.getLogger("paceline.operator")

RETRY_S: Final = 0.2
"""Delay before the first retry of a failed request, in seconds; it doubles up to RETRY_MAX_S."""
RETRY_MAX_S: Final = 30.0
LAPSED_S: Final = 0.5
"""Seconds until the next try while the Lease is lapsed. It may be regained; if another process gets
it, this one ends."""


class Coordinators(Protocol):
    """The connections to all coordinators. No method waits for a coordinator."""

    def follow(
        self, key: Key, job: JobObject, address: str, *, key_id: str, pods: int, hurry: bool
    ) -> None:
        """Connect to the coordinator of a job, or keep the connection.

        Args:
            key: Namespace and name of the job.
            job: The job.
            address: URL of the coordinator.
            key_id: Id of the operator's key with which its secrets were made.
            pods: Number of existing worker pods.
            hurry: True to ask for news at once.
        """
        ...

    def send(self, key: Key, message: CoordinatorMessage) -> None:
        """Queue a message for the job's coordinator, if there is a connection to it."""

    def leave(self, key: Key) -> None:
        """End the connection to the job's coordinator, if there is one."""


class Controller:
    """Reconciler of all jobs, with the memory of each."""

    def __init__(
        self,
        store: Store,
        applier: Applier,
        coordinators: Coordinators,
        *,
        clock: Callable[[], float],
        epoch: Callable[[], int],
        nodes_fresh: Callable[[], bool],
        pods_live_s: Callable[[], float | None],
        key_id: Callable[[], str],
    ) -> None:
        """Connect the parts that a decision needs.

        Args:
            store: Facts that the watches have shown.
            applier: Writes changes to the API server.
            coordinators: Connections to the coordinators.
            clock: Returns seconds of the wall clock.
            epoch: Returns the number of the present leadership.
            nodes_fresh: Returns True if the watch of nodes is alive.
            pods_live_s: Returns `Observed.pods_live_s`.
            key_id: Returns the id of the operator's newest key.
        """
        self._store, self._applier, self._coordinators = store, applier, coordinators
        self._clock = clock
        self._epoch, self._nodes_fresh, self._key_id = epoch, nodes_fresh, key_id
        self._pods_live_s = pods_live_s
        self.memories: dict[Key, Memory] = {}
        self._read: dict[Key, tuple[Mapping[str, Any], JobObject]] = {}
        """Each job as it was read last, with the object that it was read from."""

    async def reconcile(self, key: Key) -> float | None:
        """Decide about a job and carry out the decision.

        Args:
            key: Namespace and name of the job.

        Returns:
            Seconds until the next decision; None if only a change makes one necessary.
        """
        body = self._store.jobs.get(key)
        if body is None:
            self.forget(key)
            return None
        if not self._applier.leads():
            return LAPSED_S
        job = self._job(key, body)
        memory = self._memory(key, job)
        now_s = self._clock()
        changes = reconcile(job, self._observed(key, memory), now_s)
        memory.clocks = changes.clocks
        if changes.forget_coordinator:
            memory.coordinator = None
        self._send(key, changes, memory, now_s)
        self._follow(key, job, changes)
        try:
            done = await self._applier.carry_out(job, changes, memory)
            if done:
                memory.replaced = max(memory.replaced, changes.replaced)
            memory.errors = 0
        except JobGoneError:
            log.info("the job is gone", extra={"job": f"{job.namespace}/{job.name}"})
            self._store.drop_job(key, job.uid)
            self.forget(key)
            return None
        except DeposedError:
            return LAPSED_S
        except ApiError as error:
            return self._retry_s(job, memory, error)
        self._follow(key, job, changes)
        if not done:
            return RETRY_S if memory.refusal is None or memory.refusal.count > 1 else 0.0
        if changes.look_again_s is None:
            return None
        return max(0.0, changes.look_again_s - self._clock())

    def forget(self, key: Key) -> None:
        """Forget a job that is gone, and end the connection to its coordinator."""
        self.memories.pop(key, None)
        self._read.pop(key, None)
        self._coordinators.leave(key)

    def key_changed(self) -> None:
        """Have each job's Secret made again, with the new key, before its further pods."""
        for memory in self.memories.values():
            memory.note(secret=False)

    def _job(self, key: Key, body: Mapping[str, Any]) -> JobObject:
        """Return the job, read from its object.

        Reading a job includes its validation, and pods change far more often than their job. The
        last result is therefore cached.

        Args:
            key: Namespace and name of the job.
            body: Its object.

        Returns:
            The job.
        """
        known = self._read.get(key)
        runtimes = self._store.runtimes
        if known is None or known[1].waits_for_runtime:
            job = read_job(body, runtimes)
        elif known[0] is body:
            return known[1]
        else:
            job = read_again(body, *known, runtimes)
        self._read[key] = body, job
        return job

    def _memory(self, key: Key, job: JobObject) -> Memory:
        memory = self.memories.get(key)
        if memory is None or memory.uid != job.uid:
            memory = self.memories[key] = Memory(job.uid)
        if memory.generation != job.generation:
            memory.generation = job.generation
            memory.note(secret=False)  # the job file may be another one now
        return memory

    def _observed(self, key: Key, memory: Memory) -> Any:
        return memory.observed(
            self._store.pods(key),
            used=self._store.used.get(key, {}),
            nodes=self._store.nodes,
            fabrics=self._store.fabrics,
            nodes_fresh=self._nodes_fresh(),
            pods_live_s=self._pods_live_s(),
            key_id=self._key_id(),
            epoch=self._epoch(),
        )

    def _send(self, key: Key, changes: Changes, memory: Memory, now_s: float) -> None:
        if changes.inventory is None and changes.targets is None:
            return
        if changes.inventory is not None:
            # Record the revision even if it does not arrive: no revision may name two inventories.
            memory.note(revision=changes.inventory.revision)
        if changes.stop:
            memory.note(stop_s=now_s)
        self._coordinators.send(
            key, CoordinatorMessage(changes.inventory, changes.targets, changes.stop)
        )

    def inventory_arrived(self, key: Key, inventory: PodInventory) -> None:
        """Record that the coordinator has acknowledged an inventory, if it is the newest one."""
        memory = self.memories.get(key)
        if memory is not None and inventory.revision == memory.sent.revision:
            memory.note(inventory=frozenset(inventory.pods), inventory_s=self._clock())

    def _follow(self, key: Key, job: JobObject, changes: Changes) -> None:
        """Follow the newest active coordinator that has an address; leave it if there is none."""
        own = [pod for pod in self._store.pods(key) if pod.owner == job.uid]
        candidates = [pod for pod in own if pod.is_coordinator and pod.active and pod.ip]
        if job.finished or not candidates:
            self._coordinators.leave(key)
            return
        newest = max(candidates, key=lambda pod: pod.attempt)
        host = f"[{newest.ip}]" if ":" in newest.ip else newest.ip
        url = f"https://{host}:{COORDINATOR_PORT}"
        key_id = newest.notes.get(NOTE_KEY, "")
        pods = sum(pod.is_worker for pod in own)
        self._coordinators.follow(key, job, url, key_id=key_id, pods=pods, hurry=changes.hurry)

    def _retry_s(self, job: JobObject, memory: Memory, error: ApiError) -> float:
        memory.errors += 1
        wait_s = min(RETRY_MAX_S, RETRY_S * 2.0 ** min(memory.errors - 1, 10))
        log.warning("%s; next try in %.1f s", error, wait_s, extra={"job": "/".join(job.key)})
        return max(wait_s, error.retry_after_s)
