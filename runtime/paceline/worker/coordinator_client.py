"""A rank's connection to the coordinator: its own thread, so that a busy rank stays reachable.

Orders go to the communication thread. Those that end what it may be blocked in (PREPARE, RELEASE,
DISMISS) raise the abort flag first. Every new connection begins with Register; what an older one
may have lost is repeated by the state machine (`Connected`).
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from typing import Final

from paceline.control.client import CONNECT_S, ControlClient, Pace
from paceline.core import wire
from paceline.core.messages import (
    Figures,
    Heartbeat,
    RankMessage,
    Register,
    ToRank,
)

PACE: Final = Pace(beat_s=0.2, ping_s=10.0, retry_s=0.05, retry_max_s=1.0)


class CoordinatorLink:
    """A connection to one of `urls` in a thread of its own; all else is up to the callbacks."""

    def __init__(
        self,
        urls: tuple[str, ...],
        token: str,
        *,
        register: Callable[[], Register],
        heartbeat: Callable[[], Heartbeat],
        figures: Callable[[], Figures],
        obey: Callable[[ToRank], None],
        connected: Callable[[], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._client: ControlClient[ToRank] = ControlClient(
            urls,
            "/v1/ranks",
            token,
            pace=PACE,
            greet=register,
            beat=heartbeat,
            figures=figures,
            decode=wire.message_to_rank,
            obey=obey,
            keeps=False,
            connected=connected,
            tls=tls,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="paceline-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: RankMessage) -> None:
        """From any thread. Lost if there is no connection: the next one begins with the facts."""
        self._loop.call_soon_threadsafe(self._client.send, message)

    def close(self) -> None:
        """Say what is still to be said and end the thread; bounded."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(CONNECT_S)

    # ---- the thread -----------------------------------------------------------------------

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._client.run())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _stop(self) -> None:
        if self._client.connected:
            self._client.leave()
        else:
            self._task.cancel()
