"""The samples that a rank records of its steps and rounds: times on its own clock, in nanoseconds.

Samples come from pods, whose images belong to the user who submitted the job, and their text is
shown on a page and on a terminal. So the types bound every number, text and list, and a name can
only be the name of a process. Decoding a message is the check.

A step belongs to the training loop: from the end of one step() to the end of the next. A round
belongs to the job. A rank takes part in rounds that none of its steps waited for, so steps and
rounds are recorded separately and matched by their times. A time of 0 means that the event did not
happen.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from paceline_api.decoding import UNDECODABLE
from paceline_api.ids import PROCS_MAX

SEGMENTS_MAX: Final = 32
"""Upper bound on the segments recorded for one round. If a model has more, neighbors are merged."""
STEPS: Final = 64
"""Number of steps kept for one rank."""
ROUNDS: Final = 64
"""Number of rounds kept for one rank."""
RANK_BYTES_MAX: Final = 512 * 1024
"""Upper bound on the samples of one rank as JSON, in bytes; 64 rounds of 32 segments take 355 KB.
"""
RANKS_PER_PLACE: Final = 2
"""Number of ranks reported for one place: the living one, and the one that died there last."""
MOMENTS_MAX: Final = 256
"""Upper bound on the moments that an agent keeps of the job's course."""
FIGURES_MAX: Final = 16
"""Upper bound on the metrics of a script that are kept for Prometheus and in a job's course."""
FIGURE_NAME_BYTES: Final = 32
"""Size of the name of such a metric in UTF-8, in bytes; longer names are cut."""
COURSE_BYTES_MAX: Final = 512 * 1024
"""Upper bound on the course of one pod as JSON, in bytes; 256 moments of 16 figures take 380 KB."""
STEPS_PATH: Final = "/steps"
"""HTTP path at which an agent serves `PodSamples` as JSON."""

Ns = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A time or a duration, in nanoseconds."""
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A non-negative integer of 63 bits."""
MemberName = Annotated[str, Meta(pattern=r"\A[0-9]{1,9}\.[0-9]{1,5}#[0-9]{1,15}\Z")]
"""A `MemberId` as text: slot.process#attempt."""
PlaceName = Annotated[str, Meta(pattern=r"\A([0-9]{1,9}\.[0-9]{1,5})?\Z")]
"""The place of a rank, slot.process, or empty."""
FigureName = Annotated[str, Meta(max_length=FIGURE_NAME_BYTES)]
"""The name of a figure that the script logs."""
ShortText = Annotated[str, Meta(max_length=253)]
"""A text that is long enough for any DNS name, and so for any Kubernetes name."""


class StepPhase(IntEnum):
    """The activity of the main thread between two calls of step()."""

    SCRIPT = 0
    """The script's own work: nothing that the hooks can see."""
    LOADING = 1
    """Inside the runtime's data loader."""
    FORWARD = 2
    """Inside the model's forward pass."""
    BACKWARD = 3
    """The loss and backward(): the time after the end of the forward pass."""


class StepSample(Struct, frozen=True):
    """One step of the training loop on one rank."""

    began_ns: Ns
    """End of the previous step(), or the time at which the loop began or continued after
    evaluation."""
    announced_ns: Ns
    """Time at which step() was called."""
    resumed_ns: Ns
    """Time at which step() returned."""
    loading_ns: Ns
    """Time spent in the data loader, without waiting for a lease."""
    forward_ns: Ns
    """Time spent in the forward pass."""
    backward_ns: Ns
    """Time spent in the loss and backward()."""
    lease_ns: Ns
    """Time spent waiting for a lease of data, or outside step() for a reduction in flight."""
    version: Count
    """Version of the weights with which step() returned."""
    fresh: bool
    """True if the gradient was applied in its own round, not kept for a later one or dropped."""
    samples: Count
    """Number of samples in the gradient; 0 if the step had none."""


