"""Messages <-> bytes. Fast path: msgpack with a version byte in front; slow path: JSON.

A message that does not decode is a fault of the sender and never changes state: `WireError`.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
from paceline_api.decoding import UNDECODABLE

from paceline.core import messages

WIRE_VERSION: Final = 2

T = TypeVar("T")


class WireError(Exception):
    """Bytes that are no message of this version."""


_pack = msgspec.msgpack.Encoder().encode
_json = msgspec.json.Encoder().encode
_peer: msgspec.msgpack.Decoder[messages.PeerMessage] = msgspec.msgpack.Decoder(messages.PeerMessage)
_from_pod: msgspec.json.Decoder[messages.AgentMessage | messages.RankMessage] = (
    msgspec.json.Decoder(messages.AgentMessage | messages.RankMessage)
)
_to_pod: msgspec.json.Decoder[messages.ToAgent | messages.ToPod | messages.BeatEvery] = (
    msgspec.json.Decoder(messages.ToAgent | messages.ToPod | messages.BeatEvery)
)
_said: msgspec.json.Decoder[messages.Said] = msgspec.json.Decoder(messages.Said)
_to_rank: msgspec.json.Decoder[messages.ToRank | messages.Introduce | messages.BeatEvery] = (
    msgspec.json.Decoder(messages.ToRank | messages.Introduce | messages.BeatEvery)
)


def pack_peer(message: messages.PeerMessage) -> bytes:
    return bytes((WIRE_VERSION,)) + _pack(message)


def unpack_peer(data: bytes | bytearray | memoryview) -> messages.PeerMessage:
    if not len(data) or data[0] != WIRE_VERSION:
        raise WireError(
            f"wire version {data[0] if len(data) else 'missing'}, expected {WIRE_VERSION}"
        )
    return _decode(_peer, data[1:])


def to_json(message: msgspec.Struct) -> str:
    return _json(message).decode()


def message_of_pod(text: str | bytes) -> messages.AgentMessage | messages.RankMessage:
    """What a coordinator reads."""
    return _decode(_from_pod, text)


def message_to_pod(
    text: str | bytes,
) -> messages.ToAgent | messages.ToPod | messages.BeatEvery:
    """What an agent reads of its coordinator."""
    return _decode(_to_pod, text)


def said_by_rank(data: str | bytes) -> messages.Said:
    """What an agent reads of its ranks."""
    return _decode(_said, data)


def message_to_rank(
    data: str | bytes | msgspec.Raw,
) -> messages.ToRank | messages.Introduce | messages.BeatEvery:
    """What a rank reads of its agent."""
    return _decode(_to_rank, data)


def body(kind: type[T], text: str | bytes) -> T:
    """An HTTP body of the slow path."""
    try:
        return msgspec.json.decode(text, type=kind)
    except UNDECODABLE as error:
        raise WireError(str(error)) from None


def _decode(decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T], data: object) -> T:
    try:
        return decoder.decode(data)  # type: ignore[arg-type]
    except UNDECODABLE as error:
        raise WireError(str(error)) from None
