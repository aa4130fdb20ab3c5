"""Split a step into its parts, and the reduction of a round into hidden and exposed time.

Every moment of a step belongs to exactly one part, so the parts add up to the step. A moment of a
reduction is exposed if the main thread was blocked in step() at that moment, else it is hidden. So
hidden and exposed time add up to the reduction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final

from paceline_api.times import NS_PER_S

from paceline.core.anatomy.samples import RoundSample, SegmentSample, StepSample
from paceline.core.collectives.select import CLASS_NAMES, size_class


class Part(StrEnum):
    """A part of a step."""

    LOADING = "loading"
    """Inside the runtime's data loader."""
    FORWARD = "forward"
    """Inside the model's forward pass."""
    BACKWARD = "backward"
    """The loss and backward()."""
    SCRIPT = "script"
    """The rest of the time outside step(): the script's own work."""
    LEASE = "lease"
    """Waiting for a lease of data."""
    BLOCKED = "blocked"
    """Blocked in step(): this rank had arrived, and the last one had not."""
    REDUCTION = "reduction"
    """Blocked in step() while gradients were reduced: the exposed part of the reduction."""
    UPDATE = "update"
    """Blocked in step() while the committed weights were updated."""
    COPY = "copy"
    """Blocked in step() while weights were copied into the model."""
    PROTOCOL = "protocol"
    """Blocked in step() for any other reason: messages, waking threads, a grace or a deadline."""


HELD: Final = (Part.BLOCKED, Part.REDUCTION, Part.UPDATE, Part.COPY, Part.PROTOCOL)
"""The parts during which the main thread is blocked in step()."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval that belongs to one part."""

    part: Part
    begin_ns: int
    end_ns: int
    key: str = ""
    """BLOCKED: place of the rank that was waited for. REDUCTION: size class. Else empty."""


@dataclass(slots=True)
class StepAnatomy:
    """The parts of one step, in nanoseconds."""

    step_ns: int
    """Duration of the step."""
    parts: Mapping[Part, int]
    """Duration of each part; they add up to `step_ns`."""
    blocked_on: Mapping[str, int]
    """Duration of BLOCKED by the place of the rank that was waited for."""
    exposed: Mapping[str, int]
    """Duration of REDUCTION by size class."""
    held: Sequence[Span]
    """The intervals inside step(), in order and without overlap; the gaps are PROTOCOL."""

    @property
    def if_nobody_were_late_ns(self) -> int:
        """Duration of the step without waiting for late ranks."""
        return self.step_ns - self.parts[Part.BLOCKED]

    @property
    def if_the_network_were_free_ns(self) -> int:
        """Duration of the step without exposed reductions."""
        return self.step_ns - self.parts[Part.REDUCTION]


def spans_of(sample: RoundSample) -> list[Span]:
    """Return the intervals of one round: blocked, each segment, update, copy."""
    spans = []
    if sample.arrived_ns and sample.last_ns:
        end_ns = min(sample.last_ns, sample.go_ns)
        spans.append(Span(Part.BLOCKED, sample.arrived_ns, end_ns, sample.last))
    spans += [Span(Part.REDUCTION, s.begun_ns, s.ended_ns, class_of(s)) for s in sample.segments]
    spans.append(Span(Part.UPDATE, sample.update_begun_ns, sample.update_ended_ns))
    spans.append(Span(Part.COPY, sample.copy_begun_ns, sample.copy_ended_ns))
    return spans


def class_of(segment: SegmentSample) -> str:
    """Return the name of the size class of a segment."""
    return CLASS_NAMES[size_class(segment.payload_bytes)]


def dissect(step: StepSample, rounds: Sequence[RoundSample]) -> StepAnatomy:
    """Split one step into its parts.

    Args:
        step: The step.
        rounds: All rounds that may overlap with the step; others are ignored.

    Returns:
        The parts of the step.
    """
    held = list(_held(step, rounds))
    parts = Counter(dict.fromkeys(Part, 0))
    blocked_on: Counter[str] = Counter()
    exposed: Counter[str] = Counter()
    for span in held:
        took_ns = span.end_ns - span.begin_ns
        parts[span.part] += took_ns
        if span.part is Part.BLOCKED:
            blocked_on[span.key] += took_ns
        elif span.part is Part.REDUCTION:
            exposed[span.key] += took_ns
    step_ns = step.resumed_ns - step.began_ns
    held_ns = step.resumed_ns - step.announced_ns
    parts[Part.PROTOCOL] = held_ns - sum(parts.values())
    left_ns = step_ns - held_ns
    for part, known_ns in (
        (Part.LEASE, step.lease_ns),
        (Part.LOADING, step.loading_ns),
        (Part.FORWARD, step.forward_ns),
        (Part.BACKWARD, step.backward_ns),
    ):
        parts[part] = min(known_ns, left_ns)
        left_ns -= parts[part]
    parts[Part.SCRIPT] = left_ns
    return StepAnatomy(step_ns, parts, blocked_on, exposed, held)


