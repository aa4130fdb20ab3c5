"""Runs a script without a job: the coordinator's state machine, in the rank itself, for one rank.

So the engine is the same with and without a job. The pure machine that answers over a socket in a
coordinator process answers here by a function call.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode, Pacing

from paceline.clock import now_ns
from paceline.core import coordinator as core
from paceline.core.messages import BeatEvery, RankMessage, ToRank


class StandaloneCoordinator:
    """Stands in for the connection to a coordinator (`ControlChannel`).

    The communication thread calls `send`; the main thread calls the rest.
    """

    def __init__(self, obey: Callable[[ToRank], None]) -> None:
        settings = RoundSettings(mode=Mode.FULL, pacing=Pacing.AUTO)
        config = core.Config(job="alone", replicas=1, settings=settings)
        self._coordinator = core.Coordinator(config, uid="alone", now_ns=now_ns())
        self._obey = obey

    def start(self) -> None:
        """Do nothing: there is no connection to make."""

    def send(self, message: RankMessage) -> None:
        """Handle a message of the rank and hand the answers to `obey` before returning."""
        for effect in self._coordinator.handle(now_ns(), core.FromRank(message)):
            if isinstance(effect, core.ToRank):
                assert not isinstance(effect.message, BeatEvery), "one rank is no load"
                self._obey(effect.message)

    def close(self) -> None:
        """Do nothing: there is no connection to close."""
