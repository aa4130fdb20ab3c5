"""The store ignores events that are late, duplicated or from before a deletion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline_operator.cluster.store import Key, Store
from paceline_operator.cluster.wire import pod_from
from paceline_operator.core.observed import Node, Pod, PodEnd

KEY: Key = ("default", "digits")
POD = Pod("digits-0-1", "uid-1", "worker", 0, 1, "job", node="node-1", version=10)


def made() -> tuple[Store, list[Key]]:
    woken: list[Key] = []
    return Store(woken.append), woken


def body(uid: str, version: int) -> dict[str, Any]:
    metadata = {"namespace": "default", "name": "digits", "uid": uid}
    return {"metadata": metadata | {"resourceVersion": str(version)}}


def test_managed_fields_are_not_kept() -> None:
    """They are longer than the job, and nothing reads them."""
    store, _ = made()
    job = body("job", 1)
    job["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    store.put_job(job)
    assert store.jobs[KEY] == body("job", 1)


def test_an_older_event_changes_nothing_and_wakes_no_job() -> None:
    store, woken = made()
    store.put_pod(KEY, POD)
    store.put_pod(KEY, replace(POD, phase="Running", version=9))
    store.put_pod(KEY, POD)
    assert store.pods(KEY) == (POD,)
    assert woken == [KEY]


def test_a_late_answer_does_not_bring_a_deleted_pod_back() -> None:
    store, _ = made()
    store.put_job(body("job", 1))
    store.put_pod(KEY, POD)
    store.drop_pod(KEY, POD.name, POD.uid)
    store.put_pod(KEY, replace(POD, version=11))
    assert store.pods(KEY) == ()
    assert store.used[KEY] == {0: 1}, "its name stays used"


def test_deleting_an_old_pod_keeps_the_new_one_of_its_name() -> None:
    store, _ = made()
    new = replace(POD, uid="uid-2", version=20)
    store.put_pod(KEY, new)
    store.drop_pod(KEY, POD.name, POD.uid)
    assert store.pods(KEY) == (new,)


def test_a_new_list_drops_missing_pods() -> None:
    store, _ = made()
    other = replace(POD, name="digits-1-1", uid="uid-2", slot=1)
    store.keep_pods([(KEY, POD), (KEY, other)])
    store.keep_pods([(KEY, other)])
    assert store.pods(KEY) == (other,)


def test_the_time_of_the_first_observed_end_is_kept() -> None:
    store, _ = made()
    store.put_pod(KEY, replace(POD, end=PodEnd(0), ended_seen_s=5.0))
    store.put_pod(KEY, replace(POD, end=PodEnd(0), ended_seen_s=9.0, version=11))
    assert store.pods(KEY)[0].ended_seen_s == 5.0


def test_an_old_job_does_not_replace_a_recreated_one() -> None:
    store, _ = made()
    store.put_job(body("new", 20))
    store.put_job(body("old", 10))
    store.drop_job(KEY, "old")
    assert store.jobs[KEY]["metadata"]["uid"] == "new"
    store.drop_job(KEY, "new")
    store.put_job(body("new", 21))
    assert store.jobs == {}


def test_a_change_of_a_node_wakes_the_jobs_on_it_only() -> None:
    store, woken = made()
    store.put_pod(KEY, POD)
    store.put_pod(("default", "other"), replace(POD, uid="uid-2", node="node-2"))
    store.put_node(Node("node-1"))
    woken.clear()
    store.put_node(Node("node-1"))
    assert woken == []
    store.put_node(Node("node-1", ready=False))
    assert woken == [KEY]


def test_the_annotations_kept_of_a_pod_are_bounded() -> None:
    """Users may write up to 256 KiB of them in each of their pods."""
    labels = {"paceline.dev/job-name": "digits", "paceline.dev/role": "worker"}
    notes = {f"paceline.dev/{n}": "x" * 10**5 for n in range(100)}
    parsed = pod_from({"metadata": {"name": "a", "labels": labels, "annotations": notes}}, 0.0)
    assert parsed is not None
    assert sum(map(len, parsed[2].notes.values())) <= 2**16


def test_used_names_are_forgotten_with_the_job_and_its_last_pod() -> None:
    store, _ = made()
    for jobs_first in (True, False):
        store.put_job(body(f"job-{jobs_first}", 1))
        pod = replace(POD, uid=f"uid-{jobs_first}")
        store.put_pod(KEY, pod)
        drops = [
            lambda uid=f"job-{jobs_first}": store.drop_job(KEY, uid),
            lambda uid=pod.uid: store.drop_pod(KEY, POD.name, uid),
        ]
        first, last = drops if jobs_first else reversed(drops)
        first()
        assert store.used[KEY] == {0: 1}
        last()
        assert store.used == {}
