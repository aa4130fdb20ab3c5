"""Tables of single decisions: lost, leaving and replaced pods, and reports to the user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from paceline_api.names import NOTE_WATCHED
from paceline_api.reasons import Reason
from paceline_api.status import STEP_S, HistoryEntry, LogStatus, Outcome, RankPhase
from paceline_api.times import timestamp
from paceline_operator.core.changes import Changes
from paceline_operator.core.clocks import Clocks
from paceline_operator.core.decide import backoff, stragglers
from paceline_operator.core.job import JobObject, read_job
from paceline_operator.core.observed import (
    NOT_STARTED,
    Observed,
    Pod,
    PodEnd,
    Sent,
)
from paceline_operator.core.plan import ReplacementCause
from paceline_operator.core.reconcile import reconcile
from paceline_operator.core.refusals import CreationRefusal, RefusalKind

from testing.fake_cluster.observations import (
    COORDINATOR,
    NOW,
    RUNNING,
    UID,
    job_of,
    rank_status,
    training,
    worker,
)
from testing.fake_cluster.world import job_body


def decided(job: JobObject, observed: Observed, now_s: float = NOW) -> Changes:
    changes = reconcile(job, observed, now_s)
    assert reconcile(job, observed, now_s) == changes, "the same facts give the same answer"
    return changes


def condition(changes: Changes, kind: str) -> dict[str, Any]:
    assert changes.status is not None
    return next(c for c in changes.status["conditions"] if c["type"] == kind)


# ---- replacement (C3, C8) ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "cause"),
    [
        (worker(0, deleting=True), ReplacementCause.LOST),
        (worker(0, end=PodEnd(137, "Evicted")), ReplacementCause.LOST),
        (worker(0, end=PodEnd(143), disrupted=True), ReplacementCause.LOST),
        (worker(0, end=PodEnd(1, "Error")), ReplacementCause.FAILED),
        (worker(0, end=PodEnd(137, "OOMKilled")), ReplacementCause.FAILED),
        (worker(0, end=PodEnd(NOT_STARTED, "OutOfcpu")), ReplacementCause.REFUSED),
        (worker(0, end=PodEnd(0, "Completed")), ReplacementCause.ENDED),
    ],
)
def test_the_end_of_a_pod_is_classified_by_its_cause(pod: Pod, cause: ReplacementCause) -> None:
    assert backoff.cause_of(pod) is cause


def test_the_third_loss_is_replaced_at_once_and_the_third_failure_is_not() -> None:
    notes = {backoff.NOTE_SLOT_FAILURES: "2"}
    lost = backoff.verdict(worker(0, deleting=True, notes=notes), NOW)
    failed = worker(0, end=PodEnd(1, finished_s=NOW), notes=notes, created_s=NOW - 5)
    assert lost.due_s == NOW
    assert backoff.verdict(failed, NOW).due_s == NOW + 4
    healthy = replace(failed, created_s=NOW - backoff.HEALTHY_S)
    assert backoff.verdict(healthy, NOW).due_s == NOW


def test_failures_count_until_a_round_is_committed() -> None:
    notes = {backoff.NOTE_FAILURES: "3", backoff.NOTE_AT_ROUND: "10"}
    pods = [worker(0, 2, notes=notes), worker(1, end=PodEnd(1))]
    assert backoff.failures(pods, version=10) == 4
    assert backoff.failures(pods, version=11) == 1


def test_exceeding_the_backoff_limit_fails_the_job_with_the_last_message() -> None:
    notes = {backoff.NOTE_FAILURES: "2", backoff.NOTE_AT_ROUND: "9"}
    bad = worker(1, 2, end=PodEnd(1, "Error", "ValueError: no data"), notes=notes)
    observed = training(1)
    changes = decided(
        job_of(RUNNING, backoffLimit=2), replace(observed, pods=(*observed.pods, bad))
    )
    failed = condition(changes, "Failed")
    assert failed["reason"] == "BackoffLimitExceeded"
    assert "ValueError: no data" in failed["message"]


def test_a_new_attempt_is_above_every_earlier_one_of_its_slot() -> None:
    foreign = worker(1, 7, owner="another-job")
    observed = training(1)
    ghost = rank_status(1, 9, RankPhase.DEAD)
    known = replace(
        observed,
        pods=(*observed.pods, foreign),
        coordinator=structs.replace(
            observed.coordinator, ranks=(*observed.coordinator.ranks, ghost)
        )
        if observed.coordinator
        else None,
    )
    changes = decided(job_of(RUNNING), known)
    assert [create.name for create in changes.workers] == ["digits-1-10"]


def test_a_pod_that_exited_with_0_is_replaced_only_if_the_job_continues() -> None:
    ended = worker(2, end=PodEnd(0), ended_seen_s=NOW)
    observed = training(2)
    observed = replace(observed, pods=(*observed.pods, ended))
    job = job_of(RUNNING, replicas=3)
    assert decided(job, observed).workers == ()
    later = replace(observed, coordinator_heard_s=NOW + 1)
    assert [c.name for c in decided(job, later, NOW + 1).workers] == ["digits-2-2"]
    assert observed.coordinator is not None
    stopping = replace(later, coordinator=structs.replace(observed.coordinator, stopping=True))
    assert decided(job, stopping, NOW + 60).workers == ()


def at_the_end(**status: Any) -> Observed:
    """Return an observation in which one of three pods was killed after the last round."""
    killed = worker(2, end=PodEnd(137, "OOMKilled"), ended_seen_s=NOW)
    observed = training(2)
    assert observed.coordinator is not None
    answer = structs.replace(observed.coordinator, **{"stopping": True, **status})
    pods = (*observed.pods, killed)
    return replace(observed, pods=pods, coordinator=answer, coordinator_heard_s=NOW + 1)


def test_a_pod_killed_after_the_last_round_does_not_fail_the_job() -> None:
    """Only the coordinator decides how a job ends whose last round is done (R17)."""
    rules = [{"action": "FailJob", "onExitCodes": [137]}]
    for spec in ({"backoffLimit": 0}, {"failurePolicy": {"rules": rules}}):
        changes = decided(job_of(RUNNING, replicas=3, **spec), at_the_end(), NOW + 1)
        kinds = {c["type"] for c in (changes.status or {}).get("conditions", ())}
        assert "Failed" not in kinds, spec
        assert changes.workers == ()


def test_a_coordinator_restarted_at_the_end_causes_no_new_workers() -> None:
    """The container restarted after the release, and no rank has reported to it yet."""
    job = job_of(RUNNING, replicas=3)
    before = decided(job, at_the_end(), NOW + 1)
    ranks = tuple(rank_status(slot, 1, RankPhase.STARTING) for slot in range(2))
    unknowing = at_the_end(stopping=False, changes=(), ranks=ranks)
    unknowing = replace(unknowing, clocks=before.clocks)
    assert decided(job, unknowing, NOW + 2).workers == ()
    on = replace(at_the_end(stopping=False), clocks=before.clocks)
    assert decided(job, on, NOW + 60).workers != (), "ranks train: it was not the end after all"


def test_an_exit_with_0_delays_new_workers_in_other_slots() -> None:
    """After a scale-down the lowest slots may be empty, and the job may be about to end."""
    ended = worker(3, end=PodEnd(0), ended_seen_s=NOW)
    observed = training(3)
    pods = tuple(pod for pod in observed.pods if not (pod.is_worker and pod.slot < 2))
    observed = replace(observed, pods=(*pods, ended))
    job = job_of(RUNNING, replicas=2)
    assert decided(job, observed).workers == ()
    later = replace(observed, coordinator_heard_s=NOW + 1)
    assert [c.name for c in decided(job, later, NOW + 1).workers] != []


# ---- scale-down -------------------------------------------------------------------------------


def test_scale_down_deletes_idle_pods_and_the_coordinator_chooses_the_others() -> None:
    idle = worker(3, node="", phase="Pending")
    observed = training(3)
    observed = replace(observed, pods=(*observed.pods, idle))
    changes = decided(job_of(RUNNING, replicas=2), observed)
    assert [d.name for d in changes.delete] == ["digits-3-1"]
    assert changes.targets == {"replicas": 2}
    assert changes.hurry


def test_a_coordinator_without_targets_is_sent_the_size() -> None:
    """After a restart it knows only the size in its file, and waits for the operator's."""
    observed = training(3)
    assert observed.coordinator is not None
    assert decided(job_of(RUNNING, replicas=3), observed).targets is None
    restarted = replace(
        observed, coordinator=structs.replace(observed.coordinator, has_targets=False)
    )
    assert decided(job_of(RUNNING, replicas=3), restarted).targets == {"replicas": 3}


