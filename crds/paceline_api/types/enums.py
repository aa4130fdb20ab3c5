"""Enumerations of a TrainingJob, spelled as in YAML.

The description of the field that uses a value says what it means, so that `kubectl explain` shows
it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Mode(StrEnum):
    """Condition that starts a round (`spec.collective.mode`)."""

    FULL = "Full"
    QUORUM = "Quorum"
    MAJORITY = "Majority"
    SOLO = "Solo"
    DEADLINE = "Deadline"
    SHADOW = "Shadow"


class Backend(StrEnum):
    """Transport of the gradients (`spec.collective.backend`)."""

    AUTO = "auto"
    MPI = "mpi"
    NCCL = "nccl"
    GLOO = "gloo"
    SHM = "shm"


class MaxAgePolicy(StrEnum):
    """Handling of gradients older than maxAge (`spec.collective.maxAgePolicy`)."""

    DROP = "Drop"
    DECAY = "Decay"
    WAIT = "Wait"


class Normalisation(StrEnum):
    """Divisor of a round's sum of gradients (`spec.collective.normalisation`)."""

    FIXED = "Fixed"
    APPLIED = "Applied"
    CONTRIBUTORS = "Contributors"


class Pacing(StrEnum):
    """Cadence of the optimizer's steps (`spec.collective.pacing`)."""

    AUTO = "Auto"
    ROUND = "Round"
    SAMPLES = "Samples"


class Overlap(StrEnum):
    """Policy on reducing gradients during backward() (`spec.collective.overlap`)."""

    AUTO = "Auto"
    NEVER = "Never"


class Wire(StrEnum):
    """Type in which gradients are sent (`spec.collective.wire`)."""

    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"


class BufferPolicy(StrEnum):
    """Handling of the model's buffers (`spec.collective.buffers.policy`)."""

    AVERAGE = "Average"
    LOCAL = "Local"


class CleanPodPolicy(StrEnum):
    """Pods deleted when the job has ended (`spec.cleanPodPolicy`)."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class StragglerResponse(StrEnum):
    """Response to a persistently slow rank."""

    TOLERATE = "Tolerate"
    RESTART_IN_PLACE = "RestartInPlace"
    REPLACE = "Replace"


class NodeOperator(StrEnum):
    """Operator of a condition on a node's label (`spec.match.nodeExpressions` of a profile)."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class DnsPolicy(StrEnum):
    """The ways in which pods of a fabric profile resolve names; each of them finds Services."""

    CLUSTER_FIRST = "ClusterFirst"
    CLUSTER_FIRST_WITH_HOST_NET = "ClusterFirstWithHostNet"


class FabricRequirement(StrEnum):
    """Network that must carry the gradients (`spec.fabric.required`)."""

    ANY = "Any"
    RDMA = "RDMA"
    GPU_DIRECT = "GPUDirect"


ABLE_BACKENDS: Final = {
    FabricRequirement.RDMA: (Backend.MPI, Backend.NCCL),
    FabricRequirement.GPU_DIRECT: (Backend.NCCL,),
}
"""Backends that can use a required network; in a cluster `auto` is the first of them."""


class Autoscaler(StrEnum):
    """Permission of the cluster autoscaler to evict workers (`spec.elasticity.autoscaler`)."""

    KEEP = "Keep"
    MAY_EVICT = "MayEvict"


class SchedulingProvider(StrEnum):
    """Queue or gang scheduler that admits the job (`spec.scheduling.provider`)."""

    AUTO = "Auto"
    NONE = "None"
    NATIVE = "Native"
    KUEUE = "Kueue"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"
    KAI = "KAI"


class RuntimeKind(StrEnum):
    """Kind of the runtime that a job names (`spec.runtimeRef.kind`)."""

    CLUSTER = "ClusterTrainingRuntime"
    """One for all namespaces."""
    NAMESPACED = "TrainingRuntime"
    """One for the jobs of its own namespace."""


class FailureAction(StrEnum):
    """Response of a rule to a failure (`spec.failurePolicy.rules`)."""

    FAIL_JOB = "FailJob"
    COUNT = "Count"
    IGNORE = "Ignore"


class Network(StrEnum):
    """The network that carries the gradients of a rank to other pods.

    Apart from UNKNOWN, the values are in order from the worst to the best. The agent of a pod
    detects the value. A network that this release does not know counts as UNKNOWN.
    """

    UNKNOWN = ""
    """Not detected yet."""
    TCP = "TCP"
    RDMA = "RDMA"
    """RDMA, which is not known to be GPUDirect."""
    GPUDIRECT = "GPUDirect"
    """RDMA to and from the memory of GPUs."""

    @classmethod
    def _missing_(cls, value: object) -> Network:  # noqa: ARG003
        return cls.UNKNOWN
