"""Messages between the ranks of a group survive packing unchanged (R51)."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.messages import Commit, Endpoints, LogPart, Start
from paceline.core.protocol.records import DataPlan, Gen, Go, LoggedMetric, Share, Trigger
from paceline.core.rank import events as ev
from paceline.core.rank import within
from paceline.core.wire import WireError
from paceline_api.ids import GenerationId, MemberId

ID = GenerationId(1, "c", 2)
ME = MemberId(0, 1, 2)
ENDS = Endpoints("fast", "data", (("more", "of it"),))
GEN = Gen(ID, (ME,), (ME,), (ME,), 4, plan=DataPlan(samples=3))
GO = Go(ID, 4, Trigger.ALL, listed=(Share(ME, 3, count=1),), ordinary=b"\1", offsets=b"\0\xff")
EVENTS: tuple[ev.Event, ...] = (
    ev.Begin("print", DataPlan(samples=8), 2, whole="w", shards=(("a", "b"),)),
    ev.Step((1, 2), 8, 4, metrics=(LoggedMetric("loss", 0.1, 2.0),)),
    ev.ChannelFailed("gone", ME, aborted=True),
    ev.Hashed(4, 2**63),
    ev.CheckpointFound(None, "damaged"),
    Commit(GEN, ME, ((ME, 1, "d"),), ME, (), ((ME, ENDS),)),
    LogPart(ID, (GO, GEN)),
    Start(GO, (ME,)),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_packing(event: ev.Event) -> None:
    ordered = within.Ordered(2**62, event)
    assert within.unpack(within.pack(ordered)) == ordered


def test_every_kind_of_event_has_its_own_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in get_args(ev.Event)]
    assert None not in tags
    assert len(set(tags)) == len(tags)


@given(st.binary(max_size=60))
def test_random_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    try:
        message = within.unpack(data)
    except WireError:
        return
    assert isinstance(message, msgspec.Struct)


@given(st.floats(allow_nan=False))
def test_a_squared_norm_keeps_its_bits(value: float) -> None:
    assert within.unpack(within.pack(within.Square(value))) == within.Square(value)
