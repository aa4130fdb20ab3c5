"""The alerts fire when they should and are silent otherwise, by Prometheus's own evaluation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from paceline.core.protocol.records import DROP_MEANINGS, DropReason

from testing.telemetry import known

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "charts/paceline/rules/paceline.yaml"
MONITORING = (ROOT / "docs/monitoring.md").read_text()
STEP_S, STEPS = 30, 140
GROUPS = yaml.load(RULES.read_text(), yaml.CSafeLoader)["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}
RECORDED = {
    rule["record"]: {"namespace", known.JOB}
    | ({"worker"} if rule["record"].startswith("worker:") else set())
    for group in GROUPS
    for rule in group["rules"]
    if "record" in rule
}
pytestmark = [pytest.mark.cluster_programs, pytest.mark.processes]

QUIET = {
    # 3 of 30 seconds are spent in step(), and each rank is late by half a second.
    'paceline_committed_rounds{worker="0.0"}': "0+300",
    'paceline_committed_rounds{worker="1.0"}': "0+300",
    'paceline_rounds_total{worker="0.0",mode="Full",trigger="all"}': "0+300",
    'paceline_rounds_total{worker="1.0",mode="Full",trigger="all"}': "0+300",
    'paceline_exposed_seconds_total{worker="0.0"}': "0+3",
    'paceline_blamed_seconds_total{worker="0.0"}': "0+0.5",
    'paceline_blamed_seconds_total{worker="1.0"}': "0+0.5",
    'paceline_samples_total{worker="0.0",kind="fresh"}': "0+9600",
    'paceline_world_size_ranks{worker="0.0",ranks="members"}': "4+0",
    'paceline_world_size_ranks{worker="0.0",ranks="active"}': "4+0",
    'paceline_generations_total{worker="0.0"}': "1+0",
    'paceline_rank_state_info{worker="0.0",state="running"}': "1+0",
    'paceline_rank_restarts_total{worker="0.0"}': "0+0",
    "paceline_coordinator_connected_info{}": "1+0",
    'paceline_transport_regret_seconds{worker="0.0",size_class="1MiB"}': "0.0001+0",
    'paceline_checkpoints_total{worker="0.0",result="written"}': "0+1",
    "paceline_operator_jobs{}": "3+0",
    'paceline_operator_jobs_in_state{state="Training"}': "2+0",
    'paceline_operator_jobs_in_state{state="Starting"}': "1+0",
    'paceline_operator_watch_age_seconds{kind="pods"}': "40+0",
    'leader_election_master_status{name="trainingjob"}': "1+0",
    'controller_runtime_reconcile_total{controller="trainingjob",result="success"}': "0+60",
    'rest_client_requests_total{method="PATCH",code="409"}': "0+60",
    'workqueue_queue_duration_seconds_bucket{name="trainingjob",le="0.1"}': "0+60",
    'workqueue_queue_duration_seconds_bucket{name="trainingjob",le="10.0"}': "0+60",
    'workqueue_queue_duration_seconds_bucket{name="trainingjob",le="+Inf"}': "0+60",
}
GONE = ""
LATE = "_x129 "
"""A prefix for a series that is absent for 65 minutes and begins with its first event."""
TROUBLE: dict[str, dict[str, str]] = {
    "PacelineOperatorAbsent": {series: GONE for series in QUIET if "paceline_op" in series},
    "PacelineOperatorHasNoLeader": {'leader_election_master_status{name="trainingjob"}': "0+0"},
    "PacelineWatchSilent": {'paceline_operator_watch_age_seconds{kind="pods"}': "0+30"},
    "PacelineDecisionsFail": {
        'controller_runtime_reconcile_total{controller="trainingjob",result="error"}': "0+1"
    },
    "PacelineQueueSlow": {
        'workqueue_queue_duration_seconds_bucket{name="trainingjob",le="0.1"}': "0+0"
    },
    "PacelineJobsHeldUp": {'paceline_operator_jobs_in_state{state="QuotaExceeded"}': "1+0"},
    "PacelineRequestsRefused": {'rest_client_requests_total{method="GET",code="403"}': "0+6"},
    "PacelineJobStandsStill": {
        'paceline_committed_rounds{worker="0.0"}': "9+0",
        'paceline_committed_rounds{worker="1.0"}': "9+0",
    },
    "PacelineCoordinatorAway": {"paceline_coordinator_connected_info{}": "0+0"},
    # Three other ranks wait for it, each for 9 seconds of 30.
    "PacelineStraggler": {'paceline_blamed_seconds_total{worker="1.0"}': "0+27"},
    "PacelineSamplesDropped": {
        'paceline_samples_dropped_total{worker="1.0",reason="failed"}': "0+200"
    },
    "PacelineGradientsNotFinite": {
        'paceline_samples_dropped_total{worker="1.0",reason="nonfinite"}': f"{LATE}32+0"
    },
    "PacelineRanksMissing": {'paceline_world_size_ranks{worker="0.0",ranks="active"}': "3+0"},
    "PacelineMembershipRestless": {'paceline_generations_total{worker="0.0"}': "0+1"},
    "PacelineRanksCrash": {'paceline_rank_restarts_total{worker="0.0"}': "0+0.2"},
    "PacelineCommunicationExposed": {'paceline_exposed_seconds_total{worker="0.0"}': "0+12"},
    "PacelineTransportRegret": {
        'paceline_transport_regret_seconds{worker="0.0",size_class="1MiB"}': "0.02+0"
    },
    "PacelineTransportErrors": {
        'paceline_transport_errors_total{worker="0.0",transport="mpi"}': "0+1"
    },
    "PacelineCheckpointFailed": {
        'paceline_checkpoints_total{worker="0.0",result="failed"}': f"{LATE}1+0"
    },
    "PacelineCheckpointsSkipped": {
        'paceline_checkpoints_total{worker="0.0",result="skipped"}': "0+2"
    },
}


def reported(series: dict[str, str]) -> dict[str, Any]:
    """Return what Prometheus reports after 70 minutes of these series."""
    exported, lines = known.known(), [f"load {STEP_S}s"]
    for name, values in series.items():
        if values == GONE:
            continue
        metric, _, own = name.partition("{")
        target = ",".join(f'{k}="{v}"' for k, v in exported[metric].target.items())
        lines.append(f"  {metric}{{{target},{own} {values}x{STEPS}")
    answer = known.ask(
        rules=str(RULES), series="\n".join(lines), step_s=STEP_S, until_s=STEP_S * STEPS
    )
    assert answer["faults"] == []
    return answer


def test_every_alert_has_a_test_case() -> None:
    assert set(TROUBLE) == set(ALERTS)


def test_rules_use_exported_metrics_only() -> None:
    rules = [rule for group in GROUPS for rule in group["rules"]]
    answer = known.ask(expressions=[rule["expr"] for rule in rules])
    assert answer["faults"] == []
    for rule, uses in zip(rules, answer["uses"], strict=True):
        assert known.misused(uses, RECORDED) == [], rule


def test_no_alert_fires_for_healthy_jobs() -> None:
    assert reported(QUIET)["firing"] == []


@pytest.mark.parametrize("reason", sorted(set(DropReason) - {DropReason.NONFINITE}))
def test_each_reason_to_drop_samples_is_alerted_and_explained(reason: str) -> None:
    """The alert once missed `failed`. Gradients that are not finite have an alert of their own."""
    rule = ALERTS["PacelineSamplesDropped"]
    assert 'reason!="nonfinite"' in rule["expr"]
    runbook = rule["annotations"]["runbook"]
    assert re.search(rf"\b{reason}\b[^.]*: ", runbook), runbook
    [row] = [line for line in MONITORING.splitlines() if "`PacelineSamplesDropped`" in line]
    assert f"*{reason}*" in row
    assert set(DROP_MEANINGS) == set(DropReason)


@pytest.mark.parametrize("alert", TROUBLE)
def test_each_alert_fires_alone_with_complete_texts(alert: str) -> None:
    firing = reported(QUIET | TROUBLE[alert])["firing"]
    assert {each["alertname"] for each in firing} == {alert}
    for each in firing:
        texts = [text for name, text in each.items() if name.startswith("annotation:")]
        assert len(texts) == 3
        for text in texts:
            assert not [wrong for wrong in ("{{", "<no value>", "%!", "  ") if wrong in text], text


def test_every_alert_has_a_severity_annotations_and_documentation() -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    for name, rule in ALERTS.items():
        assert name.startswith("Paceline")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}, name
        assert "://" not in str(rule["annotations"])
        assert f"`{name}`" in page, f"docs/monitoring.md does not name {name}"
