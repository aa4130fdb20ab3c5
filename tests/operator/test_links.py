"""The operator's connections to coordinators: what they cost, and limits for a hostile one.

Real servers on the loopback interface act as coordinators. A coordinator runs in a tenant's pod and
may send anything.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from paceline_api.reasons import Reason
from paceline_api.status import HistoryEntry, Status
from paceline_operator.cluster import coordinator as cluster_coordinator
from paceline_operator.cluster.coordinator import Links
from paceline_operator.cluster.store import Key
from paceline_operator.cluster.tls import operator_context
from paceline_operator.core.coordinator_status import (
    StatusLimits,
    read_coordinator_status,
)
from paceline_operator.core.job import JobObject, read_job
from paceline_operator.core.keys import job_keys
from paceline_operator.core.observed import Sent
from paceline_operator.core.reconcile import reconcile
from paceline_operator.core.shares import Rate
from paceline_operator.core.unheard import Unheard, UnreachableCause
from paceline_operator.metrics import OperatorMetrics

from testing.fake_cluster.beside import server_context
from testing.fake_cluster.observations import (
    NOW,
    RUNNING,
    coordinator_status,
    job_of,
    training,
    worker,
)
from testing.fake_cluster.parts import job_body
from testing.loop_end import close_server

KEYS = job_keys(bytes(32), "a")
GZIP = "Content-Encoding"
MANY = 40
TLS_BYTES_MAX = 96 * 1024
"""Limit for both ends of one connection, as Python counts; asyncio's default buffers alone would
take 512 KiB."""


def job(name: str = "digits", replicas: int = 2) -> JobObject:
    body = job_body(name=name, replicas=replicas)
    body["metadata"] |= {"uid": "a", "namespace": "default", "generation": 1}
    return read_job(body)


@dataclass
class StatusRecorder:
    """A recorder of what the links report to the operator."""

    statuses: list[Status] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, _: Key, status: Status | None) -> None:
        if status is not None:
            self.statuses.append(status)
            self.news.set()


@asynccontextmanager
async def links(
    on_status: Callable[[Key, Status], None],
    *,
    metrics: OperatorMetrics | None = None,
    missed: Callable[[Key, Unheard, bool], None] = lambda *_: None,
) -> AsyncIterator[Links]:
    async with Links(
        secrets_of=lambda *_: (KEYS.operator_token, operator_context(KEYS)),
        on_status=on_status,
        missed=missed,
        arrived=lambda *_: None,
        clock=asyncio.get_running_loop().time,
        leads=lambda: True,
        metrics=metrics or OperatorMetrics(),
    ) as made:
        yield made


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while True:
            if check():
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def coordinator(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """Run a coordinator with the job's own certificate, and yield its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context(KEYS)).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.long
def test_a_connection_costs_little_memory() -> None:
    async def scenario() -> float:
        received = StatusRecorder()

        async def answer(request: web.Request) -> web.Response:
            if "after" in request.query:
                await asyncio.sleep(60)
            return web.json_response({"seq": 1})

        async with coordinator(answer) as url, links(received) as made:
            gc.collect()
            tracemalloc.start()
            for number in range(MANY):
                made.follow(
                    ("default", f"j{number}"), job(), url, key_id=KEYS.key_id, pods=2, hurry=True
                )
            async with asyncio.timeout(20):
                while len(received.statuses) < MANY:
                    received.news.clear()
                    await received.news.wait()
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            return held / MANY

    assert asyncio.run(scenario()) < TLS_BYTES_MAX


HONEST = 2
"""The `seq` of the answer that the operator may believe."""


