"""A pod whose end could not be reported during an outage is not deleted for its age."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import aiohttp
import pytest
from paceline_api.times import timestamp
from paceline_operator.cluster import observe
from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.observe import BREAK_S, SILENCE_S, Watch
from paceline_operator.cluster.store import Store
from paceline_operator.cluster.wire import Condition, NodeObject, NodeStatus, node_of
from paceline_operator.core.decide.backoff import SIDECAR_S
from paceline_operator.core.decide.finish import END_MARGIN_S
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Node, Observed, PodEnd
from paceline_operator.core.reconcile import reconcile
from paceline_operator.metrics import OperatorMetrics

from testing.fake_cluster.observations import COORDINATOR, NOW, job_of, worker

SETTINGS: Final = job_of().settings
assert SETTINGS is not None
GRACE_S: Final = SETTINGS.elasticity.drain_grace_ns / 1e9 + END_MARGIN_S
LOST_S: Final = SETTINGS.elasticity.node_lost_ns / 1e9
BACK_S: Final = NOW + 600
"""The time at which the API server, or a kubelet, is back."""
RUNNING = (worker(0), worker(1), COORDINATOR)


def ended(kind: str = "Complete") -> JobObject:
    condition = {"type": kind, "status": "True", "reason": "JobFinished"}
    return job_of({"completionTime": timestamp(NOW), "conditions": [condition]})


def deleted(observed: Observed, now_s: float) -> list[str]:
    return [deletion.name for deletion in reconcile(ended(), observed, now_s).delete]


# ---- decisions ---------------------------------------------------------------------------------


def test_workers_that_stay_are_deleted_after_their_grace_period() -> None:
    observed = Observed(pods=RUNNING, pods_live_s=NOW - 100)
    assert deleted(observed, NOW + GRACE_S - 1) == []
    assert deleted(observed, NOW + GRACE_S) == ["digits-0-1", "digits-1-1", "digits-coordinator-1"]


def test_no_pod_is_deleted_for_its_age_while_the_pod_watch_is_away() -> None:
    changes = reconcile(ended(), Observed(pods=RUNNING, pods_live_s=None), BACK_S)
    assert changes.delete == ()
    assert changes.look_again_s is not None
    assert changes.look_again_s > BACK_S, "it looks again, though no pod may change"


def test_the_grace_period_of_workers_begins_when_the_api_server_is_back() -> None:
    """The workers ended during the outage, and their kubelets report it in a moment."""
    observed = Observed(pods=RUNNING, pods_live_s=BACK_S)
    first = reconcile(ended(), observed, BACK_S)
    assert (first.delete, first.look_again_s) == ((), BACK_S + GRACE_S)
    finished = tuple(replace(p, phase="Succeeded", end=PodEnd(0, "")) for p in RUNNING[:2])
    assert deleted(replace(observed, pods=finished), BACK_S + GRACE_S) == []
    assert deleted(observed, BACK_S + GRACE_S) == [pod.name for pod in RUNNING]


def test_the_grace_period_of_a_sidecar_begins_when_the_api_server_is_back() -> None:
    lingers = worker(0, end=PodEnd(0, "finished"), phase="Running", ended_seen_s=NOW)
    for live_s, gone_s in ((None, None), (BACK_S, BACK_S + SIDECAR_S)):
        observed = Observed(pods=(lingers,), pods_live_s=live_s)
        assert deleted(observed, BACK_S) == []
        if gone_s is not None:
            assert deleted(observed, gone_s) == ["digits-0-1"]


@pytest.mark.parametrize(
    ("node", "due_s"),
    [
        (Node("node-0", ready=True, ready_again_s=BACK_S), BACK_S + GRACE_S),
        (Node("node-0", ready=False, not_ready_since_s=BACK_S), BACK_S + LOST_S + GRACE_S),
        (Node("node-0", ready=False, out_of_service=True), NOW + GRACE_S),
        (Node("node-0"), NOW + GRACE_S),
    ],
)
def test_the_grace_period_of_a_worker_begins_when_its_kubelet_is_back(
    node: Node, due_s: float
) -> None:
    """It also begins when the node counts as lost. Workers on other nodes do not wait for it."""
    observed = Observed(pods=RUNNING, nodes={"node-0": node, "node-1": Node("node-1")})
    assert "digits-0-1" not in deleted(observed, due_s - 1)
    assert "digits-0-1" in deleted(observed, due_s)
    assert "digits-1-1" in deleted(observed, NOW + GRACE_S)
    blind = replace(observed, nodes_fresh=False)
    assert "digits-0-1" in deleted(blind, NOW + GRACE_S), "nothing is concluded from nodes"


def test_workers_of_a_failed_job_are_deleted_at_once_even_in_an_outage() -> None:
    changes = reconcile(ended("Failed"), Observed(pods=RUNNING, pods_live_s=None), NOW + 1)
    assert {deletion.name for deletion in changes.delete} == {pod.name for pod in RUNNING}


def test_the_return_of_a_kubelet_is_recorded() -> None:
    def item(ready: bool) -> NodeObject:
        return NodeObject(status=NodeStatus([Condition(type="Ready", status=str(ready))]))

    first = node_of(item(True), None, NOW)
    assert first.ready_again_s == 0.0
    away = node_of(item(False), first, NOW + 10)
    back = node_of(item(True), away, NOW + 20)
    assert (away.not_ready_since_s, back.ready_again_s) == (NOW + 10, NOW + 20)
    assert node_of(item(True), back, NOW + 30).ready_again_s == NOW + 20, "it was not away again"


# ---- the watch ---------------------------------------------------------------------------------

LIST: Final = b'{"metadata":{"resourceVersion":"7"},"items":[]}'
REFUSED: Final = aiohttp.ClientConnectionError("refused")
TOO_OLD: Final = ApiError(410, "Expired", "too old resource version")
OVERLOADED: Final = ApiError(503, "ServiceUnavailable", "try again")


@dataclass(frozen=True)
class Step:
    """The fate of one request to the API server."""

    refused: Exception | None = None
    """The error of a request that is not answered."""
    after_s: float = 0.0
    """Time from the answer to the end of the connection, or from the request to the refusal."""
    ends: Exception | None = None
    """The error that ends the connection; None if it ends in order."""


class Server:
    """An API server with scripted answers, on a virtual clock. The first request is the list."""

    def __init__(self, *steps: Step) -> None:
        self.now_s = NOW
        self.times: list[float | None] = []
        """The `live_since_s` of the watch at each of its requests, and at the end."""
        self._steps = iter(steps)
        source = observe.pod_source(Store(lambda _: None), lambda: self.now_s, "")
        self.watch = Watch(cast("Any", self), source, lambda: self.now_s, OperatorMetrics())

    @asynccontextmanager
    async def stream(self, path: str, query: Any, *, silence_s: float) -> AsyncIterator[Any]:
        del path, silence_s
        self.times.append(self.watch.live_since_s)
        if "watch" not in query:
            yield Answer(LIST)
            return
        step = next(self._steps, None)
        if step is None:
            yield Answer()
            self.times.append(self.watch.live_since_s)
            raise asyncio.CancelledError
        if step.refused is not None:
            self.now_s += step.after_s
            raise step.refused
        yield Answer()
        self.now_s += step.after_s
        if step.ends is not None:
            raise step.ends

    def run(self, monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
        async def pause(_: float) -> None:
            return None

        async def scenario() -> None:
            with pytest.raises(asyncio.CancelledError):
                await self.watch.run()

        monkeypatch.setattr(observe, "pause", pause)
        asyncio.run(scenario())
        return self.times


class Answer:
    """A list, or a watch in which nothing happens."""

    def __init__(self, body: bytes = b"") -> None:
        self._body = body

    async def read(self) -> bytes:
        return self._body

    async def iter_any(self) -> AsyncIterator[bytes]:
        for chunk in (self._body,) if self._body else ():
            yield chunk


def test_an_outage_of_the_api_server_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(
        Step(after_s=50.0), Step(REFUSED, after_s=20.0), Step(REFUSED, after_s=20.0), Step()
    )
    assert server.run(monkeypatch) == [None, NOW, NOW, None, None, NOW + 90, NOW + 90]


def test_an_api_server_that_refuses_requests_counts_as_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list after a refusal is the first sign of life."""
    server = Server(Step(after_s=50.0), Step(OVERLOADED, after_s=30.0), Step())
    assert server.run(monkeypatch) == [None, NOW, NOW, None, NOW + 80, NOW + 80, NOW + 80]


def test_a_silent_watch_counts_as_away_until_its_new_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(Step(after_s=SILENCE_S, ends=TimeoutError()), Step())
    assert server.run(monkeypatch) == [None, NOW, None, NOW + SILENCE_S, NOW + SILENCE_S]


@pytest.mark.parametrize("ends", [None, aiohttp.ClientPayloadError("cut"), TOO_OLD])
def test_a_connection_reestablished_at_once_is_no_outage(
    monkeypatch: pytest.MonkeyPatch, ends: Exception | None
) -> None:
    """Proxies cut connections again and again, and a long grace period has to end all the same."""
    cut = Step(after_s=60.0, ends=ends)
    server = Server(cut, Step(REFUSED, after_s=BREAK_S / 2) if ends else cut, cut, cut)
    times = server.run(monkeypatch)
    assert set(times) <= {None, NOW}
    assert times[-1] == NOW
