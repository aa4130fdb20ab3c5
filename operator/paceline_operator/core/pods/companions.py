"""Objects of a job on which other controllers act: its gang's group and its disruption budget (C9).

Both are written by server-side apply, which creates and changes them in one request. They are
deleted with the job through its owner reference. A job that asks for neither costs no request.
"""

from __future__ import annotations

from typing import Any, Final

from paceline_api import names

from paceline_operator.core import refusals
from paceline_operator.core.changes import BUDGET_FIELD, ApplyObject, Companions
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed
from paceline_operator.core.plan import PodPlan
from paceline_operator.core.pods import children
from paceline_operator.core.providers.choice import provider_of

BUDGETS: Final = "poddisruptionbudgets"
"""Plural name of the resource PodDisruptionBudget."""


def companions(
    job: JobObject, observed: Observed, plan: PodPlan, now_s: float, *, blocked: bool
) -> Companions:
    """Decide which of the objects to write.

    Args:
        job: A job with a valid spec.
        observed: Everything observed besides the job.
        plan: The plan for its workers; the time of a retry is added to it.
        now_s: The present time.
        blocked: True if no pod may be made now. The budget of existing pods may still change.

    Returns:
        The objects to write.
    """
    wanted = provider_of(job).fewest(job)
    pods = bool(plan.living or plan.new)
    # Write it again before later pods: somebody may have deleted it, as with the Secret.
    again = (bool(plan.new) and not observed.sent.secret) or observed.refused_gang is not None
    group = None
    if wanted and pods and not blocked and (observed.sent.group != wanted or again):
        group = _group(job, wanted)
    before = observed.sent.budget
    if before is None:
        before = int(job.status.get(BUDGET_FIELD) or 0)
    least = _least_available(job) if pods else before
    due_s = refusals.retry_at(observed.budget_refusal, job.generation)
    if least != before and now_s < due_s:
        plan.look(due_s)
        least = before
    if least == before:
        return Companions(group, least=least)
    if least:
        return Companions(group, _budget(job, least), least=least)
    return Companions(group, drop_budget=True)


def _least_available(job: JobObject) -> int:
    assert job.settings is not None
    elasticity = job.spec.elasticity if job.spec else None
    return job.settings.min_replicas if elasticity and elasticity.disruption_budget else 0


def _group(job: JobObject, fewest: int) -> ApplyObject:
    provider = provider_of(job)
    assert provider.api is not None
    manifest = _manifest(job, provider.api.version, "PodGroup", provider.group(job))
    return ApplyObject(provider.api.resource, manifest, fewest)


def _budget(job: JobObject, least: int) -> ApplyObject:
    """Return the disruption budget of the workers.

    `minAvailable` is an integer; with a percentage the disruption controller would ask the
    TrainingJob for its scale. AlwaysAllow is set since a worker that does not run does not protect
    the job.

    Args:
        job: The job.
        least: Least number of workers that must stay available.

    Returns:
        The object to apply.
    """
    selector = {names.LABEL_JOB: job.name, names.LABEL_ROLE: names.ROLE_WORKER}
    spec = {
        "minAvailable": least,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector},
    }
    return ApplyObject(BUDGETS, _manifest(job, "policy/v1", "PodDisruptionBudget", spec), least)


def _manifest(job: JobObject, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {
            "name": names.group_name(job.name, job.uid),
            "namespace": job.namespace,
            "labels": children.labels(job, "job"),
            "ownerReferences": [children.owner_reference(job)],
        },
        "spec": spec,
    }
