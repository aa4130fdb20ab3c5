"""The last steps and rounds of a rank, in the same shared memory as its metrics.

Behind the metrics (`telemetry.records`) are two rings of 8-byte words. The main thread stores the
entries of steps, the communication thread those of rounds.

    ring of steps     STEPS entries of STEP_WORDS: the sequence number, then the fields of
                      `StepSample` in order
    ring of rounds    ROUNDS entries of ROUND_WORDS: ROUND_HEAD, then a column of SEGMENTS_MAX for
                      each field of `SegmentSample`, in order

The first word of an entry is its sequence number: 0 = never written, odd = being written, else
twice the number of the entry, counted from 1. A reader that observes an odd or changed number skips
the entry. Nothing is allocated for an entry: it is assembled in a scratch buffer and stored in one
copy. So all entries of a dead rank are complete, except the one that it was writing when it died.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, Final

from paceline_api.ids import MemberId

from paceline.core.anatomy.samples import (
    ROUNDS,
    SEGMENTS_MAX,
    STEPS,
    RoundSample,
    SegmentSample,
    StepSample,
)

WORD_BYTES: Final = 8
"""Size of a word, in bytes."""
STEP_WORDS: Final = 1 + len(StepSample.__struct_fields__)
"""Words of one step."""
ROUND_HEAD: Final = 13
"""Words of one round before the columns of its segments."""
(
    _,  # the sequence number
    _ROUND,
    _FLAGS,
    _ARRIVED,
    _LAST,  # 0 = none, else 1 + slot and process of the place
    _LAST_ARRIVED,
    _GO,
    _UPDATE_BEGUN,
    _UPDATE_ENDED,
    _COPY_BEGUN,
    _COPY_ENDED,
    _SEGMENTS,  # columns in use
    _TOGETHER,  # segments that share a place
) = range(ROUND_HEAD)
SEGMENT_WORDS: Final = len(SegmentSample.__struct_fields__)
"""Words of one segment: the number of columns."""
ROUND_WORDS: Final = ROUND_HEAD + SEGMENTS_MAX * SEGMENT_WORDS
"""Words of one round."""
WORDS: Final = STEPS * STEP_WORDS + ROUNDS * ROUND_WORDS
"""Words of both rings."""
STREAMED: Final = 1
"""Flag of a round: it was streamed."""
FRESH: Final = 2
"""Flag of a round: it contains a gradient of this rank that arrived in time."""
_LOCAL_BITS: Final = 16
"""Bits of the process number in the word that stores a place."""
_NOTHING: Final = memoryview(bytes(SEGMENTS_MAX * WORD_BYTES)).cast("Q")
_STEP_FIELDS: Final = Struct(f"@{STEP_WORDS - 1}Q")
"""Packs all words of a step but the sequence number in one call, which is three times as fast as
storing them one by one."""
_ROUND_FIELDS: Final = Struct(f"@{ROUND_HEAD - 1}Q")
"""Packs the words of a round between its sequence number and the columns of its segments."""


class _Ring:
    """The writing end of one ring; `scratch` is the next entry."""

    __slots__ = ("_count", "_entries", "_heads", "scratch")

    def __init__(self, words: memoryview[int], at: int, entries: int, size: int) -> None:
        self.scratch = memoryview(bytearray(size * WORD_BYTES)).cast("Q")
        places = range(at, at + entries * size, size)
        self._heads = [words[place : place + 1] for place in places]
        self._entries = [words[place : place + size] for place in places]
        self._count = 0

    def store(self) -> None:
        """Store the scratch as the next entry."""
        place, self._count = self._count % len(self._entries), self._count + 1
        head, scratch, number = self._heads[place], self.scratch, 2 * self._count
        head[0] = scratch[0] = number - 1
        self._entries[place][:] = scratch
        head[0] = number

    def release(self) -> None:
        """Release the views of the shared memory."""
        for view in (*self._heads, *self._entries):
            view.release()


class StepRing:
    """The ring of steps. Only the main thread may use it."""

    def __init__(self, words: memoryview[int]) -> None:
        self._ring = _Ring(words, 0, STEPS, STEP_WORDS)

    def write(
        self,
        *,
        began_ns: int,
        announced_ns: int,
        resumed_ns: int,
        spent_ns: Sequence[int],
        lease_ns: int,
        version: int,
        fresh: bool,
        samples: int,
    ) -> None:
        """Store one step. Times are in nanoseconds on this rank's clock.

        Args:
            began_ns: End of the previous step().
            announced_ns: Time at which step() was called.
            resumed_ns: Time at which step() returned.
            spent_ns: Duration of each `Phase`, in the order of the enum.
            lease_ns: Duration of waiting for a lease.
            version: Version of the weights with which step() returned.
            fresh: True if the gradient was applied in its own round.
            samples: Number of samples in the gradient.
        """
        ring, (_, *phases_ns) = self._ring, spent_ns
        _STEP_FIELDS.pack_into(
            ring.scratch,
            WORD_BYTES,
            began_ns,
            announced_ns,
            resumed_ns,
            *phases_ns,
            lease_ns,
            version,
            fresh,
            samples,
        )
        ring.store()

    def release(self) -> None:
        """Release the shared memory; the ring must not be used afterwards."""
        self._ring.release()


class RoundRing:
    """The ring of rounds.

    The communication thread uses it, with two exceptions in a streamed round (`worker.reduction`):
    the data thread calls `carried` and the memory thread calls `opened`, while the communication
    thread waits for them or handles other messages.
    """

    def __init__(self, words: memoryview[int]) -> None:
        self._ring = _Ring(words, STEPS * STEP_WORDS, ROUNDS, ROUND_WORDS)
        self._scratch = scratch = self._ring.scratch
        columns = range(ROUND_HEAD, ROUND_WORDS, SEGMENTS_MAX)
        self._bytes, self._ready, self._opened, self._begun, self._ended, self._busy = (
            scratch[at : at + SEGMENTS_MAX] for at in columns
        )
        self._segments, self._together = 1, 1
        self._round, self._flags, self._arrived_ns, self._go_ns = 0, 0, 0, 0
        self._copy_begun_ns, self._copy_ended_ns = 0, 0
        self._carried = 0
        self._has_ready = False
        """True if the scratch holds times of `_ready_now` of this round or an earlier one."""
        self._ready_next: array[int] = array("Q")
        """Times of the batch that was announced last."""
        self._ready_now = self._ready_next
        """Times of the batch in the round that is being applied."""

    def divide(self, segment_bytes: Sequence[int]) -> None:
        """Set the segments of the gradient.

        If there are more than SEGMENTS_MAX segments, neighbors share a place.

        Args:
            segment_bytes: Size of each segment in bytes, in order.
        """
        self._segments = len(segment_bytes)
        self._together = together = -(-self._segments // SEGMENTS_MAX)
        for place, first in enumerate(range(0, self._segments, together)):
            self._bytes[place] = sum(segment_bytes[first : first + together])

    def begin(self, number: int, go_ns: int, *, streamed: bool) -> None:
        """Begin the entry of a round.

        Args:
            number: Number of the round.
            go_ns: When GO reached this rank.
            streamed: True if the round is streamed.
        """
        self._round, self._flags, self._go_ns = number, STREAMED if streamed else 0, go_ns
        self._arrived_ns = self._copy_begun_ns = self._copy_ended_ns = self._carried = 0

    def arrived(self, at_ns: int) -> None:
        """Record that this rank's gradient arrived in time, at `at_ns`."""
        self._flags |= FRESH
        self._arrived_ns = at_ns

    def opened(self, segment: int, at_ns: int) -> None:
        """Record that this rank's contribution to a segment of a streamed round was ready."""
        self._opened[segment // self._together] = at_ns

    def carried(self, begun_ns: int, ended_ns: int) -> None:
        """Record that the next segment in order was summed.

        Args:
            begun_ns: When its reduction began.
            ended_ns: When its reduction ended.
        """
        segment, self._carried = self._carried, self._carried + 1
        if segment >= self._segments:
            return  # float buffers of the model, which are reduced after the segments
        if self._together == 1:
            self._begun[segment], self._ended[segment] = begun_ns, ended_ns
            return
        place, number = divmod(segment, self._together)
        if not number:
            self._begun[place], self._busy[place] = begun_ns, 0
        self._ended[place] = ended_ns
        self._busy[place] += ended_ns - begun_ns

    def handed_over(self, ready_ns: array[int]) -> None:
        """Set the times at which the segments of the announced batch were complete.

        Args:
            ready_ns: Time of each segment, 0 if it was not observed; empty if none was. The ring
                keeps a reference, so the caller must not change it.
        """
        self._ready_next = ready_ns

    def sum_is_taken(self) -> None:
        """Record that the sum was taken over; the next batch may begin after this call."""
        self._ready_now = self._ready_next

    def copied(self, begun_ns: int, ended_ns: int) -> None:
        """Record when weights were copied into the model."""
        self._copy_begun_ns, self._copy_ended_ns = begun_ns, ended_ns

    def end(self, last: MemberId | None, last_ns: int, begun_ns: int, ended_ns: int) -> None:
        """Complete the entry of the round and store it.

        Args:
            last: The rank that arrived last and that this rank waited for; None if there is none.
            last_ns: When it arrived, on this rank's clock.
            begun_ns: When the update began.
            ended_ns: When the update ended.
        """
        together, carried = self._together, self._carried
        if carried > self._segments:
            carried = self._segments
        _ROUND_FIELDS.pack_into(
            self._scratch,
            WORD_BYTES,
            self._round,
            self._flags,
            self._arrived_ns,
            0 if last is None else 1 + (last.slot << _LOCAL_BITS) + last.local,
            0 if last is None else last_ns,
            self._go_ns,
            begun_ns,
            ended_ns,
            self._copy_begun_ns,
            self._copy_ended_ns,
            -(-carried // together),
            together,
        )
        ready_ns = self._ready_now if self._flags & FRESH else None
        if ready_ns:
            self._has_ready = True
            if together == 1:
                self._ready[: self._segments] = memoryview(ready_ns)
            else:
                for place, first in enumerate(range(0, self._segments, together)):
                    self._ready[place] = max(ready_ns[first : first + together])
        elif self._has_ready:
            self._has_ready = False
            self._ready[:] = _NOTHING
        self._ring.store()

    def release(self) -> None:
        """Release the shared memory; the ring must not be used afterwards."""
        self._ring.release()


def read_steps(words: memoryview[int]) -> tuple[StepSample, ...]:
    """Return the complete entries of the ring of steps, in order."""
    return tuple(_step(entry) for entry in _entries(words, 0, STEPS, STEP_WORDS))


def read_rounds(words: memoryview[int]) -> tuple[RoundSample, ...]:
    """Return the complete entries of the ring of rounds, in order."""
    entries = _entries(words, STEPS * STEP_WORDS, ROUNDS, ROUND_WORDS)
    return tuple(_round(entry) for entry in entries)


def _entries(words: memoryview[int], at: int, entries: int, size: int) -> Iterator[list[int]]:
    """Return the complete entries of a ring, in order of their sequence numbers."""
    whole = []
    for place in range(at, at + entries * size, size):
        before = words[place]
        entry = words[place : place + size].tolist()
        if before and before % 2 == 0 and words[place] == before:
            whole.append((before, entry))
    return (entry for _, entry in sorted(whole))


def _step(entry: list[int]) -> StepSample:
    values = dict[str, Any](zip(StepSample.__struct_fields__, entry[1:], strict=True))
    return StepSample(**values | {"fresh": bool(values["fresh"])})


def _round(entry: list[int]) -> RoundSample:
    count, together = min(entry[_SEGMENTS], SEGMENTS_MAX), entry[_TOGETHER]
    streamed = bool(entry[_FLAGS] & STREAMED)
    columns = (entry[at : at + count] for at in range(ROUND_HEAD, ROUND_WORDS, SEGMENTS_MAX))
    segments = [
        SegmentSample(
            payload_bytes=payload_bytes,
            ready_ns=ready_ns,
            opened_ns=opened_ns if streamed else 0,
            begun_ns=begun_ns,
            ended_ns=ended_ns,
            busy_ns=busy_ns if together > 1 else ended_ns - begun_ns,
        )
        for payload_bytes, ready_ns, opened_ns, begun_ns, ended_ns, busy_ns in zip(
            *columns, strict=True
        )
    ]
    slot, local = divmod(entry[_LAST] - 1, 1 << _LOCAL_BITS)
    return RoundSample(
        round=entry[_ROUND],
        streamed=streamed,
        fresh=bool(entry[_FLAGS] & FRESH),
        arrived_ns=entry[_ARRIVED],
        last=f"{slot}.{local}" if entry[_LAST] else "",
        last_ns=entry[_LAST_ARRIVED],
        go_ns=entry[_GO],
        update_begun_ns=entry[_UPDATE_BEGUN],
        update_ended_ns=entry[_UPDATE_ENDED],
        copy_begun_ns=entry[_COPY_BEGUN],
        copy_ended_ns=entry[_COPY_ENDED],
        segments=tuple(segments),
    )
