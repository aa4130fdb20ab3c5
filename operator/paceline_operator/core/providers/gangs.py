"""Gang scheduling: what the worker pods of a gang carry, and the group that they form.

Volcano, scheduler-plugins (Coscheduling), KAI and Kubernetes itself (Native) each require a group
object with the least number of members that may start, and a mark on every pod that names it. A
group lasts as long as its job: replacements, workers of a larger size and workers after a
resumption join the same group.

The coordinator is in no gang. Schedulers count members without distinguishing them, so it would
take the place of a worker. It is also needed before all workers have come, and must be replaced on
its own.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from paceline_api.names import group_name
from paceline_api.types.enums import SchedulingProvider

from paceline_operator.core.job import JobObject
from paceline_operator.core.providers.base import GroupApi, Provider

VOLCANO_GROUP: Final = "scheduling.k8s.io/group-name"
VOLCANO_QUEUE: Final = "scheduling.volcano.sh/queue-name"
COSCHEDULING_GROUP: Final = "scheduling.x-k8s.io/pod-group"
KAI_GROUP: Final = "pod-group-name"
KAI_QUEUE: Final = "kai.scheduler/queue"
KAI_DEFAULT_QUEUE: Final = "default-queue"
"""Queue in which KAI's own grouper puts a pod without a queue; a group must name one."""
KAI_NO_GROUPER: Final = "kai.scheduler/skip-podgrouper"
"""Annotation that turns off KAI's own groups, which have one member for unknown owners."""


class GangScheduler(Provider):
    """Common part of all gang schedulers."""

    api: ClassVar[GroupApi]
    scheduler = ""
    """Name under which the scheduler is installed by default; empty: the cluster's own."""

    def fewest(self, job: JobObject) -> int:
        """Return the gang's minCount, or minReplicas if it has none; 0 if the job has no gang."""
        assert job.settings is not None
        gang = job.spec.scheduling.gang if job.spec and job.spec.scheduling else None
        return gang.min_count or job.settings.min_replicas if gang is not None else 0

    def group(self, job: JobObject) -> dict[str, Any]:
        """Return the group's spec with `minMember` and the priority class of the template."""
        spec: dict[str, Any] = {"minMember": self.fewest(job)}
        return spec | _priority(job)

    def join(self, job: JobObject, pod: dict[str, Any]) -> None:
        """Set the scheduler, the queue and the membership of the group in a worker's pod."""
        if self.scheduler:
            pod["spec"].setdefault("schedulerName", self.scheduler)
        self._queue(job, pod)
        if self.fewest(job):
            self._mark(pod, group_name(job.name, job.uid))

    def _queue(self, job: JobObject, pod: dict[str, Any]) -> None:
        """Put the pod into the queue that the job names; some providers have none."""

    def _mark(self, pod: dict[str, Any], group: str) -> None:
        """Make the pod a member of the group.

        Raises:
            NotImplementedError: The subclass does not override the method.
        """
        raise NotImplementedError


class Native(GangScheduler):
    """Gang scheduling by Kubernetes itself."""

    name = SchedulingProvider.NATIVE
    api = GroupApi(
        "podgroups.scheduling.k8s.io",
        "scheduling.k8s.io/v1beta1",
        "use Kubernetes 1.37 or later with the feature gate GenericWorkload and this API on",
    )

    def group(self, job: JobObject) -> dict[str, Any]:
        """Return the group's spec with a gang policy and the priority class of the template."""
        spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": self.fewest(job)}}}
        return spec | _priority(job)

    def _mark(self, pod: dict[str, Any], group: str) -> None:
        pod["spec"]["schedulingGroup"] = {"podGroupName": group}


class Volcano(GangScheduler):
    """Gang scheduling by Volcano."""

    name = SchedulingProvider.VOLCANO
    api = GroupApi(
        "podgroups.scheduling.volcano.sh", "scheduling.volcano.sh/v1beta1", "install Volcano"
    )
    scheduler = "volcano"

    def group(self, job: JobObject) -> dict[str, Any]:
        """Return the group's spec with the queue that the job or its template names."""
        queue = {**_template(job, "annotations"), **job.annotations}.get(VOLCANO_QUEUE)
        return super().group(job) | ({"queue": queue} if queue else {})

    def _queue(self, job: JobObject, pod: dict[str, Any]) -> None:
        if VOLCANO_QUEUE in job.annotations:
            pod["metadata"]["annotations"][VOLCANO_QUEUE] = job.annotations[VOLCANO_QUEUE]

    def _mark(self, pod: dict[str, Any], group: str) -> None:
        pod["metadata"]["annotations"][VOLCANO_GROUP] = group


class Coscheduling(GangScheduler):
    """Gang scheduling by the Coscheduling plugin of scheduler-plugins."""

    name = SchedulingProvider.COSCHEDULING
    api = GroupApi(
        "podgroups.scheduling.x-k8s.io",
        "scheduling.x-k8s.io/v1alpha1",
        "install scheduler-plugins with Coscheduling",
    )
    scheduler = "scheduler-plugins-scheduler"

    def group(self, job: JobObject) -> dict[str, Any]:
        """Return the group's spec, which has no priority class."""
        return {"minMember": self.fewest(job)}  # its groups have no priority class

    def _mark(self, pod: dict[str, Any], group: str) -> None:
        pod["metadata"]["labels"][COSCHEDULING_GROUP] = group


class Kai(GangScheduler):
    """Gang scheduling by KAI."""

    name = SchedulingProvider.KAI
    api = GroupApi(
        "podgroups.scheduling.run.ai",
        "scheduling.run.ai/v2alpha2",
        "install the KAI scheduler, 0.15 or later",
    )
    scheduler = "kai-scheduler"

    def group(self, job: JobObject) -> dict[str, Any]:
        """Return the group's spec with the queue of the job, its template, or the default one."""
        queues = {KAI_QUEUE: KAI_DEFAULT_QUEUE, **_template(job, "labels"), **job.labels}
        return super().group(job) | {"queue": queues[KAI_QUEUE]}

    def _queue(self, job: JobObject, pod: dict[str, Any]) -> None:
        if KAI_QUEUE in job.labels:
            pod["metadata"]["labels"][KAI_QUEUE] = job.labels[KAI_QUEUE]

    def _mark(self, pod: dict[str, Any], group: str) -> None:
        pod["metadata"]["annotations"] |= {KAI_GROUP: group, KAI_NO_GROUPER: "true"}


def _priority(job: JobObject) -> dict[str, Any]:
    priority = (job.template.get("spec") or {}).get("priorityClassName")
    return {"priorityClassName": priority} if priority else {}


def _template(job: JobObject, part: str) -> dict[str, str]:
    metadata = job.template.get("metadata") or {}
    return dict(metadata.get(part) or {})
