"""A new operator before its first answer from a coordinator, and one that has lost the lead."""

from __future__ import annotations

from dataclasses import replace

from paceline_api.crdgen import PLURAL
from paceline_operator.core.clocks import Clocks
from paceline_operator.core.reconcile import HEAR_S, reconcile

from testing.fake_cluster.observations import NOW, RUNNING, job_of, training
from testing.fake_cluster.world import NAMESPACE, World, job_body


def test_a_job_grows_once_its_coordinator_answers_or_is_away_for_long() -> None:
    """A coordinator with the smaller target of the operator before would drain the new workers."""
    job = job_of(RUNNING, replicas=4)
    unheard = replace(training(2), coordinator=None)
    waiting = reconcile(job, unheard, NOW)
    assert waiting.workers == ()
    assert waiting.look_again_s is not None
    assert waiting.look_again_s <= NOW + HEAR_S
    assert len(reconcile(job, training(2), NOW).workers) == 2
    # If the coordinator is away for long, the job grows all the same.
    silent = replace(unheard, clocks=Clocks(coordinator_away_s=NOW - HEAR_S))
    assert len(reconcile(job, silent, NOW).workers) == 2


def test_an_operator_without_its_lease_writes_nothing_and_forgets_nothing() -> None:
    """The operator continues if the Lease comes back, for example after a stall of its CPU."""
    world = World()
    leads = False
    try:
        world.server.insert(PLURAL, NAMESPACE, job_body(replicas=2))
        world.relist()
        world.controller._applier._leads = lambda: leads
        world.settle(5)
        assert world.server.writes == []
        leads = True
        world.settle(5)
        assert len(world.pods()) == 2
        leads = False
        world.server.remove("pods", NAMESPACE, "digits-1-1")
        world.settle(5)
        assert len(world.pods()) == 1
        leads = True
        world.settle(5)
        assert [pod["metadata"]["name"] for pod in world.pods()] == ["digits-0-1", "digits-1-2"]
    finally:
        world.close()
