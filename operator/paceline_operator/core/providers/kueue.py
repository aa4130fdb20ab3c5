"""A job in a queue of Kueue: its workers are one group of plain pods, admitted all at once (C16).

Kueue holds back every pod of a group with a scheduling gate until as many as the group's count are
there and the quota has room. It counts pods as they are: one that is ending or has ended in order
still holds its place, one too many is deleted, the newest first. So a replacement is made only when
the old pod has failed or is gone, and never more pods than the count at the beginning; others would
be deleted again, without an end.

A group is over when all its pods have ended, be it by a suspension or a loss, and gives its quota
back. Pods made after that form a new group, which waits in the queue anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline_api.defaults import QUEUE_LABEL
from paceline_api.names import ENV_DRAINED_EXIT, group_name
from paceline_api.reasons import Reason
from paceline_api.types.enums import SchedulingProvider
from paceline_api.types.template import TRAINER

from paceline_operator.core.job import Job
from paceline_operator.core.observed import Observed, Pod
from paceline_operator.core.plan import Plan
from paceline_operator.core.providers.base import Provider

MARKS: Final = (
    *(QUEUE_LABEL, "kueue.x-k8s.io/priority-class"),
    "kueue.x-k8s.io/max-exec-time-seconds",
)
"""Labels of a job for Kueue, which stand on its pods."""
GROUP: Final = "kueue.x-k8s.io/pod-group-name"
COUNT: Final = "kueue.x-k8s.io/pod-group-total-count"
ROLE: Final = "kueue.x-k8s.io/role-hash"
"""Set, because Kueue would take a worker that keeps away from a node for one of another kind, which
it has not admitted."""
RETRIABLE: Final = "kueue.x-k8s.io/retriable-in-group"
"""false: the group is over, and its quota free, as soon as none of its pods runs or waits."""
MANAGED: Final = "kueue.x-k8s.io/managed"
"""Label by which Kueue says that it looks after a pod."""
DRAINED_EXIT: Final = 143
"""As if SIGTERM had ended it. With 0 Kueue would count a worker that is evicted and leaves in order
as done, and admit nobody in its place."""
NOTE: Final = "paceline.dev/queue-group"
"""Name and count of the group that a pod was made for, as `name/count`."""


class Kueue(Provider):
    name = SchedulingProvider.KUEUE

    def join(self, job: Job, pod: dict[str, Any]) -> None:
        """Its annotations have the note."""
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        if NOTE not in annotations:
            return  # of a job that began without a queue
        name, _, count = annotations[NOTE].rpartition("/")
        labels |= {key: job.labels[key] for key in MARKS if key in job.labels}
        labels[GROUP] = name
        annotations |= {COUNT: count, ROLE: "worker", RETRIABLE: "false"}
        trainer = next(c for c in pod["spec"]["containers"] if c["name"] == TRAINER)
        trainer["env"].append({"name": ENV_DRAINED_EXIT, "value": str(DRAINED_EXIT)})

    def hold_back(self, job: Job, seen: Observed, plan: Plan) -> Mapping[str, str]:
        """No more new pods are left in the plan than their group has places."""
        note = _note(job, seen, plan)
        if note:
            _hold_back(job, seen, plan, note)
        return note

    def waits(self, job: Job, plan: Plan) -> str:
        """No worker has been admitted; a coordinator has no part in the quota."""
        if any(pod.node for pod in plan.living):
            return ""
        queue = job.labels.get(QUEUE_LABEL)
        return "Kueue has not yet admitted the job" + (f" of queue {queue}" if queue else "")

    def trouble(self, job: Job, plan: Plan) -> tuple[Reason, str] | None:
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


def _note(job: Job, seen: Observed, plan: Plan) -> dict[str, str]:
    """The group for new pods: that of the pods that live, or else a new one."""
    assert job.settings is not None
    found = [pod.notes[NOTE] for pod in plan.living if NOTE in pod.notes]
    if found:
        return {NOTE: found[-1]}
    if plan.living:
        return {}  # they run without a queue, and a group of one would wait for ever
    attempts = [pod.attempt for pod in seen.own(job.uid)]
    number = 1 + max([job.highest_attempt, *seen.used.values(), *attempts], default=0)
    return {NOTE: f"{group_name(job.name, job.uid)}-{number}/{job.settings.replicas}"}


def _hold_back(job: Job, seen: Observed, plan: Plan, note: dict[str, str]) -> None:
    members = [pod for pod in seen.own(job.uid) if pod.notes.get(NOTE) == note[NOTE]]
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


def _has_fixed_size(job: Job) -> bool:
    assert job.settings is not None
    s = job.settings
    return s.min_replicas == s.replicas == (s.max_replicas or s.replicas)


def _counts(pod: Pod) -> bool:
    """As Kueue does: a pod that has not failed and may still run, or has ended in order."""
    return pod.phase != "Failed" and not (pod.deleting and not pod.node)