def test_the_scale_down_handshake_has_a_deadline() -> None:
    observed = replace(training(3), clocks=Clocks(surplus_s=NOW - 100))
    changes = decided(job_of(RUNNING, replicas=2), observed)
    assert [d.name for d in changes.delete] == ["digits-2-1"]


# ---- stragglers -------------------------------------------------------------------------------


def slow_observed(**fields: Any) -> Observed:
    observed = training(3)
    assert observed.coordinator is not None
    ranks = tuple(
        structs.replace(r, facts={STEP_S: 0.3 if r.member.slot == 1 else 0.1})
        for r in observed.coordinator.ranks
    )
    slow = structs.replace(observed.coordinator, ranks=ranks, log=LogStatus(round_s=0.1))
    clocks = Clocks(slow_s={"1.0#1": NOW - 60})
    return replace(observed, coordinator=slow, clocks=clocks, **fields)


def test_a_straggler_is_replaced_away_from_its_node_once_per_cooldown() -> None:
    spec = {"replicas": 3, "straggler": {"respond": ["Replace"], "cooldownSeconds": 120}}
    job = job_of(RUNNING, **spec)
    changes = decided(job, slow_observed())
    assert [d.name for d in changes.delete] == ["digits-1-1"]
    (made,) = changes.workers
    affinity = made.manifest["spec"]["affinity"]["nodeAffinity"]
    term = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]
    assert term["matchFields"][0]["values"] == ["node-1"]
    assert changes.status is not None
    assert changes.status["stragglers"][0]["slowdownPercent"] == 300
    # Another one was replaced a minute ago.
    recent = worker(2, 2, created_s=NOW - 60, notes={backoff.NOTE_CAUSE: "Slow"})
    observed = slow_observed()
    later = decided(
        job, replace(observed, pods=(*(p for p in observed.pods if p.slot != 2), recent))
    )
    assert later.workers == ()
    assert later.delete == ()


