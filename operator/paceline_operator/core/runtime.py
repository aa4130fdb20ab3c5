"""Admission of a job with a runtime, and the judgment on a runtime itself (C21).

A job is merged with its runtime as the runtime is when a valid job comes out of it for the first
time. The runtime is then kept in `status.runtime`, and from then on only that copy counts: a
changed or deleted runtime reaches neither the running job nor a resumed or repeated attempt of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from paceline_api.errors import PacelineError, SpecError
from paceline_api.reading.load import without_nulls
from paceline_api.reasons import Reason
from paceline_api.runtimes.merge import RUNTIME_REF, Merged, Runtime, errors_of, merge
from paceline_api.runtimes.reading import problems_of, runtime_from_mapping
from paceline_api.times import timestamp
from paceline_api.types.enums import RuntimeKind
from paceline_api.types.job import API_VERSION

RuntimeKey = tuple[str, str, str]
"""Kind, namespace (empty for the whole cluster) and name of a runtime."""
READY: Final = "Ready"
"""Type of a runtime's condition."""
MESSAGE_MAX: Final = 2000
"""Upper bound on the length of a condition's message, in characters."""


@dataclass(frozen=True, slots=True)
class SeenRuntime:
    """A runtime as the API server has it."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    spec: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> RuntimeKey:
        """Kind, namespace and name."""
        return self.kind, self.namespace, self.name

    @property
    def runtime(self) -> Runtime:
        """The runtime for a merge."""
        return Runtime(self.kind, self.name, without_nulls(self.spec))

    def kept(self) -> dict[str, Any]:
        """Return what `status.runtime` of a job keeps of the runtime."""
        return {
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            "generation": self.generation,
            "spec": self.runtime.spec,
        }


Runtimes = Mapping[RuntimeKey, SeenRuntime]
NO_RUNTIMES: Final[Runtimes] = {}


@dataclass(frozen=True, slots=True)
class RuntimeMerge:
    """What a job says together with its runtime, or why it cannot be merged."""

    spec: Mapping[str, Any]
    """Spec as written, merged with the runtime if there is one; it names no runtime then."""
    runtime: Mapping[str, Any] = field(default_factory=dict)
    """What `status.runtime` has or gets; empty for a job without a runtime."""
    title: str = ""
    """Kind and name of the runtime; empty for a job without one."""
    reason: Reason | None = None
    """Why the job cannot be merged; None if it can."""
    problem: str = ""
    """The reason worded for the user, with a remedy."""


def admit(body: Mapping[str, Any], runtimes: Runtimes) -> RuntimeMerge:
    """Merge a job with its runtime.

    Args:
        body: The TrainingJob as the API server returns it.
        runtimes: The runtimes that there are.

    Returns:
        The merged spec, or why there is none.
    """
    written: Mapping[str, Any] = without_nulls(body.get("spec") or {})
    ref = written.get(RUNTIME_REF)
    if not isinstance(ref, Mapping):
        return RuntimeMerge(written)
    kept = (body.get("status") or {}).get("runtime")
    if kept:
        runtime = Runtime(str(kept["kind"]), str(kept["name"]), without_nulls(kept["spec"]))
    else:
        key = _key(ref, str(body["metadata"].get("namespace") or "default"))
        current = runtimes.get(key)
        if current is None:
            return RuntimeMerge(written, {}, "", Reason.RUNTIME_NOT_FOUND, _missing(key))
        runtime, kept = current.runtime, current.kept()
    merged = merge(runtime, written)
    if merged.refused:
        problem = _refusals(runtime, merged)
        return RuntimeMerge(written, kept, runtime.title, Reason.OVERRIDE_REFUSED, problem)
    return RuntimeMerge(merged.spec, kept, runtime.title)


def _key(ref: Mapping[str, Any], namespace: str) -> RuntimeKey:
    """Return the key of the runtime that a job names; one of a namespace is in the job's own."""
    kind = str(ref.get("kind") or RuntimeKind.CLUSTER)
    return kind, namespace if kind == RuntimeKind.NAMESPACED else "", str(ref.get("name"))


def _missing(key: RuntimeKey) -> str:
    kind, namespace, name = key
    where = f"namespace {namespace}" if namespace else "the cluster"
    other = RuntimeKind.CLUSTER if namespace else RuntimeKind.NAMESPACED
    return (
        f"spec.{RUNTIME_REF}: there is no {kind} {name} in {where}, so the job waits and no pod is "
        f"made; make it, or make the job anew with another one, such as a {other} "
        f"(spec.{RUNTIME_REF}.kind); `paceline runtimes` lists them"
    )


def _refusals(runtime: Runtime, merged: Merged) -> str:
    errors = errors_of(runtime, merged.refused)
    return "; ".join([*(error.message for error in errors), errors[0].hint])


# ---- the runtime itself ---------------------------------------------------------------------


def judge(observed: SeenRuntime, now_s: float) -> dict[str, Any] | None:
    """Return the status that a runtime should have.

    Args:
        observed: The runtime.
        now_s: The present time.

    Returns:
        The whole status; None if the runtime has it already.
    """
    if observed.status.get("observedGeneration") == observed.generation and observed.status.get(
        "conditions"
    ):
        return None
    problems = _problems(observed)
    reason, message = Reason.RUNTIME_VALID, "a job that brings a command is valid with it"
    if problems:
        reason, message = Reason.RUNTIME_INVALID, "; ".join(problems)
    holds = "False" if problems else "True"
    conditions = observed.status.get("conditions") or ()
    since = next(
        (c.get("lastTransitionTime") for c in conditions if _is_ready(c) and c["status"] == holds),
        None,
    )
    condition = {
        "type": READY,
        "status": holds,
        "reason": str(reason),
        "message": message[:MESSAGE_MAX],
        "lastTransitionTime": since or timestamp(now_s),
        "observedGeneration": observed.generation,
    }
    return {"observedGeneration": observed.generation, "conditions": [condition]}


def _is_ready(condition: Mapping[str, Any]) -> bool:
    return condition.get("type") == READY


def _problems(current: SeenRuntime) -> list[str]:
    try:
        runtime = runtime_from_mapping(
            {
                "apiVersion": API_VERSION,
                "kind": current.kind,
                "metadata": {"name": current.name},
                "spec": current.spec,
            }
        )
    except PacelineError as error:
        return [_text_of(error)]
    return [_text_of(error) for error in problems_of(runtime)]


def _text_of(error: PacelineError | SpecError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message
