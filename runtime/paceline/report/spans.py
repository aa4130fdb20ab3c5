"""The intervals of each rank, for the time line and the trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from paceline.core.anatomy.dissect import Part, dissect
from paceline.core.anatomy.job import RankRun

PHASES: Final = (Part.LEASE, Part.LOADING, Part.SCRIPT, Part.FORWARD, Part.BACKWARD)
"""Order in which the phases of a step are drawn: only the duration of each is known."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """An interval of one rank, on the common clock of all hosts."""

    part: Part
    begin_ns: int
    end_ns: int
    text: str
    """Description, for users."""
    in_transport: bool
    """True if it belongs on the line of the rank's reductions, below that of its loop."""
    waits_for: str = ""
    """Place of the rank that is waited for; empty if there is none."""


def drawn(rank: RankRun, rounds: range) -> Iterator[Drawn]:
    """Yield the intervals of one rank.

    Args:
        rank: The rank. If its clock is unknown, nothing is drawn.
        rounds: Rounds to draw: the steps that waited for one of them, and their reductions.

    Yields:
        First the intervals of the steps, then the reductions.
    """
    if rank.clock is None:
        return
    shift_ns, samples = rank.clock.shift_ns, rank.samples
    for step in samples.steps:
        if step.version - 1 not in rounds:
            continue
        anatomy = dissect(step, samples.rounds)
        at_ns = step.began_ns
        for part in PHASES:
            if took_ns := anatomy.parts[part]:
                yield _drawn(part, at_ns + shift_ns, took_ns, f"step to version {step.version}")
                at_ns += took_ns
        last_ns = step.announced_ns
        for span in anatomy.held:
            if span.begin_ns > last_ns:
                yield _drawn(Part.PROTOCOL, last_ns + shift_ns, span.begin_ns - last_ns, "")
            took_ns, waits_for = span.end_ns - span.begin_ns, ""
            detail = "exposed" if span.part is Part.REDUCTION else ""
            if span.part is Part.BLOCKED:
                waits_for, detail = span.key, f"for worker {span.key}"
            yield _drawn(span.part, span.begin_ns + shift_ns, took_ns, detail, waits_for=waits_for)
            last_ns = span.end_ns
        if step.resumed_ns > last_ns:
            yield _drawn(Part.PROTOCOL, last_ns + shift_ns, step.resumed_ns - last_ns, "")
    for sample in samples.rounds:
        if sample.round not in rounds:
            continue
        for number, segment in enumerate(sample.segments):
            detail = f"round {sample.round}, segment {number}, {segment.payload_bytes:,} bytes"
            took_ns = segment.ended_ns - segment.begun_ns
            begin_ns = segment.begun_ns + shift_ns
            yield _drawn(Part.REDUCTION, begin_ns, took_ns, detail, in_transport=True)


def _drawn(
    part: Part,
    begin_ns: int,
    took_ns: int,
    detail: str,
    *,
    in_transport: bool = False,
    waits_for: str = "",
) -> Drawn:
    """Return an interval with its description."""
    text = f"{part} {took_ns / 1e6:.2f} ms" + (f", {detail}" if detail else "")
    return Drawn(part, begin_ns, begin_ns + took_ns, text, in_transport, waits_for)
