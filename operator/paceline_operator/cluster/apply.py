"""The writes of a decision about one job, carried out request by request.

Any request may fail, or be the last one before a crash. The rest is then left undone, and the next
decision starts from the state that exists. Creations come first, then the status, then deletions,
so that a status never mentions a deletion that was decided with an older view.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from paceline_api.crdgen import PLURAL
from paceline_api.names import LABEL_MANAGER, group_name
from paceline_api.pods.advice import POD_SECURITY
from paceline_api.pods.security import Level, violations
from paceline_api.times import timestamp
from paceline_api.types.job import API_VERSION, KIND

from paceline_operator.cluster import dry_runs
from paceline_operator.cluster.api import Api, ApiError
from paceline_operator.cluster.memory import Memory
from paceline_operator.cluster.ownership import TakenError, apply_own, delete_own
from paceline_operator.cluster.store import Store
from paceline_operator.cluster.wire import last_warning, pod_from
from paceline_operator.core.changes import (
    ApplyObject,
    Changes,
    Companions,
    Create,
    Delete,
    KubernetesEvent,
    PreflightRequest,
    SecretId,
)
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Missing, Warned
from paceline_operator.core.pods.companions import BUDGETS
from paceline_operator.core.pods.service import service
from paceline_operator.core.refusals import (
    OF_GANG,
    CreationRefusal,
    RefusalKind,
    Subject,
    essence,
    refused_creation,
    refused_group,
)

log = logging.getLogger("paceline.operator")

BATCH_FIRST: Final = 1
"""Number of pods created at once at first, for a job without pods (C7)."""
BATCH_PROVEN: Final = 16
"""Number of pods created at once at first, if a pod of this job was accepted before (C7)."""
AT_ONCE: Final = 64
"""Upper bound on the number of pods created or deleted at once."""
COMPONENT: Final = "paceline-operator"
"""Component that the operator's Events name as their source."""
NAMED_MAX: Final = 5
"""Upper bound on the number of fields that a message about a template names."""

FRESH_S: Final = 60.0
"""Seconds for which what the API server has said to a dry run is not asked again."""

MakeSecret = Callable[[JobObject, SecretId], Mapping[str, Any] | None]
"""Function that makes the manifest of this Secret of a job; None if the operator's key is lost."""
LevelOf = Callable[[str], Awaitable[Level]]
"""Function that returns the level of pod security of a namespace; raises ApiError."""
EnsureService = Callable[[str], Awaitable[None]]
"""Function that makes sure that a namespace has the shared Service; raises ApiError."""


class JobGoneError(Exception):
    """Raised if the job does not exist any more, or another job has its name."""


class DeposedError(Exception):
    """Raised if this operator does not lead any more, so it must not write."""


