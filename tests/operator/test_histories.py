"""Any history of user edits, deaths, lost events and crashes ends with the right children.

The operator is the real one, from its watches to its links (fake_cluster.inside). After each
history the faults stop and time passes. Then there must be exactly the wanted workers, one
coordinator, no doubled slot, and nothing left to do. The operator's view must match the cluster,
and so must what it has sent to the coordinator. A job that was completed or deleted must stay so.
On the way there is never a process too many, and no inventory omits a living process (the world
itself checks that). HISTORIES asks for more than 40.
"""

from __future__ import annotations

import os
from collections import Counter
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paceline_api.crdgen import PLURAL
from paceline_operator.cluster.api import ApiError
from paceline_operator.core.decide.resize import ASK_S

from testing.examples import examples
from testing.fake_cluster.inside import Answer, Inside
from testing.fake_cluster.parts import NAMESPACE, job_body, place_of

JOB = "digits"
KEY = (NAMESPACE, JOB)
REPLICAS_MAX = 5
WATCHED = ["pods", "pods", PLURAL, "nodes"]
CALM_S, HEALED_S = 150.0, 400.0
"""The times after which every fault is over: without missed events, and with them. A watch does not
notice at once that it is silent. The watch of jobs never reports a job that was deleted while it
was away, but jobs are listed every five minutes. When its watch is refused, kopf gives it up, and
the operator then fails its liveness probe."""


class Requests(StrEnum):
    """Faults of the operator's requests."""

    FAIL = "500"
    FAIL_DONE = "500, and carried out"
    TOO_MANY = "429"
    LATE = "carried out, answered late"
    LOST = "carried out, not answered"
    AWAY = "nobody listens"
    BACK = "somebody listens"
    QUOTA = "no room for more pods"
    NO_QUOTA = "room for all"


