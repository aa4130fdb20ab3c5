"""One rank's figures in shared memory: 8-byte slots, one writer per group, any number of readers.

    slot 0          MAGIC; written last, when the record is complete
    slot 1          hash of the catalogue: writer and reader must agree on the layout
    slot 2          cost of one observation with its share of single figures, seconds, measured by
                    the writer when it opened the record
    slots 3 and 4   lease and part of the batch that the main thread loads or computes; NaN: none
    group MAIN      seq, then the slots of all metrics that the main thread writes
    group COMM      seq, then those of the communication thread
    names           of the script's own figures, UTF-8 padded with zeros; a name is written once,
                    before the first value of its figure
    rings           the last steps and rounds, see `telemetry.samples`

A counter or gauge is one slot; a histogram is a slot for each bucket (not cumulative, +Inf last)
and one for the sum. `seq` is odd while the writer is inside an observation of a histogram; a reader
that saw it odd or changed reads again. A counter or gauge is one store, which nobody can see half
of, so it needs no `seq`. A slot that nobody has touched holds NaN, and its series is not shown.

The values are doubles, stored by item assignment into a memoryview: that is one 8-byte store, while
struct.pack_into clears the bytes first, which readers would see. The order of the stores is kept on
x86-64; on arm64 a torn read needs two reorderings within one observation, and lasts for one scrape.

The memory is a memfd that the agent made and passed on, so no file is left over however a process
dies, and the agent can still read the last figures of a dead rank.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import isnan, nan
from typing import Final

from paceline.clock import NS_PER_S, now_ns, pause
from paceline.core.anatomy.samples import ROUNDS, STEPS, RoundSample, StepSample
from paceline.core.messages import DealtBatch
from paceline.telemetry import samples
from paceline.telemetry.catalog import (
    BY_NAME,
    CATALOG,
    FIGURE_NAME_BYTES,
    FIGURES_MAX,
    Kind,
    Metric,
    Writer,
)

MAGIC: Final = 0x3170_6C63_6361_7031
LEASE_SLOT: Final = 3
PART_SLOT: Final = 4
HEADER_SLOTS: Final = 5
SLOT_BYTES: Final = 8
COST_SAMPLES: Final = 500
COST_BOUNDS: Final = 10
SINGLES_PER_OBSERVATION: Final = 2
"""Counters and gauges written per observation, in a usual step."""
NAME_SLOTS: Final = FIGURE_NAME_BYTES // SLOT_BYTES
WHOLE_MAX: Final = 2.0**53
"""A rank may write whatever it likes here; a double counts no further than this."""
READ_TRIES: Final = 20
READ_PAUSE_S: Final = 0.0005
"""Between tries: a writer that the machine has put aside needs a moment to go on."""


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where each child of each metric is."""

    slots: int
    seq: Mapping[Writer, int]
    first: Mapping[tuple[str, tuple[str, ...]], int]
    names: int
    digest: int


def _make_layout() -> RecordLayout:
    at = HEADER_SLOTS
    seq: dict[Writer, int] = {}
    first: dict[tuple[str, tuple[str, ...]], int] = {}
    text: list[str] = []
    for writer in (Writer.MAIN, Writer.COMM):
        seq[writer] = at
        at += 1
        for metric in CATALOG:
            if metric.writer is not writer:
                continue
            for child in metric.children():
                first[metric.name, child] = at
                text.append(f"{at} {metric.name} {child} {metric.buckets}")
                at += width(metric)
    text.append(f"{STEPS} {samples.STEP_WORDS} {ROUNDS} {samples.ROUND_WORDS}")
    digest = int.from_bytes(sha256("\n".join(text).encode()).digest()[:8], "little")
    return RecordLayout(at + FIGURES_MAX * NAME_SLOTS, seq, first, at, digest)


def width(metric: Metric) -> int:
    """Slots of one child."""
    return len(metric.buckets) + 2 if metric.kind is Kind.HISTOGRAM else 1


LAYOUT: Final = _make_layout()
BYTES: Final = (LAYOUT.slots + samples.WORDS) * SLOT_BYTES


class RecordError(Exception):
    """Memory that is no record of this version."""


class Counter:
    """Handle of one counter; only its writer's thread may call `add`."""

    __slots__ = ("_at", "_slots")

    def __init__(self, slots: memoryview[float], at: int) -> None:
        self._slots, self._at = slots, at
        if isnan(slots[at]):
            slots[at] = 0.0

    def add(self, amount: float = 1.0) -> None:
        self._slots[self._at] += amount


