"""A script without a job: the coordinator's state machine in the same thread, for world size 1.

One engine for both cases: what a coordinator process would answer over a socket is answered here by
the same pure machine.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode, Pacing

from paceline.clock import now_ns
from paceline.core import coordinator as core
from paceline.core.messages import BeatEvery, RankMessage, ToRank


class StandaloneCoordinator:
    """Stands in for the connection to a coordinator, on the communication thread."""

    def __init__(self, obey: Callable[[ToRank], None]) -> None:
        settings = RoundSettings(mode=Mode.FULL, pacing=Pacing.AUTO)
        config = core.Config(job="alone", replicas=1, settings=settings)
        self._coordinator = core.Coordinator(config, uid="alone", now_ns=now_ns())
        self._obey = obey

    def start(self) -> None:
        """Nothing to connect to."""

    def send(self, message: RankMessage) -> None:
        for effect in self._coordinator.handle(now_ns(), core.FromRank(message)):
            if isinstance(effect, core.ToRank):
                assert not isinstance(effect.message, BeatEvery), "one rank is no load"
                self._obey(effect.message)

    def close(self) -> None:
        """Nothing to close."""
