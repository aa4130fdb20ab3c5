"""A TrainingJob as decisions read it: the spec in force and what its status stores.

Defaults are resolved once and kept in `status.resolved` (C12). A field that the user leaves open
keeps the value of the release with which the job started. A field that the user writes takes
effect, and one that the user removes has its default again; when, `paceline_api.fields` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from paceline_api.defaults import fixed_by_queue, with_defaults
from paceline_api.errors import InvalidJobError
from paceline_api.fields import leaves, picked, revision, written
from paceline_api.names import DEFAULT_MANAGER
from paceline_api.reading.load import job_from_mapping
from paceline_api.reasons import ConditionType, Reason
from paceline_api.resolve import resolve
from paceline_api.runtimes.merge import RUNTIME_REF
from paceline_api.settings import ResolvedJob
from paceline_api.times import seconds_of
from paceline_api.types.enums import ABLE_BACKENDS, Backend
from paceline_api.types.job import TrainingJob, TrainingJobSpec

from paceline_operator.core.runtime import NO_RUNTIMES, Runtimes, admit

_NOT_KEPT: Final = ("template", "replicas", "minReplicas", "maxReplicas", "suspend")
"""Fields of the spec missing from `status.resolved`: too large, or changed by users at any time."""
_DERIVED: Final = ("procsPerReplica",)
"""Fields whose default follows from other fields, and changes with them."""


@dataclass(frozen=True, slots=True)
class JobObject:
    """One TrainingJob, read from the object of the API server."""

    name: str
    namespace: str
    uid: str
    generation: int
    created_s: float
    deleting: bool
    manager: str
    status: Mapping[str, Any]
    """Stored status, written by this release or by another one."""
    spec: TrainingJobSpec | None
    """Spec in force, with every default filled in; None if the spec is invalid."""
    settings: ResolvedJob | None
    """Settings resolved from `spec`; None if the spec is invalid."""
    template: Mapping[str, Any]
    """`spec.template` as the user wrote it, merged with that of the runtime."""
    resolved: Mapping[str, Any]
    """Value that `status.resolved` has, or gets with the next write of the status (C12)."""
    explicit: tuple[str, ...] = ()
    """Value of `status.explicit`: paths of the fields in `resolved` that the spec sets itself."""
    revision: str = ""
    """Digest of the fields that act after a suspension; the job's pods carry it."""
    problems: str = ""
    """Reason why the spec is invalid, worded for the user; empty if it is valid."""
    reason: Reason = Reason.SPEC_INVALID
    """Kind of `problems`."""
    runtime: Mapping[str, Any] = field(default_factory=dict)
    """Value that `status.runtime` has, or gets with the next write of the status; empty for a job
    without a runtime (C21)."""
    fixed_size: bool = False
    """True if Kueue admits the job, which it does for a fixed number of workers only (C16)."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    names_runtime: bool = False
    """True if the spec names a runtime."""

    @property
    def waits_for_runtime(self) -> bool:
        """Return True if a change of its runtime may make the job valid."""
        return self.names_runtime and bool(self.problems) and not self.status.get("runtime")

    @property
    def is_admitted(self) -> bool:
        """Return True if the stored status keeps the job's runtime, or the job has none."""
        return not self.runtime or bool(self.status.get("runtime"))

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name of the job."""
        return self.namespace, self.name

    def condition(self, kind: str) -> Mapping[str, Any] | None:
        """Return the stored condition of this type, or None if the status has none."""
        for condition in self.status.get("conditions") or ():
            if condition.get("type") == kind:
                stored: Mapping[str, Any] = condition
                return stored
        return None

    @property
    def set_aside(self) -> bool:
        """Return True if the job was suspended and its ranks have not formed a membership since."""
        ring = self.condition(ConditionType.RING_READY)
        return ring is not None and ring.get("reason") == Reason.SUSPENDED_BY_SPEC

    @property
    def resumed_s(self) -> float:
        """Time at which the job was resumed, in seconds since the epoch; 0.0 if it never was."""
        condition = self.condition(ConditionType.SUSPENDED) or {}
        is_over = condition.get("reason") == Reason.RESUMED
        return (seconds_of(condition.get("lastTransitionTime")) or 0.0) if is_over else 0.0

    @property
    def has_started(self) -> bool:
        """Return True if a membership of the present pods has been observed."""
        return self.start_s is not None and not self.set_aside

    def holds(self, kind: str) -> bool:
        """Return True if the stored condition of this type has the status True."""
        condition = self.condition(kind)
        return condition is not None and condition.get("status") == "True"

    @property
    def finished(self) -> bool:
        """Return True if the stored conditions Complete or Failed hold."""
        return self.holds("Complete") or self.holds("Failed")

    @property
    def start_s(self) -> float | None:
        """`status.startTime` in seconds since the epoch; None before the first membership."""
        return seconds_of(self.status.get("startTime"))

    @property
    def active_s(self) -> float | None:
        """`status.activeTime` in seconds since the epoch; None while suspended or queued."""
        return seconds_of(self.status.get("activeTime"))

    @property
    def completion_s(self) -> float | None:
        """`status.completionTime` in seconds since the epoch; None while the job runs."""
        return seconds_of(self.status.get("completionTime"))

    @property
    def round(self) -> int:
        """Latest round in the stored status; 0 if it has none."""
        return int(self.status.get("round") or 0)

    @property
    def highest_attempt(self) -> int:
        """Highest attempt of any pod according to the stored status (C3)."""
        return int(self.status.get("highestAttempt") or 0)


def manager_of(body: Mapping[str, Any]) -> str:
    """Return the name of the operator that looks after a job, given the job's object (C15)."""
    return str((body.get("spec") or {}).get("managedBy") or DEFAULT_MANAGER)


