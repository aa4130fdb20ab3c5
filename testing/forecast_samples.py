"""Samples of made-up ranks with steps of 100 ms, from which a forecast is measured."""

from __future__ import annotations

from paceline.core.anatomy.samples import (
    PodSamples,
    RankSamples,
    RoundSample,
    SegmentSample,
    StepSample,
)

MS = 10**6
STEP_MS = 100


def rank(slot: int, computing_ms: int, rounds: int, *, since: int = 0) -> RankSamples:
    """Return samples of a rank: sums of 10 ms (15 ms on rank 0), 5 ms of update and copy."""
    steps, samples = [], []
    for number in range(since, since + rounds):
        began, go = number * STEP_MS * MS, (number * STEP_MS + 60) * MS
        announced = began + (computing_ms if number >= 2 else 59) * MS
        steps.append(
            StepSample(
                began_ns=began,
                announced_ns=announced,
                resumed_ns=began + STEP_MS * MS,
                loading_ns=0,
                forward_ns=0,
                backward_ns=0,
                lease_ns=0,
                version=number + 1,
                fresh=True,
                samples=32 if number % 10 != 9 else 5,
            )
        )
        begun = go + (5 if slot else 0) * MS
        samples.append(
            RoundSample(
                round=number,
                streamed=False,
                fresh=True,
                arrived_ns=announced,
                last="1.0",
                last_ns=go,
                go_ns=go,
                update_begun_ns=go + 15 * MS,
                update_ended_ns=go + 18 * MS,
                copy_begun_ns=go + 18 * MS,
                copy_ended_ns=go + 20 * MS,
                segments=(SegmentSample(4096, 0, 0, begun, go + 15 * MS, 10 * MS),),
            )
        )
    return RankSamples(f"{slot}.0#0", False, tuple(steps), tuple(samples))


def pods(*ranks: RankSamples) -> list[PodSamples]:
    """Return one pod for each rank, all on one host."""
    return [PodSamples("job", slot, "here", (each,)) for slot, each in enumerate(ranks)]
