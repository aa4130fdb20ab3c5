"""Texts about refusals of the API server, by the table in core/refusals.py."""

from __future__ import annotations

from typing import Final

from paceline_api.reasons import Reason

from paceline_operator.core.changes import KubernetesEvent
from paceline_operator.core.job import JobObject
from paceline_operator.core.providers.choice import provider_of
from paceline_operator.core.refusals import OBJECTS, RULES, CreationRefusal, remedy, reported

ALSO: Final = "; and also: "
"""Text between what is said to one object and to the next."""


def as_condition(job: JobObject, refusal: CreationRefusal | None) -> tuple[Reason, str] | None:
    """Return reason and message of Degraded for a refusal; None if users need not know of it."""
    reason = reported(refusal)
    if refusal is None or reason is None:
        return None
    listed = [each for each in (refusal, *refusal.also) if reported(each)]
    texts = (RULES[each.kind].condition.format_map(_facts(job, each)) for each in listed)
    return reason, ALSO.join(texts)


def as_events(job: JobObject, *refusals: CreationRefusal | None) -> list[KubernetesEvent]:
    """Return an Event for each refusal that users have to know of."""
    events = []
    every = (each for refusal in refusals if refusal for each in (refusal, *refusal.also))
    for refusal in every:
        reason = reported(refusal)
        if reason is None:
            continue
        rule, facts = RULES[refusal.kind], _facts(job, refusal)
        key, text = rule.event_key.format_map(facts), rule.event.format_map(facts)
        events.append(KubernetesEvent(key, reason, text, warning=True))
    return events


def _facts(job: JobObject, refusal: CreationRefusal) -> dict[str, object]:
    provider = provider_of(job)
    api = provider.api
    return {
        "message": refusal.message,
        "kind": refusal.kind,
        "subject": refusal.subject,
        "object": OBJECTS[refusal.subject],
        "remedy": remedy(refusal),
        "refused_generation": refusal.generation,
        "generation": job.generation,
        "replicas": job.settings.replicas if job.settings else 0,
        "provider": provider.name,
        "group": f"{api.resource} ({api.version})" if api else "",
        "install": api.install if api else "",
    }