def has_ended(body: Mapping[str, Any]) -> bool:
    """Return True if the condition Complete or Failed holds in a job's object."""
    conditions = (body.get("status") or {}).get("conditions") or ()
    return any(
        c.get("type") in ("Complete", "Failed") and c.get("status") == "True" for c in conditions
    )


def read_job(body: Mapping[str, Any], runtimes: Runtimes = NO_RUNTIMES) -> JobObject:
    """Read a job from the object of the API server.

    An invalid spec is not an exception: it gives a job with `problems` and without `spec` and
    `settings`.

    Args:
        body: The TrainingJob as the API server returns it.
        runtimes: The runtimes that there are.

    Returns:
        The job, with the defaults of `status.resolved` where the user leaves a field open.
    """
    metadata = body["metadata"]
    status = body.get("status") or {}
    spec = settings = None
    admission = admit(body, runtimes)
    problems, fixed, reason = admission.problem, False, admission.reason or Reason.SPEC_INVALID
    resolved: Mapping[str, Any] = status.get("resolved") or {}
    explicit = tuple(status.get("explicit") or ())
    declared = admission.spec
    try:
        if not problems:
            job = _in_force(body, _defaults(resolved, explicit), declared)
            spec, settings = job.spec, resolve(job)
            fixed = fixed_by_queue(job)
            resolved = _kept(job)
            explicit = tuple(p for p in written(declared) if p.partition(".")[0] not in _NOT_KEPT)
    except InvalidJobError as error:
        problems = error.message + (f" ({error.hint})" if error.hint else "")
        if admission.title:
            problems = f"merged with {admission.title}: {problems}"
    return JobObject(
        name=metadata["name"],
        namespace=metadata.get("namespace") or "default",
        uid=metadata["uid"],
        generation=int(metadata.get("generation") or 0),
        created_s=seconds_of(metadata.get("creationTimestamp")) or 0.0,
        deleting=bool(metadata.get("deletionTimestamp")),
        manager=manager_of(body),
        status=status,
        spec=spec,
        settings=settings,
        template=declared.get("template") or {},
        resolved=resolved,
        explicit=explicit,
        revision=revision(declared),
        problems=problems,
        reason=reason,
        # A runtime that makes the job invalid is not kept, since its owners may repair it.
        runtime=status.get("runtime") or (admission.runtime if not problems else {}),
        names_runtime=RUNTIME_REF in (body.get("spec") or {}),
        fixed_size=fixed,
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
    )


def read_again(
    body: Mapping[str, Any],
    before: Mapping[str, Any],
    known: JobObject,
    runtimes: Runtimes = NO_RUNTIMES,
) -> JobObject:
    """Read a changed job; cheap if only its status has changed.

    Args:
        body: The TrainingJob as it is now.
        before: The object that was read last.
        known: The job that was read from `before`.
        runtimes: The runtimes that there are.

    Returns:
        The same job as `read_job(body, runtimes)`.
    """
    status = body.get("status") or {}
    same = body.get("spec") == before.get("spec") and _identity(body) == _identity(before)
    kept = (status.get("resolved"), tuple(status.get("explicit") or ()))
    same = same and (status.get("runtime") or known.runtime) == known.runtime
    if same and kept in ((known.resolved, known.explicit), (None, ())):
        return replace(known, status=status)
    return read_job(body, runtimes)


def _identity(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in body["metadata"].items() if key != "resourceVersion"}


def _defaults(resolved: Mapping[str, Any], explicit: tuple[str, ...]) -> dict[str, Any]:
    """Return the part of `status.resolved` that the job keeps where its spec is silent.

    What a user had written and has removed since is no default, and what follows from other fields
    may follow from other values by now.

    Args:
        resolved: The stored `status.resolved`.
        explicit: The stored `status.explicit`.

    Returns:
        Defaults of the release with which the job started, in the form of a spec.
    """
    return picked(resolved, tuple(p for p in leaves() if p not in explicit and p not in _DERIVED))


def _in_force(
    body: Mapping[str, Any], defaults: Mapping[str, Any], spec: Mapping[str, Any]
) -> TrainingJob:
    # Other metadata, such as `managedFields`, is not part of Paceline's schema.
    metadata = {
        key: value
        for key, value in body["metadata"].items()
        if key in ("name", "namespace", "uid", "generation", "labels", "annotations")
    }
    mapping = {
        "apiVersion": body.get("apiVersion"),
        "kind": body.get("kind"),
        "metadata": metadata,
        "spec": _overlaid(defaults, spec),
    }
    return _with_able_backend(with_defaults(job_from_mapping(mapping)))


def _with_able_backend(job: TrainingJob) -> TrainingJob:
    """Replace the backend `auto` if a network is required that only certain backends can use."""
    collective, fabric = job.spec.collective, job.spec.fabric
    assert collective is not None
    assert fabric is not None
    assert fabric.required is not None
    able = ABLE_BACKENDS.get(fabric.required)
    if able is None or collective.backend is not Backend.AUTO:
        return job
    chosen = collective.model_copy(update={"backend": able[0]})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"collective": chosen})})


def _overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `above`, with the fields that it leaves open taken from `below`."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping) and key != "template":
            merged[key] = _overlaid(under, value)
        else:
            merged[key] = value
    return merged


def _kept(job: TrainingJob) -> Mapping[str, Any]:
    spec: dict[str, Any] = job.to_mapping()["spec"]
    return {key: value for key, value in spec.items() if key not in _NOT_KEPT}
