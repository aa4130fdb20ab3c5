"""The TrainingJob, as a user writes it and as the API server stores it.

A user states how many replicas, when a round starts and which command each rank runs; everything
else has a default. The same file is taken by `kubectl apply` and by `paceline run` on a laptop.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from paceline_api.names import DEFAULT_MANAGER
from paceline_api.settings import FINISH_DEADLINE_S, STEP_DEADLINE_S
from paceline_api.types.collective import Collective
from paceline_api.types.enums import CleanPodPolicy, RuntimeKind
from paceline_api.types.model import (
    Count,
    Flag,
    Model,
    ModelParallel,
    OpenModel,
    Positive,
    Procs,
    Replicas,
    Text,
    behaviour,
)
from paceline_api.types.policies import (
    Checkpoint,
    CoordinatorPod,
    Elasticity,
    Fabric,
    FailurePolicy,
    Logging,
    Metrics,
    Scheduling,
    Straggler,
)
from paceline_api.types.status import TrainingJobStatus
from paceline_api.types.template import Container, PodTemplate

GROUP: Final = "paceline.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "paceline.dev/v1alpha1"
KIND: Final = "TrainingJob"


class Metadata(OpenModel):
    """The part of an object's metadata that Paceline reads."""

    name: Annotated[str, Field(max_length=253)]
    """Name of the job: at most 45 lower-case letters, digits and dashes, a letter first."""

    namespace: str | None = None
    """Namespace of the job."""

    uid: str | None = None
    """Identity given by the API server."""

    generation: int | None = None
    """Number of the spec's version, given by the API server."""

    labels: dict[str, str] | None = None
    """Labels of the job."""

    annotations: dict[str, str] | None = None
    """Annotations of the job."""


class Parallelism(Model):
    """How a worker's processes share one model."""

    model: ModelParallel | None = behaviour()
    """Ranks that hold one copy of the model together, each a shard of it: a group, which trains as
    one member of the job, comes, goes and is counted as one. It divides procsPerReplica, so that a
    group is within one pod. Default: 1, each rank holds the whole model."""


class RuntimeRef(Model):
    """The runtime that a job is merged with."""

    kind: RuntimeKind | None = behaviour(RuntimeKind.CLUSTER)
    """ClusterTrainingRuntime, or TrainingRuntime for one in the namespace of the job."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the runtime."""


class OwnSpec(Model):
    """Fields that only the job itself has, and no runtime."""

    replicas: Replicas = 1
    """Wanted number of workers (pods; on a laptop, groups of processes), from minReplicas to
    maxReplicas. kubectl scale and an autoscaler change it, too."""

    suspend: Flag = False
    """true stops the job after a checkpoint and removes its pods; false starts or resumes it."""

    managed_by: Text | None = behaviour(DEFAULT_MANAGER)
    """Name of the operator that looks after the job; all others leave it alone."""

    runtime_ref: RuntimeRef | None = None
    """Runtime of the platform's team from which the job takes what it does not say itself. It may
    override what mayOverride of the runtime names. The runtime is kept in status.runtime as it is
    when the job is admitted; later changes of it do not reach this job."""


class SharedSpec(Model):
    """Fields that a job and a runtime have alike."""

    min_replicas: Replicas | None = behaviour()
    """Fewest workers with which the job starts and trains; with fewer it waits. Default: 1, so that
    a job that loses workers goes on with those that live (with Kueue: replicas). Set it to the
    value of replicas for a job of fixed size."""

    max_replicas: Replicas | None = behaviour()
    """Most workers that replicas may ask for. Default: no limit, so that kubectl scale works (with
    Kueue: replicas)."""

    procs_per_replica: Procs | None = behaviour()
    """Ranks (processes) in each worker. Default: the trainer's limit of nvidia.com/gpu, so that
    each rank has a GPU of its own; 1 without one."""

    parallelism: Parallelism | None = None
    """How a worker's processes share one model. Default: each holds all of it."""

    ttl_seconds_after_finished: Count | None = behaviour()
    """Seconds after its end at which the job is deleted. Default: never."""

    active_deadline_seconds: Positive | None = behaviour()
    """Seconds for which the job may be active before it fails, whether it trains by then or not.
    As in a Job, the time of a suspension does not count, and it begins anew when the job is
    resumed; so it does when a queue admits the job. Default: no limit."""

    finish_deadline_seconds: Positive | None = behaviour(FINISH_DEADLINE_S)
    """Seconds that the script of a rank may still take after all ranks have the final weights, to
    evaluate and to save. Then its processes are killed; the job is Complete all the same."""

    step_deadline_seconds: Positive | None = behaviour(STEP_DEADLINE_S)
    """Seconds that the script of a rank may take between two calls of step(), to load and compute a
    batch and for whatever else it does outside of pl.evaluating(). Then the rank is ended, which
    counts as a failure of its script."""

    backoff_limit: Count | None = behaviour(6)
    """Failures of ranks without progress in between before the job fails. Evictions, drains and
    lost nodes do not count."""

    clean_pod_policy: CleanPodPolicy | None = behaviour(CleanPodPolicy.RUNNING)
    """Pods deleted when the job has ended: None, Running (those that still run; ended ones are kept
    for their logs) or All."""

    coordinator: CoordinatorPod | None = None
    """Pod of the job's coordinator."""

    collective: Collective | None = behaviour()
    """How the ranks combine their gradients in rounds."""

    straggler: Straggler | None = behaviour()
    """What is done about ranks that are slow for long."""

    fabric: Fabric | None = behaviour()
    """The network between the workers' pods. Without meaning on a laptop."""

    elasticity: Elasticity | None = behaviour()
    """How the job grows, shrinks and replaces workers."""

    checkpoint: Checkpoint | None = None
    """Checkpoints of weights, optimizer, scheduler and data position. Default: none, and a job that
    loses all its ranks fails."""

    scheduling: Scheduling | None = behaviour()
    """Help from a queue or a gang scheduler. Without meaning on a laptop."""

    metrics: Metrics | None = behaviour()
    """Metrics of the job's processes, for Prometheus."""

    logging: Logging | None = None
    """Records that the job writes of itself. Default: none."""

    failure_policy: FailurePolicy | None = None
    """What to do when a rank ends badly. Default: restart it and count it against backoffLimit."""

    template: PodTemplate | None = None
    """Template of a worker's pod, as in a Job. Its container `trainer` holds the command of a rank.
    Without one, the job has that of its runtime."""

    @property
    def containers(self) -> tuple[Container, ...]:
        """Containers of the template; empty without a template."""
        return self.template.spec.containers if self.template else ()

    def trainer(self) -> Container | None:
        """Return the container in which the ranks run; None if there is none."""
        return self.template.trainer() if self.template else None


class TrainingJobSpec(SharedSpec, OwnSpec):
    """What to train with, how many of it, and what to do when something goes wrong."""


class TrainingJob(Model):
    """Data-parallel training of a PyTorch model that goes on when workers come, go or slow down."""

    api_version: Literal["paceline.dev/v1alpha1"] = API_VERSION
    """paceline.dev/v1alpha1"""

    kind: Literal["TrainingJob"] = KIND
    """TrainingJob"""

    metadata: Metadata
    """Name, namespace, labels."""

    spec: TrainingJobSpec
    """What to train with, how many of it, and what to do when something goes wrong."""

    status: TrainingJobStatus | None = None
    """State of the job as last seen by the operator."""

    def to_mapping(self) -> dict[str, Any]:
        """Return the job as in its file: in camelCase, without fields that are not set."""
        mapping: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return mapping