async def heard_after(
    hostile: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> StatusRecorder:
    """Return what the links report if the first answer is hostile and the next one correct."""
    received, asked = StatusRecorder(), 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return await hostile(request) if asked == 1 else web.json_response({"seq": HONEST})

    async with coordinator(answer) as url, links(received) as made:
        made.follow(("default", "digits"), job(), url, key_id=KEYS.key_id, pods=2, hurry=True)
        async with asyncio.timeout(10):
            await received.news.wait()
    return received


def handler(body: bytes, **headers: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, headers={"Content-Type": "application/json", **headers})

    return answer


async def chunked(request: web.Request) -> web.StreamResponse:
    """Answer without a length; each byte could come in a chunk with a long extension."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'{"seq":1}')
    await response.write_eof()
    return response


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'{"seq":1,"why":"')
    try:
        while True:
            await response.write(b"x" * 65536)
    except ConnectionError:
        return response


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(handler(b'{"seq":1,"why":"' + b"x" * 2**20 + b'"}'), id="large"),
        pytest.param(endless, id="endless"),
        pytest.param(chunked, id="without a length"),
        pytest.param(handler(b'{"seq":1,"ranks":[' + b"[]," * 60_000 + b"[]]}"), id="many values"),
        pytest.param(
            handler(gzip.compress(b'{"seq":1,"why":"' + b"x" * 2**24 + b'"}'), **{GZIP: "gzip"}),
            id="compressed",
        ),
        pytest.param(handler(b'{"seq":1,"ranks":' + b"[" * 100_000), id="deep"),
        pytest.param(handler(b"[]", **{"Set-Cookie": "a=" + "b" * 10_000}), id="headers"),
        pytest.param(handler(b"no JSON"), id="nonsense"),
    ],
)
def test_a_hostile_answer_is_refused_and_the_next_one_accepted(
    hostile: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> None:
    received = asyncio.run(heard_after(hostile))
    assert [status.seq for status in received.statuses] == [HONEST]


RANK = {"member": [0, 0, 1000]}


@pytest.mark.parametrize(("pods", "taken"), [(1, False), (300, True)])
def test_the_size_limit_follows_existing_pods_and_not_the_spec(pods: int, *, taken: bool) -> None:
    """A spec may ask for 10,000 replicas of 256 processes, which costs its namespace nothing."""
    body = job_body(replicas=1, maxReplicas=10_000, procsPerReplica=1)
    body["metadata"] |= {"uid": "a", "namespace": "default", "generation": 1}
    asked = read_job(body)
    assert asked.settings is not None

    async def scenario() -> tuple[list[int], OperatorMetrics]:
        received, metrics, refused = StatusRecorder(), OperatorMetrics(), asyncio.Event()

        async def answer(_: web.Request) -> web.Response:
            return web.json_response({"seq": HONEST, "ranks": [RANK] * 300})

        def missed(*_: object) -> None:
            refused.set()

        async with (
            coordinator(answer) as url,
            links(received, metrics=metrics, missed=missed) as made,
        ):
            key = ("default", "digits")
            made.follow(key, asked, url, key_id=KEYS.key_id, pods=pods, hurry=True)
            async with asyncio.timeout(30):
                await (received.news if taken else refused).wait()
        return [status.seq for status in received.statuses], metrics

    seqs, metrics = asyncio.run(scenario())
    assert seqs == ([HONEST] if taken else [])
    assert refusals(metrics) == ({} if taken else {"count": 1.0})


def refusals(metrics: OperatorMetrics) -> dict[str, float]:
    name = "paceline_operator_answers_refused_total"
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return {each.labels["reason"]: each.value for each in samples if each.name == name}


@pytest.mark.long
def test_refused_answers_are_counted_by_reason_and_logged_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any kind of answer, and for any number of jobs in the namespace."""
    monkeypatch.setattr(cluster_coordinator, "RETRY_MAX_S", 0.1)
    answers = (b"no JSON", b"{}" + b" " * 2**22, b'{"ranks":[' + b"[]," * 99_000 + b"[]]}")
    wanted = {"form", "length", "count"}

    async def scenario() -> dict[str, float]:
        received, metrics, asked = StatusRecorder(), OperatorMetrics(), 0

        async def answer(_: web.Request) -> web.Response:
            nonlocal asked
            asked += 1
            return web.Response(body=answers[asked % len(answers)])

        async with coordinator(answer) as url, links(received, metrics=metrics) as made:
            for name in ("one", "two", "three"):
                key = ("default", name)
                made.follow(key, job(name), url, key_id=KEYS.key_id, pods=2, hurry=True)
            await until(lambda: asked >= 30 and set(refusals(metrics)) == wanted)
        assert not received.statuses
        return refusals(metrics)

    counted = asyncio.run(scenario())
    assert set(counted) == wanted
    assert sum(counted.values()) >= 20
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 1, lines
    assert "in namespace default" in lines[0]


def test_a_peers_error_message_is_shortened_and_printable() -> None:
    """The reason of a status line goes to the log, to a condition, and so to terminals."""

    async def scenario() -> str:
        failures, news = list[Unheard](), asyncio.Event()

        async def answer(_: web.Request) -> web.Response:
            return web.Response(status=500, reason="\x1b]52;c;aGk=\x07" + "x" * 5000)

        def missed(_: Key, unheard: Unheard, __: bool) -> None:
            failures.append(unheard)
            news.set()

        async with coordinator(answer) as url, links(StatusRecorder(), missed=missed) as made:
            key = ("default", "digits")
            made.follow(key, job(), url, key_id=KEYS.key_id, pods=2, hurry=True)
            async with asyncio.timeout(30):
                await news.wait()
        return failures[0].why

    why = asyncio.run(scenario())
    assert why.isprintable()
    assert len(why) < 500


def test_jobs_of_a_namespace_beyond_its_share_are_polled_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each answer is within all bounds; a job of another namespace is polled at once."""
    text = b'{"seq":1,"transport_why":"' + b"x" * 200_000 + b'"}'
    monkeypatch.setattr(cluster_coordinator, "NAMESPACE_BYTES", Rate(1.0, 3.0 * len(text)))

    async def scenario() -> tuple[dict[Key, int], set[Key], dict[str, float]]:
        metrics, answers, late = OperatorMetrics(), dict[Key, int](), set[Key]()

        async def answer(_: web.Request) -> web.Response:
            return web.Response(body=text)

        def hear(key: Key, _: Status) -> None:
            answers[key] = answers.get(key, 0) + 1

        def missed(key: Key, unheard: Unheard, _: bool) -> None:
            assert unheard.cause is UnreachableCause.SHARE, unheard
            late.add(key)

        async with coordinator(answer) as url, links(hear, metrics=metrics, missed=missed) as made:
            for number in range(10):
                key = ("greedy", f"j{number}")
                made.follow(key, job(), url, key_id=KEYS.key_id, pods=2, hurry=False)
            await until(lambda: len(late) >= 7)
            key = ("other", "digits")
            made.follow(key, job(), url, key_id=KEYS.key_id, pods=2, hurry=False)
            await until(lambda: key in answers)
        return answers, late, refusals(metrics)

    answers, late, counted = asyncio.run(scenario())
    assert sum(count for key, count in answers.items() if key[0] == "greedy") == 3
    assert answers["other", "digits"] >= 1
    assert {key[0] for key in late} == {"greedy"}
    assert set(counted) == {"share"}


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
ANSWER = HEAD + b'{"seq":2}'
FLOOD_MAX = 32 * 2**20


@pytest.mark.parametrize(
    ("first", "flood"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
        (ANSWER, b"HTTP/1.1 204 No Content\r\n\r\n"),
        (ANSWER, ANSWER),
        (HEAD, b"HTTP/1.1 200 OK\r\nX: y\r\n"),
        (b"", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000),
    ],
    ids=["100", "103", "204 after it", "answers after it", "the body is none", "headers"],
)
def test_an_endless_response_loses_its_connection(first: bytes, flood: bytes) -> None:
    """Each of these is valid HTTP for as long as the client reads."""

    async def scenario() -> int:
        sent, over = 0, asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            try:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(first)
                while sent < 2 * FLOOD_MAX:
                    writer.write(flood * 1000)
                    await writer.drain()
                    sent += 1000 * len(flood)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            over.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context(KEYS))
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with links(StatusRecorder()) as made:
            key = ("default", "digits")
            made.follow(key, job(), url, key_id=KEYS.key_id, pods=2, hurry=False)
            async with asyncio.timeout(60):
                await over.wait()
            total = sent
        await close_server(server)
        return total

    assert asyncio.run(scenario()) < FLOOD_MAX


def test_answers_are_decoded_outside_the_event_loop_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop keeps running while one answer takes long to decode."""
    begun, go_on, threads = threading.Event(), threading.Event(), list[int]()

    def slow(raw: bytearray, limits: StatusLimits) -> Status:
        threads.append(threading.get_ident())
        begun.set()
        assert go_on.wait(30)
        return read_coordinator_status(raw, limits)

    monkeypatch.setattr(cluster_coordinator, "read_coordinator_status", slow)

    async def scenario() -> StatusRecorder:
        received = StatusRecorder()

        async def answer(_: web.Request) -> web.Response:
            return web.json_response({"seq": HONEST})

        async with coordinator(answer) as url, links(received) as made:
            key = ("default", "digits")
            made.follow(key, job(), url, key_id=KEYS.key_id, pods=2, hurry=True)
            await until(begun.is_set)
            go_on.set()
            await until(lambda: received.statuses)
        return received

    try:
        assert asyncio.run(scenario()).statuses[0].seq == HONEST
    finally:
        go_on.set()
    assert threading.get_ident() not in threads


@pytest.mark.long
def test_an_answer_that_never_completes_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_coordinator, "REPLY_S", 0.3)
    monkeypatch.setattr(cluster_coordinator, "POLL_S", 0)

    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100000"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b" ")
                await asyncio.sleep(0.05)
        except ConnectionError:
            return response

    received = asyncio.run(heard_after(trickle))
    assert [status.seq for status in received.statuses] == [HONEST]


