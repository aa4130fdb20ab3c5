"""Random histories on a real API server end with exactly the pods that are wanted.

Users scale, suspend, delete and submit jobs; pods end, are evicted and deleted; the operator is
killed, dies between two writes, and loses its connections. Several jobs run at once, each with its
own history; the operator's faults affect them all. PACELINE_HISTORIES asks for more than 30.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from paceline_api.names import LABEL_JOB, LABEL_SLOT

from testing.cluster.api import ApiError
from testing.cluster.control_plane import ControlPlane
from testing.cluster.fake_nodes import FakeNodes
from testing.fake_cluster.beside import (
    JOBS,
    Running,
    change,
    holds,
    own_requests,
    pods,
    stays,
    submit,
    until,
    until_quiet,
)
from testing.fake_cluster.proxy import Proxy
from testing.fake_cluster.stub import Fleet
from tests.layers import exhaustive_except

JOBS_AT_ONCE = 6
HISTORIES = int(os.environ.get("PACELINE_HISTORIES", "30"))
FIRST_SEED = int(os.environ.get("PACELINE_HISTORIES_SEED", "0"))
STEPS = 12
CONVERGED_S = 90.0
DRAIN_GRACE_S = 5
"""Drain grace of each job. A worker that does not hear of the end, as no pod of a stub does, is
deleted only after this time and a margin; with the default of 60 s, that is nearly CONVERGED_S."""

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(400)]


class History:
    """One job and the random changes to it."""

    def __init__(
        self, plane: ControlPlane, namespace: str, name: str, rng: random.Random, nodes: FakeNodes
    ) -> None:
        self.plane, self.namespace, self.name, self.rng = plane, namespace, name, rng
        self.nodes = nodes
        self.deleted = self.suspended = self.finished = False
        self.checkpoint = rng.random() < 0.5
        self.actions: list[str] = []
        self.create()

    def create(self) -> None:
        self.replicas = self.rng.randint(1, 4)
        extra: dict[str, Any] = {"checkpoint": {"path": "/c"}} if self.checkpoint else {}
        submit(
            self.plane,
            self.namespace,
            self.name,
            replicas=self.replicas,
            backoffLimit=100,
            elasticity={"drainGraceSeconds": DRAIN_GRACE_S},
            **extra,
        )
        self.deleted = self.suspended = self.finished = False

    def body(self) -> dict[str, Any] | None:
        try:
            return self.plane.api.get(f"{JOBS.format(self.namespace)}/{self.name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def pods(self, role: str = "worker") -> list[dict[str, Any]]:
        listed = pods(self.plane, self.namespace, role)
        return [pod for pod in listed if pod["metadata"]["labels"][LABEL_JOB] == self.name]

    def step(self, fleet: Fleet) -> None:
        actions = [self.scale] * 3 + [self.suspend, self.resume, self.resume, self.delete_worker]
        actions += [self.delete_worker, self.delete_coordinator, self.end_pod, self.evict_pod]
        actions += [self.delete_job, self.nothing, self.nothing]
        action = self.rng.choice(actions)
        if self.deleted:
            action = self.rng.choice([self.create, self.nothing])
        elif self.rng.random() < 0.03:
            self.finish(fleet)
            return
        self.actions.append(action.__name__)
        action()

    def nothing(self) -> None:
        """Let time pass."""

    def scale(self) -> None:
        self.replicas = self.rng.randint(1, 5)
        change(self.plane, self.namespace, self.name, replicas=self.replicas)

    def suspend(self) -> None:
        self.suspended = True
        change(self.plane, self.namespace, self.name, suspend=True)

    def resume(self) -> None:
        self.suspended = False
        change(self.plane, self.namespace, self.name, suspend=False)

    def _pick(self, role: str) -> str:
        candidates = [pod for pod in self.pods(role) if stays(pod)]
        return self.rng.choice(candidates)["metadata"]["name"] if candidates else ""

    def delete_worker(self) -> None:
        self._delete(self._pick("worker"))

    def delete_coordinator(self) -> None:
        self._delete(self._pick("coordinator"))

    def _delete(self, name: str) -> None:
        if name:
            self.plane.api.delete(f"/api/v1/namespaces/{self.namespace}/pods/{name}")

    def end_pod(self) -> None:
        if name := self._pick("worker"):
            self._ignoring_absence(
                lambda: self.nodes.end_pod(self.namespace, name, self.rng.choice([0, 0, 1, 137]))
            )

    def evict_pod(self) -> None:
        if name := self._pick("worker"):
            self._ignoring_absence(lambda: self.nodes.evict_pod(self.namespace, name))

    def _ignoring_absence(self, call: Any) -> None:
        try:
            call()
        except ApiError as error:
            if error.status != 404:
                raise

    def delete_job(self) -> None:
        self.deleted = True
        self.plane.api.delete(f"{JOBS.format(self.namespace)}/{self.name}")

    def finish(self, fleet: Fleet) -> None:
        ring = fleet.ring(self.name)
        if ring is not None and ring.members and not self.suspended:
            self.actions.append("finish")
            self.finished = True
            fleet.finish(self.name)

    # ---- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        """Check that no slot has two pods that stay."""
        slots = Counter(
            (pod["metadata"]["ownerReferences"][0]["uid"], pod["metadata"]["labels"][LABEL_SLOT])
            for pod in self.pods()
            if stays(pod)
        )
        assert all(count == 1 for count in slots.values()), (slots, self.actions)

    def trouble(self) -> str:
        """Return what has not converged yet; empty if everything has."""
        workers = [pod for pod in self.pods() if stays(pod)]
        posts = [pod for pod in self.pods("coordinator") if stays(pod)]
        body = self.body()
        if body is None:
            left = self.pods() + self.pods("coordinator")
            return f"{len(left)} pods without a job" if left else ""
        if holds(body, "Complete") or holds(body, "Failed"):
            return f"{len(workers)} + {len(posts)} pods after the end" if workers or posts else ""
        wanted = body["spec"]["replicas"]
        if body["spec"]["suspend"]:
            word = body.get("status", {}).get("state")
            good = not workers and not posts and word == "Suspended"
            return "" if good else f"suspended, {len(workers)} + {len(posts)} pods, {word}"
        slots = sorted(int(pod["metadata"]["labels"][LABEL_SLOT]) for pod in workers)
        if len(set(slots)) != wanted or len(workers) != wanted or len(posts) != 1:
            return f"{slots} instead of {wanted}, {len(posts)} coordinators"
        ready = body.get("status", {}).get("ready")
        return "" if ready == f"{wanted}/{wanted}" else f"ready {ready} of {wanted}"

    def judge(self) -> None:
        """Check the final state, once nothing changes anymore."""
        body = self.body()
        if body is None:
            assert self.deleted, "the job is lost"
            return
        assert not self.deleted
        if holds(body, "Complete"):
            assert self.finished or self.checkpoint, "completed, but never finished"
        if failed := holds(body, "Failed"):
            assert failed["reason"] == "StateLost", failed
            assert not self.checkpoint, failed


class Misfortune:
    """The operator and the faults that it suffers."""

    def __init__(self, running: Running, proxy: Proxy, rng: random.Random) -> None:
        self.running, self.proxy, self.rng = running, proxy, rng
        plain = running.plane.kubeconfig_of(running.user, "system:masters")
        self.kubeconfig = proxy.kubeconfig(plain)
        self.crashes = self.acted = self.lives = 0
        self.actions: list[str] = []

    def start(self, crash_at: int = 0) -> None:
        options = ["--lease-duration=60"]
        if not crash_at:
            self.running.start(*options, kubeconfig=self.kubeconfig)
            return
        program = (sys.executable, "-m", "testing.fake_cluster.crashing", str(crash_at))
        self.running.start(*options, kubeconfig=self.kubeconfig, program=program)

    def again(self) -> None:
        """Restart the operator if it has died of an injected fault."""
        assert self.running.process is not None
        code = self.running.process.poll()
        if code is not None:
            assert code in (137, -9), f"the operator has ended with {code}"
            self.crashes += 1
            self.start(self.moment())

    def moment(self) -> int:
        return self.rng.choice([0, 1, 1]) * self.rng.choice([-1, 1]) * self.rng.randint(1, 12)

    def step(self) -> None:
        self.again()
        if self.crashes + 1 > self.lives:
            self._acts()
        what = self.rng.choice(["cut", "kill", "none", "none"])
        self.actions.append(what)
        if what == "cut":
            self.proxy.cut()
        elif what == "kill":
            self.running.stop(signal.SIGKILL)
            self.again()

    def _acts(self) -> None:
        """Wait until the operator acts or has died."""
        assert self.running.process is not None
        process, log = self.running.process, self.running.log
        until(
            lambda: process.poll() is not None or log.read_text().count("acting for") > self.acted,
            "the operator acts or dies",
        )
        self.acted = log.read_text().count("acting for")
        self.lives = self.crashes + 1

    def calm(self) -> None:
        """Run the operator without faults from now on."""
        assert self.running.process is not None
        if self.running.process.poll() is None:
            self.running.stop(signal.SIGKILL)
        self.start()


def seeds() -> list[int]:
    batches = max(1, -(-HISTORIES // JOBS_AT_ONCE))
    return [FIRST_SEED + number for number in range(batches)]


@pytest.mark.parametrize("seed", exhaustive_except([FIRST_SEED], seeds()))
def test_random_histories_converge_to_the_wanted_pods(
    plane: ControlPlane, namespace: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    running = Running(plane, namespace, tmp_path / "operator.log")
    try:
        with (
            Proxy(plane.url) as proxy,
            plane.fake_nodes(3) as nodes,
            Fleet(plane, namespace) as fleet,
        ):
            operator = Misfortune(running, proxy, rng)
            operator.start(operator.moment())
            histories = [
                History(plane, namespace, f"h{number}", random.Random(f"{seed}/{number}"), nodes)
                for number in range(JOBS_AT_ONCE)
            ]
            for _ in range(STEPS):
                operator.step()
                for history in histories:
                    history.step(fleet)
                    history.check()
                time.sleep(rng.uniform(0.0, 1.0))
            operator.calm()
            _settled(histories)
            for history in histories:
                history.check()
                history.judge()
            assert fleet.wrong == []
            until_quiet(lambda: own_requests(plane, namespace).total(), 1.5, 30)
    except AssertionError:
        sys.stderr.write((tmp_path / "operator.log").read_text()[-20_000:])
        raise
    finally:
        running.end()


def _settled(histories: list[History]) -> None:
    troubles: dict[str, str] = {}

    def settled() -> bool:
        by_name = {history.name: history.trouble() for history in histories}
        troubles.clear()
        troubles.update({name: trouble for name, trouble in by_name.items() if trouble})
        return not troubles

    try:
        until(settled, "converged", CONVERGED_S)
    except AssertionError:
        stories = {h.name: h.actions for h in histories if h.name in troubles}
        raise AssertionError(f"not converged: {troubles}; {stories}") from None