def test_tolerate_only_reports_a_straggler() -> None:
    changes = decided(job_of(RUNNING, replicas=3), slow_observed())
    assert changes.workers == ()
    assert condition(changes, "Degraded")["reason"] == "RankSlow"
    assert any(event.reason == "RankSlow" for event in changes.events)


def test_a_rank_that_is_slow_for_a_moment_is_no_straggler() -> None:
    observed = replace(slow_observed(), clocks=Clocks())
    assert stragglers.verdict(job_of(RUNNING), observed, [worker(1)], NOW).slow == ()


# ---- reports to the user ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (RefusalKind.TEMPLATE, "TemplateInvalid"),
        (RefusalKind.FORBIDDEN, "TemplateInvalid"),
        (RefusalKind.QUOTA, "QuotaExceeded"),
    ],
)
def test_refusals_quote_the_api_server(kind: RefusalKind, reason: str) -> None:
    refusal = CreationRefusal(kind, "its own words", NOW, generation=3)
    changes = decided(job_of(), Observed(refusal=refusal))
    assert condition(changes, "Degraded")["reason"] == reason
    assert "its own words" in condition(changes, "Degraded")["message"]
    assert changes.workers == ()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"waiting": "ErrImagePull: no such image"}, "PodNotStarting"),
        ({"waiting": "CreateContainerConfigError: image runs as root"}, "PodNotStarting"),
    ],
)
def test_pods_that_cannot_start_are_reported(fields: dict[str, Any], reason: str) -> None:
    pods = (worker(0, phase="Pending", **fields), worker(1), COORDINATOR)
    changes = decided(job_of(), Observed(pods=pods, sent=Sent(secret=True)))
    assert condition(changes, "Degraded")["reason"] == reason


