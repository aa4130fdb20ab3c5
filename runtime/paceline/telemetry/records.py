"""The metrics of one rank in shared memory, with one writer per group and any number of readers.

The record is an array of 8-byte slots:

    slot 0          MAGIC; written last, when the record is complete
    slot 1          hash of the catalog: writer and reader must agree on the layout
    slot 2          cost of one observation with its share of single values, in seconds; measured
                    by the writer when it opened the record
    slots 3 and 4   lease and part of the batch that the main thread loads or computes; NaN: none
    group MAIN      seq, then the slots of all metrics that the main thread writes
    group COMM      seq, then those of the communication thread
    names           of the script's own metrics, UTF-8 padded with zeros; a name is written once,
                    before the first value of its metric
    rings           the last steps and rounds, see `telemetry.samples`

A counter or gauge is one slot. A histogram is a slot for each bucket (not cumulative, +Inf last)
and one for the sum. `seq` is odd while the writer is inside an observation of a histogram; a reader
that observes an odd or changed number reads again. A counter or gauge is one store, which is never
visible in part, so it needs no `seq`. A slot that was never written holds NaN, and its series is
not shown.

The values are doubles, stored by item assignment into a memoryview: that is one 8-byte store.
struct.pack_into first clears the bytes, which readers would observe. x86-64 keeps the order of the
stores. On arm64 a torn read needs two reorderings within one observation, and lasts for one scrape.

The memory is a memfd that the agent creates and passes on. So no file is left behind however a
process dies, and the agent can still read the last values of a dead rank.
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

from paceline_api.times import NS_PER_S

from paceline.clock import now_ns, pause
from paceline.core.anatomy.samples import (
    FIGURE_NAME_BYTES,
    FIGURES_MAX,
    ROUNDS,
    STEPS,
    RoundSample,
    StepSample,
)
from paceline.core.messages import DealtBatch
from paceline.telemetry import samples
from paceline.telemetry.catalog import (
    BY_NAME,
    CATALOG,
    Metric,
    MetricKind,
    Writer,
)

MAGIC: Final = 0x3170_6C63_6361_7031
"""Value of slot 0 of a complete record."""
LEASE_SLOT: Final = 3
"""Slot of the lease that the main thread works on."""
PART_SLOT: Final = 4
"""Slot of the batch within that lease."""
HEADER_SLOTS: Final = 5
"""Number of slots before the first group."""
SLOT_BYTES: Final = 8
"""Size of a slot, in bytes."""
COST_SAMPLES: Final = 500
"""Number of observations over which the cost is measured."""
COST_BOUNDS: Final = 10
"""Number of buckets of the histogram on which the cost is measured."""
SINGLES_PER_OBSERVATION: Final = 2
"""Number of counters and gauges written per observation in a typical step."""
NAME_SLOTS: Final = FIGURE_NAME_BYTES // SLOT_BYTES
"""Number of slots of one name."""
WHOLE_MAX: Final = 2.0**53
"""Largest integer that is believed: a rank may write any value here, and a double is exact only up
to this."""
READ_TRIES: Final = 20
"""Upper bound on the attempts to read a group without a concurrent observation."""
READ_PAUSE_S: Final = 0.0005
"""Seconds between attempts: a writer that was preempted needs a moment to continue."""


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The position of each child of each metric."""

    slots: int
    """Number of slots before the rings."""
    seq: Mapping[Writer, int]
    """Slot of the sequence number of each group."""
    first: Mapping[tuple[str, tuple[str, ...]], int]
    """First slot of each child, by metric and label values."""
    names: int
    """First slot of the names."""
    digest: int
    """Hash of the layout."""


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
    """Return the number of slots of one child."""
    return len(metric.buckets) + 2 if metric.kind is MetricKind.HISTOGRAM else 1


LAYOUT: Final = _make_layout()
"""The layout of this version's catalog."""
BYTES: Final = (LAYOUT.slots + samples.WORDS) * SLOT_BYTES
"""Size of a record, in bytes."""


class RecordError(Exception):
    """Raised for memory that is not a record of this version."""


