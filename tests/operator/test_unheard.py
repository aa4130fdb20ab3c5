"""A job whose coordinator the operator cannot reach still ends, and the reason is reported."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs
from paceline_api.status import Status
from paceline_operator.cluster import coordinator as driver
from paceline_operator.cluster.tls import operator_context
from paceline_operator.core.changes import Changes
from paceline_operator.core.clocks import Clocks
from paceline_operator.core.keys import job_keys
from paceline_operator.core.observed import Observed, PodEnd, Sent
from paceline_operator.core.reconcile import reconcile
from paceline_operator.core.unheard import TOLD_S, Unheard, UnreachableCause
from paceline_operator.metrics import OperatorMetrics

from testing.fake_cluster.beside import server_context
from testing.fake_cluster.observations import COORDINATOR, NOW, RUNNING, job_of, worker

RELEASED = PodEnd(0, "Completed", "finished: released with version 40", finished_s=NOW - 60)
CRASHED = PodEnd(1, "Error", "failed: out of data", finished_s=NOW - 60)
UNHEARD = Unheard(UnreachableCause.REFUSED, "10.0.0.7:7070")


def condition(changes: Changes, kind: str) -> dict[str, Any]:
    assert changes.status is not None
    return next(c for c in changes.status["conditions"] if c["type"] == kind)


# ---- the end ------------------------------------------------------------------------------------


def unheard(*ends: PodEnd | None, **fields: Any) -> Observed:
    """Return an observation without any answer of the coordinator; None marks a running worker."""
    pods = [
        worker(slot, end=end, ended_seen_s=NOW - 60 if end else 0.0)
        for slot, end in enumerate(ends)
    ]
    return Observed(pods=(*pods, COORDINATOR), sent=Sent(secret=True), **fields)


@pytest.mark.parametrize("last", [RELEASED, None, CRASHED], ids=["both", "first", "one"])
def test_a_job_without_coordinator_answers_completes_once_a_pod_was_released(
    last: PodEnd | None,
) -> None:
    """A version with which one pod was released is complete, whatever happens to others (R17)."""
    changes = reconcile(job_of(), unheard(RELEASED, last), NOW)
    assert condition(changes, "Complete")["reason"] == "JobFinished"
    assert "digits-0-1" in condition(changes, "Complete")["message"]
    assert changes.workers == ()


def test_workers_that_still_finish_have_their_grace_period() -> None:
    """One pod is released before another, which may still write the final weights."""
    observed = unheard(RELEASED, None)
    ended = reconcile(job_of(), observed, NOW)
    job = replace(job_of(), status=ended.status or {})
    later = reconcile(job, observed, NOW + 1)
    assert [deletion.name for deletion in later.delete] == []
    assert later.look_again_s is not None
    last = reconcile(job, observed, later.look_again_s)
    assert [deletion.name for deletion in last.delete] == ["digits-1-1", "digits-coordinator-1"]


def new_coordinator(observed: Observed, **fields: Any) -> Observed:
    """Return `observed` with a coordinator that was created after the end and knows no rank."""
    status = Status(coordinator="coordinator-uid", replicas=2, **fields)
    return replace(observed, coordinator=status, coordinator_heard_s=NOW)


def test_a_new_coordinator_without_ranks_does_not_revoke_completion() -> None:
    changes = reconcile(job_of(RUNNING), new_coordinator(unheard(RELEASED, RELEASED)), NOW)
    assert condition(changes, "Complete")["reason"] == "JobFinished"


def test_a_released_pod_is_not_replaced() -> None:
    """The other ranks have not reported to the new coordinator yet."""
    observed = new_coordinator(unheard(RELEASED, None))
    changes = reconcile(job_of(RUNNING), observed, NOW)
    assert changes.workers == ()
    coordinator = structs.replace(observed.coordinator or Status(), stopping=True)
    waiting = reconcile(job_of(RUNNING), replace(observed, coordinator=coordinator), NOW)
    assert waiting.workers == (), "its outcome is waited for"


def test_a_drained_pod_does_not_complete_the_job() -> None:
    drained = PodEnd(0, "Completed", "drained: scaled down", finished_s=NOW - 60)
    changes = reconcile(job_of(), unheard(drained, None), NOW)
    assert [create.name for create in changes.workers] == ["digits-0-2"]


# ---- reports to the user ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (UnreachableCause.REFUSED, "connection is refused"),
        (UnreachableCause.TIMEOUT, "NetworkPolicy"),
        (UnreachableCause.TLS, "certificate is not the job's"),
        (UnreachableCause.TOKEN, "paceline-operator-key"),
        (UnreachableCause.OTHER, "kubectl logs"),
    ],
)
@pytest.mark.parametrize("status", [{}, RUNNING], ids=["new", "running"])
def test_an_unreachable_coordinator_is_reported_with_its_cause(
    status: dict[str, Any], cause: UnreachableCause, words: str
) -> None:
    unheard_of = Unheard(cause, "10.0.0.7:7070", "its words")
    observed = unheard(None, None, unheard=unheard_of)
    first = reconcile(job_of(status), observed, NOW)
    assert first.clocks.coordinator_away_s == NOW
    assert first.look_again_s is not None
    assert first.look_again_s <= NOW + TOLD_S
    observed = replace(observed, clocks=first.clocks)
    before = reconcile(job_of(status), observed, NOW + TOLD_S - 1)
    assert not any(event.reason == "CoordinatorAway" for event in before.events)
    changes = reconcile(job_of(status), observed, NOW + TOLD_S)
    degraded = condition(changes, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "CoordinatorAway")
    assert words in degraded["message"]
    assert "10.0.0.7:7070" in degraded["message"]
    (event,) = (e for e in changes.events if e.reason == "CoordinatorAway")
    assert event.warning
    assert event.message == degraded["message"]


@pytest.mark.parametrize(
    ("cause", "words"),
    [(UnreachableCause.ANSWER, "kubectl logs"), (UnreachableCause.SHARE, "jobs")],
)
@pytest.mark.parametrize("status", [{}, RUNNING], ids=["new", "running"])
def test_refused_answers_are_reported_with_the_reason(
    status: dict[str, Any], cause: UnreachableCause, words: str
) -> None:
    """The report comes at once: the coordinator is there, and waiting fixes nothing."""
    refused = Unheard(cause, "10.0.0.7:7070", "its answer has 31457280 bytes")
    changes = reconcile(job_of(status), unheard(None, None, unheard=refused), NOW)
    degraded = condition(changes, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "AnswerRefused")
    for part in ("refuses", "10.0.0.7:7070", "its answer has 31457280 bytes", words):
        assert part in degraded["message"]
    (event,) = (e for e in changes.events if e.reason == "AnswerRefused")
    assert event.message == degraded["message"]


def test_one_refused_answer_is_not_reported_while_the_last_one_counts() -> None:
    refused = Unheard(UnreachableCause.ANSWER, "10.0.0.7:7070", "its answer has 31457280 bytes")
    observed = new_coordinator(unheard(None, None, unheard=refused))
    changes = reconcile(job_of(RUNNING), observed, NOW)
    assert not any(event.reason == "AnswerRefused" for event in changes.events)


def test_each_cause_is_reported_once() -> None:
    clocks = Clocks(coordinator_away_s=NOW - 60)
    observed = unheard(None, None, unheard=UNHEARD, clocks=clocks)
    changes = reconcile(job_of(RUNNING), observed, NOW)
    job = replace(job_of(RUNNING), status=changes.status or {})
    assert not reconcile(job, observed, NOW + 1).events
    other = replace(observed, unheard=Unheard(UnreachableCause.TOKEN, UNHEARD.address))
    assert [event.reason for event in reconcile(job, other, NOW + 1).events] == ["CoordinatorAway"]


def test_a_coordinator_that_is_not_running_yet_is_not_away() -> None:
    """Pulling its image may take minutes."""
    pods = (worker(0), replace(COORDINATOR, phase="Pending"))
    observed = Observed(pods=pods, clocks=Clocks(coordinator_away_s=NOW - 60), unheard=UNHEARD)
    changes = reconcile(job_of(), observed, NOW)
    assert not any(event.reason == "CoordinatorAway" for event in changes.events)
    assert changes.clocks.coordinator_away_s is None


# ---- the causes, over real sockets ------------------------------------------------------------

KEYS = job_keys(bytes(32), "job-uid")
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def _401(_: web.Request) -> web.StreamResponse:
    raise web.HTTPUnauthorized


async def _nonsense(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>")


@asynccontextmanager
async def serving(answer: Answer, tls: ssl.SSLContext) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/v1/status", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def missed_at(
    port: int, clock: Callable[[], float], times: int = 1
) -> list[tuple[Unheard, bool]]:
    """Return what a link to this port reports about failed requests."""
    failures: asyncio.Queue[tuple[Unheard, bool]] = asyncio.Queue()
    links = driver.Links(
        secrets_of=lambda *_: (KEYS.operator_token, operator_context(KEYS)),
        on_status=lambda *_: None,
        missed=lambda _, unheard_of, away: failures.put_nowait((unheard_of, away)),
        arrived=lambda *_: None,
        clock=clock,
        leads=lambda: True,
        metrics=OperatorMetrics(),
    )
    async with links:
        links.follow(
            ("default", "digits"),
            job_of(),
            f"https://127.0.0.1:{port}",
            key_id="",
            pods=2,
            hurry=True,
        )
        return [await asyncio.wait_for(failures.get(), 20) for _ in range(times)]


@pytest.mark.parametrize(
    ("answer", "tls", "cause"),
    [
        (_401, "job-uid", UnreachableCause.TOKEN),
        (_401, "another-job", UnreachableCause.TLS),
        (_nonsense, "job-uid", UnreachableCause.ANSWER),
    ],
)
def test_an_invalid_answer_is_reported_with_its_cause(
    answer: Answer, tls: str, cause: UnreachableCause
) -> None:
    async def scenario() -> None:
        async with serving(answer, server_context(job_keys(bytes(32), tls))) as port:
            ((unheard_of, away),) = await missed_at(port, lambda: 0.0)
            assert unheard_of.cause is cause, unheard_of
            assert unheard_of.address == f"127.0.0.1:{port}"
            assert away, "it never answered"

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.parametrize(
    ("listens", "cause"), [(False, UnreachableCause.REFUSED), (True, UnreachableCause.TIMEOUT)]
)
@pytest.mark.parametrize("after_s", [0.0, TOLD_S])
def test_refused_and_timed_out_connections_are_distinguished(
    *,
    listens: bool,
    cause: UnreachableCause,
    after_s: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A listener that never accepts stands for packets that are dropped on their way."""
    monkeypatch.setattr(driver, "CONNECT_S", 0.3)

    times_s = iter([0.0, after_s])

    async def scenario() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            if listens:
                silent.listen()
            port = silent.getsockname()[1]
            ((unheard_of, _),) = await missed_at(port, lambda: next(times_s, after_s))
            assert unheard_of.cause is cause, unheard_of
            messages = [f"the coordinator does not answer: {unheard_of.why}"] if after_s else []
            assert [record.getMessage() for record in caplog.records] == messages

    asyncio.run(scenario())


def test_failed_requests_count_as_away_only_after_a_while() -> None:
    asked = 0

    async def once(_: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise web.HTTPServiceUnavailable
        return web.json_response({})

    async def scenario() -> None:
        async with serving(once, server_context(KEYS)) as port:
            clock = lambda: driver.AWAY_S if asked > 2 else 0.0  # noqa: E731
            first, second = await missed_at(port, clock, times=2)
            assert "503" in first[0].why
            assert [away for _, away in (first, second)] == [False, True]

    asyncio.run(scenario())
