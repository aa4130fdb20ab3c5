"""The agent's connection to the coordinator: evidence out, requests in.

The agent works on while the coordinator is away. Each new connection begins with AgentHello, which
names all processes that live and all that are known dead (C3).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final

from paceline.control.client import ControlClient, Pace
from paceline.core import wire
from paceline.core.messages import AgentBeat, AgentDone, AgentHello, ToAgent

log = logging.getLogger("paceline.agent")

PACE: Final = Pace(beat_s=1.0, ping_s=5.0, retry_s=0.1, retry_max_s=2.0)
FAREWELL_S: Final = 10.0
"""How long an agent whose ranks have ended tries to say so; the inventory says it too (R25)."""


class CoordinatorLink(ControlClient[ToAgent]):
    def __init__(
        self,
        urls: tuple[str, ...],
        token: str,
        *,
        hello: Callable[[], AgentHello],
        beat: Callable[[], AgentBeat],
        obey: Callable[[ToAgent], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(
            urls,
            "/v1/agents",
            token,
            pace=PACE,
            greet=hello,
            beat=beat,
            decode=wire.message_to_agent,
            obey=obey,
            keeps=True,
            tls=tls,
        )

    async def finish(self, done: AgentDone) -> bool:
        """Say that the pod has ended; true when the coordinator has read it."""
        self.leave(done)
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self.left.wait()
        except TimeoutError:
            log.warning("the coordinator did not hear that this agent is done")
        return self.left.is_set()
