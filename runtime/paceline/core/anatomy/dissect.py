"""The parts of a step, and of a round's reduction what was hidden and what was exposed.

Every moment of a step belongs to exactly one part, so the parts sum to the step. A moment of a
reduction is exposed if the main thread was held in step() at it, else hidden, so the two sum to the
reduction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final

from paceline.core.anatomy.samples import RoundSample, SegmentSample, StepSample
from paceline.core.collectives.select import CLASS_NAMES, size_class

NS_PER_S: Final = 1e9


class Part(StrEnum):
    """Of a step."""

    LOADING = "loading"
    FORWARD = "forward"
    BACKWARD = "backward"
    SCRIPT = "script"
    LEASE = "lease"
    BLOCKED = "blocked"
    """Held in step(): this rank had arrived, and the last one had not."""
    REDUCTION = "reduction"
    """Held, while gradients were summed: what was exposed."""
    UPDATE = "update"
    COPY = "copy"
    PROTOCOL = "protocol"
    """Held, and none of the four: messages, threads that wake, a grace or a deadline."""


HELD: Final = (Part.BLOCKED, Part.REDUCTION, Part.UPDATE, Part.COPY, Part.PROTOCOL)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time that belongs to a part; `key`: whom for, or the size class."""

    part: Part
    begin_ns: int
    end_ns: int
    key: str = ""


@dataclass(slots=True)
class StepAnatomy:
    """One step, in nanoseconds."""

    step_ns: int
    parts: Mapping[Part, int]
    """They sum to `step_ns`."""
    blocked_on: Mapping[str, int]
    exposed: Mapping[str, int]
    """Reduction by size class."""
    held: Sequence[Span]
    """What the time in step() was, in order and without overlap; the gaps are PROTOCOL."""

    @property
    def if_nobody_were_late_ns(self) -> int:
        return self.step_ns - self.parts[Part.BLOCKED]

    @property
    def if_the_network_were_free_ns(self) -> int:
        return self.step_ns - self.parts[Part.REDUCTION]


def spans_of(sample: RoundSample) -> list[Span]:
    """Of one round, in order."""
    spans = []
    if sample.arrived_ns and sample.last_ns:
        end_ns = min(sample.last_ns, sample.go_ns)
        spans.append(Span(Part.BLOCKED, sample.arrived_ns, end_ns, sample.last))
    spans += [Span(Part.REDUCTION, s.begun_ns, s.ended_ns, class_of(s)) for s in sample.segments]
    spans.append(Span(Part.UPDATE, sample.update_begun_ns, sample.update_ended_ns))
    spans.append(Span(Part.COPY, sample.copy_begun_ns, sample.copy_ended_ns))
    return spans


def class_of(segment: SegmentSample) -> str:
    return CLASS_NAMES[size_class(segment.payload_bytes)]


def dissect(step: StepSample, rounds: Sequence[RoundSample]) -> StepAnatomy:
    """`rounds`: all whose work may lie in the step; others do no harm."""
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
    """Two clocks tell of arrivals, so spans may overlap a little: the first one counts."""
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
    step_s: float = 0.0
    parts: dict[Part, float] = field(default_factory=dict)
    blocked_on: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    """Of the reductions, by size class of their segments."""
    hidden: dict[str, float] = field(default_factory=dict)
    gap_s: float = 0.0
    """From the end of one update to the beginning of the next."""
    gaps: int = 0

    @property
    def if_nobody_were_late_s(self) -> float:
        return self.step_s - self.parts.get(Part.BLOCKED, 0.0)

    @property
    def if_the_network_were_free_s(self) -> float:
        return self.step_s - self.parts.get(Part.REDUCTION, 0.0)


def summarise(steps: Sequence[StepSample], rounds: Sequence[RoundSample]) -> RankAnatomy:
    """Means over the steps. Of the rounds, those that lie within the time of the steps."""
    if not steps:
        return RankAnatomy()
    found = [dissect(step, rounds) for step in steps]
    count = len(found)
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
    for anatomy in found:
        blocked_on.update(anatomy.blocked_on)
    gaps = [
        later.update_begun_ns - earlier.update_ended_ns
        for earlier, later in pairwise(rounds)
        if later.round == earlier.round + 1
    ]
    return RankAnatomy(
        steps=count,
        step_s=sum(a.step_ns for a in found) / count / NS_PER_S,
        parts={part: sum(a.parts[part] for a in found) / count / NS_PER_S for part in Part},
        blocked_on={peer: ns / count / NS_PER_S for peer, ns in blocked_on.items()},
        exposed={name: exposed[name] / count / NS_PER_S for name in reduced},
        hidden={name: (reduced[name] - exposed[name]) / count / NS_PER_S for name in reduced},
        gap_s=sum(gaps) / len(gaps) / NS_PER_S if gaps else 0.0,
        gaps=len(gaps),
    )
