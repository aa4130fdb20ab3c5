"""What a rank notes of a step and of a round: moments on its own clock, in nanoseconds.

Samples come from pods, whose images belong to whoever submitted the job, and their text ends up
on a page and on a terminal. So the types bound every number, text and list, and a name is a name of
a process and nothing else: decoding is the check.

A step is the loop's, from the end of one step() to the end of the next. A round is the job's; a
rank takes part in rounds that none of its steps waited for, so the two are noted apart and meet
again by their times. 0 stands for a moment that there was not.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from paceline_api.decoding import UNDECODABLE
from paceline_api.types.model import PROCS_MAX

SEGMENTS_MAX: Final = 32
"""Kept of one round. Of a model with more, neighbours are put together."""
STEPS: Final = 64
"""Kept of one rank."""
ROUNDS: Final = 64
"""Kept of one rank."""
RANK_BYTES_MAX: Final = 512 * 1024
"""Of one rank's samples as JSON; 64 rounds of 32 segments come to 355 KB."""
RANKS_PER_PLACE: Final = 2
"""The one that lives and the one that died there last."""
STEPS_PATH: Final = "/steps"
"""Where an agent serves `PodSamples` as JSON."""

Ns = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A moment or a length of time, in nanoseconds."""
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
MemberName = Annotated[str, Meta(pattern=r"\A[0-9]{1,9}\.[0-9]{1,5}#[0-9]{1,15}\Z")]
"""A `MemberId` as text."""
PlaceName = Annotated[str, Meta(pattern=r"\A([0-9]{1,9}\.[0-9]{1,5})?\Z")]
"""Slot.process, or empty."""
ShortText = Annotated[str, Meta(max_length=253)]
"""Long enough for any name of DNS, and so of Kubernetes."""


class Phase(IntEnum):
    """What the main thread is at between two step()."""

    SCRIPT = 0
    """Nothing that hooks can see: the script's own work."""
    LOADING = 1
    """Inside our loader."""
    FORWARD = 2
    BACKWARD = 3
    """From the end of forward on: loss and backward."""


class StepSample(Struct, frozen=True):
    """One step of the loop."""

    began_ns: Ns
    announced_ns: Ns
    """step() was called."""
    resumed_ns: Ns
    """step() returned."""
    loading_ns: Ns
    forward_ns: Ns
    backward_ns: Ns
    lease_ns: Ns
    """Waiting for data to be dealt."""
    version: Count
    """Of the weights after it."""
    fresh: bool
    samples: Count
    """That its gradient is of; 0 if it had none to bring."""


class SegmentSample(Struct, frozen=True):
    """One segment of the gradient, or several neighbours, in one round."""

    payload_bytes: Count
    ready_ns: Ns
    """backward() had added the last gradient; 0 where nobody looked."""
    opened_ns: Ns
    """What this rank contributes lay ready for the transport; 0 in a round that is not streamed,
    where that is just before `begun_ns` of the first one."""
    begun_ns: Ns
    ended_ns: Ns
    """Of its reduction."""
    busy_ns: Ns
    """Of this time in the transport; less than all of it only where neighbours are put together."""


class RoundSample(Struct, frozen=True):
    """One round on one rank."""

    round: Count
    streamed: bool
    fresh: bool
    """It holds a gradient of this rank that came in time."""
    arrived_ns: Ns
    """This rank's announcement; 0 if it had none that was fresh."""
    last: PlaceName
    """Slot.process of the rank that arrived last; empty if no rank was fresh."""
    last_ns: Ns
    """When that one did, on this rank's clock."""
    go_ns: Ns
    update_begun_ns: Ns
    update_ended_ns: Ns
    copy_begun_ns: Ns
    copy_ended_ns: Ns
    """Of the weights into the model; 0 if the main thread was not waiting for them."""
    segments: Annotated[tuple[SegmentSample, ...], Meta(max_length=SEGMENTS_MAX)]


class RankSamples(Struct, frozen=True):
    """The last steps and rounds of one rank process, in their order."""

    member: MemberName
    alive: bool
    steps: Annotated[tuple[StepSample, ...], Meta(max_length=STEPS)]
    rounds: Annotated[tuple[RoundSample, ...], Meta(max_length=ROUNDS)]


class PodSamples(Struct, frozen=True):
    """What an agent tells of its ranks."""

    job: ShortText
    slot: Count
    host: ShortText
    """Ranks of one host share a clock."""
    ranks: Annotated[tuple[RankSamples, ...], Meta(max_length=RANKS_PER_PLACE * PROCS_MAX)]


class SilentPod(Struct, frozen=True):
    """One that runs, and whose agent has not told its samples."""

    pod: str
    why: str


class SamplesError(ValueError):
    """Raised for an answer that is not the samples of a pod's ranks; the message says why."""


def bytes_max(procs: int) -> int:
    """Return how many bytes the samples of a pod with so many processes may have."""
    return RANKS_PER_PLACE * max(1, min(procs, PROCS_MAX)) * RANK_BYTES_MAX


def read_samples(answer: bytes) -> PodSamples:
    """Return the samples that a pod tells, once all their bounds hold.

    Args:
        answer: JSON, of at most `bytes_max()`.

    Raises:
        SamplesError: It is no such JSON, exceeds a bound, or has ranks of another pod.
    """
    try:
        pod = msgspec.json.decode(answer, type=PodSamples)
    except UNDECODABLE as error:
        raise SamplesError(str(error)) from None
    for rank in pod.ranks:
        if int(rank.member.partition(".")[0]) != pod.slot:
            raise SamplesError(f"rank {rank.member} is none of slot {pod.slot}")
    return pod


def with_steps(pods: Iterable[PodSamples]) -> tuple[PodSamples, ...]:
    """Those of which a rank has made a step, in order of their slots."""
    found = (pod for pod in pods if any(rank.steps for rank in pod.ranks))
    return tuple(sorted(found, key=lambda pod: pod.slot))


def place_of_member(member: str) -> str:
    """Slot.process of a member's name: what stays the same when it is started again."""
    return member.partition("#")[0]