class Gauge:
    """Handle of one gauge; shown once it was set."""

    __slots__ = ("_at", "_slots")

    def __init__(self, slots: memoryview[float], at: int) -> None:
        self._slots, self._at = slots, at

    def set(self, value: float) -> None:
        self._slots[self._at] = value

    def clear(self) -> None:
        """Show it no more."""
        self.set(nan)


class Histogram:
    """Handle of one histogram."""

    __slots__ = ("_at", "_bounds", "_seq", "_slots", "_sum", "_words")

    def __init__(
        self,
        slots: memoryview[float],
        words: memoryview[int],
        seq: int,
        at: int,
        bounds: tuple[float, ...],
    ) -> None:
        self._slots, self._words, self._seq, self._at = slots, words, seq, at
        self._bounds = bounds
        self._sum = at + len(bounds) + 1
        for slot in range(at, self._sum + 1):
            if isnan(slots[slot]):
                slots[slot] = 0.0

    def observe(self, value: float) -> None:
        slots, words, seq = self._slots, self._words, self._seq
        bucket = self._at + bisect_left(self._bounds, value)
        count = words[seq] + 1
        words[seq] = count
        slots[bucket] += 1.0
        slots[self._sum] += value
        words[seq] = count + 1


class SharedMemory:
    """The mapping of one record, as doubles and as words."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, BYTES)
        self._view = memoryview(self._map)
        self.slots = self._view.cast("d")
        self.words = self._view.cast("Q")
        self.rings = self.words[LAYOUT.slots :]

    @classmethod
    def checked(cls, fd: int) -> SharedMemory:
        if os.fstat(fd).st_size != BYTES:
            raise RecordError(f"{os.fstat(fd).st_size} bytes instead of {BYTES}: another version")
        memory = cls(fd)
        if memory.words[0] != MAGIC or memory.words[1] != LAYOUT.digest:
            memory.close()
            raise RecordError("written by another version of Paceline")
        return memory

    def close(self) -> None:
        self.slots.release()
        self.rings.release()
        self.words.release()
        self._view.release()
        self._map.close()


def allocate_record() -> int:
    """An empty record as a file descriptor, owned by the caller."""
    fd = os.memfd_create("paceline-record")
    os.ftruncate(fd, BYTES)
    memory = SharedMemory(fd)
    for slot in range(LEASE_SLOT, LAYOUT.names):
        memory.slots[slot] = nan
    for seq in LAYOUT.seq.values():
        memory.words[seq] = 0
    memory.slots[2] = 0.0
    memory.words[1] = LAYOUT.digest
    memory.words[0] = MAGIC
    memory.close()
    return fd


class RankRecord:
    """A rank's record. Resolve handles once (`counter`, `gauge`, `histogram`), then only use these.

    A name or label value that is not in the catalogue raises KeyError: a mistake in the program.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        memory.slots[2] = _observation_cost_s()
        self.steps = samples.StepRing(memory.rings)
        self.rounds = samples.RoundRing(memory.rings)

    @classmethod
    def create(cls) -> RankRecord:
        """A record of its own, for a script that works alone."""
        return cls.open(allocate_record())

    @classmethod
    def open(cls, fd: int) -> RankRecord:
        """The record behind PACELINE_RECORD_FD, for writing; takes the descriptor."""
        try:
            return cls(SharedMemory.checked(fd))
        finally:
            os.close(fd)

    def counter(self, name: str, **labels: str) -> Counter:
        _, at = _find(name, Kind.COUNTER, labels)
        return Counter(self._memory.slots, at)

    def gauge(self, name: str, **labels: str) -> Gauge:
        _, at = _find(name, Kind.GAUGE, labels)
        return Gauge(self._memory.slots, at)

    def histogram(self, name: str, **labels: str) -> Histogram:
        seq, at = _find(name, Kind.HISTOGRAM, labels)
        bounds = BY_NAME[name].buckets
        return Histogram(self._memory.slots, self._memory.words, seq, at, bounds)

    def works_on(self, batch: DealtBatch | None) -> None:
        """The main thread loads or computes this batch from now on."""
        slots = self._memory.slots
        slots[PART_SLOT] = nan if batch is None else batch.part
        slots[LEASE_SLOT] = nan if batch is None else batch.lease

    def name_figure(self, number: int, name: str) -> None:
        """Its values follow; `name`: at most FIGURE_NAME_BYTES in UTF-8."""
        raw = name.encode().ljust(FIGURE_NAME_BYTES, b"\0")
        at = LAYOUT.names + number * NAME_SLOTS
        for slot, word in enumerate(memoryview(raw).cast("Q"), at):
            self._memory.words[slot] = word

    def close(self) -> None:
        """Handles must not be used afterwards."""
        self.steps.release()
        self.rounds.release()
        self._memory.close()