class Events(StrEnum):
    """Faults of the operator's watches."""

    HELD = "events are behind, so answers and other kinds overtake them"
    FLOW = "they catch up"
    CUT = "connections end, watches go on where they were"
    GONE = "connections end, the versions are too old (status 410)"
    GONE_IN_STREAM = "the same, told by an event"
    SILENT = "the connection stands, and nothing comes through"


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = Inside()
        self.finished = False
        self.finished_s = 0.0
        self.known: set[str] = set()
        """Workers at the end of the job."""
        self.disturbed = False
        """True if something removed the outcome, perhaps before the operator received it."""
        self.deleted = False
        self.cut_off: set[str] = set()
        """Pods whose node has been away, even if only for a while."""
        self.missed = False
        """True if a watch may have missed events."""

    @initialize(replicas=st.integers(1, 4), checkpoint=st.booleans(), trains=st.booleans())
    def submit(self, replicas: int, checkpoint: bool, trains: bool) -> None:
        extra: dict[str, Any] = {"checkpoint": {"path": "/checkpoints"}} if checkpoint else {}
        extra["straggler"] = {"respond": ["Replace"], "cooldownSeconds": 5}
        self.world.server.insert(PLURAL, NAMESPACE, job_body(replicas=replicas, **extra))
        if trains:
            self.world.settle(10)

    # ---- edits of users ---------------------------------------------------------------------

    @rule(replicas=st.integers(1, REPLICAS_MAX))
    def scale(self, replicas: int) -> None:
        self._edit(replicas=replicas)

    @rule(suspend=st.booleans())
    def suspend(self, suspend: bool) -> None:
        self._edit(suspend=suspend)

    def _edit(self, **spec: Any) -> None:
        self.disturbed |= self.finished
        if not self.deleted:
            self.world.server.change(PLURAL, NAMESPACE, JOB, spec=spec)

    @rule(pick=st.integers(0, 9), role=st.sampled_from(["worker", "worker", "coordinator"]))
    def delete_a_pod(self, pick: int, role: str) -> None:
        pods = self.world.pods(JOB, role)
        self.disturbed |= self.finished
        if pods:
            name = pods[pick % len(pods)]["metadata"]["name"]
            self.world.server.remove("pods", NAMESPACE, name)

    @rule(again=st.booleans())
    @precondition(lambda self: not self.deleted)
    def delete_the_job(self, again: bool) -> None:
        self.world.server.remove(PLURAL, NAMESPACE, JOB)
        self.finished = self.disturbed = False
        if again:  # under the same name
            self.world.server.insert(PLURAL, NAMESPACE, job_body(replicas=2))
        else:
            self.deleted = True

    # ---- faults of pods -----------------------------------------------------------------------

    @rule(pick=st.integers(0, 9), code=st.sampled_from([0, 1, 137]), evicted=st.booleans())
    def a_pod_ends(self, pick: int, code: int, evicted: bool) -> None:
        pods = list(self.world.processes(JOB).values())
        if pods:
            name = pods[pick % len(pods)]["metadata"]["name"]
            self.world.end_pod(name, code, evicted=evicted and code != 0)

    @rule(pick=st.integers(0, 9))
    def a_rank_is_slow(self, pick: int) -> None:
        places = sorted(self.world.processes(JOB))
        if places:
            self.world.steps[places[pick % len(places)]] = 1.0

    @rule(node=st.integers(0, 2), ready=st.booleans())
    def a_node_changes(self, node: int, ready: bool) -> None:
        self.disturbed |= self.finished
        self.world.node_ready(f"node-{node}", ready)

    @rule()
    @precondition(lambda self: (NAMESPACE, JOB) in self.world.ranks and self._training())
    def the_job_finishes(self) -> None:
        self.world.finish(JOB)
        self.finished, self.finished_s = True, self.world.now_s
        self.known = {pod["metadata"]["name"] for pod in self.world.pods(JOB)}

    def _training(self) -> bool:
        key = (NAMESPACE, JOB)
        body = self.world.server.objects.get((PLURAL, *key))
        ranks = self.world.ranks[key]
        living = self.world.processes(JOB)
        pods = [*living.values(), *self.world.pods(JOB, "coordinator")]
        owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods}
        return (
            body is not None
            and owners == {body["metadata"]["uid"]}
            and not body["spec"]["suspend"]
            and not {c["type"] for c in self._conditions()} & {"Suspended", "Failed"}
            and ranks.outcome is None
            and bool(ranks.members)
            and set(living) == ranks.members
            and not any("deletionTimestamp" in pod["metadata"] for pod in living.values())
            and not self.world.cut_off
        )

    # ---- faults of the operator -----------------------------------------------------------------

    @rule(after=st.sampled_from([None, 0, 1, 2, 3, 5]), before=st.booleans())
    def the_operator_dies(self, after: int | None, before: bool) -> None:
        """Kill it now, or at one of its next requests, which may still be carried out."""
        if after is None:
            self.world.crash()
        else:
            self.world.server.crash_in, self.world.server.crash_before = after, before

    @rule(what=st.sampled_from(Requests), count=st.integers(1, 4))
    def requests_go_wrong(self, what: Requests, count: int) -> None:
        server, api = self.world.server, self.world.api
        match what:
            case Requests.FAIL | Requests.FAIL_DONE:
                server.failing, server.failing_applied = count, what is Requests.FAIL_DONE
            case Requests.TOO_MANY:
                api.busy = count
            case Requests.LATE:
                api.late, api.late_s = count, (0.5, 5.0, 14.0, 20.0)[count - 1]
            case Requests.LOST:
                api.lost = count
            case Requests.AWAY | Requests.BACK:
                api.away(what is Requests.AWAY)
            case Requests.QUOTA:
                server.quota = count
            case Requests.NO_QUOTA:
                server.quota = None

    @rule(what=st.sampled_from(Events), kind=st.sampled_from(WATCHED))
    def events_go_wrong(self, what: Events, kind: str) -> None:
        api, network = self.world.api, self.world.loop.network
        match what:
            case Events.HELD | Events.FLOW:
                api.hold(kind, what is Events.HELD)
            case Events.CUT:
                network.cut(api.host)
            case Events.GONE | Events.GONE_IN_STREAM:
                api.gone_in_stream = what is Events.GONE_IN_STREAM
                api.forget()
                network.cut(api.host)
                self.missed = True
            case Events.SILENT:
                api.silence(kind)
                self.missed = True

    @rule(
        what=st.sampled_from(["delete a pod", "end a pod", "delete the job", "nothing"]),
        pick=st.integers(0, 9),
        in_stream=st.booleans(),
    )
    def something_happens_unseen(self, what: str, pick: int, in_stream: bool) -> None:
        """Make a change between the end of a watch and its new list; no event reports it."""
        for kind in WATCHED:
            self.world.api.hold(kind, True)
        match what:
            case "delete a pod":
                self.delete_a_pod(pick, "worker")
            case "end a pod":
                self.a_pod_ends(pick, 1, False)
            case "delete the job" if not self.deleted:
                self.delete_the_job(pick % 2 == 0)
        self.world.settle(1.0)
        self.events_go_wrong(Events.GONE_IN_STREAM if in_stream else Events.GONE, "pods")
        for kind in WATCHED:
            self.world.api.hold(kind, False)
        self.missed = True

    @rule(wrong=st.sampled_from([None, *Answer]), seconds=st.sampled_from([0.0, 3.0, 80.0]))
    def the_coordinator_answers(self, wrong: Answer | None, seconds: float) -> None:
        self.world.misbehave(JOB, wrong)
        if seconds:
            self.world.settle(seconds)
            answers = wrong in (None, Answer.LATE, Answer.OTHER)
            assert seconds < 80 or answers or not self.world.operator._links.connected, (
                "nobody is told that the coordinator does not answer"
            )

    # ---- time -----------------------------------------------------------------------------------

    @rule()
    def kubelets(self) -> None:
        self.world.kubelets()
        self.world.server.collect_garbage()

    @rule()
    def coordinators(self) -> None:
        self.world.coordinators()

    @rule(seconds=st.sampled_from([0.003, 0.02, 0.3, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.spend(seconds)

    @rule(seconds=st.sampled_from([2.0, 2.0, 20.0]))
    def everything_moves(self, seconds: float) -> None:
        self.world.settle(seconds)

    @rule(seconds=st.sampled_from([2.0, 5.0]))
    def everything_moves_on(self, seconds: float) -> None:
        self.world.settle(seconds)

    # ---- invariants -----------------------------------------------------------------------------

    @invariant()
    def no_slot_has_two_pods_that_stay(self) -> None:
        """Check that the pods of a slot overlap only while one is leaving, ended, slow or cut off.

        In the last two cases the replacement is created before the old pod is drained.
        """
        world = self.world
        self.cut_off |= {
            pod["metadata"]["name"]
            for pod in world.pods(JOB)
            if pod["spec"].get("nodeName") in world.cut_off
        }
        staying = Counter(
            (pod["metadata"]["ownerReferences"][0]["uid"], place_of(pod)[0])
            for pod in world.pods(JOB)
            if "deletionTimestamp" not in pod["metadata"]
            and pod["status"]["phase"] not in ("Succeeded", "Failed")
            and pod["metadata"]["name"] not in self.cut_off
            and place_of(pod) not in world.steps
        )
        assert all(count == 1 for count in staying.values()), staying

    @invariant()
    def nothing_is_made_for_a_job_that_is_ending(self) -> None:
        """Orderly exits are the first sign of the end; only a long silence contradicts them."""
        if not self.finished or self.disturbed or self.world.now_s - self.finished_s >= ASK_S:
            return
        names = {pod["metadata"]["name"] for pod in self.world.pods(JOB)}
        assert names <= self.known, names - self.known

    def _conditions(self) -> list[dict[str, Any]]:
        body = self.world.server.objects.get((PLURAL, NAMESPACE, JOB))
        conditions = (body or {}).get("status", {}).get("conditions", [])
        return [c for c in conditions if c["status"] == "True"]

    def _state(self) -> str:
        body = self.world.server.objects[PLURAL, NAMESPACE, JOB]
        return str(body.get("status", {}).get("state"))

    def teardown(self) -> None:
        try:
            if any(kind == PLURAL for kind, _, _ in self.world.server.objects) or self.deleted:
                self._converges()
        finally:
            self.world.close()

    def _calm(self) -> None:
        """Stop the faults; a watch that has fallen silent is not repaired."""
        world = self.world
        server, api = world.server, world.api
        server.crash_in, server.failing, server.quota = None, 0, None
        api.busy = api.late = api.lost = 0
        api.away(False)
        for kind in WATCHED:
            api.hold(kind, False)
        for node in world.nodes:
            world.node_ready(node, True)
        world.misbehave(JOB, None)

    def _converges(self) -> None:
        world = self.world
        self._calm()
        before = self._requests()
        for _ in range(10):
            world.settle((HEALED_S if self.missed else CALM_S) / 10, step_s=1.0)
            spent = self._requests() - before
            assert spent < 200, ("it runs in circles", world.server.writes[-20:])
        before = self._requests()
        world.settle(30, step_s=1.0)
        figures = self._requests() - before
        assert figures <= 1, ("not at rest", world.server.writes[-10:])
        self._nothing_is_left()
        workers = [pod for pod in world.pods(JOB) if pod["status"]["phase"] == "Running"]
        posts = world.pods(JOB, "coordinator")
        event(f"ends {'deleted' if self.deleted else self._state()}")
        if self.deleted:
            assert not world.pods(JOB), "children of a deleted job"
            assert not posts
            return
        held = {c["type"]: c for c in self._conditions()}
        body = world.server.objects[PLURAL, NAMESPACE, JOB]
        if self.finished and not self.disturbed:
            assert "Complete" in held, (held, world.server.writes[-20:])
        if "Complete" in held or "Failed" in held:
            assert not workers, "workers after the end"
            assert not posts, "a coordinator after the end"
            if "Complete" in held:
                assert self.finished, "completed, but never finished"
            return
        if body["spec"]["suspend"]:
            assert not workers
            assert not posts
            assert "Suspended" in held
            return
        assert len(workers) == body["spec"]["replicas"], world.server.writes[-20:]
        assert len({place_of(pod)[0] for pod in workers}) == len(workers)
        assert len(posts) == 1
        assert body["status"]["ready"] == f"{len(workers)}/{len(workers)}"
        places = {place_of(pod) for pod in workers}
        assert world.ranks[KEY].inventory == places, "the coordinator's inventory is another one"
        assert world.operator._links.connected == 1

    def _requests(self) -> int:
        """Return the count of requests, without those for the Lease and the operator's key."""
        counts = self.world.server.requests
        return sum(n for what, n in counts.items() if what.split()[1] not in ("leases", "secrets"))

    def _nothing_is_left(self) -> None:
        """Check that the operator's view is current, and that all its work lies in the future."""
        operator, server = self.world.operator, self.world.server
        queue, store = operator._queue, operator._store
        assert not queue._busy
        assert not queue._again
        assert all(at_s > self.world.loop.time() for at_s in queue._due.values())
        known = {pod.uid: pod.version for key in [KEY] for pod in store.pods(key)}
        assert known == _versions(server.of_kind("pods"))
        jobs = _versions([dict(job) for job in store.jobs.values()])
        assert jobs == _versions(server.of_kind(PLURAL))
        assert {name: node.ready for name, node in store.nodes.items()} == dict.fromkeys(
            self.world.nodes, True
        )
        assert operator._controller is not None
        assert set(operator._controller.memories) == set(store.jobs)
        assert set(operator._links._links) <= set(store.jobs)
        assert self.world.health() == 200


def _versions(bodies: list[dict[str, Any]]) -> dict[str, int]:
    return {body["metadata"]["uid"]: int(body["metadata"]["resourceVersion"]) for body in bodies}


TestHistories = pytest.mark.long(Histories.TestCase)
TestHistories.settings = settings(
    max_examples=int(os.environ.get("HISTORIES", examples(40))),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_an_api_error_shows_its_status_reason_and_message() -> None:
    assert str(ApiError(409, "Conflict", "the uid differs")) == "409 Conflict: the uid differs"
