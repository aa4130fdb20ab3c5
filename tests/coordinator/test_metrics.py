"""The coordinator's metrics page is derived from its status."""

from __future__ import annotations

from paceline.coordinator.metrics import Exporter
from paceline.refusals import Entry, RefusalReason, Refusals
from paceline_api.ids import GenerationId, MemberId
from paceline_api.status import LiveCondition, RankPhase, RankStatus, Status
from prometheus_client.parser import text_string_to_metric_families


def page(status: Status, refusals: Refusals | None = None) -> dict[str, float]:
    exporter = Exporter(lambda: status, refusals or Refusals())
    families = text_string_to_metric_families(exporter.text().decode())
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def rank(slot: int, state: RankPhase) -> RankStatus:
    return RankStatus(MemberId(slot, 0, 0), state)


def test_each_metric_is_derived_from_the_status() -> None:
    states = (RankPhase.ACTIVE, RankPhase.ACTIVE, RankPhase.JOINING)
    status = Status(
        job="job",
        coordinator="a",
        generation=GenerationId(3, "a", 7),
        replicas=5,
        version=1234,
        ranks=tuple(rank(slot, state) for slot, state in enumerate(states)),
        conditions=(LiveCondition("Degraded", "RanksMissing", "3 of 5", 0.0),),
    )
    by_state = {f"paceline_ranks {state}": states.count(state) for state in RankPhase}
    assert page(status) == by_state | {
        "paceline_coordinator_incarnation_number": 3,
        "paceline_membership_generation_number": 7,
        "paceline_replicas_wanted": 5,
        "paceline_rounds_committed_total": 1234,
        "paceline_job_degraded": 1,
    }


def test_a_job_that_is_not_degraded_exports_zero() -> None:
    ready = (LiveCondition("RingReady", "AllActive", "", 0.0),)
    shown = page(Status(job="job", coordinator="a", conditions=ready))
    assert shown["paceline_job_degraded"] == 0


def test_refusals_are_counted_by_entry_and_reason() -> None:
    refusals = Refusals()
    for _ in range(3):
        refusals.refuse(Entry.COORDINATOR, RefusalReason.MALFORMED, "10.0.0.9", now_ns=0)
    shown = page(Status(job="job", coordinator="a"), refusals)
    assert shown["paceline_refused_total coordinator malformed"] == 3
