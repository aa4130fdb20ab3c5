"""Evidence for the end of a pod (C4), and the numbered inventory that follows from it (R25)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paceline_api.status import RankPhase, Status
from paceline_operator.core.clocks import Clocks
from paceline_operator.core.decide import evidence
from paceline_operator.core.observed import Node, Observed, Pod, PodEnd, Sent
from paceline_operator.core.reconcile import reconcile

from testing.fake_cluster.observations import (
    COORDINATOR,
    NOW,
    RUNNING,
    job_of,
    rank_status,
    training,
    worker,
)


def lost(pod: Pod, observed: Observed, now_s: float = NOW) -> evidence.Loss:
    speaks = (pod.slot, pod.attempt) in evidence.speaking(observed)
    return evidence.lost(pod, observed, speaks=speaks, node_lost_s=60.0, now_s=now_s)


NODES = {f"node-{n}": Node(f"node-{n}") for n in range(5)}
AWAY = Node("node-1", ready=False, not_ready_since_s=NOW - 61)


@pytest.mark.parametrize(
    ("nodes", "fresh", "gone"),
    [
        (NODES, True, False),
        (NODES | {"node-1": AWAY}, True, True),
        (NODES | {"node-1": replace(AWAY, not_ready_since_s=NOW - 59)}, True, False),
        (NODES | {"node-1": AWAY}, False, False),
        (NODES | {f"node-{n}": replace(AWAY, name=f"node-{n}") for n in range(3)}, True, False),
        (NODES | {"node-1": replace(NODES["node-1"], out_of_service=True)}, True, True),
        ({}, True, False),
    ],
    ids=["well", "away", "not-long", "blind", "most-are-away", "tainted", "no-nodes-known"],
)
def test_a_pod_is_lost_only_with_evidence_about_its_node(
    nodes: dict[str, Node], fresh: bool, gone: bool
) -> None:
    observed = Observed(nodes=nodes, nodes_fresh=fresh)
    assert bool(lost(worker(1), observed).why) is gone


@pytest.mark.parametrize(("seconds", "gone"), [(60, True), (62, False)])
def test_node_lost_seconds_sets_how_long_a_node_must_be_away(seconds: int, gone: bool) -> None:
    """The node has been NotReady for 61 s."""
    away = Node("node-1", ready=False, not_ready_since_s=NOW - 61)
    observed = replace(training(3), nodes=NODES | {"node-1": away}, coordinator=None)
    job = job_of(RUNNING, replicas=3, elasticity={"nodeLostSeconds": seconds})
    made = [create.manifest["metadata"]["name"] for create in reconcile(job, observed, NOW).workers]
    assert made == (["digits-1-2"] if gone else [])


HEARD = Status(ranks=(rank_status(1, 1, RankPhase.ACTIVE),))


def test_a_new_pod_is_not_lost_with_its_node() -> None:
    observed = Observed(nodes=NODES | {"node-1": AWAY}, coordinator=HEARD)
    assert lost(worker(1, 2), observed).why, "another pod than the one that speaks"
    assert not lost(worker(1, 2, created_s=NOW - 9), observed).why


def test_a_deleted_node_must_be_gone_for_a_while() -> None:
    nodes = {name: node for name, node in NODES.items() if name != "node-1"}
    observed = Observed(nodes=nodes)
    first = lost(worker(1), observed)
    assert not first.why
    assert first.node_missing_s is not None
    later = replace(observed, clocks=Clocks(node_missing_s={"node-1": first.node_missing_s}))
    assert lost(worker(1), later, NOW + evidence.GONE_S).why


@pytest.mark.parametrize(
    "nodes",
    [
        NODES | {"node-1": AWAY},
        NODES | {"node-1": replace(AWAY, out_of_service=True)},
        {name: node for name, node in NODES.items() if name != "node-1"},
    ],
    ids=["away", "tainted", "gone"],
)
def test_a_pod_with_heartbeats_is_not_lost_with_its_node(nodes: dict[str, Node]) -> None:
    """A kubelet that cannot reach the API server makes its node NotReady, and its pods live on."""
    observed = Observed(
        nodes=nodes, clocks=Clocks(node_missing_s={"node-1": NOW - 60}), coordinator=HEARD
    )
    loss = lost(worker(1), observed)
    assert not loss.why
    assert loss.look_again_s == NOW + evidence.SPEAKS_LOOK_S
    assert lost(worker(1), replace(observed, coordinator=None)).why


def test_a_coordinator_that_answers_is_not_lost_with_its_node() -> None:
    away = Node("node-9", ready=False, not_ready_since_s=NOW - 61)
    observed = training(3, nodes=NODES | {"node-9": away}, coordinator_heard_s=NOW - 50)
    kept = reconcile(job_of(RUNNING, replicas=3), observed, NOW)
    assert kept.coordinator is None
    assert not kept.delete
    assert kept.look_again_s is not None
    assert kept.look_again_s <= NOW + evidence.SPEAKS_LOOK_S
    silence_s = evidence.POLL_S + evidence.REPLY_S
    for silent in (
        replace(observed, coordinator_heard_s=NOW - silence_s),
        replace(observed, coordinator=None),
    ):
        changes = reconcile(job_of(RUNNING, replicas=3), silent, NOW)
        assert changes.coordinator is not None
        assert [deletion.name for deletion in changes.delete] == ["digits-coordinator-1"]


def test_a_new_coordinator_has_time_to_receive_heartbeats() -> None:
    """The node is away only because of its kubelet, and the old coordinator was just lost."""
    coordinator = replace(COORDINATOR, created_s=NOW - 5)
    observed = Observed(pods=(worker(1), coordinator), nodes=NODES | {"node-1": AWAY})
    loss = lost(worker(1), observed)
    assert not loss.why
    assert loss.look_again_s == NOW - 5 + evidence.FOUND_S
    assert lost(worker(1), observed, NOW - 5 + evidence.FOUND_S).why


def test_a_heartbeat_overrules_evidence_of_an_end() -> None:
    ended = worker(1, end=PodEnd(1))
    silent = rank_status(1, 1, RankPhase.SUSPECT, silent_ms=60_000)
    job = job_of()
    for rank, lives in ((rank_status(1, 1, RankPhase.ACTIVE, 0), True), (silent, False)):
        observed = Observed(pods=(ended,), coordinator=Status(ranks=(rank,)))
        living, overruled = evidence.may_live(job, observed, {})
        assert ((1, 1) in living) is lives
        assert overruled is lives


def test_a_draining_pod_counts_as_alive() -> None:
    living, _ = evidence.may_live(job_of(), Observed(pods=(worker(1, deleting=True),)), {})
    assert living == {(1, 1)}


def test_planned_pods_are_in_the_inventory_before_they_exist() -> None:
    observed = training(2)
    changes = reconcile(job_of(RUNNING, replicas=4), observed, NOW)
    assert changes.inventory is not None
    assert {(2, 2), (3, 2)} <= set(changes.inventory.pods)


def test_inventory_revisions_of_a_new_leader_are_higher() -> None:
    old = reconcile(
        job_of(RUNNING, replicas=3), training(epoch=4, sent=Sent(revision=4 << 32)), NOW
    )
    new = reconcile(job_of(RUNNING, replicas=3), training(epoch=5), NOW)
    assert old.inventory is not None
    assert new.inventory is not None
    assert new.inventory.revision > old.inventory.revision + 1000
