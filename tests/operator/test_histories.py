"""Any history of user edits, deaths, lost events and crashes ends with the right children.

After each history the disturbances stop and time passes. Then there must be exactly as many
workers as are wanted, one coordinator, no doubled slot, and nothing left to do; a job that was
completed or deleted must stay so. On the way there is never a process too many, and no inventory
that leaves out a living one (the world itself checks that).
"""

from __future__ import annotations

import os
from collections import Counter

from fake_cluster.world import NAMESPACE, World, job_body, place_of
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paceline_api.crdgen import PLURAL
from paceline_operator.cluster.api import ApiError
from paceline_operator.core.decide.resize import ASK_S

JOB = "digits"
REPLICAS_MAX = 5


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.finished = False
        self.finished_s = 0.0
        self.known: set[str] = set()
        """Workers at the end of the job."""
        self.disturbed = False
        """Something took the outcome away before the operator may have heard of it."""
        self.deleted = False

    @initialize(replicas=st.integers(1, 4), checkpoint=st.booleans())
    def submit(self, replicas: int, checkpoint: bool) -> None:
        extra: dict[str, object] = {"checkpoint": {"path": "/checkpoints"}} if checkpoint else {}
        extra["straggler"] = {"respond": ["Replace"], "cooldownSeconds": 5}
        self.world.server.insert(PLURAL, NAMESPACE, job_body(replicas=replicas, **extra))

    # ---- what users do ----------------------------------------------------------------------

    @rule(replicas=st.integers(1, REPLICAS_MAX))
    def scale(self, replicas: int) -> None:
        self._edit(replicas=replicas)

    @rule(suspend=st.booleans())
    def suspend(self, suspend: bool) -> None:
        self._edit(suspend=suspend)

    def _edit(self, **spec: object) -> None:
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

    # ---- what happens to pods -----------------------------------------------------------------

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

    # ---- what happens to the operator -----------------------------------------------------------

    @rule(after=st.integers(0, 6), before=st.booleans())
    def crash(self, after: int, before: bool) -> None:
        self.world.server.crash_in, self.world.server.crash_before = after, before

    @rule(count=st.integers(1, 4), applied=st.booleans())
    def requests_fail(self, count: int, applied: bool) -> None:
        self.world.server.failing, self.world.server.failing_applied = count, applied

    @rule(quota=st.sampled_from([None, 2, 4]))
    def quota(self, quota: int | None) -> None:
        self.world.server.quota = quota

    @rule(count=st.integers(0, 5), again=st.integers(0, 4))
    def some_events_arrive(self, count: int, again: int) -> None:
        self.world.deliver(count, again=again)

    @rule()
    def events_are_lost_and_listed_again(self) -> None:
        self.world.relist()

    # ---- time -----------------------------------------------------------------------------------

    @rule()
    def work(self) -> None:
        self.world.work()

    @rule()
    def kubelets(self) -> None:
        self.world.kubelets()

    @rule()
    def coordinators(self) -> None:
        self.world.coordinators()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule()
    def everything_moves(self) -> None:
        self.world.settle(2)

    # ---- what must hold -------------------------------------------------------------------------

    @invariant()
    def no_slot_has_two_pods_that_stay(self) -> None:
        """Two of one slot may overlap only while one of them is leaving, ended or cut off."""
        staying = Counter(
            (pod["metadata"]["ownerReferences"][0]["uid"], place_of(pod)[0])
            for pod in self.world.pods(JOB)
            if "deletionTimestamp" not in pod["metadata"]
            and pod["status"]["phase"] not in ("Succeeded", "Failed")
            and pod["spec"].get("nodeName") not in self.world.cut_off
        )
        assert all(count == 1 for count in staying.values()), staying

    @invariant()
    def nothing_is_made_for_a_job_that_is_ending(self) -> None:
        """Pods that end in order are its first sign; only a long silence speaks against it."""
        if not self.finished or self.disturbed or self.world.now_s - self.finished_s >= ASK_S:
            return
        names = {pod["metadata"]["name"] for pod in self.world.pods(JOB)}
        assert names <= self.known, names - self.known

    def _conditions(self) -> list[dict]:
        body = self.world.server.objects.get((PLURAL, NAMESPACE, JOB))
        found = (body or {}).get("status", {}).get("conditions", [])
        return [c for c in found if c["status"] == "True"]

    def _state(self) -> str:
        body = self.world.server.objects[PLURAL, NAMESPACE, JOB]
        return str(body.get("status", {}).get("state"))

    def teardown(self) -> None:
        try:
            if self.world.server.objects:
                self._converges()
        finally:
            self.world.close()

    def _converges(self) -> None:
        world = self.world
        world.server.crash_in, world.server.failing, world.server.quota = None, 0, None
        for node in world.nodes:
            world.node_ready(node, True)
        for key in list(world.store.jobs):
            world.dirty[key] = world.now_s
        before = world.server.requests.total()
        for _ in range(40):
            world.settle(10, step_s=1.0)
            spent = world.server.requests.total() - before
            assert spent < 150, ("it runs in circles", world.server.writes[-20:])
        before = world.server.requests.total()
        world.settle(30, step_s=1.0)
        figures = world.server.requests.total() - before
        assert figures <= 1, ("not at rest", world.server.writes[-10:])
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


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=int(os.environ.get("HISTORIES", "60")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_api_errors_say_what_happened() -> None:
    assert str(ApiError(409, "Conflict", "the uid differs")) == "409 Conflict: the uid differs"
