"""Every message survives its way, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paceline.core import messages as m
from paceline.core import wire
from paceline.core.protocol.records import Go, Record, pack_record

CI = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
FAST = get_args(m.PeerMessage)
SLOW = [
    (kind, decode)
    for union, decode in (
        (m.RankMessage, wire.rank_message),
        (m.AgentMessage, wire.agent_message),
        (m.ToRank, wire.message_to_rank),
        (m.ToAgent, wire.message_to_agent),
    )
    for kind in get_args(union)
]

st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))


def build(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Any value that the types allow."""
    fields = msgspec.structs.fields(kind)
    return st.builds(kind, **{f.name: of(f.type) for f in fields})


def of(kind: Any) -> st.SearchStrategy[Any]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return build(kind)
    args = get_args(kind)
    if not args:
        return st.from_type(kind)
    if getattr(kind, "__origin__", None) is tuple:
        if args[-1] is Ellipsis:
            return st.lists(of(args[0]), max_size=2).map(tuple)
        return st.tuples(*(of(a) for a in args))
    if getattr(kind, "__origin__", None) is dict:
        return st.dictionaries(of(args[0]), of(args[1]), max_size=2)
    return st.one_of(*(st.none() if a is type(None) else of(a) for a in args))


@pytest.mark.parametrize("kind", FAST, ids=lambda kind: kind.__name__)
def test_fast_path(kind: type[msgspec.Struct]) -> None:
    @CI
    @given(build(kind))
    def round_trip(message: Any) -> None:
        data = wire.pack_peer(message)
        assert wire.unpack_peer(data) == message
        assert wire.unpack_peer(memoryview(data)) == message
        for wrong in (b"", data[1:], bytes((wire.WIRE_VERSION + 1,)) + data[1:], data[:-1]):
            with pytest.raises(wire.WireError):
                wire.unpack_peer(wrong)

    round_trip()


@pytest.mark.parametrize(("kind", "decode"), SLOW, ids=lambda x: getattr(x, "__name__", ""))
def test_slow_path(kind: type[msgspec.Struct], decode: Any) -> None:
    @CI
    @given(build(kind))
    def round_trip(message: Any) -> None:
        text = wire.to_json(message)
        assert decode(text) == message
        assert decode(text.encode()) == message
        with pytest.raises(wire.WireError):
            decode(text[:-1])

    round_trip()


@CI
@given(build(get_args(Record)[0]))
def test_equal_records_have_equal_bytes(record: Go) -> None:
    """The digest of the log is made of them."""
    again = msgspec.msgpack.decode(pack_record(record), type=Go)
    assert again == record
    assert pack_record(again) == pack_record(record)


@pytest.mark.parametrize("kind", [m.Inventory, m.Targets], ids=lambda kind: kind.__name__)
def test_bodies(kind: type[msgspec.Struct]) -> None:
    @CI
    @given(build(kind))
    def round_trip(message: Any) -> None:
        assert wire.body(kind, wire.to_json(message)) == message

    round_trip()
    with pytest.raises(wire.WireError):
        wire.body(kind, '{"revision": "x", "replicas": "x"}')


def test_a_message_of_another_table_is_refused() -> None:
    text = wire.to_json(m.Dismiss("over"))
    for decode in (wire.rank_message, wire.agent_message, wire.message_to_agent):
        with pytest.raises(wire.WireError):
            decode(text)
