"""The agent's page shows the anatomy of its ranks' last steps, and rounds as exemplars."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from paceline.core.anatomy.dissect import Part
from paceline.telemetry.catalog import PEERS_MAX
from paceline.telemetry.collector import PodRecords
from paceline.telemetry.records import RankRecord
from paceline_api.ids import MemberId
from prometheus_client.openmetrics.parser import text_string_to_metric_families

MS = 10**6
ME = MemberId(3, 0, 1)


@pytest.fixture
def pod() -> Iterator[PodRecords]:
    records = PodRecords(slot=3, procs=1)
    yield records
    records.close()


def work(pod: PodRecords, rounds: int) -> RankRecord:
    """Record steps of 100 ms in which a peer comes 40 ms late and each reduction takes 20 ms."""
    record = RankRecord.open(os.dup(pod.begin(ME)))
    record.rounds.divide([8 << 20])
    waits = record.histogram("paceline_round_wait_seconds")
    for number in range(rounds):
        at = (1000 + 100 * number) * MS
        record.rounds.begin(number, at + 80 * MS, streamed=False)
        record.rounds.arrived(at + 30 * MS)
        waits.observe(0.05)
        record.rounds.carried(at + 75 * MS, at + 95 * MS)
        record.rounds.end(MemberId(10 + number, 0, 0), at + 70 * MS, at + 95 * MS, at + 97 * MS)
        record.steps.write(
            began_ns=at,
            announced_ns=at + 30 * MS,
            resumed_ns=at + 100 * MS,
            spent_ns=(0, 5 * MS, 10 * MS, 15 * MS),
            lease_ns=0,
            version=number + 1,
            fresh=True,
            samples=32,
        )
    return record


def shown(pod: PodRecords, name: str) -> dict[tuple[str, ...], float]:
    samples = [s for family in pod.collect() for s in family.samples if s.name == name]
    assert all(s.labels["worker"] == "3.0" for s in samples)
    return {tuple(v for k, v in s.labels.items() if k != "worker"): s.value for s in samples}


def test_the_page_shows_the_parts_of_a_step(pod: PodRecords) -> None:
    assert not shown(pod, "paceline_anatomy_step_seconds"), "no rank, no series"
    work(pod, 20).close()
    parts = shown(pod, "paceline_anatomy_step_seconds")
    assert parts.keys() == {(part,) for part in Part}
    assert sum(parts.values()) == pytest.approx(0.1)
    assert parts["blocked",] == pytest.approx(0.04)
    assert parts["reduction",] == pytest.approx(0.02)
    reduction = shown(pod, "paceline_anatomy_reduction_seconds")
    assert reduction == {
        ("exposed", "16MiB"): pytest.approx(0.02),
        ("hidden", "16MiB"): pytest.approx(0.0),
    }
    assert shown(pod, "paceline_anatomy_gap_seconds")[()] == pytest.approx(0.098)
    ideal = shown(pod, "paceline_anatomy_ideal_seconds")
    assert ideal == {("lateness",): pytest.approx(0.06), ("network",): pytest.approx(0.08)}


def test_the_number_of_blamed_peers_on_the_page_is_bounded(pod: PodRecords) -> None:
    work(pod, 20).close()
    peers = shown(pod, "paceline_anatomy_blocked_seconds")
    assert len(peers) == PEERS_MAX
    assert list(peers.values()) == pytest.approx([0.002] * PEERS_MAX)


def test_a_histogram_bucket_has_its_last_round_as_exemplar(pod: PodRecords) -> None:
    work(pod, 3).close()
    text = pod.page(exemplars=True).decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    buckets = families["paceline_round_wait_seconds"].samples
    exemplars = [(s.labels["le"], s.exemplar) for s in buckets if s.exemplar]
    assert [(le, e.labels, e.value) for le, e in exemplars] == [
        ("0.1", {"round": "2", "peer": "12.0"}, 0.05)
    ]
    assert b"# {" not in pod.page(), "the plain notation has none"


def test_samples_of_a_dead_rank_are_kept(pod: PodRecords) -> None:
    work(pod, 5).close()
    assert [(r.member, r.alive, len(r.rounds)) for r in pod.samples()] == [(str(ME), True, 5)]
    pod.retire(ME)
    assert not shown(pod, "paceline_anatomy_step_seconds")
    assert [(r.member, r.alive, len(r.steps)) for r in pod.samples()] == [(str(ME), False, 5)]
    pod.begin(MemberId(3, 0, 2))
    assert [(r.member, r.alive) for r in pod.samples()] == [
        (str(ME), False),
        (str(MemberId(3, 0, 2)), True),
    ]
