"""`Jobs` of a namespace: TrainingJobs and their pods, as the API server returns them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline_api.access.access import Access
from paceline_api.errors import InvalidJobError, JobFileError, PacelineError
from paceline_api.names import LABEL_JOB, NOTE_WATCHED
from paceline_api.pods.needed import Needed, needed
from paceline_api.reading.load import job_from_mapping
from paceline_api.resolve import resolve
from paceline_api.runtimes.merge import RUNTIME_REF, Runtime
from paceline_api.runtimes.reading import runtime_from_mapping
from paceline_api.settings import ResolvedJob
from paceline_api.times import NS_PER_S, timestamp
from paceline_api.types.enums import RuntimeKind
from paceline_api.types.job import GROUP, KIND, VERSION, TrainingJob
from paceline_api.types.runtime import PLURALS

from paceline.clock import now_ns, wall_s
from paceline.core.anatomy.samples import with_steps
from paceline.jobs.cluster import samples
from paceline.jobs.cluster.checks import DRY_RUN, check_pods
from paceline.jobs.cluster.logs import Logs
from paceline.jobs.cluster.patience import Patience
from paceline.jobs.cluster.server import ApiServer, NotFoundError
from paceline.jobs.core import carried, explain, from_cluster, sampled
from paceline.jobs.errors import (
    AwayError,
    JobsError,
    NameTakenError,
    NoSuchJobError,
    NoSuchRuntimeError,
    NotAllowedError,
    NotInstalledError,
    RejectedError,
    WaitTimeoutError,
)
from paceline.jobs.interface import (
    ALL_LINES,
    NOTHING,
    SUSPENDED,
    SUSPENDING,
    Checks,
    ClusterFinding,
    Explanation,
    JobEvent,
    JobStatus,
    LogLine,
    RuntimeRow,
    Samples,
    Selection,
    Until,
)

WATCHED_S: Final = 120.0
"""Seconds for which one request asks the operator for fresh figures. The clocks of the operator and
of this machine may differ by a minute."""
WATCHED_AGAIN_S: Final = 45.0
"""Seconds after which a watcher renews its request for fresh figures."""
WATCH_S: Final = 240
"""Seconds after which the API server ends a watch; the job is then read again."""


class ClusterJobs:
    """The TrainingJobs of one namespace; implements `Jobs`.

    See `paceline.jobs.interface.Jobs` for the contract of the methods. After their first request,
    `watch`, `wait`, followed `logs` and the wait of `delete` survive an outage of the API server of
    up to `outage.BORNE_NS`. All other requests raise AwayError at once.
    """

    def __init__(
        self,
        access: Access,
        namespace: str | None = None,
        *,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create the back end; no request is sent yet.

        Args:
            access: Address and credentials of the API server.
            namespace: Namespace of the jobs; None takes that of the kubeconfig's context.
            say: Called with a message when the API server is away while a job is watched, and when
                it is back. Threads that read logs may call it.
        """
        self._server = ApiServer(access)
        self._say = say
        self.namespace = namespace or self._server.namespace
        self._path = f"/apis/{GROUP}/{VERSION}/namespaces/{self.namespace}/trainingjobs"
        self._core_path = f"/api/v1/namespaces/{self.namespace}"
        self._pods_path = f"{self._core_path}/pods"

    @property
    def where(self) -> str:
        """The place as text for a message, with the namespace and the server's URL."""
        return f"namespace {self.namespace} of {self._server.url}"

    def submit(
        self,
        job: TrainingJob,
        *,
        folder: Path,  # noqa: ARG002
        function: Mapping[str, str] = NOTHING,
    ) -> JobStatus:
        """Create a TrainingJob, and a ConfigMap for its function if it has one.

        Args:
            job: The job; its status is left out.
            folder: Unused: a pod has no access to the files of this machine.
            function: Text files of the function that the trainer runs, by file name.

        Returns:
            The status of the new job.

        Raises:
            RejectedError: The job names another namespace, or the API server rejects it.
            NameTakenError: A TrainingJob with that name exists already.
            NotInstalledError: The cluster has TrainingJobs of another release, without one of the
                fields.
        """
        body = job.to_mapping()
        carrier = f"{job.metadata.name}-function-{secrets.token_hex(4)}"
        if function:
            body = carried.with_function(body, carrier)
        body.pop("status", None)
        own = body["metadata"].setdefault("namespace", self.namespace)
        if own != self.namespace:
            raise RejectedError(
                f"the job file says metadata.namespace {own}, and not {self.namespace}",
                hint=f"paceline submit -n {own}, or take it out of the file",
            )
        name = job.metadata.name
        try:
            created = self._server.create(self._path, body, {"fieldValidation": "Strict"})
        except NotFoundError as error:
            raise self._nowhere(error) from None
        except NameTakenError:
            raise NameTakenError(
                f"there is already a job {name} in the {self.where}",
                hint=f"choose another metadata.name, or `paceline delete {name}` first",
            ) from None
        except RejectedError as error:
            if "unknown field" in error.message:
                raise NotInstalledError(
                    f"the TrainingJobs of {self._server.url} are of another release of Paceline: "
                    f"{error.message}",
                    hint="upgrade the chart paceline-crds, or leave the field out",
                ) from None
            raise
        if function:
            self._carry(carried.config_map(carrier, created, function), created)
        return self._status_of(created, [])

    def _carry(self, config_map: Mapping[str, Any], job: Mapping[str, Any]) -> None:
        """Create the ConfigMap with the files of a function.

        The pods of the job wait until it exists. If it cannot be created, the job is deleted again,
        because its pods would wait forever.

        Args:
            config_map: The ConfigMap, owned by the job.
            job: The job, as the API server returned it.

        Raises:
            PacelineError: The ConfigMap cannot be created.
        """
        try:
            self._server.create(f"{self._core_path}/configmaps", config_map)
        except PacelineError:
            which = {"preconditions": {"uid": job["metadata"]["uid"]}}
            self._server.delete(f"{self._path}/{job['metadata']['name']}", which)
            raise

    def all(self) -> list[JobStatus]:
        """Return the status of all jobs of the namespace, without `detail`, by name."""
        try:
            items = self._server.get(self._path)["items"]
        except NotFoundError as error:
            raise self._nowhere(error) from None
        return sorted((self._status_of(job, None) for job in items), key=lambda job: job.name)

    def status(self, name: str) -> JobStatus:
        """Return the current status of a job, from the TrainingJob and its pods."""
        job = self._job(name)
        return self._status_of(job, self._pods(job))

    def resolved(self, name: str) -> ResolvedJob:
        """Return the settings of a job with this release's defaults filled in."""
        job = self._job(name)
        kept = (job.get("status") or {}).get("runtime")
        if not kept and RUNTIME_REF in job["spec"]:
            raise JobFileError(
                f"job {name} is not merged with its runtime yet",
                hint=f"`paceline explain {name}` says what it waits for",
            )
        runtime = Runtime(kept["kind"], kept["name"], kept["spec"]) if kept else None
        return resolve(job_from_mapping(job, runtime))

    def watch(self, name: str) -> Generator[JobStatus]:
        """Yield each new status of a job, and ask the operator for fresh figures."""
        patience = Patience(self._say)
        asked_ns: int | None = None
        for job in self._follow(name, None, patience):
            status = self._status_of(job, patience.asked(partial(self._pods, job)))
            again = asked_ns is None or now_ns() - asked_ns > WATCHED_AGAIN_S * NS_PER_S
            if again and not status.ended:
                asked_ns = now_ns()
                self._ask_for_figures(name)
            yield status
            if status.ended:
                return
            if status.state == SUSPENDING and from_cluster.state(job) == SUSPENDED:
                # The job does not change when its last pod goes, so the watch would not end.
                self._left_pods(job, None, patience)
                yield self._status_of(job, patience.asked(partial(self._pods, job)))

    def wait(
        self, name: str, until: Until = Until.ENDED, *, timeout_s: float | None = None
    ) -> JobStatus:
        """Block until a job meets a condition, or has ended."""
        end_ns = None if timeout_s is None else now_ns() + round(timeout_s * NS_PER_S)
        patience, state = Patience(self._say), "not heard of"
        for job in self._follow(name, end_ns, patience):
            last = self._status_of(job, None)
            state = last.state
            if not last.meets(until):
                continue
            if state == SUSPENDED and self._left_pods(job, end_ns, patience):
                state = SUSPENDING
                break
            return self._status_of(job, patience.asked(partial(self._pods, job)))
        if end_ns is not None and now_ns() >= end_ns:
            raise WaitTimeoutError(
                f"job {name} is {state} after {timeout_s:g} s, and not yet {until}",
                hint=f"wait longer with --timeout; `paceline explain {name}` says what it waits "
                "for",
            )
        raise NoSuchJobError(
            f"job {name} was deleted while it was waited for", hint="submit it again"
        )

    def logs(
        self, name: str, selection: Selection = ALL_LINES, *, follow: bool = False
    ) -> Generator[LogLine]:
        """Yield the lines of the job's pods, merged in order of time."""
        job = self._job(name)
        patience = Patience(self._say)
        logs = Logs(self._server, self.namespace, job, selection, patience)
        if follow:
            yield from logs.followed(lambda: self._follow(name, None, patience))
        else:
            yield from logs.until_now(self._pods(job))

    def scale(self, name: str, replicas: int) -> int:
        """Set `spec.replicas` through the scale subresource; return the value before."""
        before = int(self._job(name)["spec"].get("replicas", 1))
        self._server.patch(f"{self._path}/{name}/scale", {"spec": {"replicas": replicas}})
        return before

    def suspend(self, name: str) -> None:
        """Set `spec.suspend` to true; the operator stops the job after a checkpoint."""
        self._change(name, {"suspend": True})

    def resume(self, name: str) -> None:
        """Set `spec.suspend` to false; the operator starts the pods again."""
        self._change(name, {"suspend": False})

    def delete(self, name: str, *, wait_s: float = 0.0) -> None:
        """Delete a TrainingJob; its pods end in the background."""
        job = self._job(name)
        # Delete this job only: another one of the same name may have been created meanwhile.
        which = {"preconditions": {"uid": job["metadata"]["uid"]}}
        how = {"propagationPolicy": "Background", **which}
        try:
            self._server.delete(f"{self._path}/{name}", how)
        except NotFoundError as error:
            raise self._missing(name, error) from None
        if wait_s:
            self._until_gone(job, now_ns() + round(wait_s * NS_PER_S), wait_s)

    def events(self, name: str) -> list[JobEvent]:
        """Return the Events of a job and of its pods, the oldest first."""
        job = self._job(name)
        items = self._server.get(f"/api/v1/namespaces/{self.namespace}/events")["items"]
        return from_cluster.job_events(items, job, self._pods(job))

    def explain(self, name: str) -> Explanation:
        """Return why a job is slow or does not start, and what to type next."""
        flags = f" -n {self.namespace}"
        return explain.explain(self.status(name), self.events(name), flags=flags, cluster=True)

    def samples(self, name: str) -> Samples:
        """Return the samples of the last steps, from the agents in the job's pods."""
        job = self._job(name)
        status, flags = self._status_of(job, None), f" -n {self.namespace}"
        if not (pods := sampled.asked(self._pods(job))):
            raise sampled.nobody(status, flags=flags)
        answers, silent = samples.ask(self._server, self._core_path, pods)
        if not answers:
            raise AwayError(
                f"none of the {len(pods)} workers of job {name} answers: "
                f"{silent[0].pod}: {silent[0].why}",
                hint="the API server must reach the port spec.metrics.port of the pods: see that "
                "no NetworkPolicy or firewall is between them",
            )
        if not (known := with_steps(answers)):
            raise sampled.not_yet(status)
        return Samples(known, tuple(silent))

    def check(self, job: TrainingJob) -> Checks:
        """Ask the API server what it would say to a job; nothing is created.

        The job is merged with its runtime, sent with `dryRun=All`, so that schema, rules, webhooks
        and policies answer, and so are the pods of a worker and of the coordinator. All pods
        together are compared with the quotas. What they need is looked up. Only rights of the user
        are used.

        Args:
            job: The job as in its file.

        Returns:
            What is wrong, and what could not be checked. An API server that is away raises
            AwayError.
        """
        wrong: list[ClusterFinding] = []
        unchecked: list[ClusterFinding] = []
        whole = self._whole(job, wrong, unchecked)
        body = {key: each for key, each in job.to_mapping().items() if key != "status"}
        body["metadata"] = {**body["metadata"], "namespace": self.namespace}
        try:
            self._server.create(self._path, body, DRY_RUN)
        except NotAllowedError as error:
            unchecked.append(
                ClusterFinding("", error.message, "ask for the right to create TrainingJobs")
            )
        except NotFoundError as error:
            raise self._nowhere(error) from None
        except NameTakenError:
            hint = f"choose another one, or `paceline delete {job.metadata.name}` first"
            taken = f"metadata.name: there is already a job {job.metadata.name}"
            wrong.append(ClusterFinding("metadata.name", taken, hint))
        except RejectedError as error:
            wrong.append(ClusterFinding("", error.message, error.hint))
        for one in needed(whole.to_mapping() if whole is not None else job.to_mapping()):
            self._look_up(one, wrong, unchecked)
        if whole is not None:
            check_pods(self._server, self.namespace, whole, wrong, unchecked)
        return Checks(tuple(wrong), tuple(unchecked))

    def _whole(
        self, job: TrainingJob, wrong: list[ClusterFinding], unchecked: list[ClusterFinding]
    ) -> TrainingJob | None:
        """Return a job merged with the runtime of the cluster that it names; None if it cannot be.

        Args:
            job: The job.
            wrong: What is wrong is added to it.
            unchecked: What could not be checked is added to it.
        """
        if (ref := job.spec.runtime_ref) is None:
            return job
        field = f"spec.{RUNTIME_REF}"
        try:
            runtime = runtime_from_mapping(self.runtime(ref.kind or RuntimeKind.CLUSTER, ref.name))
            return job_from_mapping(job.to_mapping(), runtime)
        except NoSuchRuntimeError as error:
            wrong.append(ClusterFinding(field, f"{field}: {error.message}", error.hint))
        except NotAllowedError as error:
            unchecked.append(ClusterFinding(field, f"{field}: {error.message}", error.hint))
        except InvalidJobError as error:
            wrong += [ClusterFinding(each.path, each.message, each.hint) for each in error.errors]
        return None

    def _look_up(
        self, one: Needed, wrong: list[ClusterFinding], unchecked: list[ClusterFinding]
    ) -> None:
        path = one.path.format(namespace=self.namespace)
        try:
            self._server.get(f"{path}/{one.name}")
        except NotFoundError as error:
            text = f"{one.field}: {one.kind} {one.name} is not there: {error.message}"
            hint = f"create the {one.kind}, or correct the name; pods would wait for it"
            wrong.append(ClusterFinding(one.field, text, hint))
        except NotAllowedError as error:
            text = f"{one.field}: {one.kind} {one.name} could not be looked up: {error.message}"
            unchecked.append(ClusterFinding(one.field, text, "have somebody with the right look"))

    def runtimes(self) -> list[RuntimeRow]:
        """Return the runtimes that a job of this namespace can name, by kind and name.

        Those of the cluster are left out for a user who may not read them.

        Returns:
            One row for each.

        Raises:
            NotAllowedError: The user may not read those of the namespace.
        """
        rows: list[RuntimeRow] = []
        for kind in RuntimeKind:
            try:
                items = self._server.get(self._runtimes_path(kind))["items"]
            except NotFoundError as error:
                raise self._nowhere(error) from None
            except NotAllowedError:
                if kind is RuntimeKind.NAMESPACED:
                    raise
                continue
            rows += [_runtime_row(kind, item) for item in items]
        return sorted(rows, key=lambda row: (row.kind, row.name))

    def runtime(self, kind: RuntimeKind, name: str) -> dict[str, Any]:
        """Return a runtime as in a file.

        Args:
            kind: Its kind.
            name: Its name.

        Returns:
            The object without what only the API server needs.

        Raises:
            NoSuchRuntimeError: There is no runtime of that name.
        """
        try:
            body = self._server.get(f"{self._runtimes_path(kind)}/{name}")
        except NotFoundError as error:
            if f'"{name}"' not in error.message:  # the server does not know the kind itself
                raise self._nowhere(error) from None
            where = "the cluster" if kind is RuntimeKind.CLUSTER else f"the {self.where}"
            raise NoSuchRuntimeError(
                f"there is no {kind} {name} in {where}",
                hint="`paceline runtimes` lists those that there are",
            ) from None
        head = {"apiVersion": f"{GROUP}/{VERSION}", "kind": str(kind), "metadata": {"name": name}}
        return {**head, "spec": body["spec"]}

    def _runtimes_path(self, kind: RuntimeKind) -> str:
        within = f"/namespaces/{self.namespace}" if kind is RuntimeKind.NAMESPACED else ""
        return f"/apis/{GROUP}/{VERSION}{within}/{PLURALS[kind]}"

    # ---- what the server has ---------------------------------------------------------------

    def _job(self, name: str) -> dict[str, Any]:
        try:
            return self._server.get(f"{self._path}/{name}")
        except NotFoundError as error:
            raise self._missing(name, error) from None

    def _pods(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the pods that this job owns, and not those of an earlier namesake."""
        query = {"labelSelector": f"{LABEL_JOB}={job['metadata']['name']}"}
        pods: list[dict[str, Any]] = self._server.get(self._pods_path, query)["items"]
        return [pod for pod in pods if _is_of(pod, job)]

    def _change(self, name: str, spec: Mapping[str, Any]) -> None:
        try:
            self._server.patch(f"{self._path}/{name}", {"spec": spec})
        except NotFoundError as error:
            raise self._missing(name, error) from None

    def _ask_for_figures(self, name: str) -> None:
        """Ask the operator to write fresh figures while a user watches the job.

        A user without permission to change the job gets the figures that are written once a minute.

        Args:
            name: The job.
        """
        until = timestamp(wall_s() + WATCHED_S)
        with suppress(JobsError):
            self._server.patch(
                f"{self._path}/{name}", {"metadata": {"annotations": {NOTE_WATCHED: until}}}
            )

    def _until_gone(self, job: Mapping[str, Any], end_ns: int, wait_s: float) -> None:
        """Wait until neither the job nor one of its pods exists.

        Args:
            job: The deleted job, as the API server returned it.
            end_ns: Deadline, on the clock of `now_ns`.
            wait_s: The whole wait in seconds, for the error.

        Raises:
            WaitTimeoutError: Pods are left at the deadline.
        """
        name, patience = job["metadata"]["name"], Patience(self._say)
        try:
            for _ in self._follow(name, end_ns, patience):
                pass
        except NoSuchJobError:
            pass  # the job was gone before the first request
        if left := self._left_pods(job, end_ns, patience):
            raise WaitTimeoutError(
                f"job {name} is deleted, and {left} of its pods have not ended after {wait_s:g} s",
                hint="they end by themselves within their grace period; wait longer with --timeout",
            )

    def _left_pods(self, job: Mapping[str, Any], end_ns: int | None, patience: Patience) -> int:
        """Wait until the pods that the job has now are gone, at most until `end_ns`.

        Pods that are created later do not count.

        Args:
            job: The job.
            end_ns: Deadline, on the clock of `now_ns`; None waits without a bound.
            patience: Handles an API server that is away.

        Returns:
            The number of pods that are left; 0 as soon as all of them are gone.
        """
        mine: set[str] | None = None
        query = {"labelSelector": f"{LABEL_JOB}={job['metadata']['name']}"}
        while True:
            answer = patience.asked(partial(self._server.get, self._pods_path, query))
            left = {pod["metadata"]["name"] for pod in answer["items"] if _is_of(pod, job)}
            mine = left if mine is None else mine & left
            left = set(mine)  # pods that are created meanwhile do not count
            if not left or (end_ns is not None and now_ns() >= end_ns):
                return len(left)
            since = query | {"resourceVersion": answer["metadata"]["resourceVersion"]}
            timeout_s = WATCH_S if end_ns is None else min(WATCH_S, _whole_s(end_ns))
            try:
                for kind, pod in self._server.watch(self._pods_path, since, timeout_s=timeout_s):
                    left -= {pod["metadata"]["name"]} if kind == "DELETED" else set()
                    if not left:
                        break
            except PacelineError as error:
                patience.rest(error)

    def _follow(
        self, name: str, end_ns: int | None, patience: Patience
    ) -> Generator[dict[str, Any]]:
        """Yield the job now and after each change, until it is deleted or `end_ns`.

        Args:
            name: The job.
            end_ns: Deadline, on the clock of `now_ns`; None follows without a bound.
            patience: Handles an API server that is away.

        Yields:
            The TrainingJob, as the API server holds it.
        """
        uid, version = self._job(name)["metadata"]["uid"], ""
        only = {"fieldSelector": f"metadata.name={name}"}
        while True:
            try:
                # Start the watch from the version of the list, which is current. The version of a
                # job that has not changed for long may be too old for a watch.
                answer = self._server.get(self._path, only)
                patience.answered()
                job = next(iter(answer["items"]), None)
                if job is None or job["metadata"]["uid"] != uid:
                    return
                if job["metadata"]["resourceVersion"] != version:
                    version = job["metadata"]["resourceVersion"]
                    yield job
                since = only | {"resourceVersion": answer["metadata"]["resourceVersion"]}
                left_s = WATCH_S if end_ns is None else min(WATCH_S, _whole_s(end_ns))
                for kind, job in self._server.watch(self._path, since, timeout_s=left_s):
                    if kind == "DELETED":
                        return
                    if kind == "ERROR":
                        continue  # the watch ends; the job is read again
                    version = job["metadata"]["resourceVersion"]
                    yield job
            except PacelineError as error:
                patience.rest(error)
            if end_ns is not None and now_ns() >= end_ns:
                return

    def _status_of(self, job: Mapping[str, Any], pods: list[dict[str, Any]] | None) -> JobStatus:
        return from_cluster.job_status(job, pods, wall_s())

    # ---- what is missing -------------------------------------------------------------------

    def _missing(self, name: str, error: NotFoundError) -> Exception:
        if "trainingjobs" in error.message:
            return NoSuchJobError(
                f"there is no job {name} in the {self.where}",
                hint="`paceline status` lists those that are there; -n names another namespace",
            )
        return self._nowhere(error)

    def _nowhere(self, error: NotFoundError) -> Exception:
        """Return the error for a cluster or namespace without TrainingJobs, with the reason."""
        if error.message.startswith("namespaces "):
            return RejectedError(
                f"there is no namespace {self.namespace} in the cluster {self._server.url}",
                hint="name another one with -n, or ask for it to be made",
            )
        try:
            group = self._server.get(f"/apis/{GROUP}")
        except NotFoundError:
            return NotInstalledError(
                f"the cluster {self._server.url} does not know {KIND}s: Paceline is not installed "
                "in it",
                hint="ask for the charts paceline-crds and paceline, or choose another cluster "
                "with --context",
            )
        known = ", ".join(version["version"] for version in group["versions"])
        return NotInstalledError(
            f"the cluster {self._server.url} has {KIND}s of {GROUP}/{known}, and this paceline "
            f"supports {VERSION}",
            hint="upgrade the charts of the cluster, or use the paceline of its release",
        )


def _is_of(pod: Mapping[str, Any], job: Mapping[str, Any]) -> bool:
    """Return True if this job owns the pod, and not an earlier job of the same name."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(one["uid"] == job["metadata"]["uid"] for one in owners)


def _whole_s(end_ns: int) -> int:
    """Return the seconds until `end_ns`, rounded up and at least 1, as a watch's timeout."""
    return max(1, math.ceil((end_ns - now_ns()) / NS_PER_S))


def _runtime_row(kind: RuntimeKind, item: Mapping[str, Any]) -> RuntimeRow:
    conditions = (item.get("status") or {}).get("conditions") or ()
    ready: Mapping[str, Any] = next((c for c in conditions if c.get("type") == "Ready"), {})
    status = str(ready.get("status") or "Unknown")
    return RuntimeRow(
        name=item["metadata"]["name"],
        kind=str(kind),
        ready=status,
        description=str(item["spec"].get("description") or ""),
        problem=str(ready.get("message") or "") if status == "False" else "",
    )
