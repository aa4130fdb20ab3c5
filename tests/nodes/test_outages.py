"""Training needs neither the operator nor the API server; both catch up when they are back."""

from __future__ import annotations

import time

import pytest

from testing.cluster.control_plane import API_SERVER
from testing.jobs.terminal import until
from tests.nodes.jobs import CHANGE_S, END_S, NewJob, containers
from tests.nodes.platform import SYSTEM, Platform
from tests.nodes.test_verbs import kubeconfig_of, terminal_of

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(900)]
OUTAGE_S, OUTAGE_ROUNDS = 35.0, 40
"""Longer than the operator's Lease (10 s) and than the time after which the controller manager
gives up a node (20 s), and at least as long as this many rounds."""


def test_a_job_scales_after_its_operator_was_killed(platform: Platform, new_job: NewJob) -> None:
    """The successor continues where it was: nothing is created twice, nothing is restarted."""
    job = new_job()
    job.apply(2)
    job.wait_trains(2)
    before = containers(job.workers())
    (operator,) = platform.operator_pods()
    name = operator["metadata"]["name"]
    platform.kubectl("-n", SYSTEM, "delete", "pod", name, "--grace-period=0", "--force")
    job.kubectl("scale", "tj/job", "--replicas=3")
    job.wait_trains(3)
    assert before.items() <= containers(job.workers()).items()
    job.finish()


def test_a_job_finishes_while_the_operator_is_down(platform: Platform, new_job: NewJob) -> None:
    job = new_job()
    job.apply(2)
    job.wait_trains(2)
    try:
        platform.scale_operator(0)
        job.brake.unlink()
        job.until(lambda: not job.workers(), END_S, "at its end")
        assert job.watcher.last["outcome"]["complete"], job.watcher.last
        assert not job.condition("Complete")
    finally:
        platform.scale_operator(1)
    job.wait_condition("Complete", CHANGE_S)
    job.check_weights()
    assert [pod["status"]["phase"] for pod in job.pods()] == ["Succeeded"] * 2


def watches_of_jobs(platform: Platform) -> int:
    """Return how many watches of TrainingJobs the API server is serving."""
    count = 0.0
    for line in platform.kubectl("get", "--raw", "/metrics").splitlines():
        served = line.startswith("apiserver_longrunning_requests{")
        if served and 'resource="trainingjobs"' in line and 'verb="WATCH"' in line:
            count += float(line.rpartition(" ")[2])
    return int(count)


def test_training_and_watching_commands_survive_an_api_server_outage(
    platform: Platform, new_job: NewJob, request: pytest.FixtureRequest
) -> None:
    """Commands that watch report the outage once and continue."""
    job = new_job()
    job.apply(2, long=True)
    job.wait_trains(2)
    say = terminal_of(kubeconfig_of(platform, job, "dev", "edit"))
    others = watches_of_jobs(platform)
    request.addfinalizer(say.close)
    # Start the commands first: a server that is away from the start is reported as an error.
    waited = say.start("wait", "job")
    until(lambda: watches_of_jobs(platform) > others, "the server serves the watch of `wait`")
    watched = say.start("status", "job", "--watch")
    until(lambda: watches_of_jobs(platform) > others + 1, "and that of `status`")
    followed = say.start("logs", "job", "-f")
    until(lambda: watched.lines and followed.lines, "both show something")
    before, server = containers(job.workers()), platform.cluster.control_plane.programs[API_SERVER]
    server.stop()
    try:
        began_s = time.monotonic()
        job.wait_rounds(OUTAGE_ROUNDS, timeout_s=END_S)  # no round needs the server
        time.sleep(max(0.0, began_s + OUTAGE_S - time.monotonic()))
    finally:
        server.start()
        platform.cluster.control_plane.wait_ready()
    assert containers(job.workers()) == before
    version = job.watcher.version
    job.kubectl("scale", "tj/job", "--replicas=3")
    job.wait_trains(3)
    job.wait(lambda body: body["status"]["round"] >= version, CHANGE_S, "caught up")
    assert before.items() <= containers(job.workers()).items(), "a container was restarted"
    job.finish(nodes_in_touch=False)
    for one in (watched, followed, waited):
        assert one.end() == 0, one.lines[-5:]
        for text in ("does not answer", "answers again"):
            assert sum(text in line for line in one.lines) == 1, one.lines
    assert watched.lines[-1].startswith("Complete")
    assert waited.lines[-1].startswith("job job: Complete")
    results = [line for line in followed.lines if "RESULT " in line]
    # Each rank's result is here once, even if its pod is gone.
    assert sorted(line.partition(" |")[0] for line in results) == ["rank 0", "rank 1", "rank 2"]
