"""A permanently slow worker is detected, named and replaced on another node, with a cooldown."""

from __future__ import annotations

import time

import pytest

from tests.nodes.jobs import CHANGE_S, NewJob

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(900)]
COOLDOWN_S = 60


def test_a_slow_worker_is_replaced_on_the_other_node(new_job: NewJob) -> None:
    job = new_job()
    detect = {"windowRounds": 5, "slowdownFactor": 2}
    straggler = {"detect": detect, "respond": ["Replace"], "cooldownSeconds": COOLDOWN_S}
    # Slot 1 stays slow wherever it runs: only the cooldown prevents a second replacement.
    job.apply(2, slow_ms={"1": 800.0}, straggler=straggler, epochs=4)
    job.until(lambda: bool(job.workers()), CHANGE_S, "started")
    job.until(lambda: all(p["spec"].get("nodeName") for p in job.workers()), CHANGE_S, "placed")
    where = {p["metadata"]["name"]: p["spec"]["nodeName"] for p in job.workers()}
    assert len(set(where.values())) == 2
    slow_node = where["job-1-1"]
    text = job.wait_event("RankSlow", 180)
    assert "job-1-1" in text
    assert slow_node in text
    job.until(lambda: "job-1-2" in [p["metadata"]["name"] for p in job.workers()], 60, "replaced")
    replaced = time.monotonic()
    assert "away from node" in job.wait_event("RankReplaced")
    job.wait_trains(2)
    (second,) = [p for p in job.workers() if p["metadata"]["name"] == "job-1-2"]
    assert second["spec"]["nodeName"] != slow_node
    job.wait(lambda j: j["status"].get("stragglerCount") == 1, CHANGE_S, "slow again")
    status = job.get()["status"]
    assert status["stragglers"][0]["replica"] == "job-1-2"
    time.sleep(max(0.0, replaced + COOLDOWN_S - 20 - time.monotonic()))
    assert [p["metadata"]["name"] for p in job.workers()] == ["job-0-1", "job-1-2"]
    job.finish()
