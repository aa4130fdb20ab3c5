"""Sockets and a timer around `core.coordinator`: carries messages, decides nothing.

    GET  /v1/agents       web socket of a pod: of its agent and all of its ranks (R43); first
                          message AgentHello
    GET  /v1/status       core.status.Status; ?after=SEQ&timeout=10s waits for something newer
    POST /v1/inventory    core.messages.Inventory (R25)
    POST /v1/targets      core.messages.Targets
    POST /v1/acknowledge  the runner or operator has seen the outcome; the process may end
    GET  /metrics         for Prometheus
    GET  /healthz         no token needed

In a cluster a caller shows a certificate of the job's authority, or gets to the health check only.
Agents have one token, for their sockets, which their ranks know too. Who looks after the job has
another one, for all the rest: what a rank runs is the user's, and an inventory from it could
declare others dead.

Everything runs on one thread, so the events of all connections reach the coordinator one after the
other. An event that it cannot handle ends the process: a new one recovers from the registrations.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar, assert_never

import msgspec
from aiohttp import web
from paceline_api.names import CALLER_AGENT, CALLER_OPERATOR
from paceline_api.types.durations import parse_duration

from paceline.clock import NS_PER_S, now_ns
from paceline.control.front import BODY_S, caller_of
from paceline.control.tls import caller_role
from paceline.control.tokens import Tokens
from paceline.coordinator.connection import Connection
from paceline.coordinator.metrics import CONTENT_TYPE, Exporter
from paceline.core import wire
from paceline.core.coordinator import events as core
from paceline.core.coordinator.machine import Coordinator
from paceline.core.messages import (
    AgentDone,
    AgentHello,
    AgentMessage,
    Figures,
    Inventory,
    PodBeat,
    RankMessage,
    Targets,
    ToPod,
    pod_of,
)
from paceline.core.status import Outcome, RankPhase, Status
from paceline.refusals import Reason, Refusals

log = logging.getLogger("paceline.coordinator")

AGENTS: Final = "/v1/agents"
HEALTH: Final = "/healthz"
HELLO_S: Final = 10.0
"""For the first message of a connection."""
POLL_MAX_S: Final = 60.0
"""Longest wait of a status request."""
FLUSH_S: Final = 1.0
"""For the last messages when the process ends."""
SIGNS_S: Final = 3.0
"""Those who were told to go together with this process say so in this time."""
SEE_OFF_S: Final = 20.0
LOOK_S: Final = 0.2
UNLISTED_S: Final = 60.0
"""How long the agent of a pod that no inventory lists is kept waiting for one that does."""

_TOKEN: Final = web.RequestKey("token", str)
"""The one of the pods that the caller of a request has shown."""
_Body = TypeVar("_Body", Inventory, Targets)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


_Pod = tuple[int, int]


def _pods(message: AgentMessage | RankMessage) -> set[_Pod]:
    """Of whom it speaks: an agent may speak for its own pod only."""
    match message:
        case AgentHello(slot=slot, attempt=attempt):
            named = (*message.living, *message.dead, *(r.member for r in message.registers))
        case PodBeat(slot=slot, attempt=attempt):
            named = tuple(beat.member for beat in message.changed)
        case AgentDone(slot=slot, attempt=attempt):
            named = ()
        case _:
            return {pod_of(message.member)}
    return {(slot, attempt), *map(pod_of, named)}


class BrokenError(Exception):
    """An event could not be handled. What is half changed in memory is not to be trusted."""


class Server:
    """`app` is what is served behind a `Front`, `wait` says when this process has nothing more to
    do."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        tokens: Tokens,
        operator_token: str,
        linger_s: float,
        refusals: Refusals,
        certificates: bool = False,
    ) -> None:
        """`tokens`: of agents. `certificates`: callers must show one of the job's authority, as in
        a cluster (C2)."""
        self._coordinator = coordinator
        self._tokens = tokens
        self._of_the_operator = f"Bearer {operator_token}".encode()
        self._certificates = certificates
        self._linger_s = linger_s
        self._agents: dict[_Pod, Connection] = {}
        self._sockets: set[Connection] = set()
        """All of pods, those included that have not said yet which."""
        self._timer: asyncio.TimerHandle | None = None
        self._seq = 0
        self._version = 0
        self._told_s = 0.0
        """When waiting readers heard of a new version last."""
        self._told: tuple[float, Status, bytes] | None = None
        """The last status: when it was made, and as bytes."""
        self._later: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._acknowledged = asyncio.Event()
        self._retired = ""
        self._broken: Exception | None = None
        self._over = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._exporter = Exporter(self.status, refusals)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get(AGENTS, self._serve_agent),
                web.get("/v1/status", self._get_status),
                web.post("/v1/inventory", self._post_inventory),
                web.post("/v1/targets", self._post_targets),
                web.post("/v1/acknowledge", self._post_acknowledge),
                web.get("/metrics", self._get_metrics),
                web.get(HEALTH, self._get_health),
            ]
        )
        app.on_shutdown.append(self._shut)
        return app

    async def wait(self) -> str:
        """Why it retired; empty if the job has ended or `stop` was called. Raises BrokenError."""
        ended = asyncio.create_task(self._ended.wait())
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait([ended, over], return_when=asyncio.FIRST_COMPLETED)
        if not self._over.is_set():
            seen = asyncio.create_task(self._acknowledged.wait())
            await asyncio.wait(
                [seen, over], timeout=self._linger_s, return_when=asyncio.FIRST_COMPLETED
            )
            seen.cancel()
        ended.cancel()
        over.cancel()
        if self._broken is not None:
            raise BrokenError from self._broken
        return self._retired

    def stop(self) -> None:
        """End at the next opportunity; another coordinator can take over."""
        self._over.set()

    def leave(self) -> None:
        """This process was told to go, perhaps with all others of the job (C5)."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._see_off())

    async def _see_off(self) -> None:
        """Ranks that leave wait for somebody to dismiss them: stay for that, but not for long."""
        start_ns = now_ns()
        while self._agents and not self._over.is_set():
            past_s = (now_ns() - start_ns) / NS_PER_S
            leaves = any(r.state is RankPhase.DRAINING for r in self.status().ranks)
            if past_s > SEE_OFF_S or (past_s > SIGNS_S and not leaves):
                break
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            except TimeoutError:
                continue
        self.stop()

    def status(self) -> Status:
        return self._status()[0]

    def _status(self) -> tuple[Status, bytes]:
        """Made anew after news, else only when the last one is as old as a heartbeat may be: it is
        made of all ranks, and whoever asks must not be a load (R42)."""
        now_s = asyncio.get_running_loop().time()
        state = self._coordinator.state
        oldest_s = now_s - state.config.pace.report_ns(state.expected) / NS_PER_S
        told = self._told
        if told is None or told[0] <= oldest_s or told[1].seq != self._seq:
            status = msgspec.structs.replace(self._coordinator.status(now_ns()), seq=self._seq)
            told = self._told = now_s, status, msgspec.json.encode(status)
        return told[1], told[2]

    # ---- events in, effects out -----------------------------------------------------------

    def post(self, event: core.Event) -> None:
        """Hand an event to the coordinator and carry out what it answers."""
        if self._over.is_set():
            return
        self._end_revoked()
        try:
            effects = self._coordinator.handle(now_ns(), event)
        except Exception as error:
            # A bug, or a message that breaks the protocol. The next coordinator starts from what
            # the ranks know (R1, R10).
            log.exception("an event could not be handled: %r", event)
            self._broken = error
            self._over.set()
            return
        packed: dict[int, msgspec.Raw] = {}
        for effect in core.by_pod(effects):
            self._do(effect, packed)
        told = any(isinstance(effect, (core.Happened, core.JobEnded)) for effect in effects)
        if self._is_news(event) or told:
            self._tell_readers()

    def _do(self, effect: core.Effect | core.ToRanks, packed: dict[int, msgspec.Raw]) -> None:
        """`packed`: what was sent for the same event; a COMMIT to a thousand is packed once."""
        match effect:
            case core.ToRanks(members=members, message=message):
                if agent := self._agents.get(effect.pod):
                    key = id(message)
                    if key not in packed:
                        packed[key] = msgspec.Raw(msgspec.json.encode(message))
                    agent.send(ToPod(members, packed[key]))
            case core.ToRank():
                raise AssertionError("they are put together by pod")
            case core.ToAgent():
                if agent := self._agents.get((effect.slot, effect.attempt)):
                    agent.send(effect.message)
            case core.WakeAt():
                self._wake_at(effect.at_ns)
            case core.Happened():
                facts = "".join(f" {key}={value}" for key, value in effect.facts.items())
                log.info("%s: %s%s", effect.reason, effect.message, facts)
            case core.JobEnded():
                self._log_end(effect.outcome)
                self._ended.set()
            case core.Retire():
                log.warning("retiring: %s", effect.why)
                self._retired = effect.why
                self._over.set()
            case _:
                assert_never(effect)

    def _log_end(self, outcome: Outcome) -> None:
        word = "complete" if outcome.complete else "failed"
        log.info("job %s: %s: %s", word, outcome.reason, outcome.message)

    def _wake_at(self, at_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0, at_ns - now_ns()) / NS_PER_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.post, core.Tick())

    def _tell_readers(self) -> None:
        self._seq += 1
        self._news.set()
        self._news = asyncio.Event()

    def _is_news(self, event: core.Event) -> bool:
        """Whether a waiting reader of the status wants to hear of this event."""
        match event:
            case core.FromRank(message=Figures()):
                return False
            case core.FromAgent(message=PodBeat() as beat):
                version = max((beat.version, *(each.version for each in beat.changed)))
                newer, self._version = version > self._version, max(version, self._version)
                return newer and self._tells_of_rounds()
            case core.Tick():
                return False
        return True

    def _tells_of_rounds(self) -> bool:
        """Of many ranks one is always the first to tell of a round: readers hear of it as often as
        one rank would tell."""
        loop, state = asyncio.get_running_loop(), self._coordinator.state
        next_s = self._told_s + state.config.pace.report_ns(state.expected) / NS_PER_S
        if loop.time() >= next_s:
            self._told_s = loop.time()
            return True
        if self._later is None:
            self._later = loop.call_at(next_s, self._tell_later)
        return False

    def _tell_later(self) -> None:
        self._later, self._told_s = None, asyncio.get_running_loop().time()
        self._tell_readers()

    # ---- web sockets ----------------------------------------------------------------------

    async def _serve_agent(self, request: web.Request) -> web.StreamResponse:
        """One connection from its first message to its end. The newest of a pod counts."""
        connection, caller = Connection(request, request[_TOKEN]), caller_of(request)
        pod: _Pod | None = None
        self._sockets.add(connection)
        try:
            await connection.open()
            while text := await connection.receive(HELLO_S if pod is None else None):
                message = wire.message_of_pod(text)
                named = _pods(message)
                if pod is None:
                    if not isinstance(message, AgentHello):
                        raise wire.WireError(f"first message is {type(message).__name__}")
                    await self._listed(message.slot, message.attempt)
                    pod = message.slot, message.attempt
                    caller.know()
                    if older := self._agents.get(pod):
                        older.abort()
                    self._agents[pod] = connection
                elif self._agents.get(pod) is not connection:
                    break
                if named != {pod}:
                    raise wire.WireError(f"a message in the name of {named - {pod}}")
                self.post(core.heard(message))
        except _UnlistedError as error:
            caller.refuse(Reason.UNKNOWN_PEER, str(error))
        except wire.WireError as error:
            caller.refuse(Reason.MALFORMED, f"agent {pod}: {error}" if pod else str(error))
        except TimeoutError:
            caller.refuse(Reason.TOO_SLOW, f"no first message within {HELLO_S:g} s")
        except ConnectionError as error:
            log.info("agent %s has gone before it was answered: %s", request.remote, error)
        finally:
            self._sockets.discard(connection)
            if pod is not None and self._agents.get(pod) is connection:
                del self._agents[pod]
                self.post(core.AgentGone(*pod))
            await connection.close()
        return connection.socket

    async def _listed(self, slot: int, attempt: int) -> None:
        """Wait until the inventory lists a pod, which may be newer than that; a pod of nobody would
        hold up the job. Raises _UnlistedError."""
        roster = self._coordinator.state.roster
        deadline = asyncio.get_running_loop().time() + UNLISTED_S
        while not roster.may_greet(slot, attempt):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            except TimeoutError:
                raise _UnlistedError(f"which calls itself pod {slot}#{attempt}") from None

    def _end_revoked(self) -> None:
        """Close the sockets whose token does not count any more. Called with each event, and a pod
        that beats is one: a revoked token ends a peer within one heartbeat."""
        if not self._tokens.look():
            return
        for connection in list(self._sockets):
            if connection.token not in self._tokens.accepted:
                connection.refuse_token()
                connection.abort()

    async def _shut(self, _: web.Application) -> None:
        """Everybody gets what is queued for him, then all connections end."""
        connections = list(self._agents.values())
        await asyncio.gather(*(connection.flush(FLUSH_S) for connection in connections))
        for connection in connections:
            connection.abort()

    # ---- requests -------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """A certificate in a cluster, and a token, compared in constant time, on everything but the
        health check."""
        if request.path == HEALTH:
            return await handler(request)
        role = CALLER_AGENT if request.path == AGENTS else CALLER_OPERATOR
        if self._certificates and caller_role(request.transport) != role:
            return _refuse(401, f"{request.path} needs a certificate of this job for {role}")
        # aiohttp keeps bytes that are no UTF-8 as surrogates; these are the bytes that were sent.
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        self._end_revoked()
        shown = [
            token
            for token in self._tokens.accepted
            if hmac.compare_digest(given, f"Bearer {token}".encode())
        ]
        of_a_pod = bool(shown)
        of_the_operator = hmac.compare_digest(given, self._of_the_operator)
        if not of_a_pod and not of_the_operator:
            return _refuse(401, "the job's token is missing or wrong")
        if of_a_pod is not (request.path == AGENTS):
            return _refuse(403, f"this token is not for {request.path}")
        if of_a_pod:
            request[_TOKEN] = shown[0]
        if of_the_operator:
            caller_of(request).know()
        return await handler(request)

    async def _get_status(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "")
        try:
            wait_s = parse_duration(request.query.get("timeout", "0s")) / NS_PER_S
        except ValueError as error:
            return _refuse(400, f"timeout: {error}, for example timeout=10s")
        # A restarted coordinator counts from 0 again, hence equality and not order.
        deadline = asyncio.get_running_loop().time() + min(wait_s, POLL_MAX_S)
        while after == str(self._seq) and not self._over.is_set():
            left = deadline - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                break
        return web.Response(body=self._status()[1], content_type="application/json")

    async def _post_inventory(self, request: web.Request) -> web.Response:
        return await self._post_body(request, Inventory, core.SetInventory)

    async def _post_targets(self, request: web.Request) -> web.Response:
        return await self._post_body(request, Targets, core.SetTargets)

    async def _post_body(
        self, request: web.Request, kind: type[_Body], event: Callable[[_Body], core.Event]
    ) -> web.Response:
        try:
            async with asyncio.timeout(BODY_S):
                body = wire.body(kind, await request.read())
        except wire.WireError as error:
            return _refuse(400, str(error))
        except TimeoutError:
            return _refuse(408, f"the body of the request has not come within {BODY_S:g} s")
        self.post(event(body))
        return web.json_response({})

    async def _post_acknowledge(self, _: web.Request) -> web.Response:
        if not self._ended.is_set():
            return _refuse(409, "the job has not ended")
        self._acknowledged.set()
        return web.json_response({})

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._exporter.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _get_health(self, _: web.Request) -> web.Response:
        return web.json_response({"ok": True})


class _UnlistedError(Exception):
    """A hello of a pod that is in no inventory."""


def _refuse(code: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=code)
