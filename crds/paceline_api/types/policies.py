"""The smaller parts of the spec: stragglers, fabric, elasticity, checkpoints, queues, failures."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, Strict

from paceline_api.types.enums import (
    Autoscaler,
    FabricRequirement,
    FailureAction,
    SchedulingProvider,
    StragglerResponse,
)
from paceline_api.types.model import (
    Count,
    Flag,
    Model,
    Number,
    PathText,
    Port,
    Positive,
    Replicas,
    Text,
    behaviour,
)

ExitCode = Annotated[int, Strict(), Field(ge=1, le=255)]


class CoordinatorPod(Model):
    """Pod of the job's coordinator.

    Placement that is not set here follows the worker template. Without meaning on a laptop.
    """

    resources: dict[str, Any] | None = None
    """Requests and limits of the coordinator's container, as in a pod."""

    node_selector: Annotated[dict[str, str], Field(max_length=64)] | None = None
    """Labels that the coordinator's node must have."""

    tolerations: Annotated[tuple[dict[str, Any], ...], Field(max_length=64)] | None = None
    """Taints that the coordinator's pod tolerates, as in a pod."""

    affinity: dict[str, Any] | None = None
    """Affinity of the coordinator's pod, as in a pod. Default: the template's nodeAffinity, unless
    nodeSelector is set here."""

    priority_class_name: Text | None = None
    """Priority class of the coordinator's pod."""


class StragglerDetection(Model):
    """When a rank counts as a straggler."""

    window_rounds: Annotated[Positive, Field(ge=5)] | None = behaviour(50)
    """Rounds over which step times are compared."""

    slowdown_factor: Annotated[Number, Field(gt=1, le=100)] | None = behaviour(1.5)
    """A rank is a straggler when its median step takes this many times the median of all ranks, and
    at least 10 ms more."""


class Straggler(Model):
    """What is done about ranks that are slow for long."""

    detect: StragglerDetection | None = behaviour()
    """When a rank counts as a straggler."""

    respond: Annotated[tuple[StragglerResponse, ...], Field(min_length=1, max_length=3)] | None = (
        behaviour((StragglerResponse.TOLERATE,))
    )
    """Steps taken one after the other while a rank stays slow. Tolerate: report it and let the mode
    cope. RestartInPlace: restart its process. Replace: replace its pod, away from its node
    (on a laptop: its process)."""

    cooldown_seconds: Count | None = behaviour(300)
    """Seconds between two steps against the same job's stragglers."""


class Preflight(Model):
    """The check of the network in the first rounds."""

    enabled: Flag | None = behaviour(True)
    """Fails the job if its first rounds show that less than `required` carries the
    gradients. False: it trains on, and the condition TransportVerified says so."""

    timeout_seconds: Positive | None = behaviour(120)
    """Seconds after which, while rounds run, a check without a result counts as failed."""


class Fabric(Model):
    """The network between the workers' pods. Without meaning on a laptop."""

    profile: Text | None = behaviour("auto")
    """Name of the FabricProfile that the worker pods get. With auto it is chosen by what the nodes
    offer, for a trainer that asks for a device such as nvidia.com/gpu or if `required` asks;
    otherwise, and where nothing fits, it is tcp."""

    required: FabricRequirement | None = behaviour(FabricRequirement.ANY)
    """What must carry the gradients between pods: Any, RDMA, or GPUDirect (RDMA to and from GPU
    memory). The measured result is shown in status.transport."""

    preflight: Preflight | None = behaviour()
    """The check of the network in the first rounds."""


class Elasticity(Model):
    """How the job grows, shrinks and replaces workers."""

    settle_seconds: Count | None = behaviour(30)
    """Seconds that the start waits for all replicas before it goes on with those that are there,
    if they are at least minReplicas."""

    stabilization_seconds: Count | None = behaviour(1)
    """Seconds that a worker that is ready waits for others, so that workers that come together
    join in one membership change. Nobody waits once all replicas are ready, and no start, repair or
    drain waits for it."""

    drain_grace_seconds: Positive | None = behaviour(60)
    """Seconds that a worker has after SIGTERM to finish its round and leave without losing work;
    the termination grace period of its pod."""

    node_lost_seconds: Positive | None = behaviour(60)
    """Seconds for which a node must be NotReady before its workers count as gone. Without meaning
    on a laptop."""

    allowed_sizes: Annotated[tuple[Replicas, ...], Field(min_length=1, max_length=64)] | None = None
    """Numbers of workers with which the job may train, such as [2, 4, 8]; workers beyond the
    largest such number that is reached stand by. A start waits for the smallest one; a running job
    that loses workers goes on with those that live, whatever their number. Unset: any number."""

    autoscaler: Autoscaler | None = behaviour(Autoscaler.KEEP)
    """What the cluster autoscaler may do with workers to save nodes: Keep, or MayEvict."""

    disruption_budget: Flag | None = behaviour(False)
    """Makes a PodDisruptionBudget that keeps minReplicas workers from being evicted, such as by
    kubectl drain, which then waits."""


