"""Messages <-> bytes. Fast path: msgpack with a version byte in front; slow path: JSON.

A message that does not decode is a fault of the sender and never changes state: `WireError`.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from paceline.core import messages

WIRE_VERSION: Final = 2

T = TypeVar("T")


class WireError(Exception):
    """Bytes that are no message of this version."""


_pack = msgspec.msgpack.Encoder().encode
_json = msgspec.json.Encoder().encode
_peer: msgspec.msgpack.Decoder[messages.PeerMessage] = msgspec.msgpack.Decoder(messages.PeerMessage)
_from_rank: msgspec.json.Decoder[messages.RankMessage] = msgspec.json.Decoder(messages.RankMessage)
_from_agent: msgspec.json.Decoder[messages.AgentMessage] = msgspec.json.Decoder(
    messages.AgentMessage
)
_to_rank: msgspec.json.Decoder[messages.ToRank | messages.BeatEvery] = msgspec.json.Decoder(
    messages.ToRank | messages.BeatEvery
)
_to_agent: msgspec.json.Decoder[messages.ToAgent | messages.BeatEvery] = msgspec.json.Decoder(
    messages.ToAgent | messages.BeatEvery
)


def pack_peer(message: messages.PeerMessage) -> bytes:
    return bytes((WIRE_VERSION,)) + _pack(message)


def unpack_peer(data: bytes | memoryview) -> messages.PeerMessage:
    if not len(data) or data[0] != WIRE_VERSION:
        raise WireError(
            f"wire version {data[0] if len(data) else 'missing'}, expected {WIRE_VERSION}"
        )
    return _decode(_peer, data[1:])


def to_json(message: msgspec.Struct) -> str:
    return _json(message).decode()


def rank_message(text: str | bytes) -> messages.RankMessage:
    return _decode(_from_rank, text)


def agent_message(text: str | bytes) -> messages.AgentMessage:
    return _decode(_from_agent, text)


def message_to_rank(text: str | bytes) -> messages.ToRank | messages.BeatEvery:
    return _decode(_to_rank, text)


def message_to_agent(text: str | bytes) -> messages.ToAgent | messages.BeatEvery:
    return _decode(_to_agent, text)


def body(kind: type[T], text: str | bytes) -> T:
    """An HTTP body of the slow path."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(str(error)) from None


def _decode(decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T], data: object) -> T:
    try:
        return decoder.decode(data)  # type: ignore[arg-type]
    except msgspec.MsgspecError as error:
        raise WireError(str(error)) from None
