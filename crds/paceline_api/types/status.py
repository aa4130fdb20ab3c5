"""`status` of a TrainingJob: written by the operator, read by people, kubectl and other programs.

Fields are only added, and unknown ones are ignored, so that an operator can read what a newer one
wrote.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from paceline_api.types.model import Model

STRAGGLERS_MAX = 16
RANK_STATE_MAX = 16
TERMINATION_MAX = 1024
RANKS_MAX = 64
"""Upper bound on the ranks in the status: about 8 KB, which each write of the status sends to
everybody who watches the job."""


class StatusModel(Model):
    """Base class of the parts of the status: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class JobCondition(StatusModel):
    """One standard condition."""

    type: Annotated[str, Field(max_length=316)]
    """Type of the condition, such as RingReady, Degraded, Complete or Failed."""

    status: Annotated[str, Field(pattern="^(True|False|Unknown)$")]
    """True, False or Unknown."""

    reason: Annotated[str, Field(max_length=1024)]
    """One word for programs; the list is part of this API."""

    message: Annotated[str, Field(max_length=32_768)] = ""
    """What happened and what to do, for people."""

    last_transition_time: datetime
    """When the condition last changed its status."""

    observed_generation: int | None = None
    """metadata.generation for which the condition holds."""


class Restarts(StatusModel):
    """Restarts since the job was created."""

    ranks: int = 0
    """Processes restarted in place by their agent."""

    replicas: int = 0
    """Pods replaced by the operator, for whatever reason."""

    failures: int = 0
    """Failures without progress in between, as compared with spec.backoffLimit."""


class FabricStatus(StatusModel):
    """The fabric profile of the worker pods, chosen before the first of them."""

    profile: str
    """Name of the profile."""

    carries: str = ""
    """The best that a job can reach with it, as in spec.fabric.required."""

    pod: dict[str, Any] | None = None
    """What it adds to a pod, as it was when the job started; later changes of the profile do not
    reach a job that has begun."""

    message: str = ""
    """Why it is less than the nodes offer, and what to do."""


class TransportStatus(StatusModel):
    """What moves the gradients now."""

    kind: str
    """The transport in use, and what carries it between pods (TCP, RDMA, or GPUDirect) once that
    is known, such as mpi over RDMA; as measured on the worst of the ranks, not as asked for."""

    verified_at: datetime | None = None
    """When it was first measured to be what spec.fabric.required asks for."""

    message: str = ""
    """How it sums (machines, type on the wire), and the measurements that led to the choice."""


class RuntimeStatus(StatusModel):
    """The runtime of the job, as it was when the operator admitted the job."""

    kind: str
    """ClusterTrainingRuntime or TrainingRuntime."""

    name: str
    """Name of the runtime."""

    uid: str = ""
    """uid of the runtime; one that is made anew under the same name has another."""

    generation: int | None = None
    """metadata.generation of the runtime when the job was admitted."""

    spec: dict[str, Any]
    """spec of the runtime at that time, which stays in force for all attempts of this job."""


class CollectiveStatus(StatusModel):
    """How the rounds went so far."""

    mode: str
    """The mode in force, which follows spec.collective.mode at an agreed round."""

    partial_percent: int | None = None
    """Share of the rounds that started before all active ranks had arrived, in percent."""

    wait_avoided_seconds: int | None = None
    """Seconds of waiting, summed over ranks, that the mode has saved against Full."""

    round_microseconds: int | None = None
    """Median time of the recent rounds."""


class StragglerRow(StatusModel):
    """One rank that is slow for long."""

    rank: int
    """Rank number when the slowness was detected."""

    replica: str = ""
    """Name of its pod."""

    node: str = ""
    """The node on which it runs."""

    slowdown_percent: int
    """Median step of the rank in percent of the median of all ranks; 200 is twice as slow."""

    since: datetime
    """When it was detected."""

    action: str
    """The last step taken against it."""