def test_redirects_are_not_followed() -> None:
    """Otherwise a tenant's coordinator could make the operator send requests inside the cluster."""

    async def scenario() -> tuple[StatusRecorder, int]:
        asked = 0

        async def elsewhere(_: web.Request) -> web.Response:
            nonlocal asked
            asked += 1
            return web.json_response({"seq": 1})

        async with coordinator(elsewhere) as other:

            async def redirect(_: web.Request) -> web.StreamResponse:
                return web.Response(status=307, headers={"Location": f"{other}/v1/status"})

            return await heard_after(redirect), asked

    received, asked = asyncio.run(scenario())
    assert [status.seq for status in received.statuses] == [HONEST]
    assert asked == 0


def test_cookies_are_not_kept() -> None:
    async def scenario() -> list[str]:
        received, cookies = StatusRecorder(), []

        async def answer(request: web.Request) -> web.Response:
            cookies.append(request.headers.get("Cookie", ""))
            return web.json_response({"seq": len(cookies)}, headers={"Set-Cookie": "a=b; Path=/"})

        async with coordinator(answer) as url, links(received) as made:
            made.follow(
                ("default", "digits"),
                job(),
                url.replace("127.0.0.1", "localhost"),
                key_id=KEYS.key_id,
                pods=2,
                hurry=True,
            )
            async with asyncio.timeout(10):
                while len(cookies) < 2:
                    received.news.clear()
                    await received.news.wait()
        return cookies

    assert set(asyncio.run(scenario())) == {""}


