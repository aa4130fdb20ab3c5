"""A coordinator's server on a real socket, in the event loop of the test."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from paceline.clock import now_ns, wall_s
from paceline.control.front import Front
from paceline.control.tokens import Tokens
from paceline.coordinator.server import CoordinatorServer
from paceline.core.admission import Bounds
from paceline.core.coordinator.events import Config
from paceline.core.coordinator.machine import Coordinator
from paceline.core.coordinator.pace import LoadBounds
from paceline.core.messages import AgentHello, Endpoints, Register
from paceline.refusals import Entry, Refusals
from paceline_api.ids import NO_GENERATION, MemberId, pod_of
from paceline_api.status import Status

TOKEN = "the-token-of-the-ranks"
OPERATOR_TOKEN = "the-token-of-the-operator"
BOUNDS = Bounds(connections=1000, of_one_address=500)


@dataclass
class Served:
    server: CoordinatorServer
    http: aiohttp.ClientSession
    url: str
    ends: AsyncExitStack
    refusals: Refusals

    async def status(self, **params: str) -> Status:
        async with self.http.get("/v1/status", params=params) as response:
            assert response.status == 200
            return msgspec.json.decode(await response.read(), type=Status)

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.http.post(path, data=msgspec.json.encode(body)) as response:
            return response.status, await response.json()

    async def socket(
        self, first: AgentHello, token: str = TOKEN
    ) -> aiohttp.ClientWebSocketResponse:
        socket = await self.bare_socket(token)
        await socket.send_str(text(first))
        return socket

    async def bare_socket(self, token: str = TOKEN) -> aiohttp.ClientWebSocketResponse:
        calling = self.http.ws_connect("/v1/agents", headers={"Authorization": f"Bearer {token}"})
        return await self.ends.enter_async_context(calling)


def text(message: msgspec.Struct) -> str:
    return msgspec.json.encode(message).decode()


def register(member: MemberId, version: int = 0) -> Register:
    return Register(
        member=member,
        pid=1,
        host="here",
        endpoints=Endpoints(trigger="ipc:///nowhere", data="nowhere"),
        promise=NO_GENERATION,
        last=NO_GENERATION,
        version=version,
        has_state=False,
        ready=False,
    )


def hello(slot: int, attempt: int = 0) -> AgentHello:
    return AgentHello(slot, attempt, host="here", metrics="", living=(), dead=())


def greeting(*members: MemberId) -> AgentHello:
    """Return the hello of a pod with these ranks, all of which have registered."""
    slot, attempt = pod_of(members[0])
    registers = tuple(register(member) for member in members)
    return msgspec.structs.replace(hello(slot, attempt), living=members, registers=registers)


@asynccontextmanager
async def served(
    *,
    replicas: int = 2,
    procs: int = 1,
    linger_s: float = 5.0,
    pace: LoadBounds | None = None,
    bounds: Bounds = BOUNDS,
    tokens_file: Path | None = None,
) -> AsyncIterator[Served]:
    config = Config(job="job", replicas=replicas, procs=procs, pace=pace or LoadBounds())
    coordinator = Coordinator(config, uid="uid", now_ns=now_ns(), wall_s=wall_s())
    refusals = Refusals()
    server = CoordinatorServer(
        coordinator,
        tokens=Tokens(TOKEN, tokens_file),
        operator_token=OPERATOR_TOKEN,
        linger_s=linger_s,
        refusals=refusals,
    )
    front = Front(server.app(), Entry.COORDINATOR, lambda: bounds, refusals, shutdown_s=0.1)
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    await front.start(listener)
    url = f"http://{host}:{port}"
    headers = {"Authorization": f"Bearer {OPERATOR_TOKEN}"}
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(url, headers=headers, timeout=timeout) as http,
            AsyncExitStack() as ends,
        ):
            yield Served(server, http, url, ends, refusals)
    finally:
        await front.stop()
