"""All or nothing at the start: what the worker pods of a gang carry, and the group they form.

Volcano, scheduler-plugins (Coscheduling), KAI and Kubernetes itself (Native) each ask for a group
object with the fewest members that may start, and for a mark on every pod that names it; Kueue
asks for marks only (kueue.py). A group lasts as long as its job: a replacement, a worker of a
larger size and one after a resumption join the same one.

The coordinator is in no gang. Members are counted, not told apart, so it would take the place of a
worker; it is needed before all workers have come, and it must be replaced on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from paceline_api.enums import SchedulingProvider
from paceline_api.names import group_name

from paceline_operator.core.job import Job
from paceline_operator.core.observed import Refusal, RefusalKind
from paceline_operator.core.providers import kueue

VOLCANO_GROUP: Final = "scheduling.k8s.io/group-name"
VOLCANO_QUEUE: Final = "scheduling.volcano.sh/queue-name"
COSCHEDULING_GROUP: Final = "scheduling.x-k8s.io/pod-group"
KAI_GROUP: Final = "pod-group-name"
KAI_QUEUE: Final = "kai.scheduler/queue"
KAI_DEFAULT_QUEUE: Final = "default-queue"
"""Where KAI's own grouper puts a pod that names no queue; a group must name one."""
KAI_NO_GROUPER: Final = "kai.scheduler/skip-podgrouper"
"""Without it KAI makes a group of its own for a kind it does not know, with one member."""


@dataclass(frozen=True, slots=True)
class Family:
    """The group object of one provider."""

    resource: str
    """As kubectl names it: plural and API group."""
    version: str
    """Its apiVersion."""
    scheduler: str
    """Name under which the scheduler is installed by default; empty: that of the cluster."""
    install: str
    """What a cluster without it lacks."""


FAMILIES: Final = {
    SchedulingProvider.NATIVE: Family(
        "podgroups.scheduling.k8s.io",
        "scheduling.k8s.io/v1beta1",
        "",
        "use Kubernetes 1.37 or later with the feature gate GenericWorkload and this API on",
    ),
    SchedulingProvider.VOLCANO: Family(
        "podgroups.scheduling.volcano.sh",
        "scheduling.volcano.sh/v1beta1",
        "volcano",
        "install Volcano",
    ),
    SchedulingProvider.COSCHEDULING: Family(
        "podgroups.scheduling.x-k8s.io",
        "scheduling.x-k8s.io/v1alpha1",
        "scheduler-plugins-scheduler",
        "install scheduler-plugins with Coscheduling",
    ),
    SchedulingProvider.KAI: Family(
        "podgroups.scheduling.run.ai",
        "scheduling.run.ai/v2alpha2",
        "kai-scheduler",
        "install the KAI scheduler, 0.15 or later",
    ),
}


def provider_of(job: Job) -> SchedulingProvider:
    """Auto is Kueue for a job with its queue label, and nobody otherwise."""
    if job.fixed_size:
        return SchedulingProvider.KUEUE
    scheduling = job.spec.scheduling if job.spec else None
    if scheduling is None or scheduling.provider in (None, SchedulingProvider.AUTO):
        return SchedulingProvider.NONE
    return scheduling.provider


def family_of(job: Job) -> Family | None:
    return FAMILIES.get(provider_of(job))


def fewest(job: Job) -> int:
    """Members for which there must be room at once; 0: the job is no gang."""
    assert job.settings is not None
    gang = job.spec.scheduling.gang if job.spec and job.spec.scheduling else None
    if gang is None or family_of(job) is None:
        return 0
    return gang.min_count or job.settings.min_replicas


def group_spec(job: Job) -> dict[str, Any]:
    """Of the group object of a job with `fewest`."""
    provider, count = provider_of(job), fewest(job)
    if provider is SchedulingProvider.NATIVE:
        spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": count}}}
    else:
        spec = {"minMember": count}
    priority = (job.template.get("spec") or {}).get("priorityClassName")
    if priority and provider is not SchedulingProvider.COSCHEDULING:
        spec["priorityClassName"] = priority
    metadata = job.template.get("metadata") or {}
    if provider is SchedulingProvider.VOLCANO:
        queue = {**(metadata.get("annotations") or {}), **job.annotations}.get(VOLCANO_QUEUE)
        spec |= {"queue": queue} if queue else {}
    if provider is SchedulingProvider.KAI:
        queues = {KAI_QUEUE: KAI_DEFAULT_QUEUE, **(metadata.get("labels") or {}), **job.labels}
        spec["queue"] = queues[KAI_QUEUE]
    return spec


def join(job: Job, pod: dict[str, Any]) -> None:
    """Makes a worker's pod a member: adds what the provider wants to find in it."""
    provider, family = provider_of(job), family_of(job)
    labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
    spec = pod["spec"]
    if provider is SchedulingProvider.KUEUE:
        kueue.mark(job, pod)
    if family is None:
        return
    if family.scheduler:
        spec.setdefault("schedulerName", family.scheduler)
    if provider is SchedulingProvider.VOLCANO and VOLCANO_QUEUE in job.annotations:
        annotations[VOLCANO_QUEUE] = job.annotations[VOLCANO_QUEUE]
    if provider is SchedulingProvider.KAI and KAI_QUEUE in job.labels:
        labels[KAI_QUEUE] = job.labels[KAI_QUEUE]
    if not fewest(job):
        return
    group = group_name(job.name, job.uid)
    if provider is SchedulingProvider.NATIVE:
        spec["schedulingGroup"] = {"podGroupName": group}
    elif provider is SchedulingProvider.VOLCANO:
        annotations[VOLCANO_GROUP] = group
    elif provider is SchedulingProvider.COSCHEDULING:
        labels[COSCHEDULING_GROUP] = group
    else:
        annotations |= {KAI_GROUP: group, KAI_NO_GROUPER: "true"}


def unavailable(job: Job, refusal: Refusal) -> str:
    """Why the group could not be made, and what to do, in words for the user."""
    family, provider = family_of(job), provider_of(job)
    assert family is not None
    what = f"{family.resource} ({family.version})"
    if refusal.kind is RefusalKind.NO_GANG_API:
        problem = f"the cluster does not serve {what}"
        hint = f"{family.install}, or make the job anew with spec.scheduling.provider: None"
    elif refusal.kind is RefusalKind.GANG_FORBIDDEN:
        problem = f"the operator has no right to {what}: {refusal.message}"
        hint = "set rbac.gangs: true in the values of its chart"
    else:
        problem = f"the API server refuses {what}: {refusal.message}"
        hint = "correct what it names"
    return f"provider {provider}: {problem}; {hint}; it is tried again, no pod is made before"
