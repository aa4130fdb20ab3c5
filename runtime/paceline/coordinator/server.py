"""HTTP server and timer around the state machine in `core.coordinator`.

    GET  /v1/agents       web socket of a pod: of its agent and all of its ranks (R43); first
                          message AgentHello
    GET  /v1/status       paceline_api.status.Status; ?after=SEQ&timeout=10s waits for a newer one
    POST /v1/inventory    core.messages.Inventory (R25)
    POST /v1/targets      core.messages.Targets
    POST /v1/acknowledge  the runner or operator has read the outcome; the process may end
    GET  /metrics         for Prometheus
    GET  /healthz         no token needed

The state machine decides about membership, failures and the end of the job. This module decides
what concerns connections and this process: which callers are admitted and to which path, which
connection counts for a pod, how old a status may be and when its readers are woken, and when the
process ends.

In a cluster a caller shows a certificate of the job's authority; without one it reaches only the
health check. Agents have one set of tokens, for their web sockets. The ranks of a pod know it too.
The owner of the job, which is the operator or the runner, has another token for all other paths. A
rank runs the user's code, and an inventory from it could declare other ranks dead.

Everything runs on one thread, so the events of all connections reach the state machine one after
the other. An event that it cannot handle ends the process: a new coordinator recovers from the
registrations.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar, assert_never

import msgspec
from aiohttp import web
from paceline_api.ids import pod_of
from paceline_api.names import CALLER_AGENT, CALLER_OPERATOR
from paceline_api.status import Outcome, RankPhase, Status
from paceline_api.times import NS_PER_S
from paceline_api.types.durations import parse_duration

from paceline.clock import now_ns
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
    Inventory,
    PodBeat,
    RankFigures,
    RankMessage,
    Targets,
    ToPod,
)
from paceline.refusals import RefusalReason, Refusals

log = logging.getLogger("paceline.coordinator")

AGENTS: Final = "/v1/agents"
"""Path of the web sockets of pods."""
HEALTH: Final = "/healthz"
"""Path of the health check."""
HELLO_S: Final = 10.0
"""Timeout for the first message of a web socket."""
POLL_MAX_S: Final = 60.0
"""Longest wait of a status request."""
FLUSH_S: Final = 1.0
"""How long the process waits for the last messages to be written when it ends."""
SIGNS_S: Final = 3.0
"""Time in which ranks that have to leave with this process report that they drain."""
SEE_OFF_S: Final = 20.0
"""Upper bound on the time that a leaving process waits for ranks that drain."""
LOOK_S: Final = 0.2
"""Longest interval between two looks of a leaving process at ranks that drain."""
UNLISTED_S: Final = 60.0
"""How long the agent of a pod that no inventory lists waits for an inventory that does."""

_TOKEN: Final = web.RequestKey("token", str)
"""Token of agents that the caller of a request has sent."""
_Body = TypeVar("_Body", Inventory, Targets)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


_Pod = tuple[int, int]


def _pods(message: AgentMessage | RankMessage) -> set[_Pod]:
    """Return the pods in whose name a message speaks. An agent may speak only for its own."""
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
    """Raised when the state machine could not handle an event.

    Its state may be half updated and cannot be trusted. A new coordinator has to take over.
    """


class CoordinatorServer:
    """Server of one coordinator, on one event loop.

    `app` returns what is served behind a `Front`, and `wait` returns when the process has nothing
    more to do.
    """

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
        """Prepare a server, which takes over the state machine.

        Args:
            coordinator: The state machine. No other code may call it.
            tokens: Tokens of the agents.
            operator_token: Token of the owner of the job.
            linger_s: How long the process waits, after the end of the job, for an acknowledgment.
            refusals: Counter of refused callers and messages, for the metrics.
            certificates: True if callers must show a certificate of the job's authority, as in a
                cluster (C2).
        """
        self._coordinator = coordinator
        self._tokens = tokens
        self._of_the_operator = f"Bearer {operator_token}".encode()
        self._certificates = certificates
        self._linger_s = linger_s
        self._agents: dict[_Pod, Connection] = {}
        self._sockets: set[Connection] = set()
        """All open web sockets, including those whose first message has not come."""
        self._timer: asyncio.TimerHandle | None = None
        self._seq = 0
        self._version = 0
        self._told_s = 0.0
        """Time at which waiting readers were last informed of a new version."""
        self._encoded: tuple[float, Status, bytes] | None = None
        """The last status: when it was made, the status, and its JSON."""
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
        """Return the application, with its routes and the check of certificates and tokens."""
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
        """Wait until the process has nothing more to do.

        That is so once the job has ended and its outcome was acknowledged, or `linger_s` later;
        after `stop` or `leave`; and after the coordinator has retired.

        Returns:
            The reason why the coordinator retired; empty if it did not.

        Raises:
            BrokenError: The state machine could not handle an event.
        """
        ended = asyncio.create_task(self._ended.wait())
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait([ended, over], return_when=asyncio.FIRST_COMPLETED)
        if not self._over.is_set():
            acknowledged = asyncio.create_task(self._acknowledged.wait())
            await asyncio.wait(
                [acknowledged, over], timeout=self._linger_s, return_when=asyncio.FIRST_COMPLETED
            )
            acknowledged.cancel()
        ended.cancel()
        over.cancel()
        if self._broken is not None:
            raise BrokenError from self._broken
        return self._retired

    def stop(self) -> None:
        """Let `wait` return at once. Another coordinator can take over."""
        self._over.set()

    def leave(self) -> None:
        """Stop soon, because this process was ordered to leave, perhaps with the whole job (C5).

        Ranks that drain have to be dismissed first; `SEE_OFF_S` bounds the wait.
        """
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._see_off())

    async def _see_off(self) -> None:
        """Wait a bounded time until no rank drains, then stop."""
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
        """Return the status of the job, at most as old as `_status` allows."""
        return self._status()[0]

    def _status(self) -> tuple[Status, bytes]:
        """Return the status and its JSON.

        It is rebuilt after news. Else it is rebuilt only if the last one is older than
        `LoadBounds.report_ns`: it is made of all ranks, and requests must not become a load (R42).

        Returns:
            The status, and the same as JSON.
        """
        now_s = asyncio.get_running_loop().time()
        state = self._coordinator.state
        oldest_s = now_s - state.config.pace.report_ns(state.expected) / NS_PER_S
        cached = self._encoded
        if cached is None or cached[0] <= oldest_s or cached[1].seq != self._seq:
            status = msgspec.structs.replace(self._coordinator.status(now_ns()), seq=self._seq)
            cached = self._encoded = now_s, status, msgspec.json.encode(status)
        return cached[1], cached[2]

    # ---- events in, effects out -----------------------------------------------------------

    def post(self, event: core.Event) -> None:
        """Hand an event to the state machine and carry out its effects.

        If the state machine raises an exception, the server stops and `wait` raises BrokenError.
        After the end of the server events are ignored.

        Args:
            event: The event.
        """
        if self._over.is_set():
            return
        self._end_revoked()
        try:
            effects = self._coordinator.handle(now_ns(), event)
        except Exception as error:
            # This is a bug, or a message that breaks the protocol. The next coordinator recovers
            # from the registrations of the ranks (R1, R10).
            log.exception("an event could not be handled: %r", event)
            self._broken = error
            self._over.set()
            return
        packed: dict[int, msgspec.Raw] = {}
        for effect in core.by_pod(effects):
            self._do(effect, packed)
        is_shown = any(isinstance(effect, (core.Happened, core.JobEnded)) for effect in effects)
        if self._is_news(event) or is_shown:
            self._tell_readers()

    def _do(self, effect: core.Effect | core.ToRanks, packed: dict[int, msgspec.Raw]) -> None:
        """Carry out one effect.

        Args:
            effect: An effect, where messages to ranks are merged by pod.
            packed: Messages encoded for the same event, by identity: a COMMIT to a thousand ranks
                is encoded once.

        Raises:
            AssertionError: The effect is a `ToRank`, which `by_pod` should have merged.
        """
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
        """Return True if waiting readers of the status are to be woken for this event."""
        match event:
            case core.FromRank(message=RankFigures()):
                return False
            case core.FromAgent(message=PodBeat() as beat):
                version = max((beat.version, *(each.version for each in beat.changed)))
                newer, self._version = version > self._version, max(version, self._version)
                return newer and self._tells_of_rounds()
            case core.Tick():
                return False
        return True

    def _tells_of_rounds(self) -> bool:
        """Return True if readers may be woken for a new version now.

        With many ranks there is always one that is first to report a round. Readers are woken as
        often as a single rank would report.

        Returns:
            False if the last time is too recent. Readers are woken later then.
        """
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
        """Serve a web socket of a pod until its end. The newest of a pod replaces an older."""
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
            caller.refuse(RefusalReason.UNKNOWN_PEER, str(error))
        except wire.WireError as error:
            caller.refuse(RefusalReason.MALFORMED, f"agent {pod}: {error}" if pod else str(error))
        except TimeoutError:
            caller.refuse(RefusalReason.TOO_SLOW, f"no first message within {HELLO_S:g} s")
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
        """Wait until an inventory lists the pod, since the pod may be newer than the inventory.

        A pod that does not belong to the job would hold it up.

        Args:
            slot: Slot of the pod.
            attempt: Attempt of the pod in that slot.

        Raises:
            _UnlistedError: No inventory has listed the pod for `UNLISTED_S`.
        """
        roster = self._coordinator.state.roster
        deadline = asyncio.get_running_loop().time() + UNLISTED_S
        while not roster.may_greet(slot, attempt):
            try:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            except TimeoutError:
                raise _UnlistedError(f"which calls itself pod {slot}#{attempt}") from None

    def _end_revoked(self) -> None:
        """Close the web sockets whose token was revoked.

        This is called with each event, and a beat of a pod is one. So a revoked token ends a
        connection within one heartbeat.
        """
        if not self._tokens.look():
            return
        for connection in list(self._sockets):
            if connection.token not in self._tokens.accepted:
                connection.refuse_token()
                connection.abort()

    async def _shut(self, _: web.Application) -> None:
        """Send what is queued for the agents, then end all of their connections."""
        connections = list(self._agents.values())
        await asyncio.gather(*(connection.flush(FLUSH_S) for connection in connections))
        for connection in connections:
            connection.abort()

    # ---- requests -------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Admit a request if its certificate and token are valid for its path.

        The health check needs neither. Tokens are compared in constant time.

        Args:
            request: The request.
            handler: The handler of its path.

        Returns:
            The handler's response, or a refusal with status 401 or 403.
        """
        if request.path == HEALTH:
            return await handler(request)
        role = CALLER_AGENT if request.path == AGENTS else CALLER_OPERATOR
        if self._certificates and caller_role(request.transport) != role:
            return _refuse(401, f"{request.path} needs a certificate of this job for {role}")
        # aiohttp keeps bytes that are not UTF-8 as surrogates. Restore the bytes that were sent.
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
        # A restarted coordinator counts from 0 again, so compare for equality and not for order.
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
    """Raised for a greeting of a pod that no inventory lists."""


def _refuse(code: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=code)