class SegmentSample(Struct, frozen=True):
    """The reduction of one segment of the gradient, or of merged neighbors, in one round."""

    payload_bytes: Count
    """Size of the segment, in bytes."""
    ready_ns: Ns
    """Time at which backward() had added the last gradient of the segment; 0 if it was not
    observed."""
    opened_ns: Ns
    """Time at which this rank's contribution was ready for the transport. 0 in a round that is not
    streamed: there it is just before `begun_ns` of the first segment."""
    begun_ns: Ns
    """Start of its reduction."""
    ended_ns: Ns
    """End of its reduction."""
    busy_ns: Ns
    """Part of that time in which the transport was busy. Less than all of it only if neighbors are
    merged."""


class RoundSample(Struct, frozen=True):
    """One round on one rank."""

    round: Count
    """Number of the round."""
    streamed: bool
    """True if the round was reduced while backward() ran."""
    fresh: bool
    """True if the round contains a gradient of this rank that arrived in time."""
    arrived_ns: Ns
    """Time at which this rank announced its gradient; 0 if it had no fresh one."""
    last: PlaceName
    """Place of the rank that this rank waited for: the last one to arrive. Empty if this rank was
    the last, or not fresh."""
    last_ns: Ns
    """Time at which that rank arrived, on this rank's clock."""
    go_ns: Ns
    """Time at which GO reached this rank."""
    update_begun_ns: Ns
    """Start of the update of the committed weights."""
    update_ended_ns: Ns
    """End of the update of the committed weights."""
    copy_begun_ns: Ns
    """Start of the copy of the weights into the model; 0 if the main thread did not wait for it."""
    copy_ended_ns: Ns
    """End of the copy of the weights into the model; 0 if the main thread did not wait for it."""
    segments: Annotated[tuple[SegmentSample, ...], Meta(max_length=SEGMENTS_MAX)]
    """The segments that this rank reduced, in order."""


class RankSamples(Struct, frozen=True):
    """The last steps and rounds of one rank process, in order."""

    member: MemberName
    alive: bool
    """True if the process is alive."""
    steps: Annotated[tuple[StepSample, ...], Meta(max_length=STEPS)]
    rounds: Annotated[tuple[RoundSample, ...], Meta(max_length=ROUNDS)]


class Moment(Struct, frozen=True):
    """The state of the job at one moment, as the ranks of one pod knew it."""

    wall_ms: Count
    """Unix time in milliseconds, on the clock of the pod's host."""
    round: Count
    """Number of rounds applied so far."""
    figures: Annotated[dict[FigureName, tuple[float, float]], Meta(max_length=FIGURES_MAX)]
    """Sum of value x weight and sum of the weights of what the script has logged so far. Empty
    unless the rank that reports them is in this pod."""


class PodSamples(Struct, frozen=True):
    """The samples that an agent reports for its ranks, and the job's course."""

    job: ShortText
    slot: Count
    host: ShortText
    """Name of the host. Ranks on one host share a clock."""
    ranks: Annotated[tuple[RankSamples, ...], Meta(max_length=RANKS_PER_PLACE * PROCS_MAX)]
    course: Annotated[tuple[Moment, ...], Meta(max_length=MOMENTS_MAX)] = ()
    """Moments since the agent has started, in order."""


class SilentPod(Struct, frozen=True):
    """A running pod whose agent did not report its samples."""

    pod: str
    """Name of the pod."""
    why: str
    """Reason why its samples are missing, for users."""


class SamplesError(ValueError):
    """Raised for an answer that is not the samples of a pod's ranks; the message says why."""


def bytes_max(procs: int) -> int:
    """Return the upper bound on the samples of a pod with `procs` processes, in bytes."""
    ranks = RANKS_PER_PLACE * max(1, min(procs, PROCS_MAX))
    return ranks * RANK_BYTES_MAX + COURSE_BYTES_MAX


def read_samples(answer: bytes) -> PodSamples:
    """Decode and check the samples that a pod reports.

    Args:
        answer: JSON, at most `bytes_max()` bytes long.

    Returns:
        The samples; all bounds hold.

    Raises:
        SamplesError: The answer is not such JSON, exceeds a bound, or names ranks of another pod.
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
    """Return the pods in which at least one rank has made a step, ordered by slot."""
    known = (pod for pod in pods if any(rank.steps for rank in pod.ranks))
    return tuple(sorted(known, key=lambda pod: pod.slot))


def place_of_member(member: str) -> str:
    """Return slot.process of a member's name: the part that stays the same after a restart."""
    return member.partition("#")[0]
