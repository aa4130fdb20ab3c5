"""What the ranks of a group say to each other over their own lines (R50 to R54).

    lead -> the others    Welcome, Ordered, Interrupt, Total
    the others -> lead    Greeting, Said, Came, Wrote, Mail, Square

msgpack like what ranks of different members say to each other; never a pickle.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct
from paceline_api.decoding import UNDECODABLE

from paceline.core.protocol.ids import GenerationId
from paceline.core.rank.agreement import ScriptEvent
from paceline.core.rank.events import Event, Written
from paceline.core.wire import WireError

Key = tuple[str, GenerationId, int]
"""Of a message with tensors: the same for all shards."""


class Greeting(Struct, frozen=True, tag=True):
    address: str
    """Of its sockets (`PeerSockets.address`)."""


class Welcome(Struct, frozen=True, tag=True):
    """What the lead is known by, which all of its group run the machine of."""

    pid: int
    host: str
    address: str
    data: str
    port: int
    """On the loopback: where the group's process group of torch meets."""


class Ordered(Struct, frozen=True, tag=True):
    """The next event of the member, at this time of the lead's clock."""

    now_ns: int
    event: Event


class Interrupt(Struct, frozen=True, tag=True):
    """An order that interrupts has come; it follows among the events."""


class Total(Struct, frozen=True, tag=True):
    value: float


class Said(Struct, frozen=True, tag=True):
    """By the script of one rank."""

    event: ScriptEvent


class Came(Struct, frozen=True, tag=True):
    """Of an effect, on one rank."""

    event: Event


class Wrote(Struct, frozen=True, tag=True):
    """Its part of a checkpoint."""

    event: Written


class Mail(Struct, frozen=True, tag=True):
    """Tensors of its shard have arrived; they wait for those of the others."""

    key: Key


class Square(Struct, frozen=True, tag=True):
    value: float


ToLead = Greeting | Said | Came | Wrote | Mail | Square
FromLead = Welcome | Ordered | Interrupt | Total
Message = ToLead | FromLead

_pack: Final = msgspec.msgpack.Encoder().encode
_any: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    return _pack(message)


def unpack(data: bytes) -> Message:
    """Raises WireError."""
    try:
        return _any.decode(data)
    except UNDECODABLE as error:
        raise WireError(str(error)) from None