class Checkpoint(Model):
    """Checkpoints of weights, optimizer, scheduler and data position, written in the background."""

    path: PathText
    """Folder for the checkpoints, as the trainer sees it. On a laptop it may be relative to the job
    file's folder."""

    claim_name: Text | None = behaviour()
    """PersistentVolumeClaim that is mounted at `path` in every worker. Unset: the template mounts
    something there itself. Without meaning on a laptop."""

    every_rounds: Positive | None = behaviour(1000)
    """Rounds between two checkpoints. There is always one when the job is suspended or ends."""

    keep: Positive | None = behaviour(3)
    """Newest checkpoints that are kept; older ones are deleted."""

    required: Flag | None = behaviour(False)
    """true fails the job when a checkpoint cannot be written, such as on a full disk. Otherwise it
    trains on, says so, and tries the next one."""


class Gang(Model):
    """All or nothing at the start."""

    min_count: Replicas | None = None
    """Workers for which there must be room at once before any is started. Default: minReplicas
    (with Kueue: replicas)."""


class Scheduling(Model):
    """Help from a queue or a gang scheduler. Without meaning on a laptop."""

    provider: SchedulingProvider | None = behaviour(SchedulingProvider.AUTO)
    """Who admits the job. None: nobody, pods are scheduled one by one. Native: the PodGroup of
    Kubernetes itself. Kueue, Volcano, Coscheduling, KAI: that project's objects. Auto: Kueue if the
    job has its queue label, otherwise None. With Kueue the number of replicas is fixed."""

    gang: Gang | None = None
    """All or nothing at the start; needs a provider. Unset: workers start as room is found for
    them (with Kueue: all at once)."""

    topology_key: Text | None = behaviour()
    """Node label of which all workers must have the same value, such as
    topology.kubernetes.io/rack. Unset: workers may run anywhere."""

    start_deadline_seconds: Positive | None = behaviour()
    """Seconds that a job may take from its start or resumption until its ranks train; with more it
    fails, with what it waited for. The time in a queue does not count. Default: no limit."""


class Metrics(Model):
    """Metrics of the job's processes, for Prometheus."""

    port: Port | None = behaviour(9464)
    """Port of /metrics in every worker's pod. On a laptop each worker takes the next free one."""


class Logging(Model):
    """Records that the job writes of itself."""

    tensor_board: PathText
    """Folder, as the trainer sees it, for TensorBoard event files with the figures of `pl.log`: the
    means over all ranks. In a cluster the template mounts something there. On a laptop it may be
    relative to the job file's folder. The image needs the package tensorboard."""


class FailureRule(Model):
    """What to do when a rank ends in a certain way. One of the two lists must match."""

    action: FailureAction
    """FailJob: the job fails at once. Count: the rank is restarted, before the first round too, and
    it counts against backoffLimit. Ignore: it is restarted and does not count."""

    on_exit_codes: Annotated[tuple[ExitCode, ...], Field(min_length=1, max_length=64)] | None = None
    """Exit codes of the rank; a death by signal n is 128 + n."""

    on_reasons: Annotated[tuple[Text, ...], Field(min_length=1, max_length=16)] | None = None
    """Reasons that Kubernetes gives for the end of the container or pod, such as OOMKilled or
    Evicted. Of a pod that the cluster has ended they alone count, not its exit code."""


class FailurePolicy(Model):
    """What to do when a rank ends badly."""

    rules: Annotated[tuple[FailureRule, ...], Field(min_length=1, max_length=32)] | None = None
    """Rules in order; the first that matches decides. If none matches: Count; but a script that
    fails before the first round, with exit code 2 (a mistake of its user), at the same line on a
    second rank, or a second time with the same batch, ends the job."""

    max_skipped_batches: Annotated[Count, Field(le=1000)] | None = behaviour(0)
    """How many batches may be given up because the script fails with them. A batch with which two
    processes have failed is not dealt again, and its samples count as dropped; one more than this
    ends the job. 0: the second failure with the same batch ends the job."""