class RankRow(StatusModel):
    """One rank, as the coordinator reported it."""

    member: Annotated[str, Field(max_length=64)]
    """slot.process#attempt, as in the logs."""

    state: Annotated[str, Field(max_length=RANK_STATE_MAX)]
    """What it does: starting, joining, standby, active, benched, suspect, draining, finished. Of a
    job that has ended or is suspended: finished, or dead."""

    pid: int = 0
    """Process ID of the rank in its pod."""

    step_microseconds: int | None = None
    """Median of its recent steps: batch in hand until the gradient is announced."""

    lag_microseconds: int | None = None
    """Median of its recent arrivals after the first rank of the same round."""

    share_percent: int | None = None
    """Rounds with a contribution of it, in percent of those in which it was active."""

    round: int = 0
    """Rounds that it has applied."""


class ProgressStatus(StatusModel):
    """How far the job is, from the samples applied."""

    percent: int
    """Samples applied, in percent of all epochs' samples."""

    eta_seconds: int | None = None
    """Seconds left at the present speed."""


class TrainingJobStatus(StatusModel):
    """State of the job as last seen by the operator."""

    observed_generation: int | None = None
    """metadata.generation that this status is about; -1 before the operator has seen the job."""

    state: str | None = None
    """One word for people that sums up the conditions; programs read the conditions."""

    ready: str | None = None
    """Replicas that train and replicas asked for, such as 7/8."""

    replicas: int | None = None
    """Worker pods that are not ending."""

    ready_replicas: int | None = None
    """Worker pods whose ranks all take part in the present membership."""

    selector: str | None = None
    """Label selector of the worker pods, for kubectl scale and autoscalers."""

    active_ranks: int | None = None
    """Ranks that compute; joining and benched ones do not count."""

    round: int | None = None
    """Rounds applied. Written at most once a minute."""

    membership_generation: str | None = None
    """The present membership; it changes when ranks join or leave."""

    highest_attempt: int | None = None
    """Highest attempt number of any pod of this job, so that no name is used twice."""

    restarts: Restarts | None = None
    """Restarts since the job was created."""

    disruption_budget: int | None = None
    """minAvailable of the job's PodDisruptionBudget; unset if it has none."""

    runtime: RuntimeStatus | None = None
    """The runtime that the job was merged with."""

    fabric: FabricStatus | None = None
    """What network the worker pods were made for."""

    transport: TransportStatus | None = None
    """What moves the gradients now."""

    collective: CollectiveStatus | None = None
    """How the rounds went so far."""

    straggler_count: int | None = None
    """Ranks that are slow for long."""

    stragglers: Annotated[tuple[StragglerRow, ...], Field(max_length=STRAGGLERS_MAX)] = ()
    """The slowest of them, at most 16."""

    progress: ProgressStatus | None = None
    """How far the job is."""

    ranks: Annotated[tuple[RankRow, ...], Field(max_length=RANKS_MAX)] = ()
    """The ranks with their figures; of more than 64 those that come last. Written at most once a
    minute, but for transitions."""

    figures_time: datetime | None = None
    """When the coordinator reported round, progress and ranks."""

    start_time: datetime | None = None
    """When training first started."""

    active_time: datetime | None = None
    """Since when the job is active: created, resumed, or admitted by its queue. Unset while it is
    suspended or queued; activeDeadlineSeconds counts from then."""

    completion_time: datetime | None = None
    """When the job became Complete or Failed."""

    termination_reason: Annotated[str, Field(max_length=TERMINATION_MAX)] | None = None
    """Why the job ended, in one line; of a script that failed: the exception, the numbers of the
    samples and the ranks."""

    resolved: dict[str, Any] | None = None
    """The settings in force, in the form of spec: as the spec sets them, and with each default as
    it was when the job started."""

    explicit: Annotated[tuple[str, ...], Field(max_length=128)] = ()
    """Paths of the fields in `resolved` that the spec sets itself; all others are defaults."""

    conditions: Annotated[tuple[JobCondition, ...], Field(max_length=32)] = ()
    """Standard conditions, one of each type."""
