"""Generator of the operator's page of the reference: values, conditions, Events, rights.

The page is generated so that it cannot contradict the code. The uses of each reason are listed here
once, and a test compares them with the code that writes conditions and Events.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from paceline_api.reasons import ConditionType, Reason

HEAD: Final = """\
<!-- Generated from charts/paceline/values.yaml and the operator's code; do not edit. -->
# The operator

It looks after TrainingJobs: worker pods and a coordinator pod per job, one Secret per job, and one
headless Service per namespace. It keeps nothing that a new one could not find out again, so it may
be killed, updated or uninstalled while jobs train.
"""

TIMES: Final = """\
## How soon it acts

| what happens | it acts |
|---|---|
| a worker is deleted or evicted | at once, with a new pod |
| a worker fails | at once; in a row in one slot after 2, 4, 8 ... 300 s |
| the leader is killed or stopped | another replica within leaseDurationSeconds + 2 s |
| the leader ends in order (an update) | another replica within 2 s |
| a leader that was stopped wakes up | it writes nothing, and ends with exit code 3 |
| connections to the API server are cut | they are made anew at once |
| they stand, but nothing comes through | within 130 s (`paceline_operator_watch_age_seconds`) |
"""

T = ConditionType
CONDITIONS: Final[dict[ConditionType, tuple[Reason, ...]]] = {
    T.READY: (
        *(Reason.TRAINING, Reason.JOB_FINISHED, Reason.SUSPENDED_BY_SPEC),
        *(Reason.STARTING, Reason.SETTLING, Reason.SUSPENDING, Reason.QUEUED),
        *(Reason.UNSCHEDULABLE, Reason.QUOTA_EXCEEDED, Reason.WAITING_FOR_EVIDENCE),
    ),
    T.STALLED: (
        *(Reason.SPEC_INVALID, Reason.TEMPLATE_INVALID, Reason.FABRIC_UNAVAILABLE),
        *(Reason.SCHEDULER_UNAVAILABLE, Reason.POD_NOT_STARTING, Reason.NAME_TAKEN),
        *(Reason.POD_SECURITY, Reason.CREATION_REFUSED, Reason.RUNTIME_NOT_FOUND),
        *(Reason.OVERRIDE_REFUSED, Reason.OBJECT_MISSING, Reason.RESOLVED),
    ),
    T.SCHEDULED: (Reason.PODS_PLACED, Reason.STARTING, Reason.QUEUED, Reason.UNSCHEDULABLE),
    T.RING_READY: (
        *(Reason.RING_FORMED, Reason.STARTING, Reason.SETTLING, Reason.SUSPENDED_BY_SPEC),
    ),
    T.TRANSPORT_VERIFIED: (
        *(Reason.TRANSPORT_MEASURED, Reason.TRANSPORT_PENDING, Reason.TRANSPORT_DEGRADED),
    ),
    T.DEGRADED: (
        *(Reason.SPEC_INVALID, Reason.RUNTIME_NOT_FOUND, Reason.OVERRIDE_REFUSED),
        *(Reason.TEMPLATE_INVALID, Reason.QUOTA_EXCEEDED, Reason.CREATION_REFUSED),
        *(Reason.FABRIC_UNAVAILABLE, Reason.SCHEDULER_UNAVAILABLE, Reason.NAME_TAKEN),
        *(Reason.POD_NOT_STARTING, Reason.SIZE_NOT_FIXED, Reason.WAITING_FOR_EVIDENCE),
        *(Reason.QUORUM_REDUCED, Reason.COORDINATOR_AWAY, Reason.BELOW_MIN_REPLICAS),
        *(Reason.ANSWER_REFUSED, Reason.POD_SECURITY, Reason.OBJECT_MISSING),
        *(Reason.RANK_BENCHED, Reason.RANK_SLOW, Reason.SCRIPT_STARTS_OVER),
        *(Reason.SCRIPT_TAKES_NO_PART, Reason.SAMPLES_SKIPPED, Reason.SCRIPT_STILL_RUNS),
        *(Reason.SCRIPT_STUCK, Reason.CHECKPOINT_FAILED, Reason.WAITING_FOR_RANK_0),
        *(Reason.BUDGET_REFUSED, Reason.UNSCHEDULABLE, Reason.RESOLVED),
    ),
    T.RESIZING: (Reason.SCALING, Reason.RANK_REPLACED, Reason.RESOLVED),
    T.SUSPENDED: (*(Reason.SUSPENDED_BY_SPEC, Reason.SUSPENDING, Reason.RESUMED, Reason.RESOLVED),),
    T.COMPLETE: (Reason.JOB_FINISHED,),
    T.FAILED: (
        *(Reason.BACKOFF_LIMIT_EXCEEDED, Reason.DEADLINE_EXCEEDED),
        *(Reason.START_DEADLINE_EXCEEDED, Reason.FAILURE_POLICY),
        *(Reason.STATE_LOST, Reason.SCRIPT_ENDED_EARLY, Reason.PREFLIGHT_FAILED),
        *(Reason.CHECKPOINT_FAILED, Reason.SCRIPT_FAILED, Reason.SCRIPT_TOOK_NO_PART),
        *(Reason.RANK_FAILED, Reason.INTERRUPTED, Reason.DATA_CHANNEL_FAILED),
        *(Reason.WEIGHTS_DIFFER, Reason.PARAMETERS_DIFFER, Reason.DATA_DIFFERS),
        *(Reason.CALLS_DIFFER, Reason.UNEVEN_PASSES),
        *(Reason.PLAN_DIFFERS, Reason.GROUP_DISAGREES),
        *(Reason.LOGS_DIVERGE, Reason.CHECKPOINT_UNUSABLE, Reason.RUNTIME_BROKEN),
        Reason.RANK_0_LOST,
    ),
}
"""Reasons that each condition can have."""

EVENTS: Final[dict[Reason, str]] = {
    Reason.SPEC_INVALID: "Warning",
    Reason.RUNTIME_NOT_FOUND: "Warning",
    Reason.OVERRIDE_REFUSED: "Warning",
    Reason.TEMPLATE_INVALID: "Warning",
    Reason.QUOTA_EXCEEDED: "Warning",
    Reason.CREATION_REFUSED: "Warning",
    Reason.OBJECT_MISSING: "Warning",
    Reason.POD_NOT_STARTING: "Warning",
    Reason.UNSCHEDULABLE: "Warning",
    Reason.FABRIC_UNAVAILABLE: "Warning",
    Reason.TRANSPORT_DEGRADED: "Warning",
    Reason.SCHEDULER_UNAVAILABLE: "Warning",
    Reason.BUDGET_REFUSED: "Warning",
    Reason.RING_FORMED: "Normal",
    Reason.RANK_REPLACED: "Normal, Warning after a failure",
    Reason.RANK_SLOW: "Warning",
    Reason.COORDINATOR_AWAY: "Warning",
    Reason.ANSWER_REFUSED: "Warning",
    Reason.NAME_TAKEN: "Warning",
    Reason.POD_SECURITY: "Warning",
    Reason.MODE_CHANGED: "Normal",
    Reason.SCALING: "Normal",
    Reason.SUSPENDING: "Normal",
    Reason.SUSPENDED_BY_SPEC: "Normal",
    Reason.PROGRESS_LOST: "Warning",
    Reason.RESUMED_FROM_CHECKPOINT: "Warning",
    Reason.BATCH_SKIPPED: "Warning",
    Reason.JOB_FINISHED: "Normal",
    Reason.JOB_FAILED: "Warning",
}
"""Type of each Event. The Event of a failed job has the reason of its condition Failed if that is
known."""

OF_COORDINATOR: Final = (
    *(Reason.WAITING_FOR_EVIDENCE, Reason.QUORUM_REDUCED, Reason.SCRIPT_STARTS_OVER),
    *(Reason.SCRIPT_ENDED_EARLY, Reason.SCRIPT_TAKES_NO_PART, Reason.SAMPLES_SKIPPED),
    *(Reason.SCRIPT_STILL_RUNS, Reason.SCRIPT_STUCK, Reason.CHECKPOINT_FAILED),
    *(Reason.SCRIPT_FAILED, Reason.SCRIPT_TOOK_NO_PART, Reason.RANK_FAILED, Reason.INTERRUPTED),
    *(Reason.DATA_CHANNEL_FAILED, Reason.WEIGHTS_DIFFER, Reason.PARAMETERS_DIFFER),
    *(Reason.DATA_DIFFERS, Reason.CALLS_DIFFER, Reason.UNEVEN_PASSES, Reason.PLAN_DIFFERS),
    Reason.GROUP_DISAGREES,
    *(Reason.LOGS_DIVERGE, Reason.CHECKPOINT_UNUSABLE, Reason.RUNTIME_BROKEN),
    *(Reason.WAITING_FOR_RANK_0, Reason.RANK_0_LOST),
)
"""Reasons that only coordinators set; the operator passes them on."""


@dataclass(frozen=True, slots=True)
class Right:
    """One right of the operator, as the page shows it."""

    where: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    why: str
    name: str = ""
    """Name of the only object that the right covers; empty for all."""


JOBS: Final = "namespaces of jobs"
OWN: Final = "its own namespace"
RIGHTS: Final = (
    Right(
        JOBS,
        ("trainingjobs",),
        ("get", "list", "watch", "delete"),
        "ttlSecondsAfterFinished deletes",
    ),
    Right(JOBS, ("trainingjobs/status",), ("patch",), "the status"),
    Right(JOBS, ("trainingruntimes",), ("list", "watch"), "the runtimes that jobs name"),
    Right(JOBS, ("trainingruntimes/status",), ("patch",), "whether jobs are valid with a runtime"),
    Right(
        JOBS,
        ("pods",),
        ("get", "list", "watch", "create", "delete"),
        "workers and coordinators; get only when a name is taken",
    ),
    Right(JOBS, ("secrets",), ("create",), "the job's tokens and certificate; never read back"),
    Right(
        JOBS,
        ("services",),
        ("get", "create", "patch", "list", "delete"),
        "by server-side apply, unless somebody else has made it; found and removed in namespaces "
        "without jobs",
        "paceline-jobs",
    ),
    Right(JOBS, ("namespaces",), ("get",), "the label of pod security that a pod is held to"),
    Right(
        JOBS,
        ("persistentvolumeclaims",),
        ("get",),
        "whether a claim that a job names is there; without it jobs run all the same",
    ),
    Right(
        JOBS,
        ("events",),
        ("create", "list"),
        "what kubectl describe shows; why a pod does not start, from the kubelet",
    ),
    Right(
        JOBS,
        ("podgroups",),
        ("get", "create", "patch"),
        "gangs of spec.scheduling, by server-side apply; unless `rbac.gangs` is false",
    ),
    Right(
        JOBS,
        ("poddisruptionbudgets",),
        ("get", "create", "patch", "delete"),
        "spec.elasticity.disruptionBudget; delete is for when it is turned off",
    ),
    Right(
        "the cluster, not with a namespaced installation",
        ("nodes",),
        ("list", "watch"),
        "workers on lost nodes; what networks the nodes offer",
    ),
    Right(
        "the cluster, not with a namespaced installation",
        ("fabricprofiles",),
        ("list", "watch"),
        "the cluster's own fabric profiles",
    ),
    Right(
        "the cluster, not with a namespaced installation",
        ("clustertrainingruntimes",),
        ("list", "watch"),
        "the runtimes that jobs of all namespaces name",
    ),
    Right(
        "the cluster, not with a namespaced installation",
        ("clustertrainingruntimes/status",),
        ("patch",),
        "whether jobs are valid with a runtime",
    ),
    Right(OWN, ("leases",), ("create",), "the Lease of the leader"),
    Right(OWN, ("leases",), ("get", "update"), "the Lease of the leader", "paceline-operator"),
    Right(OWN, ("secrets",), ("create",), "its own key, and again if it was deleted"),
    Right(OWN, ("secrets",), ("get",), "its own key", "paceline-operator-key"),
)


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a chart: its path, its default, and its comment."""

    path: str
    default: str
    text: str


