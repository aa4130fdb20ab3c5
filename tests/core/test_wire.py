"""Every message survives encoding, and other data are rejected."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paceline.core import messages as m
from paceline.core import wire
from paceline.core.protocol.log import chain
from paceline.core.protocol.records import (
    DataPlan,
    Drop,
    DropReason,
    Gen,
    Go,
    LeftOut,
    Record,
    Request,
    Share,
    Trigger,
    pack_record,
)
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import MaxAgePolicy, Mode, Normalisation, Pacing

from testing.examples import examples

CI = settings(
    max_examples=examples(40),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
FAST = get_args(m.PeerMessage)
SLOW = [
    (kind, decode)
    for union, decode in (
        (m.RankMessage | m.AgentMessage, wire.message_of_pod),
        (m.ToRank | m.Introduce | m.BeatEvery, wire.message_to_rank),
        (m.ToAgent | m.BeatEvery, wire.message_to_pod),
        (m.RankEnvelope | None, wire.said_by_rank),
    )
    for kind in get_args(union)
    if kind is not type(None)
]

st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))


def build(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Return a strategy for any value that the types allow."""
    fields = msgspec.structs.fields(kind)
    return st.builds(kind, **{f.name: of(f.type) for f in fields})


def whole(bounds: list[msgspec.Meta]) -> st.SearchStrategy[int]:
    """Return a strategy for whole numbers within the bounds of a declaration."""
    least, most = -(2**63), 2**63 - 1
    for each in bounds:
        least = max(least, least if each.ge is None else int(each.ge))
        most = min(most, most if each.le is None else int(each.le))
        most = min(most, most if each.lt is None else int(each.lt) - 1)
    return st.integers(least, most)


def of(kind: Any) -> st.SearchStrategy[Any]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return build(kind)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: of(hints[name]) for name in kind._fields})
    args = get_args(kind)
    if get_origin(kind) is Annotated and args[0] is int:
        return whole(list(args[1:]))
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
def test_peer_messages_survive_a_round_trip(kind: type[msgspec.Struct]) -> None:
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
def test_json_messages_survive_a_round_trip(kind: type[msgspec.Struct], decode: Any) -> None:
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
    """The digest of the log is computed from these bytes."""
    again = msgspec.msgpack.decode(pack_record(record), type=Go)
    assert again == record
    assert pack_record(again) == pack_record(record)


@pytest.mark.parametrize("kind", [m.Inventory, m.Targets], ids=lambda kind: kind.__name__)
def test_request_bodies_survive_a_round_trip(kind: type[msgspec.Struct]) -> None:
    @CI
    @given(build(kind))
    def round_trip(message: Any) -> None:
        assert wire.body(kind, wire.to_json(message)) == message

    round_trip()
    with pytest.raises(wire.WireError):
        wire.body(kind, '{"revision": "x", "replicas": "x"}')


def test_a_message_to_a_pod_contains_the_packed_message_for_its_ranks() -> None:
    """A COMMIT is packed once for all pods, and unpacked by the ranks (R43)."""
    order = m.Dismiss("over")
    packed = msgspec.Raw(msgspec.json.encode(order))
    sent = wire.to_json(m.ToPod((MemberId(0, 1, 0), MemberId(0, 2, 0)), packed))
    got = wire.message_to_pod(sent)
    assert isinstance(got, m.ToPod)
    assert got.members == (MemberId(0, 1, 0), MemberId(0, 2, 0))
    assert wire.message_to_rank(bytes(got.message)) == order


def test_a_message_of_another_direction_is_rejected() -> None:
    text = wire.to_json(m.Dismiss("over"))
    for decode in (wire.message_of_pod, wire.said_by_rank, wire.message_to_pod):
        with pytest.raises(wire.WireError):
            decode(text)


SETTINGS = RoundSettings(
    mode=Mode.QUORUM,
    quorum=2,
    deadline_ns=5,
    grace_ns=7,
    late=MaxAgePolicy.DECAY,
    normalisation=Normalisation.APPLIED,
    pacing=Pacing.SAMPLES,
)
SETTINGS_BYTES = (
    "de0014a46d6f6465a651756f72756da671756f72756d02ae71756f72756d5f70657263656e7400b07261"
    "6e646f6d5f696e69746961746f72c2ab646561646c696e655f6e7305af646561646c696e655f66616374"
    "6f72cb4008000000000000a867726163655f6e7307ab67726163655f7368617265cb3fa999999999999a"
    "ad7761726d75705f726f756e647300aa66756c6c5f657665727900a76d61785f61676504a46c617465a5"
    "4465636179ac64656361795f666163746f72cb3fe0000000000000ad6e6f726d616c69736174696f6ea7"
    "4170706c696564a6706163696e67a753616d706c6573ae62656e63685f61667465725f6e7300ad627566"
    "666572735f657665727900a76f7665726c6170a44175746fa8706970656c696e6500aa686173685f6576"
    "65727964"
)
GEN_BYTES_BEFORE_SETTINGS = (
    "8aa474797065a367656ea269649301a16302a76d656d6265727392930000cd03e8930100cd07d0aa77697468"
    "5f737461746591930000cd03e8a661637469766592930000cd03e8930100cd07d0a776657273696f6e00a86c"
    "6566745f6f75749182a66d656d62657293020000a3776879a464656164a96c6f6f6b61686561649192930000"
    "cd03e802a4706c616e87a773616d706c657340a5626174636804aa616363756d756c61746501a665706f6368"
    "7302a47365656407a964726f705f6c617374c2a5737465707300a873657474696e6773"
)


def test_the_bytes_of_a_record_match_golden_values() -> None:
    """Ranks of two releases may share a log, and their digests are computed from these bytes."""
    a, b = MemberId(0, 0, 1000), MemberId(1, 0, 2000)
    gen = Gen(
        GenerationId(1, "c", 2),
        (a, b),
        with_state=(a,),
        active=(a, b),
        version=0,
        left_out=(LeftOut(MemberId(2, 0, 0), "dead"),),
        lookahead=((a, 2),),
        plan=DataPlan(samples=64, batch=4, accumulate=1, epochs=2, seed=7),
        settings=SETTINGS,
    )
    drop = Drop(DropReason.STALE, 4, (1,))
    share = Share(a, 1, 1, fresh=True, samples=4, unit=4, leases=(0,), drops=(drop,))
    go = Go(gen.id, 0, Trigger.QUORUM, (share,), request=Request(1, SETTINGS), wait_us=3)
    assert pack_record(gen).hex() == GEN_BYTES_BEFORE_SETTINGS + SETTINGS_BYTES
    assert SETTINGS_BYTES in pack_record(go).hex()
    assert chain(chain("", gen), go) == "d84666f35f724ca035a27c6d"
    assert wire.to_json(SETTINGS) == (
        '{"mode":"Quorum","quorum":2,"quorum_percent":0,"random_initiator":false,"deadline_ns":5,'
        '"deadline_factor":3.0,"grace_ns":7,"grace_share":0.05,"warmup_rounds":0,"full_every":0,'
        '"max_age":4,"late":"Decay","decay_factor":0.5,"normalisation":"Applied",'
        '"pacing":"Samples","bench_after_ns":0,"buffers_every":0,"overlap":"Auto",'
        '"pipeline":0,"hash_every":100}'
    )
