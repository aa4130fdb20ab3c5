"""One job from observation to writes: observe, decide, carry out, remember.

`reconcile` may be called at any time and for any job; it never raises for what the cluster does.
Exactly one call per job runs at a time, which the queue sees to.
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
from paceline_operator.core.changes import Changes, Message
from paceline_operator.core.job import Job, read_again, read_job
from paceline_operator.core.observed import Inventory
from paceline_operator.core.reconcile import reconcile

log = logging.getLogger("paceline.operator")

RETRY_S: Final = 0.2
RETRY_MAX_S: Final = 30.0
LAPSED_S: Final = 0.5
"""A Lease that was renewed too late may be had again; if another one has it, this process ends."""


class Coordinators(Protocol):
    """The connections to all coordinators. Nothing here waits for one of them."""

    def follow(
        self, key: Key, job: Job, address: str, *, key_id: str, pods: int, hurry: bool
    ) -> None:
        """Listen to the coordinator of a job at this URL. `key_id`: of the operator's key with
        which its secrets were made. `pods`: its worker pods that exist."""
        ...

    def send(self, key: Key, message: Message) -> None: ...

    def leave(self, key: Key) -> None: ...


class Controller:
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
        """`pods_live_s`: as `Observed` has it. `key_id`: of the operator's newest key."""
        self._store, self._applier, self._coordinators = store, applier, coordinators
        self._clock = clock
        self._epoch, self._nodes_fresh, self._key_id = epoch, nodes_fresh, key_id
        self._pods_live_s = pods_live_s
        self.memories: dict[Key, Memory] = {}
        self._read: dict[Key, tuple[Mapping[str, Any], Job]] = {}
        """Each job as it was read last, with its object."""

    async def reconcile(self, key: Key) -> float | None:
        """Seconds until the next look, None for: when something has changed."""
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
        self.memories.pop(key, None)
        self._read.pop(key, None)
        self._coordinators.leave(key)

    def key_changed(self) -> None:
        """Jobs without pods need another Secret than was made for them."""
        for memory in self.memories.values():
            memory.note(secret=False)

    def _job(self, key: Key, body: Mapping[str, Any]) -> Job:
        """Pods change far more often than their job, and to read one means to validate it."""
        known = self._read.get(key)
        if known is None:
            job = read_job(body)
        elif known[0] is body:
            return known[1]
        else:
            job = read_again(body, *known)
        self._read[key] = body, job
        return job

    def _memory(self, key: Key, job: Job) -> Memory:
        memory = self.memories.get(key)
        if memory is None or memory.uid != job.uid:
            memory = self.memories[key] = Memory(job.uid)
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
            # Spent even if it does not arrive: a number never stands for two lists.
            memory.note(revision=changes.inventory.revision)
        if changes.stop:
            memory.note(stop_s=now_s)
        self._coordinators.send(key, Message(changes.inventory, changes.targets, changes.stop))

    def inventory_arrived(self, key: Key, inventory: Inventory) -> None:
        memory = self.memories.get(key)
        if memory is not None and inventory.revision == memory.sent.revision:
            memory.note(inventory=frozenset(inventory.pods), inventory_s=self._clock())

    def _follow(self, key: Key, job: Job, changes: Changes) -> None:
        """Listen to the newest coordinator that has an address."""
        own = [pod for pod in self._store.pods(key) if pod.owner == job.uid]
        found = [pod for pod in own if pod.is_coordinator and pod.active and pod.ip]
        if job.finished or not found:
            self._coordinators.leave(key)
            return
        newest = max(found, key=lambda pod: pod.attempt)
        host = f"[{newest.ip}]" if ":" in newest.ip else newest.ip
        url = f"https://{host}:{COORDINATOR_PORT}"
        key_id = newest.notes.get(NOTE_KEY, "")
        pods = sum(pod.is_worker for pod in own)
        self._coordinators.follow(key, job, url, key_id=key_id, pods=pods, hurry=changes.hurry)

    def _retry_s(self, job: Job, memory: Memory, error: ApiError) -> float:
        memory.errors += 1
        wait_s = min(RETRY_MAX_S, RETRY_S * 2.0 ** min(memory.errors - 1, 10))
        log.warning("%s; next try in %.1f s", error, wait_s, extra={"job": "/".join(job.key)})
        return max(wait_s, error.retry_after_s)
