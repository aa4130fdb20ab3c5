"""Samples of a made-up job of three ranks, the last of which is late in each round."""

from __future__ import annotations

from msgspec.structs import replace
from paceline.core.anatomy.samples import (
    Moment,
    PodSamples,
    RankSamples,
    RoundSample,
    SegmentSample,
    StepSample,
)

MS = 10**6
"""Nanoseconds in a millisecond."""
LATE_MS = 40
ROUNDS = 5
BEGAN_MS = 1_795_831_134_000
"""Wall-clock time at which the job began: 2026-11-28 01:58:54 UTC."""


def rank(slot: int, late_ms: int = 0, shift_ms: int = 0) -> RankSamples:
    """Return steps of 100 ms: backward takes 30 ms + `late_ms`, a 10 ms sum begins at 80 ms."""
    steps, rounds = [], []
    for number in range(ROUNDS):
        at = 1000 + 100 * number + shift_ms
        came = at + 30 + late_ms
        steps.append(
            StepSample(
                at * MS,
                came * MS,
                (at + 100) * MS,
                0,
                0,
                (30 + late_ms) * MS,
                0,
                version=number + 1,
                fresh=True,
                samples=32,
            )
        )
        rounds.append(
            RoundSample(
                round=number,
                streamed=False,
                fresh=True,
                arrived_ns=came * MS,
                last="" if late_ms else "2.0",
                last_ns=0 if late_ms else (at + 30 + LATE_MS) * MS,
                go_ns=(at + 75) * MS,
                update_begun_ns=(at + 90) * MS,
                update_ended_ns=(at + 95) * MS,
                copy_begun_ns=0,
                copy_ended_ns=0,
                segments=(segment(at + 80, at + 90),),
            )
        )
    return RankSamples(f"{slot}.0#0", True, tuple(steps), tuple(rounds))


def pods(shift_ms: int = 0) -> list[PodSamples]:
    """Return the pods of the job; the late one is on another host, whose clock may differ.

    The first one reports what the script logs.

    Args:
        shift_ms: How far the clock of the other host is ahead.

    Returns:
        The samples of three pods.
    """
    late = PodSamples("job", 2, "other", (rank(2, LATE_MS, shift_ms),))
    first, second = (PodSamples("job", slot, "here", (rank(slot),)) for slot in (0, 1))
    return [replace(first, course=moments("loss")), replace(second, course=moments()), late]


def moments(*figures: str, count: int = 41, per_s: int = 10) -> tuple[Moment, ...]:
    """Return a moment per second of a job with `per_s` rounds per second.

    Args:
        figures: Names of what the script logs: 1 / second in each round, with weight 32.
        count: How many moments there are.
        per_s: Rounds per second.

    Returns:
        The moments, from second 0 on of `BEGAN_MS`.
    """
    total, made = 0.0, []
    for second in range(count):
        total += per_s * 32 / second if second else 0.0
        sums = dict.fromkeys(figures, (total, 32.0 * per_s * second))
        made.append(Moment(BEGAN_MS + 1000 * second, per_s * second, sums))
    return tuple(made)


def asked_later(pod: PodSamples, rounds: int) -> PodSamples:
    """Return a pod's samples `rounds` rounds later, with as many old ones forgotten."""
    (own,) = pod.ranks
    later = tuple(replace(one, round=one.round + rounds) for one in own.rounds)
    return replace(pod, ranks=(replace(own, rounds=later),))


def segment(begun_ms: int, ended_ms: int, payload_bytes: int = 4 << 20) -> SegmentSample:
    """Return the sample of a segment's sum."""
    took_ns = (ended_ms - begun_ms) * MS
    return SegmentSample(payload_bytes, 0, 0, begun_ms * MS, ended_ms * MS, took_ns)