class Applier:
    """Writer of decisions to the API server, on the event loop of the operator."""

    def __init__(
        self,
        api: Api,
        store: Store,
        *,
        make_secret: MakeSecret,
        ensure_service: EnsureService,
        level_of: LevelOf,
        clock: Callable[[], float],
        leads: Callable[[], bool],
    ) -> None:
        self._api, self._store = api, store
        self._make_secret, self._ensure_service = make_secret, ensure_service
        self._level_of = level_of
        self._clock, self._leads = clock, leads

    async def carry_out(self, job: JobObject, changes: Changes, memory: Memory) -> bool:
        """Carry out the changes of a decision, in the order of the module's docstring.

        JobGoneError, DeposedError and the ApiError of a failed request pass to the caller. Refusals
        that belong to the job are recorded in `memory` instead.

        Args:
            job: The job as the decision saw it.
            changes: The changes.
            memory: The operator's memory of the job; what was written is recorded in it.

        Returns:
            True if everything was done. False if a creation was refused; the status was not written
            then.
        """
        if changes.verify_job:
            await self._verify(job)
        before = memory.refusal
        if not await self._prepare(job, changes, memory):
            await self._ask_the_rest(job, changes, memory, before)
            return False
        complete = await self._create_pods(job, changes, memory)
        if not complete:
            await self._ask_the_rest(job, changes, memory, before)
        complete = complete and await self._budget(job, changes.beside, memory)
        if changes.status is not None and complete:
            await self._write_status(job, changes.status, memory)
        for group in _groups(changes.delete, AT_ONCE):
            await _all(self._delete(job, deletion) for deletion in group)
        for event in changes.events:
            await self._tell(job, event, memory)
        if changes.delete_job:
            await self._delete_job(job)
        if changes.ask_why:
            await self._ask_why(job, changes.ask_why, memory)
        return complete

    async def _prepare(self, job: JobObject, changes: Changes, memory: Memory) -> bool:
        """Do what precedes the creation of pods; return False if something was refused."""
        if not await self._are_secure(job, changes, memory):
            return False
        if changes.preflight is not None and not await self._preflight(job, changes, memory):
            return False
        group = changes.beside.group
        if group is not None and not await self._group(job, group, memory):
            return False
        needs_secret = changes.needs_secret
        if needs_secret is not None and not await self._secret(job, needs_secret, memory):
            return False
        return not changes.needs_service or await self._service(job, memory)

    def leads(self) -> bool:
        """Return True if this operator may write."""
        return self._leads()

    def _fence(self) -> None:
        """Check before a write that this process still leads.

        A process that was stopped may continue with an old view.

        Raises:
            DeposedError: This process does not lead any more.
        """
        if not self._leads():
            raise DeposedError

    # ---- the job --------------------------------------------------------------------------

    async def _verify(self, job: JobObject) -> None:
        self._fence()
        try:
            body = await self._api.get(PLURAL, job.namespace, job.name)
        except ApiError as error:
            if error.code == 404:
                raise JobGoneError from None
            raise
        if body["metadata"]["uid"] != job.uid:
            raise JobGoneError
        self._store.put_job(body)

    async def _write_status(
        self, job: JobObject, status: Mapping[str, Any], memory: Memory
    ) -> None:
        self._fence()
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            # With the uid, the write fails if the job was recreated under this name.
            "metadata": {"name": job.name, "namespace": job.namespace, "uid": job.uid},
            "status": status,
        }
        try:
            body = await self._api.apply(
                PLURAL, job.namespace, manifest, force=True, subresource="status"
            )
        except ApiError as error:
            if error.code == 409:
                # Either the job was recreated under this name, or another write came in between.
                # Only the first case ends here.
                await self._verify(job)
            elif error.code == 404:
                raise JobGoneError from None
            raise
        now_s = self._clock()
        figures = {"figures_s": now_s} if status.get("round") != job.status.get("round") else {}
        memory.note(status_s=now_s, **figures)
        self._store.put_job(body)

    async def _delete_job(self, job: JobObject) -> None:
        self._fence()
        log.info("deleting the job: its ttlSecondsAfterFinished is over", extra=_of(job))
        await self._ignore_gone(self._api.delete(PLURAL, job.namespace, job.name, uid=job.uid))

    # ---- dry runs -------------------------------------------------------------------------

    async def _preflight(self, job: JobObject, changes: Changes, memory: Memory) -> bool:
        """Ask the API server before the first pod of an attempt.

        Args:
            job: The job.
            changes: The changes with the pods.
            memory: The operator's memory of the job.

        Returns:
            True if the pods may be made now. False if a worker's pod is refused, or objects are
            missing that were not known to be: the next decision reports it.
        """
        asked = changes.preflight
        assert asked is not None
        if _is_fresh(memory.checked, job, self._clock()):
            return True
        self._fence()
        missing = await self._missing(job, asked)
        if asked.worker and changes.workers:
            pod = changes.workers[0].manifest
            error = await dry_runs.refused(self._api, "pods", job.namespace, pod)
            if error is not None:
                memory.missing = missing
                self._refused(job, error, memory, Subject.WORKER)
                return False
        memory.checked = job.generation, self._clock()
        memory.missing = missing
        return missing is None

    async def _missing(self, job: JobObject, asked: PreflightRequest) -> Missing | None:
        missing = await dry_runs.missing(self._api, job.namespace, asked.look_up)
        if not missing:
            return None
        more = f"; and {len(missing) - NAMED_MAX} more" if len(missing) > NAMED_MAX else ""
        texts = (f"{each.field}: there is no {each.kind} {each.name}" for each in missing)
        text = "; ".join([*texts][:NAMED_MAX]) + more
        log.warning("objects are missing: %s", text, extra=_of(job))
        return Missing(self._clock(), text)

    async def _ask_the_rest(
        self, job: JobObject, changes: Changes, memory: Memory, before: CreationRefusal | None
    ) -> None:
        """Add to a refusal, while there is no pod, what is said to the other objects of the job.

        Args:
            job: The job.
            changes: The changes that were refused.
            memory: The operator's memory of the job.
            before: The refusal before these changes were carried out.
        """
        refusal, asked = memory.refusal, changes.preflight
        if asked is None or refusal is None or refusal is before:
            return
        if refusal.kind in (RefusalKind.TRANSIENT, RefusalKind.ENDING):
            return
        memory.checked = None
        self._fence()
        also: list[CreationRefusal] = []
        for subject, call in self._dry_runs(job, changes):
            if subject is refusal.subject and refusal.kind is not RefusalKind.LEVEL:
                call.close()
                continue
            error = await call
            if error is None or error.transient:
                continue
            other = self._counted(job, error, None, subject)
            is_level = refusal.kind is RefusalKind.LEVEL and POD_SECURITY in other.message
            if not is_level and essence(other) not in map(essence, (refusal, *also)):
                also.append(other)
        memory.refusal = replace(refusal, also=tuple(also))
        memory.missing = await self._missing(job, asked)

    def _dry_runs(
        self, job: JobObject, changes: Changes
    ) -> Iterator[tuple[Subject, Coroutine[Any, Any, ApiError | None]]]:
        """Yield a dry run of each object to create, the first pod of each kind."""
        api, namespace = self._api, job.namespace
        for worker in changes.workers[:1]:
            yield Subject.WORKER, dry_runs.refused(api, "pods", namespace, worker.manifest)
        if changes.coordinator is not None:
            pod = changes.coordinator.manifest
            yield Subject.COORDINATOR, dry_runs.refused(api, "pods", namespace, pod)
        secret = changes.needs_secret and self._make_secret(job, changes.needs_secret)
        if secret:
            yield Subject.SECRET, dry_runs.refused(api, "secrets", namespace, secret)
        if changes.needs_service:
            shared = dry_runs.refused_apply(api, "services", namespace, service(namespace))
            yield Subject.SERVICE, shared

    # ---- children -------------------------------------------------------------------------

    async def _secret(self, job: JobObject, secret: SecretId, memory: Memory) -> bool:
        self._fence()
        manifest = self._make_secret(job, secret)
        if manifest is not None:  # the key is lost; the job's pods show that it had a Secret
            try:
                await self._api.create("secrets", job.namespace, manifest)
            except ApiError as error:
                if error.code != 409:  # it exists, and its name tells its content
                    self._refused(job, error, memory, Subject.SECRET)
                    return False
        memory.note(secret=True)
        return True

    async def _are_secure(self, job: JobObject, changes: Changes, memory: Memory) -> bool:
        """Return True if the pods to create satisfy the level of their namespace."""
        pods = [*changes.workers[:1], *filter(None, [changes.coordinator])]
        try:
            level = await self._level_of(job.namespace) if pods else Level.PRIVILEGED
        except ApiError as error:
            self._refused(job, error, memory, Subject.NAMESPACE)
            return False
        # The coordinator has the user of the worker, so the worker's fields are named if they can.
        every = (violations(pod.manifest, level) for pod in pods)
        problems = next(filter(None, every), None)
        if problems is None:
            return True
        more = f"; and {len(problems) - NAMED_MAX} more" if len(problems) > NAMED_MAX else ""
        text = "; ".join(f"spec.template.{each}" for each in problems[:NAMED_MAX])
        message = f'a pod {POD_SECURITY} "{level}" of namespace {job.namespace}: {text}{more}'
        broken = ApiError(403, "Forbidden", message)
        self._refused(job, broken, memory, Subject.WORKER, RefusalKind.LEVEL)
        return False

    async def _service(self, job: JobObject, memory: Memory) -> bool:
        self._fence()
        try:
            await self._ensure_service(job.namespace)
        except TakenError as error:
            self._refused(job, error, memory, Subject.SERVICE, RefusalKind.TAKEN)
            return False
        except ApiError as error:
            self._refused(job, error, memory, Subject.SERVICE)
            return False
        return True

    async def _group(self, job: JobObject, group: ApplyObject, memory: Memory) -> bool:
        """Write the gang's group before the first pod; the scheduler ignores pods without it."""
        self._fence()
        try:
            await apply_own(self._api, group.kind, job.namespace, group.manifest, owner=job.uid)
        except TakenError as error:
            self._refused(job, error, memory, Subject.GROUP, RefusalKind.TAKEN_GROUP)
            return False
        except ApiError as error:
            kind = None if error.transient else refused_group(error.code, error.message)
            self._refused(job, error, memory, Subject.GROUP, kind)
            return False
        memory.note(group=group.number)
        if memory.refusal is not None and memory.refusal.kind in OF_GANG:
            memory.refusal = None
        return True

    async def _budget(self, job: JobObject, beside: Companions, memory: Memory) -> bool:
        if beside.budget is None and not beside.drop_budget:
            return True
        self._fence()
        name = group_name(job.name, job.uid)
        try:
            if beside.budget is None:
                await delete_own(self._api, BUDGETS, job.namespace, name, owner=job.uid)
            else:
                manifest = beside.budget.manifest
                await apply_own(self._api, BUDGETS, job.namespace, manifest, owner=job.uid)
        except ApiError as error:
            taken = isinstance(error, TakenError)
            kind = RefusalKind.TAKEN if taken else RefusalKind.BUDGET
            before = memory.budget_refusal
            memory.budget_refusal = self._counted(job, error, before, Subject.BUDGET, kind)
            log.warning("the disruption budget was refused: %s", error, extra=_of(job))
            return False
        memory.budget_refusal = None
        memory.note(budget=beside.least)
        return True

    async def _create_pods(self, job: JobObject, changes: Changes, memory: Memory) -> bool:
        """Create pods, few at first: a defect of one pod is a defect of all of them (C7).

        The coordinator comes first, so that workers do not hold devices that nobody coordinates.
        The first worker comes before it if a worker of this job was refused.

        Args:
            job: The job.
            changes: The changes with the pods.
            memory: The operator's memory of the job.

        Returns:
            True if all were created.
        """
        workers, coordinator = list(changes.workers), changes.coordinator
        proven = any(pod.is_worker and pod.owner == job.uid for pod in self._store.pods(job.key))
        if coordinator is not None and (proven or not _is_of_worker(memory.refusal)):
            if not await self._create(job, coordinator, Subject.COORDINATOR, memory):
                return False
        elif coordinator is not None:
            workers.insert(min(1, len(workers)), coordinator)
        size = BATCH_PROVEN if proven else BATCH_FIRST
        while workers:
            batch, workers = workers[:size], workers[size:]
            done = await _all(
                self._create(job, create, _subject(changes, create), memory) for create in batch
            )
            if not all(done):
                if coordinator is not None and not proven and _is_of_worker(memory.refusal):
                    await self._withdraw(job, coordinator)
                return False
            size = min(2 * size, AT_ONCE)
        if changes.workers or changes.coordinator is not None:
            memory.refusal = None
            # Create the Secret again before later pods: somebody may delete it meanwhile, and the
            # operator never reads it.
            memory.note(secret=False)
        return True

    async def _withdraw(self, job: JobObject, coordinator: Create) -> None:
        """Delete a coordinator that was just made: the template of its workers is refused."""
        for pod in self._store.pods(job.key):
            if pod.name == coordinator.name and pod.owner == job.uid and not pod.deleting:
                await self._delete(job, Delete(pod.name, pod.uid, "its workers are refused"))

    async def _create(
        self, job: JobObject, create: Create, subject: Subject, memory: Memory
    ) -> bool:
        self._fence()
        try:
            body = await self._api.create("pods", job.namespace, create.manifest, strict=True)
        except ApiError as error:
            if error.code == 409:
                return await self._adopt(job, create)
            self._refused(job, error, memory, subject)
            return False
        log.info("made pod %s: %s", create.name, create.why, extra=_of(job))
        self._put_pod(body)
        return True

    async def _adopt(self, job: JobObject, create: Create) -> bool:
        """Handle a taken name: it belongs to an own pod not observed yet, or to another owner."""
        try:
            body = await self._api.get("pods", job.namespace, create.name)
        except ApiError as error:
            if error.code == 404:
                return False
            raise
        labels = create.manifest["metadata"]["labels"]
        if (body["metadata"].get("labels") or {}).get(LABEL_MANAGER) == labels[LABEL_MANAGER]:
            self._put_pod(body)  # another operator's pods are not in this operator's watch
        owners = body["metadata"].get("ownerReferences") or ()
        own = any(owner.get("uid") == job.uid for owner in owners)
        if not own:
            self._store.reserve(job.key, labels)
        return own and not body["metadata"].get("deletionTimestamp")

    def _put_pod(self, body: Mapping[str, Any]) -> None:
        entry = pod_from(body, self._clock())
        if entry is not None:
            namespace, name, pod = entry
            self._store.put_pod((namespace, name), pod)

    def _refused(
        self,
        job: JobObject,
        error: ApiError,
        memory: Memory,
        subject: Subject,
        kind: RefusalKind | None = None,
    ) -> None:
        memory.refusal = self._counted(job, error, memory.refusal, subject, kind)
        log.warning("a creation was refused: %s", error, extra=_of(job))

    def _counted(
        self,
        job: JobObject,
        error: ApiError,
        before: CreationRefusal | None,
        subject: Subject,
        kind: RefusalKind | None = None,
    ) -> CreationRefusal:
        """Return a refusal with the number of refusals of its kind and subject in a row."""
        if kind is None:
            kind = refused_creation(error.code, error.message, transient=error.transient)
        same = before is not None and (before.kind, before.subject) == (kind, subject)
        count = before.count + 1 if before is not None and same else 1
        return CreationRefusal(kind, error.message, self._clock(), count, job.generation, subject)

    async def _delete(self, job: JobObject, deletion: Delete) -> bool:
        self._fence()
        log.info("deleting pod %s: %s", deletion.name, deletion.why, extra=_of(job))
        call = self._api.delete("pods", job.namespace, deletion.name, uid=deletion.uid)
        body = await self._ignore_gone(call)
        if body is None:
            self._store.drop_pod(job.key, deletion.name, deletion.uid)
        else:
            self._put_pod(body)
            self._store.mark_deleting(job.key, deletion.name, deletion.uid)
        return True

    async def _ignore_gone(self, call: Awaitable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        try:
            return await call
        except ApiError as error:
            if error.code in (404, 409):
                return None
            raise

    # ---- events ---------------------------------------------------------------------------

    async def _ask_why(self, job: JobObject, uids: tuple[str, ...], memory: Memory) -> None:
        """Read the last warning about each pod. Without the right to, nothing is known of it."""
        for uid in uids:
            warning = ""
            try:
                warning = last_warning(await self._api.warnings_of(job.namespace, uid))
            except ApiError as error:
                log.warning("the Events of a pod: %s", error, extra=_of(job))
            memory.warned[uid] = Warned(self._clock(), warning)
        known = {pod.uid for pod in self._store.pods(job.key)}
        memory.warned = {uid: each for uid, each in memory.warned.items() if uid in known}

    async def _tell(self, job: JobObject, event: KubernetesEvent, memory: Memory) -> None:
        self._fence()
        now = timestamp(self._clock())
        digest = hashlib.sha256(f"{job.uid}/{event.key}".encode()).hexdigest()[:16]
        manifest = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
            },
            "type": "Warning" if event.warning else "Normal",
            "reason": str(event.reason),
            "message": event.message[:1000],
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        log.info("%s: %s", event.reason, event.message, extra=_of(job))
        memory.note(events=memory.sent.events | {event.key})
        try:
            await self._api.create("events", job.namespace, manifest)
        except ApiError as error:
            # With 409 an earlier operator has sent the Event. Any other failure only loses it.
            if error.code != 409:
                log.warning("an Event was refused: %s", error, extra=_of(job))


def _is_fresh(checked: tuple[int, float] | None, job: JobObject, now_s: float) -> bool:
    return checked is not None and checked[0] == job.generation and now_s < checked[1] + FRESH_S


OF_TEMPLATE: Final = (RefusalKind.TEMPLATE, RefusalKind.FORBIDDEN, RefusalKind.NO_RIGHT)
"""Kinds of refusals that hold for each worker alike."""


def _is_of_worker(refusal: CreationRefusal | None) -> bool:
    """Return True if the template of the workers was refused."""
    return refusal is not None and refusal.subject is Subject.WORKER and refusal.kind in OF_TEMPLATE


def _subject(changes: Changes, create: Create) -> Subject:
    return Subject.COORDINATOR if create is changes.coordinator else Subject.WORKER


def _of(job: JobObject) -> dict[str, str]:
    return {"job": f"{job.namespace}/{job.name}"}


def _groups(items: tuple[Delete, ...], size: int) -> list[tuple[Delete, ...]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


async def _all(calls: Iterable[Awaitable[bool]]) -> list[bool]:
    """Run all calls at once; return their results, or raise the first error once all ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    done: list[bool] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done
