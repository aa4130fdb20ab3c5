"""Messages between the ranks of a group, over their own sockets (R50 to R54).

    lead -> the others    Welcome, Ordered, Interrupt, Total
    the others -> lead    Greeting, FromScript, Came, Wrote, Mail, Square

They are encoded as msgpack, like the messages between ranks of different members; never as a
pickle.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct
from paceline_api.decoding import UNDECODABLE
from paceline_api.ids import GenerationId

from paceline.core.rank.agreement import ScriptEvent
from paceline.core.rank.events import Event, Written
from paceline.core.wire import WireError

Key = tuple[str, GenerationId, int]
"""Key of a message with tensors, (kind, generation, number); the same for all shards."""


class Greeting(Struct, frozen=True, tag=True):
    """First message of a rank to the lead."""

    address: str
    """Address of its peer sockets (`PeerSockets.address`)."""


class Welcome(Struct, frozen=True, tag=True):
    """First message of the lead: the identity under which all ranks run the member's machine."""

    pid: int
    host: str
    address: str
    data: str
    port: int
    """Port on the loopback where the ranks open the group's torch process group."""


class Ordered(Struct, frozen=True, tag=True):
    """Next event of the member, with its time on the lead's clock."""

    now_ns: int
    event: Event


class Interrupt(Struct, frozen=True, tag=True):
    """Announces an order that interrupts the reduction; the order itself follows as an event."""


class Total(Struct, frozen=True, tag=True):
    """Sum over the group of the values in Square."""

    value: float


class FromScript(Struct, frozen=True, tag=True):
    """Event of the script of one rank."""

    event: ScriptEvent


class Came(Struct, frozen=True, tag=True):
    """Outcome of an effect on one rank."""

    event: Event


class Wrote(Struct, frozen=True, tag=True):
    """Outcome of writing one rank's part of a checkpoint."""

    event: Written


class Mail(Struct, frozen=True, tag=True):
    """Tensors of one shard have arrived; they wait for those of the other shards."""

    key: Key


class Square(Struct, frozen=True, tag=True):
    """Value of one rank for a sum over the group: the square of its gradient's norm (R54)."""

    value: float


ToLead = Greeting | FromScript | Came | Wrote | Mail | Square
FromLead = Welcome | Ordered | Interrupt | Total
Message = ToLead | FromLead

_pack: Final = msgspec.msgpack.Encoder().encode
_any: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Encode a message."""
    return _pack(message)


def unpack(data: bytes) -> Message:
    """Decode a message.

    Args:
        data: Bytes that were received.

    Returns:
        The message.

    Raises:
        WireError: If the bytes are not a message.
    """
    try:
        return _any.decode(data)
    except UNDECODABLE as error:
        raise WireError(str(error)) from None
