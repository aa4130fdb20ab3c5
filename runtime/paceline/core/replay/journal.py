"""The journal: what a rank writes down during a run so that the run can be replayed (I15).

The round log says which contributions make each round. What a contribution *is*, bit by bit,
depends on more: the weights on which it was computed, what was pending in the same buffer, and the
order of the additions. The journal of a rank records that, in the order in which its communication
thread did it. The journals of all ranks together contain the round log several times, so the death
of any rank leaves no gap.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Struct, field
from paceline_api.ids import GenerationId, MemberId

from paceline.core.protocol.pending import BufferName, BufferOp
from paceline.core.protocol.records import Record

JOURNAL_VERSION: Final = 3
"""Version of the format, in the first entry of each journal."""
_LENGTH: Final = struct.Struct(">I")


class Opened(Struct, frozen=True, tag="opened"):
    """First entry of a journal."""

    version: int
    """JOURNAL_VERSION of the writer."""
    member: MemberId


class Logged(Struct, frozen=True, tag="logged"):
    """A record was appended to this rank's log."""

    index: int
    """Number of records in the log after it."""
    digest: str
    """Chained hash of the log after it."""
    record: Record


class Placed(Struct, frozen=True, tag="placed"):
    """The log was replaced by that of another rank: this rank has joined."""

    index: int
    """Number of records in the new log."""
    digest: str
    """Chained hash of the new log."""


class Let(Struct, frozen=True, tag="let"):
    """The main thread continues, with the weights of this version in the model."""

    version: int


class Stepped(Struct, frozen=True, tag="stepped"):
    """The main thread added the gradient of these leases to the buffer GRAD."""

    leases: tuple[int, ...]
    """Leases of the batches in the gradient."""
    samples: int
    """Number of samples in the gradient."""
    unit: int
    """Unit of the sum: the sample count for a mean loss, 1 for a sum (D3)."""
    finite: bool
    """False if the gradient contains a value that is not a number or infinite."""


class Skipped(Struct, frozen=True, tag="skipped"):
    """The script took a batch of this lease and made no step with it."""

    lease: int


class Did(Struct, frozen=True, tag="did"):
    """An operation on the gradient buffers."""

    op: BufferOp


class Gave(Struct, frozen=True, tag="gave"):
    """This rank contributed the content of `source`, times `factor`, to an attempt at a round."""

    generation: GenerationId
    """Generation of the attempt."""
    round: int
    source: BufferName = field(name="place")
    factor: float
    methods: tuple[str, ...]
    """Candidate that summed each buffer (`collectives.select`); empty in a group of one."""
    machines: tuple[int, ...] = ()
    """Machine of each member, if one of the methods has two levels; else empty."""


class Hashed(Struct, frozen=True, tag="hashed"):
    """The hash of the committed weights."""

    version: int
    """Version of the weights."""
    value: int
    """The hash."""


class Ended(Struct, frozen=True, tag="ended"):
    """The rank was released (R17)."""

    index: int
    """Number of records in the log at the end."""
    digest: str
    """Chained hash of the log at the end."""
    version: int
    """Last version of the weights."""
    state: str
    """Hash of weights, optimizer and scheduler."""


Entry = Opened | Logged | Placed | Let | Stepped | Skipped | Did | Gave | Hashed | Ended

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def pack(entry: Entry) -> bytes:
    """Encode an entry with its length in front."""
    data = _encode(entry)
    return _LENGTH.pack(len(data)) + data


def unpack(data: bytes) -> Iterator[Entry]:
    """Yield all complete entries of a journal.

    An entry that was cut off by the death of its writer is skipped. Bytes that are not a journal
    raise one of `paceline_api.decoding.UNDECODABLE`.

    Args:
        data: The content of a journal file.

    Yields:
        The entries, in order.
    """
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        end = at + _LENGTH.size + length
        if end > len(data):
            return
        yield _decoder.decode(data[at + _LENGTH.size : end])
        at = end