class Counter:
    """Handle of one counter. Only one thread may write to it at a time."""

    __slots__ = ("_at", "_slots")

    def __init__(self, slots: memoryview[float], at: int) -> None:
        self._slots, self._at = slots, at
        if isnan(slots[at]):
            slots[at] = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Increase the counter."""
        self._slots[self._at] += amount

    def raise_to(self, total: float) -> None:
        """Set the counter to a total since the start of the rank, which never decreases."""
        self._slots[self._at] = total


class Gauge:
    """Handle of one gauge, which is shown once it was set. Only one thread may write to it."""

    __slots__ = ("_at", "_slots")

    def __init__(self, slots: memoryview[float], at: int) -> None:
        self._slots, self._at = slots, at

    def set(self, value: float) -> None:
        """Set the value."""
        self._slots[self._at] = value

    def clear(self) -> None:
        """Hide the gauge until it is set again."""
        self.set(nan)


class Histogram:
    """Handle of one histogram. Only the thread of its group may call `observe`."""

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
        """Count a value."""
        slots, words, seq = self._slots, self._words, self._seq
        bucket = self._at + bisect_left(self._bounds, value)
        count = words[seq] + 1
        words[seq] = count
        slots[bucket] += 1.0
        slots[self._sum] += value
        words[seq] = count + 1


class RecordMemory:
    """The mapping of one record, as doubles and as words."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, BYTES)
        self._view = memoryview(self._map)
        self.slots = self._view.cast("d")
        self.words = self._view.cast("Q")
        self.rings = self.words[LAYOUT.slots :]

    @classmethod
    def checked(cls, fd: int) -> RecordMemory:
        """Map a record and check that its writer had the same layout.

        Args:
            fd: Descriptor of the memory; the caller keeps it.

        Returns:
            The mapping.

        Raises:
            RecordError: The memory has another size or layout.
        """
        if os.fstat(fd).st_size != BYTES:
            raise RecordError(f"{os.fstat(fd).st_size} bytes instead of {BYTES}: another version")
        memory = cls(fd)
        if memory.words[0] != MAGIC or memory.words[1] != LAYOUT.digest:
            memory.close()
            raise RecordError("written by another version of Paceline")
        return memory

    def close(self) -> None:
        """Unmap the memory; the views must not be used afterwards."""
        self.slots.release()
        self.rings.release()
        self.words.release()
        self._view.release()
        self._map.close()


