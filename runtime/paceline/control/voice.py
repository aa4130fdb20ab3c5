"""The voice of a pod at its coordinator (R43): one connection for the agent and all of its ranks.

Whom it tells what is decided in `core.agent.relay`; here that meets the connection. Packets come
from the ranks, and go to them, by whatever carries them.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final

from paceline.control.client import ControlClient, Pace
from paceline.core import wire
from paceline.core.agent.relay import Relay
from paceline.core.messages import (
    AgentDone,
    AgentHello,
    BeatEvery,
    Introduce,
    Network,
    RankDead,
    RankStarted,
    Register,
    ToAgent,
    ToPod,
)
from paceline.core.protocol.ids import MemberId
from paceline.refusals import Entry, Reason, refuse

log = logging.getLogger("paceline.agent")

PACE: Final = Pace(beat_s=0.2, ping_s=5.0, retry_s=0.1, retry_max_s=2.0)
INTRODUCTIONS_S: Final = 0.2
"""The greeting of a new connection waits so long for the ranks' own words. Who is later, for
instance because he is stopped, is not in it."""
FAREWELL_S: Final = 10.0
"""How long an agent whose ranks have ended tries to say so; the inventory says it too (R25)."""

Carriers = tuple[tuple[MemberId, Network], ...]


class PodVoice:
    """Lives on one event loop. The agent works on while the coordinator is away (C3)."""

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
        pace: Pace = PACE,
    ) -> None:
        """`token`: asked before each connection. `tell`: a packet to a rank. It may be lost, if
        `anew` is called then."""
        self._relay, self._hello, self._obey, self._tell = relay, hello, obey, tell
        self._introduced = asyncio.Event()
        self._rhythm: bytes = b""
        """What the coordinator has said of it over this connection."""
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
        return self._client.connected

    @property
    def connections(self) -> int:
        """So many there have been."""
        return self._client.connections

    async def run(self) -> None:
        """Until `finish`, or for ever."""
        await self._client.run()

    def send(self, message: RankStarted | RankDead) -> None:
        """The agent's own word: kept until it can be said."""
        self._client.send(message)

    async def finish(self, done: AgentDone) -> bool:
        """Say that the pod has ended; true when the coordinator has read it."""
        self._client.leave(done)
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._client.left.wait()
        except TimeoutError:
            log.warning("the coordinator did not hear that this agent is done")
        return self._client.left.is_set()

    # ---- ranks ----------------------------------------------------------------------------

    def open(self, member: MemberId) -> None:
        """There is a line to this rank."""
        self._introduce(member, self._relay.open(member))

    def anew(self, member: MemberId) -> None:
        """What this rank was told is lost."""
        self._introduce(member, self._relay.anew(member))

    def heard(self, member: MemberId, data: bytes) -> None:
        """A rank says something."""
        try:
            words = self._relay.hear(member, wire.said_by_rank(data))
        except (wire.WireError, ValueError):
            refuse(Entry.RANK_PIPE, Reason.MALFORMED, f"rank {member}")
            return
        if not self._relay.awaits:
            self._introduced.set()
        for word in words:
            self._client.pass_on(word)

    def close(self, member: MemberId) -> None:
        """Its line has ended."""
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
