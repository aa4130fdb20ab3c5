"""Encode and decode messages.

The fast path uses msgpack with a leading version byte, the slow path JSON.

A message that cannot be decoded is an error of the sender. It raises `WireError` and never changes
any state.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
from paceline_api.decoding import UNDECODABLE

from paceline.core import messages

WIRE_VERSION: Final = 2
"""Version of the fast path's format, in the first byte of each message."""

T = TypeVar("T")


class WireError(Exception):
    """Raised for bytes that are not a message of this version."""


_pack = msgspec.msgpack.Encoder().encode
_json = msgspec.json.Encoder().encode
_peer: msgspec.msgpack.Decoder[messages.PeerMessage] = msgspec.msgpack.Decoder(messages.PeerMessage)
_from_pod: msgspec.json.Decoder[messages.AgentMessage | messages.RankMessage] = (
    msgspec.json.Decoder(messages.AgentMessage | messages.RankMessage)
)
_to_pod: msgspec.json.Decoder[messages.ToAgent | messages.ToPod | messages.BeatEvery] = (
    msgspec.json.Decoder(messages.ToAgent | messages.ToPod | messages.BeatEvery)
)
_said: msgspec.json.Decoder[messages.RankEnvelope] = msgspec.json.Decoder(messages.RankEnvelope)
_to_rank: msgspec.json.Decoder[messages.ToRank | messages.Introduce | messages.BeatEvery] = (
    msgspec.json.Decoder(messages.ToRank | messages.Introduce | messages.BeatEvery)
)


def pack_peer(message: messages.PeerMessage) -> bytes:
    """Encode a message from one rank to another."""
    return bytes((WIRE_VERSION,)) + _pack(message)


def unpack_peer(data: bytes | bytearray | memoryview) -> messages.PeerMessage:
    """Decode a message from another rank.

    Bytes that cannot be decoded raise WireError.

    Args:
        data: The bytes of the message, with the version byte.

    Returns:
        The message.

    Raises:
        WireError: The version is missing or different.
    """
    if not len(data) or data[0] != WIRE_VERSION:
        raise WireError(
            f"wire version {data[0] if len(data) else 'missing'}, expected {WIRE_VERSION}"
        )
    return _decode(_peer, data[1:])


def to_json(message: msgspec.Struct) -> str:
    """Encode a message of the slow path."""
    return _json(message).decode()


def message_of_pod(text: str | bytes) -> messages.AgentMessage | messages.RankMessage:
    """Decode a message that a coordinator receives from an agent; raises WireError."""
    return _decode(_from_pod, text)


def message_to_pod(
    text: str | bytes,
) -> messages.ToAgent | messages.ToPod | messages.BeatEvery:
    """Decode a message that an agent receives from its coordinator; raises WireError."""
    return _decode(_to_pod, text)


def said_by_rank(data: str | bytes) -> messages.RankEnvelope:
    """Decode a message that an agent receives from one of its ranks; raises WireError."""
    return _decode(_said, data)


def message_to_rank(
    data: str | bytes | msgspec.Raw,
) -> messages.ToRank | messages.Introduce | messages.BeatEvery:
    """Decode a message that a rank receives from its agent; raises WireError."""
    return _decode(_to_rank, data)


def body(kind: type[T], text: str | bytes) -> T:
    """Decode an HTTP body of the slow path.

    Args:
        kind: Expected type.
        text: The body, as JSON.

    Returns:
        The decoded value.

    Raises:
        WireError: The body is not JSON of this type.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except UNDECODABLE as error:
        raise WireError(str(error)) from None


def _decode(decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T], data: object) -> T:
    try:
        return decoder.decode(data)  # type: ignore[arg-type]
    except UNDECODABLE as error:
        raise WireError(str(error)) from None
