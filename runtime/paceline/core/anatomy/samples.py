"""What a rank notes of a step and of a round: moments on its own clock, in nanoseconds.

A step is the loop's, from the end of one step() to the end of the next. A round is the job's; a
rank takes part in rounds that none of its steps waited for, so the two are noted apart and meet
again by their times. 0 stands for a moment that there was not.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final

from msgspec import Struct

SEGMENTS_MAX: Final = 32
"""Kept of one round. Of a model with more, neighbours are put together."""
STEPS_PATH: Final = "/steps"
"""Where an agent serves `PodSamples` as JSON."""


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

    began_ns: int
    announced_ns: int
    """step() was called."""
    resumed_ns: int
    """step() returned."""
    loading_ns: int
    forward_ns: int
    backward_ns: int
    lease_ns: int
    """Waiting for data to be dealt."""
    version: int
    """Of the weights after it."""
    fresh: bool
    samples: int
    """That its gradient is of; 0 if it had none to bring."""


class SegmentSample(Struct, frozen=True):
    """One segment of the gradient, or several neighbours, in one round."""

    payload_bytes: int
    ready_ns: int
    """backward() had added the last gradient; 0 where nobody looked."""
    opened_ns: int
    """What this rank contributes lay ready for the transport; 0 in a round that is not streamed,
    where that is just before `begun_ns` of the first one."""
    begun_ns: int
    ended_ns: int
    """Of its reduction."""
    busy_ns: int
    """Of this time in the transport; less than all of it only where neighbours are put together."""


class RoundSample(Struct, frozen=True):
    """One round on one rank."""

    round: int
    streamed: bool
    fresh: bool
    """It holds a gradient of this rank that came in time."""
    arrived_ns: int
    """This rank's announcement; 0 if it had none that was fresh."""
    last: str
    """Slot.process of the rank that arrived last; empty if no rank was fresh."""
    last_ns: int
    """When that one did, on this rank's clock."""
    go_ns: int
    update_begun_ns: int
    update_ended_ns: int
    copy_begun_ns: int
    copy_ended_ns: int
    """Of the weights into the model; 0 if the main thread was not waiting for them."""
    segments: tuple[SegmentSample, ...]


class RankSamples(Struct, frozen=True):
    """The last steps and rounds of one rank process, in their order."""

    member: str
    alive: bool
    steps: tuple[StepSample, ...]
    rounds: tuple[RoundSample, ...]


class PodSamples(Struct, frozen=True):
    """What an agent tells of its ranks."""

    job: str
    slot: int
    host: str
    """Ranks of one host share a clock."""
    ranks: tuple[RankSamples, ...]


class SilentPod(Struct, frozen=True):
    """One that runs, and whose agent has not told its samples."""

    pod: str
    why: str


def with_steps(pods: Iterable[PodSamples]) -> tuple[PodSamples, ...]:
    """Those of which a rank has made a step, in order of their slots."""
    found = (pod for pod in pods if any(rank.steps for rank in pod.ranks))
    return tuple(sorted(found, key=lambda pod: pod.slot))


def place_of_member(member: str) -> str:
    """Slot.process of a member's name: what stays the same when it is started again."""
    return member.partition("#")[0]