def _find(name: str, kind: Kind, labels: dict[str, str]) -> tuple[int, int]:
    metric = BY_NAME[name]
    assert metric.kind is kind, f"{name} is a {metric.kind}"
    assert labels.keys() == set(metric.labels), f"{name} has labels {metric.labels}, not {labels}"
    child = tuple(str(labels[label]) for label in metric.labels)
    return LAYOUT.seq[metric.writer], LAYOUT.first[name, child]


def _observation_cost_s() -> float:
    """What one observation costs here with the single figures that come with it, measured on memory
    that nobody reads."""
    scratch = memoryview(bytearray((COST_BOUNDS + 4) * SLOT_BYTES))
    slots, bounds = scratch.cast("d"), tuple(map(float, range(COST_BOUNDS)))
    histogram, counter = Histogram(slots, scratch.cast("Q"), 0, 1, bounds), Counter(slots, 1)
    before = now_ns()
    for _ in range(COST_SAMPLES):
        histogram.observe(1.0)
        for _ in range(SINGLES_PER_OBSERVATION):
            counter.add(1.0)
    return (now_ns() - before) / COST_SAMPLES / NS_PER_S


@dataclass(frozen=True, slots=True)
class Reading:
    """A consistent copy of a record. `values` is indexed like the slots; NaN = never touched."""

    values: tuple[float, ...]
    observations: int
    """Of histograms, by both threads."""
    observation_s: float
    """Measured cost of one, with its share of single figures."""
    figures: tuple[str, ...]
    """Names of the script's own figures by their number; empty where there is none."""


class RecordReader:
    """The agent's view of a record; keeps it readable after the rank has died."""

    def __init__(self, fd: int) -> None:
        self._memory = SharedMemory.checked(fd)

    def read(self) -> Reading:
        slots, words = self._memory.slots, self._memory.words
        values = slots[: LAYOUT.slots].tolist()
        observations = 0
        for writer, seq in LAYOUT.seq.items():
            first, last = seq + 1, _group_end(writer)
            for _ in range(READ_TRIES):
                before = words[seq]
                values[first:last] = slots[first:last].tolist()
                if before == words[seq] and before % 2 == 0:
                    break
                pause(READ_PAUSE_S)
            # Else the writer died, or was stopped, inside an observation: at most one figure of a
            # histogram is behind the others, and no reader waits for a dead writer.
            observations += words[seq] // 2
        return Reading(tuple(values), observations, slots[2], self._figures())

    def batch(self) -> DealtBatch | None:
        """Return what the main thread loads or computes, or did when the rank died."""
        lease, part = self._memory.slots[LEASE_SLOT], self._memory.slots[PART_SLOT]
        if not (0 <= lease < WHOLE_MAX and 0 <= part < WHOLE_MAX):  # NaN as well
            return None
        return DealtBatch(int(lease), int(part))

    def steps(self) -> tuple[StepSample, ...]:
        """The last ones, in their order."""
        return samples.read_steps(self._memory.rings)

    def rounds(self) -> tuple[RoundSample, ...]:
        """The last ones, in their order."""
        return samples.read_rounds(self._memory.rings)

    def _figures(self) -> tuple[str, ...]:
        raw = self._memory.words[LAYOUT.names : LAYOUT.slots].tobytes()
        parts = (raw[n : n + FIGURE_NAME_BYTES] for n in range(0, len(raw), FIGURE_NAME_BYTES))
        return tuple(part.rstrip(b"\0").decode(errors="replace") for part in parts)

    def close(self) -> None:
        self._memory.close()


def _group_end(writer: Writer) -> int:
    later = [seq for seq in LAYOUT.seq.values() if seq > LAYOUT.seq[writer]]
    return min(later, default=LAYOUT.names)