def test_an_unschedulable_worker_quotes_the_scheduler() -> None:
    stuck = worker(0, node="", phase="Pending", unschedulable="0/3 nodes are available")
    changes = decided(
        job_of(replicas=1), Observed(pods=(stuck, COORDINATOR), sent=Sent(secret=True))
    )
    assert condition(changes, "Scheduled")["reason"] == "Unschedulable"
    assert "0/3 nodes are available" in condition(changes, "Scheduled")["message"]


def with_states(count: int, **states: str) -> Observed:
    """Return an observation with rank states by slot, for example `s2="standby"`."""
    observed = training(count)
    assert observed.coordinator is not None
    ranks = [
        structs.replace(rank, state=RankPhase(state), rank=None)
        if (state := states.get(f"s{rank.member.slot}"))
        else rank
        for rank in observed.coordinator.ranks
    ]
    return replace(observed, coordinator=structs.replace(observed.coordinator, ranks=tuple(ranks)))


@pytest.mark.parametrize(
    ("states", "holds", "message"),
    [
        ({}, "False", "all 4 replicas train"),
        ({"s3": "standby"}, "False", "3 of 4 replicas train; 1 stand by"),
        ({"s2": "standby", "s3": "starting"}, "True", "digits-3-1 not yet in; 1 stand by"),
    ],
)
def test_standby_ranks_are_reported_and_do_not_count_as_resizing(
    states: dict[str, str], holds: str, message: str
) -> None:
    before = [{**RUNNING["conditions"][0], "type": kind} for kind in ("Resizing", "Degraded")]
    job = job_of({**RUNNING, "conditions": [*RUNNING["conditions"], *before]}, replicas=4)
    changes = decided(job, with_states(4, **states))
    assert condition(changes, "Resizing")["status"] == holds
    assert message in condition(changes, "Resizing")["message"]
    assert condition(changes, "Degraded")["status"] == "False"


@pytest.mark.parametrize(
    ("outcome", "kind", "reason"),
    [
        (Outcome(True, "Complete", "done"), "Complete", "JobFinished"),
        (Outcome(False, "ScriptEndedEarly", "m", "h"), "Failed", "ScriptEndedEarly"),
        (Outcome(False, "two words", "m"), "Failed", "Failed"),
    ],
)
def test_an_outcome_sets_the_final_condition_and_state(
    outcome: Outcome, kind: str, reason: str
) -> None:
    observed = training()
    assert observed.coordinator is not None
    changes = decided(
        job_of(RUNNING),
        replace(observed, coordinator=structs.replace(observed.coordinator, outcome=outcome)),
    )
    assert condition(changes, kind)["reason"] == reason
    assert changes.status is not None
    assert changes.status["state"] == kind
    assert changes.status["completionTime"] == timestamp(NOW)
    assert changes.delete == (), "the end stands in the status before anything is removed"


def test_an_expired_deadline_fails_the_job() -> None:
    job = job_of(RUNNING | {"activeTime": timestamp(NOW - 900)}, activeDeadlineSeconds=900)
    assert condition(decided(job, training()), "Failed")["reason"] == "DeadlineExceeded"
    later = job_of(RUNNING | {"activeTime": timestamp(NOW - 899)}, activeDeadlineSeconds=900)
    assert decided(later, training()).look_again_s == NOW + 1


def test_a_rule_of_the_failure_policy_fails_the_job() -> None:
    rule = {"action": "FailJob", "onExitCodes": [42]}
    bad = worker(1, end=PodEnd(42))
    observed = training(1)
    job = job_of(RUNNING, failurePolicy={"rules": [rule]})
    changes = decided(job, replace(observed, pods=(*observed.pods, bad)))
    assert condition(changes, "Failed")["reason"] == "FailurePolicy"


def with_rules(*rules: dict[str, Any], **spec: Any) -> JobObject:
    return job_of(RUNNING, replicas=3, failurePolicy={"rules": list(rules)}, **spec)


