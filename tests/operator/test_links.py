"""The operator's connections to coordinators: what they cost, and what a hostile one may do to it.

Against real servers on the loopback: a coordinator runs in a tenant's pod, and says what it likes.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from paceline_api.reasons import Reason
from paceline_operator.cluster import coordinator as cluster_coordinator
from paceline_operator.cluster.coordinator import Links
from paceline_operator.cluster.store import Key
from paceline_operator.cluster.tls import pair_of, pinned
from paceline_operator.core.coordinator_status import (
    CoordinatorStatus,
    Happening,
    read_coordinator_status,
)
from paceline_operator.core.job import Job, read_job
from paceline_operator.core.keys import job_keys
from paceline_operator.core.observed import Sent
from paceline_operator.core.reconcile import reconcile
from paceline_operator.core.unheard import Cause, Unheard

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

KEYS = job_keys(bytes(32), "a")
GZIP = "Content-Encoding"
MANY = 40
TLS_BYTES_MAX = 96 * 1024
"""Of both ends of one connection, as Python counts; asyncio's own buffers alone are 512 KiB."""


def job(name: str = "digits", replicas: int = 2) -> Job:
    body = job_body(name=name, replicas=replicas)
    body["metadata"] |= {"uid": "a", "namespace": "default", "generation": 1}
    return read_job(body)


@dataclass
class Heard:
    """What the links tell the operator."""

    statuses: list[CoordinatorStatus] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, _: Key, status: CoordinatorStatus | None) -> None:
        if status is not None:
            self.statuses.append(status)
            self.news.set()


@asynccontextmanager
async def links(heard: Heard) -> AsyncIterator[Links]:
    async with Links(
        secrets_of=lambda *_: (KEYS.operator_token, pinned(pair_of(KEYS).certificate)),
        heard=heard,
        missed=lambda *_: None,
        arrived=lambda *_: None,
        clock=asyncio.get_running_loop().time,
        leads=lambda: True,
    ) as made:
        yield made


@asynccontextmanager
async def coordinator(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """The URL of a coordinator with the job's own certificate."""
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
        heard = Heard()

        async def answer(request: web.Request) -> web.Response:
            if "after" in request.query:
                await asyncio.sleep(60)
            return web.json_response({"seq": 1})

        async with coordinator(answer) as url, links(heard) as made:
            gc.collect()
            tracemalloc.start()
            for number in range(MANY):
                made.follow(("default", f"j{number}"), job(), url, key_id=KEYS.key_id, hurry=True)
            async with asyncio.timeout(20):
                while len(heard.statuses) < MANY:
                    heard.news.clear()
                    await heard.news.wait()
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            return held / MANY

    assert asyncio.run(scenario()) < TLS_BYTES_MAX


HONEST = 2
"""seq of the answer that may be believed."""


async def heard_after(hostile: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Heard:
    """A coordinator answers once in a hostile way, then as it should."""
    heard, asked = Heard(), 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return await hostile(request) if asked == 1 else web.json_response({"seq": HONEST})

    async with coordinator(answer) as url, links(heard) as made:
        made.follow(("default", "digits"), job(), url, key_id=KEYS.key_id, hurry=True)
        async with asyncio.timeout(10):
            await heard.news.wait()
    return heard


def said(body: bytes, **headers: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, headers={"Content-Type": "application/json", **headers})

    return answer


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
        pytest.param(said(b'{"seq":1,"why":"' + b"x" * 2**20 + b'"}'), id="large"),
        pytest.param(endless, id="endless"),
        pytest.param(
            said(gzip.compress(b'{"seq":1,"why":"' + b"x" * 2**24 + b'"}'), **{GZIP: "gzip"}),
            id="compressed",
        ),
        pytest.param(said(b'{"seq":1,"ranks":' + b"[" * 100_000), id="deep"),
        pytest.param(said(b"[]", **{"Set-Cookie": "a=" + "b" * 10_000}), id="headers"),
        pytest.param(said(b"no JSON"), id="nonsense"),
    ],
)
def test_what_no_coordinator_says_is_not_believed_and_stops_nothing(
    hostile: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> None:
    heard = asyncio.run(heard_after(hostile))
    assert [status.seq for status in heard.statuses] == [HONEST]


def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_coordinator, "REPLY_S", 0.3)
    monkeypatch.setattr(cluster_coordinator, "POLL_S", 0)

    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b" ")
                await asyncio.sleep(0.05)
        except ConnectionError:
            return response

    heard = asyncio.run(heard_after(trickle))
    assert [status.seq for status in heard.statuses] == [HONEST]


def test_nobody_is_followed_elsewhere() -> None:
    """Else a tenant's coordinator could have the operator ask whom it likes, from the inside."""

    async def scenario() -> tuple[Heard, int]:
        asked = 0

        async def elsewhere(_: web.Request) -> web.Response:
            nonlocal asked
            asked += 1
            return web.json_response({"seq": 1})

        async with coordinator(elsewhere) as other:

            async def redirect(_: web.Request) -> web.StreamResponse:
                return web.Response(status=307, headers={"Location": f"{other}/v1/status"})

            return await heard_after(redirect), asked

    heard, asked = asyncio.run(scenario())
    assert [status.seq for status in heard.statuses] == [HONEST]
    assert asked == 0


