"""The coordinator's server over real sockets: access, protocol violations, waiting, its end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from paceline.coordinator.server import LOOK_S, SIGNS_S
from paceline.core import wire
from paceline.core.coordinator.pace import LoadBounds
from paceline.core.messages import (
    Fatal,
    Heartbeat,
    Inventory,
    KillRank,
    PodBeat,
    Prepare,
    RankDead,
    Targets,
    ToPod,
)
from paceline_api.ids import MemberId
from paceline_api.status import RankPhase
from prometheus_client.parser import text_string_to_metric_families

from tests.coordinator.served import OPERATOR_TOKEN, TOKEN, greeting, hello, register, served, text

TIMEOUT_S = 60.0
RANK, NEIGHBOUR = MemberId(0, 0, 0), MemberId(1, 0, 0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


async def until_closed(ws: aiohttp.ClientWebSocketResponse) -> None:
    while (await ws.receive(30.0)).type is aiohttp.WSMsgType.TEXT:
        pass
    assert ws.closed


def heartbeat(who: MemberId, version: int) -> Heartbeat:
    nothing = register(who).promise
    return Heartbeat(who, nothing, nothing, version)


# ---- access ---------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "Bearer", f"Bearer {TOKEN}x", f"bearer {TOKEN}", "Bearer ü"])
@pytest.mark.parametrize("path", ["/v1/status", "/v1/agents", "/metrics", "/nothing"])
def test_every_path_needs_a_valid_token(token: str, path: str) -> None:
    async def go() -> None:
        headers = {"Authorization": token} if token else {}
        async with (
            served() as at,
            aiohttp.ClientSession(at.url, headers=headers) as stranger,
            stranger.get(path) as response,
        ):
            assert response.status == 401
            assert "token" in (await response.json())["error"]

    run(go())


@pytest.mark.parametrize(
    ("token", "method", "path"),
    [
        (TOKEN, "POST", "/v1/inventory"),
        (TOKEN, "POST", "/v1/targets"),
        (TOKEN, "POST", "/v1/acknowledge"),
        (TOKEN, "GET", "/v1/status"),
        (TOKEN, "GET", "/metrics"),
        (OPERATOR_TOKEN, "GET", "/v1/agents"),
    ],
)
def test_each_token_is_valid_for_its_own_role_only(token: str, method: str, path: str) -> None:
    """A rank runs user code, so its token must not allow an inventory, which declares pods dead."""

    async def go() -> None:
        headers = {"Authorization": f"Bearer {token}"}
        async with served() as at, aiohttp.ClientSession(at.url, headers=headers) as one:
            body = msgspec.json.encode(Inventory(1, ()))
            async with one.request(method, path, data=body) as response:
                assert response.status == 403
                assert path in (await response.json())["error"]
            assert (await at.status()).inventory == 0

    run(go())


def test_a_request_without_a_token_changes_nothing() -> None:
    async def go() -> None:
        async with served() as at, aiohttp.ClientSession(at.url) as stranger:
            body = msgspec.json.encode(Targets(replicas=9))
            async with stranger.post("/v1/targets", data=body) as response:
                assert response.status == 401
            assert (await at.status()).replicas == 2

    run(go())


def test_the_health_check_needs_no_token() -> None:
    async def go() -> None:
        async with (
            served() as at,
            aiohttp.ClientSession(at.url) as stranger,
            stranger.get("/healthz") as response,
        ):
            assert response.status == 200

    run(go())


# ---- web sockets ----------------------------------------------------------------------------


def test_a_registered_rank_stays_in_the_status_when_its_connection_closes() -> None:
    async def go() -> None:
        async with served() as at:
            ws = await at.socket(greeting(RANK))
            before = await at.status(after="0", timeout="5s")
            assert [rank.member for rank in before.ranks] == [RANK]
            await ws.close()
            after = await at.status(after=str(before.seq), timeout="5s")
            assert after.seq > before.seq, "the closed connection was no event"
            assert [rank.member for rank in after.ranks] == [RANK], "silence is not death (R25)"

    run(go())


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["{}"],
        [text(register(RANK))],
        [text(Fatal(RANK, "TooEarly", "before its agent has said hello"))],
        [text(greeting(RANK)), "nonsense"],
        [text(greeting(RANK)), text(hello(1))],
        [text(greeting(RANK)), text(register(NEIGHBOUR))],
        [text(greeting(RANK)), text(Fatal(NEIGHBOUR, "Mine", "in another's name"))],
        [text(greeting(RANK)), text(RankDead(NEIGHBOUR, -9, "in another's name", False))],
        [text(greeting(RANK)), text(PodBeat(1, 0, ((0, 0),)))],
        [text(greeting(RANK)), text(PodBeat(0, 0, ((0, 0),), changed=(heartbeat(NEIGHBOUR, 9),)))],
        [text(msgspec.structs.replace(hello(0), registers=(register(NEIGHBOUR),)))],
        [text(msgspec.structs.replace(hello(0), dead=(NEIGHBOUR,)))],
    ],
)
def test_a_protocol_violation_closes_the_connection_and_changes_nothing(words: list[str]) -> None:
    async def go() -> None:
        async with served() as at:
            ws = await at.bare_socket()
            for word in words:
                await ws.send_str(word)
            await until_closed(ws)
            status = await at.status()
            assert status.outcome is None
            assert {rank.member for rank in status.ranks} <= {RANK}

    run(go())


def test_a_new_connection_of_an_agent_replaces_the_old_one() -> None:
    async def go() -> None:
        async with served() as at:
            old = await at.socket(hello(0))
            first = await at.status(after="0", timeout="5s")
            new = await at.socket(hello(0))
            await until_closed(old)
            await at.status(after=str(first.seq), timeout="5s")
            at.server._agents[0, 0].send(KillRank(RANK, "test"))
            assert "kill-rank" in (await new.receive(30.0)).data

    run(go())


def test_an_order_for_the_ranks_of_a_pod_is_sent_once() -> None:
    """Each pod receives one message, addressed to its own ranks (R43)."""

    async def go() -> None:
        async with served(replicas=2, procs=2) as at:
            pods = []
            for slot in range(2):
                ranks = tuple(MemberId(slot, local, 0) for local in range(2))
                ready = tuple(msgspec.structs.replace(register(x), ready=True) for x in ranks)
                message = msgspec.structs.replace(greeting(*ranks), registers=ready)
                pods.append((ranks, await at.socket(message)))
            for ranks, ws in pods:
                order = msgspec.json.decode((await ws.receive(30.0)).data, type=ToPod)
                assert order.members == ranks
                assert isinstance(wire.message_to_rank(bytes(order.message)), Prepare)

    run(go())


def test_a_client_that_disconnects_before_the_answer_is_not_logged_as_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client may have timed out in the middle of its TLS handshake, for example."""

    async def gone(*_: object) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async def go() -> None:
        async with served() as at:
            with monkeypatch.context() as patched:
                patched.setattr(web.WebSocketResponse, "prepare", gone)
                with pytest.raises(aiohttp.ClientError):
                    await at.bare_socket()
            await at.socket(greeting(RANK))
            status = await at.status(after="0", timeout="5s")
            assert [rank.member for rank in status.ranks] == [RANK]

    with caplog.at_level(logging.INFO):
        run(go())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "has gone before it was answered" in caplog.text


