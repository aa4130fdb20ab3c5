"""Each rank logs once per membership which transport carries its sums."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from paceline.core.messages import Endpoints
from paceline.core.rank import events as ev
from paceline.transport.base import Abort, Group
from paceline.worker.data_channel import DataChannel
from paceline_api.ids import GenerationId, MemberId

from testing.memory_transport import Hub, SimTransport

MEMBERS = MemberId(0, 0, 0), MemberId(1, 0, 0)


class Wired(SimTransport):
    """A transport with fixed facts that connects to nobody."""

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        pass

    def describe(self) -> dict[str, str]:
        return {"wire": "Float32", "choice.4KiB": "shm is the fastest"}


def test_the_data_channel_is_logged_once_per_membership(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics: Any = SimpleNamespace(opened=lambda *_: None)
    channel = DataChannel(Wired(Hub(), "r0"), Abort(), metrics)
    with caplog.at_level(logging.INFO, "paceline.rank"):
        for counter in (1, 2):
            commit: Any = SimpleNamespace(
                gen=SimpleNamespace(id=GenerationId(1, "c", counter), members=MEMBERS),
                endpoints=tuple((member, Endpoints("", "sim")) for member in MEMBERS),
            )
            assert isinstance(channel.open(commit, MEMBERS[0]), ev.ChannelOpened)
    message = "data channel: choice.4KiB: shm is the fastest; wire: Float32"
    assert caplog.messages == [message, message]