def failed_pods(*ends: PodEnd, disrupted: bool = False) -> Observed:
    """Return an observation in which each slot has failed once, without a round in between."""
    pods = [worker(n, end=e, disrupted=disrupted, ended_seen_s=NOW) for n, e in enumerate(ends)]
    observed = training(3)
    living = tuple(pod for pod in observed.pods if not pod.is_worker or pod.slot >= len(ends))
    return replace(observed, pods=(*living, *pods))


IGNORE_42 = {"action": "Ignore", "onExitCodes": [42]}
OOM = PodEnd(137, "OOMKilled")


@pytest.mark.parametrize(
    ("rules", "ends", "failures"),
    [
        ([], [PodEnd(42), OOM], 2),
        ([IGNORE_42], [PodEnd(42), OOM], 1),
        ([{"action": "Ignore", "onReasons": ["OOMKilled"]}], [OOM, PodEnd(42)], 1),
        ([IGNORE_42, {"action": "FailJob", "onExitCodes": [42]}], [PodEnd(42)], 0),
        ([{"action": "Count", "onExitCodes": [42]}, IGNORE_42], [PodEnd(42)], 1),
        ([{"action": "Count", "onReasons": ["Evicted"]}], [PodEnd(137, "Evicted")], 1),
        ([], [PodEnd(137, "Evicted")], 0),
        ([{"action": "Count", "onExitCodes": [137]}], [PodEnd(137, "Evicted")], 0),
    ],
)
def test_the_first_matching_rule_decides_if_a_failure_counts(
    rules: list[dict[str, Any]], ends: list[PodEnd], failures: int
) -> None:
    job = with_rules(*rules) if rules else job_of(RUNNING, replicas=3)
    changes = decided(job, failed_pods(*ends))
    assert changes.status is not None
    assert changes.status["restarts"]["failures"] == failures
    assert "Failed" not in {c["type"] for c in changes.status["conditions"]}
    assert len(changes.workers) == len(ends), "whatever counts, another one takes its place"


def test_an_ignored_failure_never_fails_the_job_and_backs_off() -> None:
    notes = {backoff.NOTE_SLOT_FAILURES: "5"}
    observed = training(2)
    bad = worker(
        2, 6, end=PodEnd(42, finished_s=NOW), ended_seen_s=NOW, notes=notes, created_s=NOW - 5
    )
    job = with_rules(IGNORE_42, backoffLimit=0)
    waits = decided(job, replace(observed, pods=(*observed.pods, bad)))
    assert waits.workers == ()
    kinds = {c["type"] for c in (waits.status or {}).get("conditions", ())}
    assert "Failed" not in kinds
    later = decided(job, replace(observed, pods=(*observed.pods, bad)), NOW + 60)
    (made,) = later.workers
    assert backoff.NOTE_FAILURES not in made.manifest["metadata"]["annotations"]


def test_a_disrupted_pod_matches_no_rule_about_exit_codes() -> None:
    job = with_rules({"action": "FailJob", "onExitCodes": [143]})
    for observed in (failed_pods(PodEnd(143), disrupted=True), failed_pods(PodEnd(143, "Evicted"))):
        kinds = {c["type"] for c in (decided(job, observed).status or {})["conditions"]}
        assert "Failed" not in kinds


def test_a_job_that_lost_all_ranks_fails_or_resumes_with_an_event() -> None:
    nobody = Observed(pods=(COORDINATOR,), clocks=Clocks(nobody_s=NOW - 60), sent=Sent(secret=True))
    failed = decided(job_of(RUNNING), nobody)
    assert condition(failed, "Failed")["reason"] == "StateLost"
    assert failed.workers == ()
    kept = decided(job_of(RUNNING, checkpoint={"path": "/c"}), nobody)
    assert len(kept.workers) == 2
    assert any(event.reason == "ResumedFromCheckpoint" for event in kept.events)


