"""Connection of a pod to its coordinator, for the agent and all of its ranks (R43).

`core.agent.relay` decides which message goes where; this module applies that to the connection. The
caller carries packets to and from the ranks.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final

from paceline_api.ids import MemberId
from paceline_api.types.enums import Network

from paceline.control.client import ControlClient, ControlTiming
from paceline.core import wire
from paceline.core.agent.relay import Relay
from paceline.core.messages import (
    AgentDone,
    AgentHello,
    BeatEvery,
    Introduce,
    RankDead,
    RankStarted,
    Register,
    ToAgent,
    ToPod,
)
from paceline.refusals import Entry, RefusalReason, refuse

log = logging.getLogger("paceline.agent")

PACE: Final = ControlTiming(beat_s=0.2, ping_s=5.0, retry_s=0.1, retry_max_s=2.0)
"""Intervals and timeouts of an agent's connection."""
INTRODUCTIONS_S: Final = 0.2
"""How long the greeting of a new connection waits for the registrations of the ranks. A rank that
is late, for example because it is stopped, is not in it."""
FAREWELL_S: Final = 10.0
"""Time limit for an agent to report the end of its ranks. The inventory shows it too (R25)."""

Carriers = tuple[tuple[MemberId, Network], ...]


class PodVoice:
    """Connection of one pod to its coordinator.

    It lives on one event loop, which makes all calls and callbacks. The agent continues to work
    while the coordinator is away (C3).
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        token: Callable[[], str],
        relay: Relay,
        *,
        hello: Callable[[tuple[Register, ...]], AgentHello],
        carriers: Callable[[], Carriers],
        obey: Callable[[ToAgent], None],
        tell: Callable[[MemberId, bytes], None],
        tls: ssl.SSLContext | None = None,
        pace: ControlTiming = PACE,
    ) -> None:
        """Prepare the connection; `run` opens it.

        Args:
            urls: Addresses of the coordinator, tried in turn.
            token: Returns the token; called before each connection.
            relay: State of the lines to the ranks.
            hello: Returns the greeting, from the registrations that have come.
            carriers: Returns the network that carries the data channel of each rank.
            obey: Called with each message for the agent itself.
            tell: Sends a packet to a rank. If it may have been lost, the caller has to call `anew`.
            tls: TLS settings; None for plain HTTP.
            pace: Intervals and timeouts.
        """
        self._relay, self._hello, self._obey, self._tell = relay, hello, obey, tell
        self._introduced = asyncio.Event()
        self._rhythm: bytes = b""
        """Encoded heartbeat interval from the coordinator of this connection; empty without one."""
        self._client: ControlClient[ToAgent | ToPod] = ControlClient(
            urls,
            "/v1/agents",
            token,
            pace=pace,
            greet=self._greet,
            beat=lambda: relay.beat(carriers()),
            figures=relay.figures,
            decode=wire.message_to_pod,
            obey=self._take,
            ended=self._ended,
            tls=tls,
        )

    @property
    def connected(self) -> bool:
        """True while there is a connection that was greeted."""
        return self._client.connected

    @property
    def connections(self) -> int:
        """Number of connections so far."""
        return self._client.connections

    async def run(self) -> None:
        """Keep a connection until `finish` has ended it."""
        await self._client.run()

    def send(self, message: RankStarted | RankDead) -> None:
        """Send a message of the agent itself.

        Args:
            message: Evidence about a process. It is kept until it was sent.
        """
        self._client.send(message)

    async def finish(self, done: AgentDone) -> bool:
        """Report that the pod has ended, and end the connection.

        Args:
            done: How the pod ended.

        Returns:
            True if the coordinator has read it; False after `FAREWELL_S`.
        """
        self._client.leave(done)
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._client.left.wait()
        except TimeoutError:
            log.warning("the coordinator did not hear that this agent is done")
        return self._client.left.is_set()

    # ---- ranks ----------------------------------------------------------------------------

    def open(self, member: MemberId) -> None:
        """Register the line to a new rank process."""
        self._introduce(member, self._relay.open(member))

    def anew(self, member: MemberId) -> None:
        """Make a rank register again, because messages to it were lost."""
        self._introduce(member, self._relay.anew(member))

    def receive(self, member: MemberId, data: bytes) -> None:
        """Process a packet from a rank. A malformed one is dropped and counted."""
        try:
            words = self._relay.hear(member, wire.said_by_rank(data))
        except (wire.WireError, ValueError):
            refuse(Entry.RANK_PIPE, RefusalReason.MALFORMED, f"rank {member}")
            return
        if not self._relay.awaits:
            self._introduced.set()
        for word in words:
            self._client.pass_on(word)

    def close(self, member: MemberId) -> None:
        """Remove the line of a rank, and report that to the coordinator."""
        words = self._relay.close(member)
        if not self._relay.awaits:
            self._introduced.set()
        for word in words:
            self._client.pass_on(word)

    def _introduce(self, member: MemberId, word: Introduce | None) -> None:
        if word is not None:
            self._tell(member, wire.to_json(word).encode())
            if self._rhythm:
                self._tell(member, self._rhythm)

    # ---- the connection -------------------------------------------------------------------

    async def _greet(self) -> AgentHello:
        self._introduced.clear()
        for member, word in self._relay.connect():
            self._introduce(member, word)
        if self._relay.awaits:
            try:
                async with asyncio.timeout(INTRODUCTIONS_S):
                    await self._introduced.wait()
            except TimeoutError:
                log.info("not all ranks have introduced themselves to the coordinator yet")
        return self._hello(self._relay.greet())

    def _take(self, order: ToAgent | ToPod | BeatEvery) -> None:
        match order:
            case ToPod(members=members, message=message):
                data = bytes(message)
                for member in self._relay.listeners(members):
                    self._tell(member, data)
            case BeatEvery():
                self._rhythm = wire.to_json(order).encode()
                for member in self._relay.lines:
                    self._tell(member, self._rhythm)
            case _:
                self._obey(order)

    def _ended(self) -> None:
        self._rhythm = b""
        self._relay.disconnect()
