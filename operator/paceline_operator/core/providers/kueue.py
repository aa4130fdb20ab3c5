"""Jobs in a queue of Kueue: the workers are one group of plain pods, admitted together (C16).

Kueue holds back every pod of a group with a scheduling gate until the group's count of pods exists
and the quota suffices. It counts pods as they are: a pod that is ending or has exited with code 0
still holds its place, and one pod too many is deleted, the newest first. A replacement is therefore
made only when the old pod has failed or is gone, and there are never more pods than the count at
the beginning; Kueue would delete others again and again.

A group is over when all its pods have ended, by a suspension or a loss, and its quota is free then.
Pods made after that form a new group, which waits in the queue again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline_api.defaults import QUEUE_LABEL
from paceline_api.names import ENV_DRAINED_EXIT, group_name
from paceline_api.reasons import Reason
from paceline_api.types.enums import SchedulingProvider
from paceline_api.types.template import TRAINER

from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed, Pod
from paceline_operator.core.plan import PodPlan
from paceline_operator.core.providers.base import Provider

MARKS: Final = (
    *(QUEUE_LABEL, "kueue.x-k8s.io/priority-class"),
    "kueue.x-k8s.io/max-exec-time-seconds",
)
"""Labels of a job for Kueue, which are copied to its pods."""
GROUP: Final = "kueue.x-k8s.io/pod-group-name"
"""Label of a pod with the name of its group."""
COUNT: Final = "kueue.x-k8s.io/pod-group-total-count"
"""Annotation of a pod with the number of pods in its group."""
ROLE: Final = "kueue.x-k8s.io/role-hash"
"""Annotation with the kind of a pod. Without it Kueue would take a worker that avoids a node for
another kind, which it has not admitted."""
RETRIABLE: Final = "kueue.x-k8s.io/retriable-in-group"
"""Annotation; false: the group is over, and its quota free, once none of its pods runs or waits."""
MANAGED: Final = "kueue.x-k8s.io/managed"
"""Label with which Kueue marks a pod that it manages."""
DRAINED_EXIT: Final = 143
"""Exit code of a drained worker, as after SIGTERM. With 0 Kueue would count an evicted worker as
done and admit no replacement."""
NOTE: Final = "paceline.dev/queue-group"
"""Annotation with name and count of the group that a pod was made for, as `name/count`."""


class Kueue(Provider):
    """Admission by Kueue."""

    name = SchedulingProvider.KUEUE

    def join(self, job: JobObject, pod: dict[str, Any]) -> None:
        """Add the labels and annotations of the group that the pod's note names, if any."""
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        if NOTE not in annotations:
            return  # the job started without a queue
        name, _, count = annotations[NOTE].rpartition("/")
        labels |= {key: job.labels[key] for key in MARKS if key in job.labels}
        labels[GROUP] = name
        annotations |= {COUNT: count, ROLE: "worker", RETRIABLE: "false"}
        trainer = next(c for c in pod["spec"]["containers"] if c["name"] == TRAINER)
        trainer["env"].append({"name": ENV_DRAINED_EXIT, "value": str(DRAINED_EXIT)})

    def hold_back(self, job: JobObject, observed: Observed, plan: PodPlan) -> Mapping[str, str]:
        """Remove new pods from the plan that exceed the free places of their group.

        Args:
            job: The job.
            observed: Everything observed besides the job.
            plan: The plan, which is modified.

        Returns:
            The annotation that names the group; empty for a job that runs without a queue.
        """
        note = _note(job, observed, plan)
        if note:
            _hold_back(job, observed, plan, note)
        return note

    def waits(self, job: JobObject, plan: PodPlan) -> str:
        """Return a text if no worker has a node yet; a coordinator takes no part in the quota."""
        if any(pod.node for pod in plan.living):
            return ""
        queue = job.labels.get(QUEUE_LABEL)
        return "Kueue has not yet admitted the job" + (f" of queue {queue}" if queue else "")

    def trouble(self, job: JobObject, plan: PodPlan) -> tuple[Reason, str] | None:
        """Return a problem if Kueue does not manage the pods, or the job's size is not fixed."""
        if not all(pod.queued for pod in plan.living):
            text = (
                "Kueue does not look after the pods of this job, which run without its quota: "
                "enable its integration `pod`, see that it manages this namespace, and that the "
                f"job has the label {QUEUE_LABEL}; then suspend the job and resume it"
            )
            return Reason.SCHEDULER_UNAVAILABLE, text
        if not _has_fixed_size(job):
            text = (
                "Kueue admits a fixed size: remove minReplicas and maxReplicas, or set them alike"
            )
            return Reason.SIZE_NOT_FIXED, text
        return None


def _note(job: JobObject, observed: Observed, plan: PodPlan) -> dict[str, str]:
    """Return the group for new pods: that of the living pods, or a new one."""
    assert job.settings is not None
    groups = [pod.notes[NOTE] for pod in plan.living if NOTE in pod.notes]
    if groups:
        return {NOTE: groups[-1]}
    if plan.living:
        return {}  # the job runs without a queue; a group of one pod would wait forever
    attempts = [pod.attempt for pod in observed.own(job.uid)]
    number = 1 + max([job.highest_attempt, *observed.used.values(), *attempts], default=0)
    return {NOTE: f"{group_name(job.name, job.uid)}-{number}/{job.settings.replicas}"}


def _hold_back(job: JobObject, observed: Observed, plan: PodPlan, note: dict[str, str]) -> None:
    members = [pod for pod in observed.own(job.uid) if pod.notes.get(NOTE) == note[NOTE]]
    taken = [pod.name for pod in members if _counts(pod)]
    count = int(note[NOTE].rpartition("/")[2])
    room = max(0, count - len(taken))
    if len(plan.new) <= room:
        return
    plan.keep_new(room)
    living = {pod.name for pod in plan.living}
    ending = [name for name in taken if name not in living]
    plan.waiting.append(
        f"Kueue has admitted {count} workers"
        + (f", of which {', '.join(ending[:4])} still counts" if ending else "")
        + ("" if ending else "; suspend and resume the job for another number")
    )


def _has_fixed_size(job: JobObject) -> bool:
    assert job.settings is not None
    s = job.settings
    return s.min_replicas == s.replicas == (s.max_replicas or s.replicas)


def _counts(pod: Pod) -> bool:
    """Return True if Kueue counts the pod as a member of its group."""
    return pod.phase != "Failed" and not (pod.deleting and not pod.node)