def test_no_cookie_is_kept() -> None:
    async def scenario() -> list[str]:
        heard, cookies = Heard(), []

        async def answer(request: web.Request) -> web.Response:
            cookies.append(request.headers.get("Cookie", ""))
            return web.json_response({"seq": len(cookies)}, headers={"Set-Cookie": "a=b; Path=/"})

        async with coordinator(answer) as url, links(heard) as made:
            made.follow(
                ("default", "digits"),
                job(),
                url.replace("127.0.0.1", "localhost"),
                key_id=KEYS.key_id,
                hurry=True,
            )
            async with asyncio.timeout(10):
                while len(cookies) < 2:
                    heard.news.clear()
                    await heard.news.wait()
        return cookies

    assert set(asyncio.run(scenario())) == {""}


def test_a_large_job_may_say_more() -> None:
    """1,000 ranks, each with the figures of an honest one."""
    facts = {f"a_figure_of_a_rank.{n}": 1234.56789 for n in range(40)}
    ranks = [
        {"member": [slot, 0, 1000], "state": "active", "rank": slot, "facts": facts}
        for slot in range(1000)
    ]

    async def scenario() -> Heard:
        heard = Heard()

        async def answer(_: web.Request) -> web.Response:
            return web.json_response({"seq": 1, "ranks": ranks})

        async with coordinator(answer) as url, links(heard) as made:
            made.follow(
                ("default", "digits"), job(replicas=1000), url, key_id=KEYS.key_id, hurry=True
            )
            async with asyncio.timeout(20):
                await heard.news.wait()
        return heard

    assert len(asyncio.run(scenario()).statuses[0].ranks) == 1000


@pytest.mark.parametrize(
    "number",
    [10**400, -(10**400), 1e308, float("inf"), float("nan")],
    ids=["whole", "negative", "large", "infinite", "none"],
)
def test_no_number_is_too_large(number: float) -> None:
    status = read_coordinator_status(
        {
            "seq": number,
            "version": number,
            "coordinator": number,
            "log": {"progress": number, "round_s": number, "rounds": {"full": number}},
            "ranks": [{"member": [number, 0, number], "rank": number, "state": number}],
        }
    )
    assert abs(status.version) <= 2**53
    assert abs(status.ranks[0].attempt) <= 2**53


def test_history_and_texts_are_cut() -> None:
    reason = "ResumedFromCheckpoint"
    happened = [{"seq": n, "reason": reason, "message": "m" * 10**5} for n in range(1000)]
    conditions = [{"type": f"t{n}", "message": "m" * 10**5} for n in range(1000)]
    status = read_coordinator_status({"happenings": happened, "conditions": conditions})
    assert [h.seq for h in status.happenings] == list(range(1000 - 256, 1000)), "the latest"
    assert len(status.conditions) == 64
    texts = [h.message for h in status.happenings]
    texts += [reason + message for reason, message in status.conditions.values()]
    assert max(map(len, texts)) < 10_000


def test_only_what_users_are_told_of_is_kept_of_a_history() -> None:
    """Of a job that goes on for long it would be more than all the rest that the operator has."""
    reasons = ["Draining", "ResumedFromCheckpoint", "RankDied", "BatchSkipped"]
    happened = [{"seq": n, "reason": each, "message": "m"} for n, each in enumerate(reasons)]
    status = read_coordinator_status({"happenings": happened})
    assert status.happenings == (Happening(1, "m"), Happening(3, "m", Reason.BATCH_SKIPPED))


def test_a_coordinator_has_a_bounded_number_of_events() -> None:
    sent: frozenset[str] = frozenset()
    for seq in range(0, 1000, 100):
        resumed = tuple(Happening(seq + n, "again") for n in range(100))
        workers = [worker(slot) for slot in range(3)]
        seen = training(
            coordinator=coordinator_status(workers, happenings=resumed), sent=Sent(events=sent)
        )
        events = reconcile(job_of(RUNNING, replicas=3), seen, NOW).events
        sent |= {event.key for event in events}
    assert len([key for key in sent if key.startswith("resumed:")]) == 100


def test_a_job_whose_key_is_lost_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    missed: list[tuple[Key, Unheard, bool]] = []

    async def scenario() -> None:
        async with Links(
            secrets_of=lambda *_: None,
            heard=Heard(),
            missed=lambda *told: missed.append(told),
            arrived=lambda *_: None,
            clock=asyncio.get_running_loop().time,
            leads=lambda: True,
        ) as made:
            for _ in range(3):
                made.follow(("a", "digits"), job(), "https://x", key_id="0ld0ld00", hurry=True)
            assert made.connected == 0

    asyncio.run(scenario())
    assert caplog.text.count("0ld0ld00") == 1
    ((_, told, away),) = missed
    assert (told.cause, told.detail, away) == (Cause.KEY, "0ld0ld00", True)