def values_of(text: str) -> Iterator[Value]:
    """Parse the values of a chart.

    Args:
        text: Text of a values.yaml.

    Yields:
        Each leaf with the comment right above it.
    """
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    whole = "-"
    """Prefix of the values that are documented together."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
            continue
        match = re.match(r"( *)([\w-]+):(?: (.*))?$", line)
        if match is None:
            comment = []
            continue
        indent = len(match[1])
        path = [*(part for part in path if part[0] < indent), (indent, match[2])]
        name = ".".join(part for _, part in path)
        inner = _inner(lines[number + 1 :], indent)
        if name.startswith(whole):
            continue
        if comment and inner:
            whole = f"{name}."
        if match[3] or (comment and inner):
            yield Value(name, match[3] or "; ".join(inner), " ".join(comment))
        comment = []


def _inner(lines: Iterable[str], indent: int) -> list[str]:
    """Return the lines of a mapping that is documented as a whole; else nothing."""
    inner = []
    for line in lines:
        if not line.strip() or len(line) - len(line.lstrip()) <= indent:
            break
        if line.strip().startswith("#"):
            return []
        inner.append(line.strip())
    return inner


def markdown(values: str) -> str:
    """Return the page, given the text of charts/paceline/values.yaml."""
    return "\n".join([HEAD, *_values(values), *_conditions(), *_events(), *_rights(), TIMES])


def _values(text: str) -> Iterator[str]:
    yield "## Values of the chart `paceline`\n"
    yield "| value | default | meaning |\n|---|---|---|"
    for value in values_of(text):
        yield f"| `{value.path}` | `{value.default}` | {_cell(value.text)} |"
    yield ""
    yield "A value that does not exist or has another type is refused by helm, by name."
    yield "A namespaced installation (`scope.clusterWide: false`) loses the sight of nodes, the"
    yield "jobs of other namespaces, and the rights on TrainingJobs in the cluster's roles view,"
    yield "edit and admin.\n"


def _conditions() -> Iterator[str]:
    yield "## Conditions\n"
    for kind, reasons in CONDITIONS.items():
        yield f"### {kind}\n\n{kind.sentence}\n"
        yield "| reason | meaning |\n|---|---|"
        for reason in reasons:
            yield f"| {reason} | {_cell(reason.sentence)} |"
        yield ""
    yield "A coordinator's own word, such as ScriptFailed, is passed on as the reason of Failed.\n"


def _events() -> Iterator[str]:
    yield "## Events\n"
    yield "One for each transition, also after a restart of the operator. A job that fails has an"
    yield "Event with the reason of its condition Failed.\n"
    yield "| reason | type | meaning |\n|---|---|---|"
    for reason, kind in EVENTS.items():
        yield f"| {reason} | {kind} | {_cell(reason.sentence)} |"
    yield ""


def _rights() -> Iterator[str]:
    yield "## Rights\n"
    yield "Workers and coordinators have none, and no token of a service account. The operator's:\n"
    yield "| where | resources | verbs | for |\n|---|---|---|---|"
    for right in RIGHTS:
        what = ", ".join(right.resources) + (f" `{right.name}`" if right.name else "")
        yield f"| {right.where} | {what} | {', '.join(right.verbs)} | {right.why} |"
    yield ""
    yield "The chart also adds reading of TrainingJobs to the cluster's role view, and all verbs to"
    yield "edit and admin (`rbac.aggregate`). Whoever may create pods in a namespace may read the"
    yield "keys of its jobs, as with every Secret."
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