def test_an_event_names_the_checkpoint_that_the_job_resumes_from() -> None:
    text = "the job goes on from the checkpoint of version 40; 3 rounds are lost"
    observed = training()
    assert observed.coordinator is not None
    happening = HistoryEntry(5, reason=Reason.RESUMED_FROM_CHECKPOINT, message=text)
    observed = replace(
        observed, coordinator=structs.replace(observed.coordinator, history=(happening,))
    )
    (event,) = (e for e in decided(job_of(RUNNING), observed).events if e.message == text)
    assert event.reason == "ResumedFromCheckpoint"
    again = replace(observed, sent=replace(observed.sent, events=frozenset({event.key})))
    assert event not in decided(job_of(RUNNING), again).events


def test_an_event_names_the_batch_that_is_skipped() -> None:
    observed = training()
    assert observed.coordinator is not None
    given_up = HistoryEntry(5, reason=Reason.BATCH_SKIPPED, message="OSError on ranks 0 and 1")
    observed = replace(
        observed, coordinator=structs.replace(observed.coordinator, history=(given_up,))
    )
    (event,) = (
        e for e in decided(job_of(RUNNING), observed).events if e.message == given_up.message
    )
    assert (event.reason, event.warning) == ("BatchSkipped", True)


def test_the_coordinator_is_asked_before_all_ranks_count_as_lost() -> None:
    ended = worker(0, end=PodEnd(1))
    observed = Observed(pods=(ended, COORDINATOR), sent=Sent(secret=True))
    changes = decided(job_of(RUNNING), observed)
    assert changes.workers == ()
    assert changes.status is None or not any(
        c["type"] == "Failed" for c in changes.status["conditions"]
    )


def test_the_older_of_two_pods_of_a_slot_is_deleted() -> None:
    """The operator ended between the creation of the new pod and the deletion of the old one."""
    observed = training(3)
    both = replace(observed, pods=(*observed.pods, worker(1, 2)))
    changes = decided(job_of(RUNNING, replicas=3), both)
    assert [d.name for d in changes.delete] == ["digits-1-1"]
    assert changes.workers == ()


def test_an_invalid_spec_is_reported_and_changes_nothing_else() -> None:
    body = job_body(replicas=2, minReplicas=5)
    body["metadata"] |= {"uid": UID, "generation": 3}
    changes = decided(read_job(body), training())
    assert "minReplicas" in condition(changes, "Degraded")["message"]
    assert changes.writes == 2, "status and Event"


def test_transitions_are_written_at_once_and_rounds_once_a_minute() -> None:
    job = job_of(RUNNING, replicas=3)
    first = decided(job, training())
    assert first.status is not None
    settled = replace(job, status=first.status)
    sent = Sent(secret=True, status_s=NOW, figures_s=NOW)
    observed = training(sent=sent)
    assert decided(settled, observed, NOW + 1).status is None
    assert observed.coordinator is not None
    later = replace(observed, coordinator=structs.replace(observed.coordinator, version=99))
    quiet = decided(settled, later, NOW + 1)
    assert quiet.status is None
    assert quiet.look_again_s is not None
    written = decided(settled, later, NOW + 61).status
    assert written is not None
    assert written["round"] == 99
    assert decided(settled, training(2, sent=sent), NOW + 1).status is not None


@pytest.mark.parametrize(("until_s", "pause_s"), [(90, 5), (0, 60), (9_999, 60), (None, 60)])
def test_figures_are_written_more_often_while_the_job_is_watched(
    until_s: int | None, pause_s: int
) -> None:
    """A mark that has expired, or that lies hours ahead, is ignored."""
    notes = {} if until_s is None else {NOTE_WATCHED: timestamp(NOW + until_s)}
    job = replace(job_of(RUNNING, replicas=3), annotations=notes)
    first = decided(job, training())
    assert first.status is not None
    settled = replace(job, status=first.status)
    observed = training(sent=Sent(secret=True, status_s=NOW, figures_s=NOW))
    assert observed.coordinator is not None
    later = replace(observed, coordinator=structs.replace(observed.coordinator, version=99))
    assert decided(settled, later, NOW + pause_s - 1).status is None
    assert decided(settled, later, NOW + pause_s).status is not None