@pytest.mark.long
def test_an_agent_that_does_not_read_is_disconnected_and_blocks_no_other() -> None:
    async def go() -> None:
        async with served() as at:
            deaf = socket.create_connection(("127.0.0.1", int(at.url.rpartition(":")[2])))
            # The window is so small that a few messages fill it.
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            request = (
                "GET /v1/agents HTTP/1.1\r\nHost: x\r\n"
                "Upgrade: websocket\r\nConnection: Upgrade\r\n"
                "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
                f"Authorization: Bearer {TOKEN}\r\n\r\n"
            )
            deaf.sendall(request.encode() + _masked_frame(text(hello(0))))
            ears = await at.socket(hello(1))
            while len(at.server._agents) < 2:
                await at.status()
            long = KillRank(RANK, "x" * 100_000)
            for _ in range(1000):
                if (0, 0) not in at.server._agents:
                    break
                at.server._agents[0, 0].send(long)
                await at.status()
            assert (0, 0) not in at.server._agents, "it still has its connection"
            at.server._agents[1, 0].send(KillRank(RANK, "heard"))
            assert "heard" in (await ears.receive(30.0)).data
            deaf.close()

    run(go())


def _masked_frame(content: str) -> bytes:
    """Return a web socket text frame of a client, masked with zeros, which change nothing."""
    data = content.encode()
    assert 126 <= len(data) < 65_536 or len(data) < 126
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return b"\x81" + size + bytes(4) + data


# ---- requests -------------------------------------------------------------------------------


def test_inventory_and_targets_reach_the_coordinator() -> None:
    async def go() -> None:
        async with served() as at:
            assert (await at.post("/v1/inventory", Inventory(7, ((0, 0),))))[0] == 200
            assert (await at.post("/v1/targets", Targets(replicas=5)))[0] == 200
            status = await at.status()
            assert (status.inventory, status.replicas) == (7, 5)

    run(go())


def test_an_invalid_request_is_answered_with_400_and_the_reason() -> None:
    async def go() -> None:
        async with served() as at:
            code, answer = await at.post("/v1/targets", {"replicas": "four"})
            assert code == 400
            assert "replicas" in answer["error"]
            async with at.http.get("/v1/status", params={"timeout": "soon"}) as response:
                assert response.status == 400

    run(go())


def test_a_long_poll_ends_with_the_next_event() -> None:
    async def go() -> None:
        async with served() as at:
            before = await at.status()
            poll = asyncio.create_task(at.status(after=str(before.seq), timeout="30s"))
            await at.post("/v1/targets", Targets(replicas=3))
            assert (await asyncio.wait_for(poll, 5.0)).replicas == 3

    run(go())


