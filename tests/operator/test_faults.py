"""One fault at a time around the real operator: what must follow from it, and how soon.

test_histories.py draws these faults at random. Here each is tried by itself, so that each is known
to matter. These changes make a test here fail (tried by hand): a new list that adds or drops
nothing (`Watch._list`, `Store.keep_pods`), a list of jobs that drops nothing (`Listing._list`), a
watch whose silence is tolerated (`Kube.stream`), a link that is never away or never left
(`Links._unanswered`, `leave`), a request that is not retried (`Controller._retry_s`), a decision
that is not repeated at the time that it asked for (`Queue._work`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from paceline_api.crdgen import PLURAL
from paceline_operator.cluster.observe import SILENCE_S
from paceline_operator.listing import RESYNC_S

from testing.fake_cluster.inside import Answer, Inside
from testing.fake_cluster.parts import NAMESPACE, job_body

JOB = "digits"
KEY = (NAMESPACE, JOB)


@pytest.fixture
def world() -> Iterator[Inside]:
    """Yield a cluster with a job of two workers that train."""
    world = Inside()
    try:
        world.server.insert(PLURAL, NAMESPACE, job_body(replicas=2))
        world.settle(10)
        assert workers(world) == ["digits-0-1", "digits-1-1"]
        yield world
    finally:
        world.close()


def workers(world: Inside) -> list[str]:
    running = [pod for pod in world.pods(JOB) if pod["status"]["phase"] == "Running"]
    return [
        pod["metadata"]["name"] for pod in running if "deletionTimestamp" not in pod["metadata"]
    ]


def mute(world: Inside) -> None:
    """Make the coordinator silent, so that no news of it wakes the job."""
    world.misbehave(JOB, Answer.SILENT)
    world.settle(1)


@pytest.mark.parametrize("in_stream", [True, False])
def test_a_new_list_reveals_a_missed_deletion(world: Inside, in_stream: bool) -> None:
    mute(world)
    world.api.hold("pods", True)
    world.server.remove("pods", NAMESPACE, "digits-1-1", at_once=True)
    world.settle(1)
    assert workers(world) == ["digits-0-1"]
    world.api.gone_in_stream = in_stream
    world.api.forget()
    world.loop.network.cut(world.api.host)
    world.api.hold("pods", False)
    world.settle(10)
    assert workers(world) == ["digits-0-1", "digits-1-2"]


def test_a_cut_watch_resumes_where_it_was(world: Inside) -> None:
    mute(world)
    world.api.hold("pods", True)
    world.server.remove("pods", NAMESPACE, "digits-1-1", at_once=True)
    world.settle(1)
    world.loop.network.cut(world.api.host)
    world.api.hold("pods", False)
    lists = world.server.requests.total()
    world.settle(10)
    assert workers(world) == ["digits-0-1", "digits-1-2"]
    assert world.server.requests.total() - lists < 20


def test_a_silently_dead_watch_is_restarted(world: Inside) -> None:
    mute(world)
    world.api.silence("pods")
    world.server.remove("pods", NAMESPACE, "digits-1-1", at_once=True)
    world.settle(SILENCE_S - 30)
    assert workers(world) == ["digits-0-1"], "nobody can know"
    world.settle(60)
    assert workers(world) == ["digits-0-1", "digits-1-2"]
    assert world.lives == 1


def test_a_link_is_closed_with_its_job(world: Inside) -> None:
    world.server.remove(PLURAL, NAMESPACE, JOB)
    world.settle(10)
    assert world.operator._links._links == {}


@pytest.mark.long
def test_a_job_deleted_while_its_watch_was_away_is_forgotten(world: Inside) -> None:
    world.server.change(PLURAL, NAMESPACE, JOB, spec={"suspend": True})
    world.settle(60)
    assert workers(world) == [], "nothing is left to write, which would be refused with 404"
    world.api.hold(PLURAL, True)
    world.server.remove(PLURAL, NAMESPACE, JOB)
    world.server.collect_garbage()
    world.api.gone_in_stream = True
    world.api.forget()
    world.loop.network.cut(world.api.host)
    world.api.hold(PLURAL, False)
    world.settle(RESYNC_S + 10)
    assert world.operator._store.jobs == {}
    assert world.operator._controller is not None
    assert world.operator._controller.memories == {}
    assert world.operator._links._links == {}


def test_failed_requests_are_retried(world: Inside) -> None:
    mute(world)
    world.server.failing = 4
    world.server.remove("pods", NAMESPACE, "digits-1-1", at_once=True)
    world.settle(15)
    assert workers(world) == ["digits-0-1", "digits-1-2"]


def test_an_unanswered_creation_makes_only_one_pod(world: Inside) -> None:
    """The watch is behind as well, so only the name shows that the pod exists (C3)."""
    world.api.hold("pods", True)
    world.api.lost = 1
    world.server.change(PLURAL, NAMESPACE, JOB, spec={"replicas": 3})
    world.settle(5)
    world.api.hold("pods", False)
    world.settle(5)
    assert workers(world) == ["digits-0-1", "digits-1-1", "digits-2-2"]


def test_a_pod_that_failed_twice_is_replaced_after_a_backoff(world: Inside) -> None:
    """Only the queue knows when the replacement is due."""
    mute(world)
    for attempt in (1, 2, 3):
        world.end_pod(f"digits-1-{attempt}", 1)
        world.settle(1)
        made = f"digits-1-{attempt + 1}" in {p["metadata"]["name"] for p in world.pods(JOB)}
        assert made == (attempt == 1)
        world.settle(10)
    assert workers(world) == ["digits-0-1", "digits-1-4"]


@pytest.mark.parametrize(
    "wrong", [wrong for wrong in Answer if wrong not in (Answer.LATE, Answer.OTHER)]
)
def test_a_coordinator_that_does_not_answer_counts_as_away(world: Inside, wrong: Answer) -> None:
    assert world.operator._links.connected == 1
    world.misbehave(JOB, wrong)
    world.settle(80)
    assert world.operator._links.connected == 0
    world.misbehave(JOB, None)
    world.settle(10)
    assert world.operator._links.connected == 1


def test_a_late_answer_keeps_the_coordinator_connected(world: Inside) -> None:
    world.misbehave(JOB, Answer.LATE)
    world.settle(60)
    assert world.operator._links.connected == 1
    assert workers(world) == ["digits-0-1", "digits-1-1"]


@pytest.mark.parametrize("away_s", [2, 80])
def test_workers_created_while_the_coordinator_was_away_are_not_drained(
    world: Inside, away_s: int
) -> None:
    """The coordinator learns of the new workers and of the new target at the same time.

    By its earlier target they would be too many.
    """
    world.misbehave(JOB, Answer.SILENT)
    world.settle(away_s)
    world.server.change(PLURAL, NAMESPACE, JOB, spec={"replicas": 4})
    world.settle(20)
    made = workers(world)
    assert len(made) == 4
    world.misbehave(JOB, None)
    world.settle(20)
    assert len(world.ranks[KEY].inventory) == 4
    assert workers(world) == made


def test_a_new_coordinator_is_followed_at_its_own_address(world: Inside) -> None:
    before = world.operator._links._links[KEY].url
    world.server.remove("pods", NAMESPACE, "digits-coordinator-1", at_once=True)
    world.settle(10)
    assert world.operator._links._links[KEY].url != before
    assert world.ranks[KEY].inventory == {(0, 1), (1, 1)}, "it knows what there is"


def test_a_restarted_operator_completes_interrupted_work(world: Inside) -> None:
    world.server.crash_in, world.server.crash_before = 1, False
    world.server.change(PLURAL, NAMESPACE, JOB, spec={"replicas": 4})
    world.settle(15)
    assert world.lives == 2
    assert len(workers(world)) == 4
