"""Texts about refusals of the API server, by the table in core/refusals.py."""

from __future__ import annotations

from paceline_api.reasons import Reason

from paceline_operator.core.changes import Event
from paceline_operator.core.job import Job
from paceline_operator.core.providers.choice import provider_of
from paceline_operator.core.refusals import RULES, Refusal


def as_condition(job: Job, refusal: Refusal | None) -> tuple[Reason, str] | None:
    """Return reason and message of Degraded for a refusal; None if users need not know of it."""
    rule = RULES[refusal.kind] if refusal is not None else None
    if refusal is None or rule is None or rule.reason is None:
        return None
    return rule.reason, rule.condition.format_map(_facts(job, refusal))


def as_events(job: Job, *refusals: Refusal | None) -> list[Event]:
    """Return an Event for each refusal that users have to know of."""
    events = []
    for refusal in refusals:
        rule = RULES[refusal.kind] if refusal is not None else None
        if refusal is None or rule is None or rule.reason is None:
            continue
        facts = _facts(job, refusal)
        key, text = rule.event_key.format_map(facts), rule.event.format_map(facts)
        events.append(Event(key, rule.reason, text, warning=True))
    return events


def _facts(job: Job, refusal: Refusal) -> dict[str, object]:
    provider = provider_of(job)
    api = provider.api
    return {
        "message": refusal.message,
        "kind": refusal.kind,
        "refused_generation": refusal.generation,
        "generation": job.generation,
        "replicas": job.settings.replicas if job.settings else 0,
        "provider": provider.name,
        "group": f"{api.resource} ({api.version})" if api else "",
        "install": api.install if api else "",
    }