def allocate_record() -> int:
    """Create an empty record and return its file descriptor, which the caller owns."""
    fd = os.memfd_create("paceline-record")
    os.ftruncate(fd, BYTES)
    memory = RecordMemory(fd)
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
    """The record of a rank, for writing.

    Resolve handles once (`counter`, `gauge`, `histogram`) and use only the handles afterwards. A
    name or label value that is not in the catalog raises KeyError, because it is a programming
    error.
    """

    def __init__(self, memory: RecordMemory) -> None:
        self._memory = memory
        self._facts: dict[int, str] = {}
        """Slots of the handles whose metric is a fact, with the fact's name."""
        memory.slots[2] = _observation_cost_s()
        self.steps = samples.StepRing(memory.rings)
        self.rounds = samples.RoundRing(memory.rings)

    @classmethod
    def create(cls) -> RankRecord:
        """Create a record that no agent reads, for a script that runs without a job."""
        return cls.open(allocate_record())

    @classmethod
    def open(cls, fd: int) -> RankRecord:
        """Open the record of PACELINE_RECORD_FD for writing; closes the descriptor."""
        try:
            return cls(RecordMemory.checked(fd))
        finally:
            os.close(fd)

    def counter(self, name: str, **labels: str) -> Counter:
        """Return the handle of a counter with these label values."""
        return Counter(self._memory.slots, self._slot(name, MetricKind.COUNTER, labels))

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return the handle of a gauge with these label values."""
        return Gauge(self._memory.slots, self._slot(name, MetricKind.GAUGE, labels))

    def histogram(self, name: str, **labels: str) -> Histogram:
        """Return the handle of a histogram with these label values."""
        at, metric = self._slot(name, MetricKind.HISTOGRAM, labels), BY_NAME[name]
        seq, memory = LAYOUT.seq[metric.writer], self._memory
        return Histogram(memory.slots, memory.words, seq, at, metric.buckets)

    def facts(self) -> dict[str, float]:
        """Return the metrics that the rank also reports to the coordinator (`Metric.fact`).

        Only the communication thread may call this.

        Returns:
            The values by the names of the facts, as far as they were written.
        """
        facts: dict[str, float] = {}
        # The main thread may make handles meanwhile, so iterate over a copy.
        for at, fact in tuple(self._facts.items()):
            value = self._memory.slots[at]
            if not isnan(value):
                facts[fact] = facts.get(fact, 0.0) + value
        return facts

    def works_on(self, batch: DealtBatch | None) -> None:
        """Record the batch that the main thread loads or computes from now on; None: none."""
        slots = self._memory.slots
        slots[PART_SLOT] = nan if batch is None else batch.part
        slots[LEASE_SLOT] = nan if batch is None else batch.lease

    def name_figure(self, number: int, name: str) -> None:
        """Write the name of one of the script's own metrics, before its first value.

        Args:
            number: Number of the metric, below FIGURES_MAX.
            name: The name, at most FIGURE_NAME_BYTES bytes in UTF-8.
        """
        raw = name.encode().ljust(FIGURE_NAME_BYTES, b"\0")
        at = LAYOUT.names + number * NAME_SLOTS
        for slot, word in enumerate(memoryview(raw).cast("Q"), at):
            self._memory.words[slot] = word

    def _slot(self, name: str, kind: MetricKind, labels: dict[str, str]) -> int:
        """Return the first slot of a child, and remember it if the metric is a fact."""
        metric = BY_NAME[name]
        assert metric.kind is kind, f"{name} is a {metric.kind}"
        assert labels.keys() == set(metric.labels), f"{name}: labels {metric.labels}, not {labels}"
        child = tuple(str(labels[label]) for label in metric.labels)
        at = LAYOUT.first[name, child]
        if metric.fact:
            self._facts[at] = metric.fact + "".join(child[:1])
        return at

    def close(self) -> None:
        """Unmap the record; handles must not be used afterwards."""
        self.steps.release()
        self.rounds.release()
        self._memory.close()


def _observation_cost_s() -> float:
    """Measure the cost of one observation with the single values that come with it.

    The measurement runs on memory that nobody reads.

    Returns:
        Seconds per observation.
    """
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
    """A consistent copy of a record."""

    values: tuple[float, ...]
    """Values, indexed like the slots; NaN = never written."""
    observations: int
    """Number of observations of histograms, by both groups."""
    observation_s: float
    """Measured seconds of one observation with its share of single values."""
    figures: tuple[str, ...]
    """Names of the script's own metrics by their number; empty if there is none."""


class RecordReader:
    """The agent's view of a record; it stays readable after the rank has died."""

    def __init__(self, fd: int) -> None:
        self._memory = RecordMemory.checked(fd)

    def read(self) -> Reading:
        """Copy the record.

        Returns:
            A consistent copy. If the writer died or was stopped inside an observation, one figure
            of one histogram may be behind the others.
        """
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
            # If no attempt succeeds, the writer died or was stopped inside an observation. At most
            # one slot of a histogram is then behind the others. No reader waits for a dead writer.
            observations += words[seq] // 2
        return Reading(tuple(values), observations, slots[2], self._figures())

    def batch(self) -> DealtBatch | None:
        """Return the batch that the main thread works on, or did when the rank died."""
        lease, part = self._memory.slots[LEASE_SLOT], self._memory.slots[PART_SLOT]
        if not (0 <= lease < WHOLE_MAX and 0 <= part < WHOLE_MAX):  # NaN as well
            return None
        return DealtBatch(int(lease), int(part))

    def steps(self) -> tuple[StepSample, ...]:
        """Return the last steps, in order."""
        return samples.read_steps(self._memory.rings)

    def rounds(self) -> tuple[RoundSample, ...]:
        """Return the last rounds, in order."""
        return samples.read_rounds(self._memory.rings)

    def _figures(self) -> tuple[str, ...]:
        raw = self._memory.words[LAYOUT.names : LAYOUT.slots].tobytes()
        parts = (raw[n : n + FIGURE_NAME_BYTES] for n in range(0, len(raw), FIGURE_NAME_BYTES))
        return tuple(part.rstrip(b"\0").decode(errors="replace") for part in parts)

    def close(self) -> None:
        """Unmap the record."""
        self._memory.close()


def _group_end(writer: Writer) -> int:
    """Return the slot behind the last one of a group."""
    later = [seq for seq in LAYOUT.seq.values() if seq > LAYOUT.seq[writer]]
    return min(later, default=LAYOUT.names)
