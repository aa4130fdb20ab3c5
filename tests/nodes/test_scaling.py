"""A job grows and shrinks while it trains: no rank restarts, no sample is lost or doubled."""

from __future__ import annotations

import pytest

from tests.nodes.jobs import CHANGE_S, START_S, NewJob, containers

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(900)]


def test_scaling_up_and_down_restarts_no_container(new_job: NewJob) -> None:
    job = new_job()
    job.apply(2)
    job.wait_trains(2)
    first, pids = containers(job.workers()), job.watcher.pids
    job.kubectl("scale", "tj/job", "--replicas=4")
    job.wait_trains(4, timeout_s=START_S)
    four = containers(job.workers())
    assert first.items() <= four.items(), "a container was restarted"
    assert pids.items() <= job.watcher.pids.items(), "a rank was restarted"
    job.kubectl("scale", "tj/job", "--replicas=2")
    job.wait_trains(2, timeout_s=CHANGE_S)
    two = containers(job.workers())
    assert two.items() <= four.items(), "a container was restarted"
    assert all(restarts == 0 for _, restarts in two.values())
    job.finish()
    assert ("Scaling", "2 -> 4 replicas") in job.events()


def test_a_killed_rank_restarts_in_its_pod_and_a_deleted_worker_is_replaced(
    new_job: NewJob,
) -> None:
    job = new_job()
    job.apply(2)
    job.wait_trains(2)
    before, pids = containers(job.workers()), job.watcher.pids
    pid = pids["1.0#1000"]
    job.kubectl("exec", "job-1-1", "--", "sh", "-c", f"kill -9 {pid}")
    job.until(lambda: "1.0#1001" in job.watcher.pids, CHANGE_S, "started again")
    job.wait_trains(2)
    assert containers(job.workers()) == before, "a container was restarted"
    job.kubectl("delete", "pod", "job-1-1", "--wait=false")
    job.until(
        lambda: [p["metadata"]["name"] for p in job.workers()] == ["job-0-1", "job-1-2"],
        CHANGE_S,
        "replaced",
    )
    job.wait_trains(2)
    job.finish()