def test_a_long_poll_times_out_and_returns_at_once_after_a_restart() -> None:
    async def go() -> None:
        async with served() as at:
            before = await at.status()
            same = await at.status(after=str(before.seq), timeout="50ms")
            assert same.seq == before.seq
            # A sequence number of the previous coordinator, higher than any of this one.
            await asyncio.wait_for(at.status(after="999", timeout="30s"), 5.0)

    run(go())


def test_a_heartbeat_is_an_event_only_if_it_reports_a_new_round() -> None:
    async def go() -> None:
        async with served() as at:
            ws = await at.socket(greeting(RANK))
            status = await at.status(after="0", timeout="5s")

            async def beat(version: int) -> None:
                await ws.send_str(text(PodBeat(0, 0, ((0, 0),), version=version)))

            poll = asyncio.create_task(at.status(after=str(status.seq), timeout="30s"))
            await beat(3)
            third = await asyncio.wait_for(poll, 5.0)
            assert third.version == 3
            for _ in range(5):
                await beat(3)
            await beat(4)
            fourth = await at.status(after=str(third.seq), timeout="30s")
            assert (fourth.version, fourth.seq) == (4, third.seq + 1)

    run(go())


@pytest.mark.long
def test_status_updates_of_a_large_job_are_limited_to_its_heartbeat_interval() -> None:
    """A status covers all ranks, and some rank is always the first to report a round (R42).

    Without the limit, each heartbeat would produce a new status.
    """

    async def go() -> None:
        # Two ranks that send heartbeats as rarely as in a large job: every second.
        async with served(pace=LoadBounds(beats_per_s=2)) as at:
            ws = await at.socket(greeting(RANK))
            status = await at.status(after="0", timeout="5s")
            again = await at.status()
            assert again.wall_s == status.wall_s, "made once for all who ask"
            begun_s = asyncio.get_running_loop().time()
            polls = 0
            for version in range(1, 30):
                await ws.send_str(text(PodBeat(0, 0, ((0, 0),), version=version)))
            while status.version < 29:
                status = await at.status(after=str(status.seq), timeout="30s")
                polls += 1
            assert polls <= 2
            assert asyncio.get_running_loop().time() - begun_s < 5.0

    run(go())


def test_the_metrics_page_counts_ranks_by_state() -> None:
    async def go() -> None:
        async with served() as at:
            await at.socket(greeting(RANK))
            await at.status(after="0", timeout="5s")
            async with at.http.get("/metrics") as response:
                page = await response.text()
            samples = {
                (sample.name, *sample.labels.values()): sample.value
                for family in text_string_to_metric_families(page)
                for sample in family.samples
            }
            assert samples["paceline_ranks", "starting"] == 1
            assert samples["paceline_ranks", "active"] == 0
            assert samples[("paceline_replicas_wanted",)] == 2

    run(go())


# ---- the end --------------------------------------------------------------------------------


def test_the_server_runs_until_the_outcome_is_acknowledged() -> None:
    async def go() -> None:
        async with served(linger_s=30.0) as at:
            waiting = asyncio.create_task(at.server.wait())
            assert (await at.post("/v1/acknowledge", {}))[0] == 409
            ws = await at.socket(greeting(RANK))
            await ws.send_str(text(Fatal(RANK, "ScriptFailed", "it raised")))
            status = await at.status()
            while status.outcome is None:
                status = await at.status(after=str(status.seq), timeout="5s")
            assert (status.outcome.complete, status.outcome.reason) == (False, "ScriptFailed")
            assert not waiting.done()
            assert (await at.post("/v1/acknowledge", {}))[0] == 200
            assert await waiting == ""

    run(go())


def test_the_server_ends_without_an_acknowledgement_after_the_linger_time() -> None:
    async def go() -> None:
        async with served(linger_s=0.05) as at:
            waiting = asyncio.create_task(at.server.wait())
            ws = await at.socket(greeting(RANK))
            await ws.send_str(text(Fatal(RANK, "ScriptFailed", "it raised")))
            assert await waiting == ""

    run(go())


def test_leave_ends_the_server_at_once_if_no_rank_is_left() -> None:
    async def go() -> None:
        async with served() as at:
            waiting = asyncio.create_task(at.server.wait())
            at.server.leave()
            assert await asyncio.wait_for(waiting, 1.0) == ""

    run(go())


@pytest.mark.long
def test_leave_waits_for_ranks_that_are_leaving() -> None:
    """The whole job ends, and no rank waits for a coordinator that no longer exists (C5)."""

    async def go() -> None:
        async with served() as at:
            waiting = asyncio.create_task(at.server.wait())
            leaving = msgspec.structs.replace(register(RANK), leaving=True)
            agent = await at.socket(msgspec.structs.replace(greeting(RANK), registers=(leaving,)))
            status = await at.status()
            while not status.ranks or status.ranks[0].state is not RankPhase.DRAINING:
                status = await at.status(after=str(status.seq), timeout="5s")
            at.server.leave()
            done, _ = await asyncio.wait([waiting], timeout=SIGNS_S + 2 * LOOK_S)
            assert not done, "it went before the rank that leaves"
            await agent.close()
            assert await asyncio.wait_for(waiting, 5.0) == ""

    run(go())
