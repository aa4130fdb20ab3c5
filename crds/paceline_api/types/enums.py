"""Words that a TrainingJob chooses from, spelt as in YAML.

The meaning of each word is told in the text of the field that uses it, so that `kubectl explain`
shows it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Mode(StrEnum):
    FULL = "Full"
    QUORUM = "Quorum"
    MAJORITY = "Majority"
    SOLO = "Solo"
    DEADLINE = "Deadline"
    SHADOW = "Shadow"


class Backend(StrEnum):
    AUTO = "auto"
    MPI = "mpi"
    NCCL = "nccl"
    GLOO = "gloo"
    SHM = "shm"


class MaxAgePolicy(StrEnum):
    DROP = "Drop"
    DECAY = "Decay"
    WAIT = "Wait"


class Normalisation(StrEnum):
    FIXED = "Fixed"
    APPLIED = "Applied"
    CONTRIBUTORS = "Contributors"


class Pacing(StrEnum):
    AUTO = "Auto"
    ROUND = "Round"
    SAMPLES = "Samples"


class Overlap(StrEnum):
    AUTO = "Auto"
    NEVER = "Never"


class Wire(StrEnum):
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"


class BufferPolicy(StrEnum):
    AVERAGE = "Average"
    LOCAL = "Local"


class CleanPodPolicy(StrEnum):
    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class StragglerResponse(StrEnum):
    TOLERATE = "Tolerate"
    RESTART_IN_PLACE = "RestartInPlace"
    REPLACE = "Replace"


class FabricRequirement(StrEnum):
    ANY = "Any"
    RDMA = "RDMA"
    GPU_DIRECT = "GPUDirect"


ABLE_BACKENDS: Final = {
    FabricRequirement.RDMA: (Backend.MPI, Backend.NCCL),
    FabricRequirement.GPU_DIRECT: (Backend.NCCL,),
}
"""Which can use a required network; in a cluster `auto` is the first of them."""


class Autoscaler(StrEnum):
    KEEP = "Keep"
    MAY_EVICT = "MayEvict"


class SchedulingProvider(StrEnum):
    AUTO = "Auto"
    NONE = "None"
    NATIVE = "Native"
    KUEUE = "Kueue"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"
    KAI = "KAI"


class FailureAction(StrEnum):
    FAIL_JOB = "FailJob"
    COUNT = "Count"
    IGNORE = "Ignore"