def test_a_large_job_may_send_a_larger_answer() -> None:
    """The answer has 1,000 ranks, each with the figures of an honest one."""
    facts = {f"a_figure_of_a_rank.{n}": 1234.56789 for n in range(40)}
    ranks = [
        {"member": [slot, 0, 1000], "state": "active", "rank": slot, "facts": facts}
        for slot in range(1000)
    ]

    async def scenario() -> StatusRecorder:
        received = StatusRecorder()

        async def answer(_: web.Request) -> web.Response:
            return web.json_response({"seq": 1, "ranks": ranks})

        async with coordinator(answer) as url, links(received) as made:
            made.follow(
                ("default", "digits"), job(), url, key_id=KEYS.key_id, pods=1000, hurry=True
            )
            async with asyncio.timeout(20):
                await received.news.wait()
        return received

    assert len(asyncio.run(scenario()).statuses[0].ranks) == 1000


def test_a_coordinator_causes_a_bounded_number_of_events() -> None:
    sent: frozenset[str] = frozenset()
    for seq in range(0, 1000, 100):
        resumed = tuple(
            HistoryEntry(seq + n, reason=Reason.RESUMED_FROM_CHECKPOINT, message="again")
            for n in range(100)
        )
        workers = [worker(slot) for slot in range(3)]
        observed = training(
            coordinator=coordinator_status(workers, history=resumed), sent=Sent(events=sent)
        )
        events = reconcile(job_of(RUNNING, replicas=3), observed, NOW).events
        sent |= {event.key for event in events}
    assert len([key for key in sent if key.startswith("resumed:")]) == 100


def test_a_job_with_a_lost_key_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    missed: list[tuple[Key, Unheard, bool]] = []

    async def scenario() -> None:
        async with Links(
            secrets_of=lambda *_: None,
            on_status=StatusRecorder(),
            missed=lambda *args: missed.append(args),
            arrived=lambda *_: None,
            clock=asyncio.get_running_loop().time,
            leads=lambda: True,
            metrics=OperatorMetrics(),
        ) as made:
            for _ in range(3):
                made.follow(
                    ("a", "digits"), job(), "https://x", key_id="0ld0ld00", pods=2, hurry=True
                )
            assert made.connected == 0

    asyncio.run(scenario())
    assert caplog.text.count("0ld0ld00") == 1
    ((_, failure, away),) = missed
    assert (failure.cause, failure.detail, away) == (UnreachableCause.KEY, "0ld0ld00", True)
