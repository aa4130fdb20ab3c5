"""The calls of the data channel to a transport, and its reports to the metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paceline.core.collectives.select import Method
from paceline.core.messages import Endpoints
from paceline.core.rank import events as ev
from paceline.transport.base import Abort, PeerLost
from paceline.transport.solo import NoTransport
from paceline.worker.data_channel import DataChannel
from paceline_api.ids import GenerationId, MemberId

MEMBERS = MemberId(0, 0, 0), MemberId(1, 0, 0)
SEGMENTS = [torch.ones(4), torch.ones(2), torch.ones(8)]


class Queueing(NoTransport):
    """A transport that sums nothing and records its calls."""

    def __init__(self, *, fails_at: int = -1) -> None:
        super().__init__()
        self.asked: list[tuple[str, list[int]]] = []
        self.fails_at = fails_at

    def open(self, *_: Any) -> None:
        pass

    def allreduce(self, buffers: Sequence[torch.Tensor], *_: Any) -> None:
        self.asked.append(("one", [len(buffer) for buffer in buffers]))

    def allreduce_in_turn(
        self, buffers: Sequence[torch.Tensor], _: Abort, __: str, summed: Callable[[], None]
    ) -> None:
        self.asked.append(("in turn", [len(buffer) for buffer in buffers]))
        for number, _buffer in enumerate(buffers):
            if number == self.fails_at:
                raise PeerLost("rank 1 has gone", 1)
            summed()

    def allreduce_rounded(
        self, buffers: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], *_: Any
    ) -> None:
        self.asked.append(("rounded", [len(part) for part in (*buffers, *residuals)]))


class Noted:
    """Stands in for the metrics and records what is reported."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.times: list[int] = []
        self.failures: list[str] = []

    def opened(self, *_: Any) -> None:
        pass

    def carried(self, _: Method, payload_bytes: int, begun_ns: int, ended_ns: int) -> None:
        self.bytes.append(payload_bytes)
        self.times += [begun_ns, ended_ns]

    def failed(self, method: Method) -> None:
        self.failures.append(method.transport)


def opened(transport: Queueing) -> tuple[DataChannel, Noted]:
    noted: Any = Noted()
    channel = DataChannel(transport, Abort(), noted)
    commit: Any = SimpleNamespace(
        gen=SimpleNamespace(id=GenerationId(1, "c", 1), members=MEMBERS),
        endpoints=tuple((member, Endpoints("", "")) for member in MEMBERS),
    )
    assert isinstance(channel.open(commit, MEMBERS[0]), ev.ChannelOpened)
    return channel, noted


def test_each_segment_is_reported_and_no_time_is_counted_twice() -> None:
    """Check the times of each segment.

    Several may be in flight: if their times overlapped, bytes per second would be too high.
    """
    transport = Queueing()
    channel, noted = opened(transport)
    assert channel.sum(SEGMENTS) is None
    assert channel.sum(SEGMENTS, [None, None, None]) is None
    assert transport.asked == [("in turn", [4, 2, 8])] * 2
    assert noted.bytes == [16, 8, 32] * 2
    assert noted.times == sorted(noted.times)


def test_rounded_segments_are_reduced_one_by_one_with_their_residuals() -> None:
    transport = Queueing()
    channel, noted = opened(transport)
    assert channel.sum(SEGMENTS, [torch.zeros(4), None, torch.zeros(8)]) is None
    assert transport.asked == [("rounded", [4, 4]), ("one", [2]), ("rounded", [8, 8])]
    assert noted.bytes == [8, 8, 16]


@pytest.mark.parametrize("place", [0, 2])
def test_segments_summed_before_a_peer_was_lost_are_reported(place: int) -> None:
    channel, noted = opened(Queueing(fails_at=place))
    failed = channel.sum(SEGMENTS)
    assert isinstance(failed, ev.ChannelFailed)
    assert failed.lost == MEMBERS[1]
    assert len(noted.bytes) == place
    assert len(noted.failures) == 1