def _held(step: StepSample, rounds: Sequence[RoundSample]) -> Iterator[Span]:
    """Yield the intervals inside step(), in order, cut so that they do not overlap.

    Arrival times come from two clocks, so intervals may overlap a little: the earlier one wins.

    Args:
        step: The step.
        rounds: All rounds that may overlap with the step.

    Yields:
        The intervals, each within the time that the main thread was blocked.
    """
    at_ns = step.announced_ns
    near = (r for r in rounds if _end_ns(r) > step.announced_ns and _begin_ns(r) < step.resumed_ns)
    spans = (span for sample in near for span in spans_of(sample))
    for span in sorted(spans, key=lambda span: (span.begin_ns, span.end_ns)):
        begin_ns, end_ns = max(span.begin_ns, at_ns), min(span.end_ns, step.resumed_ns)
        if end_ns > begin_ns:
            yield Span(span.part, begin_ns, end_ns, span.key)
            at_ns = end_ns


def _begin_ns(sample: RoundSample) -> int:
    return min(sample.arrived_ns or sample.go_ns, sample.go_ns)


def _end_ns(sample: RoundSample) -> int:
    return max(sample.update_ended_ns, sample.copy_ended_ns)


@dataclass(slots=True)
class RankAnatomy:
    """Means of one rank, in seconds per step."""

    steps: int = 0
    """Number of steps that the means are taken over."""
    step_s: float = 0.0
    """Duration of a step."""
    parts: dict[Part, float] = field(default_factory=dict)
    """Duration of each part; they add up to `step_s`."""
    blocked_on: dict[str, float] = field(default_factory=dict)
    """Duration of BLOCKED by the place of the rank that was waited for."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Exposed time of the reductions, by the size class of their segments."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Hidden time of the reductions, by the size class of their segments."""
    gap_s: float = 0.0
    """Mean time from the end of one update to the beginning of the next."""
    gaps: int = 0
    """Number of such pairs of consecutive rounds."""

    @property
    def if_nobody_were_late_s(self) -> float:
        """Duration of a step without waiting for late ranks."""
        return self.step_s - self.parts.get(Part.BLOCKED, 0.0)

    @property
    def if_the_network_were_free_s(self) -> float:
        """Duration of a step without exposed reductions."""
        return self.step_s - self.parts.get(Part.REDUCTION, 0.0)


def summarise(steps: Sequence[StepSample], rounds: Sequence[RoundSample]) -> RankAnatomy:
    """Return the means of one rank over its steps.

    Args:
        steps: The steps of the rank, in order.
        rounds: The rounds of the rank, in order. Exposed and hidden time use only the rounds that
            lie within the time of the steps.

    Returns:
        The means; all zero if there are no steps.
    """
    if not steps:
        return RankAnatomy()
    anatomies = [dissect(step, rounds) for step in steps]
    count = len(anatomies)
    within = [
        r
        for r in rounds
        if steps[0].began_ns <= _begin_ns(r) and _end_ns(r) <= steps[-1].resumed_ns
    ]
    exposed: Counter[str] = Counter()
    for anatomy in (dissect(step, within) for step in steps):
        exposed.update(anatomy.exposed)
    reduced: Counter[str] = Counter()
    for segment in (s for sample in within for s in sample.segments):
        reduced[class_of(segment)] += segment.ended_ns - segment.begun_ns
    blocked_on: Counter[str] = Counter()
    for anatomy in anatomies:
        blocked_on.update(anatomy.blocked_on)
    gaps = [
        later.update_begun_ns - earlier.update_ended_ns
        for earlier, later in pairwise(rounds)
        if later.round == earlier.round + 1
    ]
    return RankAnatomy(
        steps=count,
        step_s=sum(a.step_ns for a in anatomies) / count / NS_PER_S,
        parts={part: sum(a.parts[part] for a in anatomies) / count / NS_PER_S for part in Part},
        blocked_on={peer: ns / count / NS_PER_S for peer, ns in blocked_on.items()},
        exposed={name: exposed[name] / count / NS_PER_S for name in reduced},
        hidden={name: (reduced[name] - exposed[name]) / count / NS_PER_S for name in reduced},
        gap_s=sum(gaps) / len(gaps) / NS_PER_S if gaps else 0.0,
        gaps=len(gaps),
    )
