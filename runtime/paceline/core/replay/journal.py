"""What a rank writes down of a run so that it can be run again: the journal (I15).

The round log says which contributions make each round. What a contribution *is*, bit by bit,
depends on more: the weights it was computed on, what waited in the same buffer, in which order sums
were made. The journal of a rank has that, in the order in which its communication thread did it.
The journals of all ranks together hold the round log several times over, so the death of any of
them leaves no gap.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct, field

from paceline.core.protocol.ids import GenerationId, MemberId
from paceline.core.protocol.pending import BufferName, BufferOp
from paceline.core.protocol.records import Record

JOURNAL_VERSION: Final = 3
_LENGTH: Final = struct.Struct(">I")


class Opened(Struct, frozen=True, tag="opened"):
    """First entry of a journal."""

    version: int
    member: MemberId


class Logged(Struct, frozen=True, tag="logged"):
    """A record was appended to this rank's log; index and digest are those after it."""

    index: int
    digest: str
    record: Record


class Placed(Struct, frozen=True, tag="placed"):
    """The log was replaced by another rank's, which ends here: this rank has joined."""

    index: int
    digest: str


class Let(Struct, frozen=True, tag="let"):
    """The main thread goes on, with the weights of this version in the model."""

    version: int


class Stepped(Struct, frozen=True, tag="stepped"):
    """The main thread has added the gradient of these leases to GRAD."""

    leases: tuple[int, ...]
    samples: int
    unit: int
    finite: bool


class Skipped(Struct, frozen=True, tag="skipped"):
    """The script took a batch of this lease and made no step of it."""

    lease: int


class Did(Struct, frozen=True, tag="did"):
    """An operation on the gradient buffers."""

    op: BufferOp


class Gave(Struct, frozen=True, tag="gave"):
    """The contribution to an attempt at a round: what lay in `source`, times `factor`."""

    generation: GenerationId
    round: int
    source: BufferName = field(name="place")
    factor: float
    methods: tuple[str, ...]
    """The candidate that summed each buffer (`collectives.select`); empty in a group of one."""
    machines: tuple[int, ...] = ()
    """Of each member, where one of these has two levels."""


class Hashed(Struct, frozen=True, tag="hashed"):
    """Of the committed weights."""

    version: int
    value: int


class Ended(Struct, frozen=True, tag="ended"):
    """Released (R17): where the log ends, and the hash of weights, optimizer and scheduler."""

    index: int
    digest: str
    version: int
    state: str


Entry = Opened | Logged | Placed | Let | Stepped | Skipped | Did | Gave | Hashed | Ended

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def pack(entry: Entry) -> bytes:
    data = _encode(entry)
    return _LENGTH.pack(len(data)) + data


def unpack(data: bytes) -> Iterator[Entry]:
    """All whole entries; one that was cut off by the death of its writer is left out.

    Raises one of `paceline_api.decoding.UNDECODABLE` for bytes that are no journal."""
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        end = at + _LENGTH.size + length
        if end > len(data):
            return
        yield _decoder.decode(data[at + _LENGTH.size : end])
        at = end
