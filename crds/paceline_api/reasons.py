"""Condition types and reasons of a TrainingJob. Users alert on them: add, but never rename.

Each member has one sentence, from which the reference in the documentation is generated.
"""

from __future__ import annotations

from enum import StrEnum


class _Told(StrEnum):
    sentence: str

    def __new__(cls, value: str, sentence: str) -> _Told:
        member = str.__new__(cls, value)
        member._value_ = value
        member.sentence = sentence
        return member


class ConditionType(_Told):
    """Values of a condition's `type`; Complete and Failed are final."""

    READY = (
        "Ready",
        "The job is as asked: it trains, is suspended, or is Complete; else the reason says why.",
    )
    STALLED = (
        "Stalled",
        "The job will not get on unless somebody does something; the message says what is wrong.",
    )
    SUSPENDED = "Suspended", "The job is stopped because its spec says so."
    SCHEDULED = "Scheduled", "The coordinator and at least minReplicas workers have a node."
    TRANSPORT_VERIFIED = (
        "TransportVerified",
        "The transport in use was measured and is as required.",
    )
    RING_READY = "RingReady", "A membership stands and rounds can run."
    DEGRADED = "Degraded", "The job trains, or waits, with less than was asked for."
    RESIZING = "Resizing", "Workers are being added, replaced or taken away."
    COMPLETE = "Complete", "The job has ended and all its data is applied."
    FAILED = "Failed", "The job has ended before its data was applied."


class Reason(_Told):
    """Values of the `reason` of a condition or an Event."""

    SUSPENDED_BY_SPEC = "SuspendedBySpec", "spec.suspend is true."
    RESUMED = "Resumed", "spec.suspend was set back to false."
    SETTLING = "Settling", "The start waits for all replicas until settleSeconds are over."
    RING_FORMED = "RingFormed", "A new membership stands; the message lists who joined and left."
    JOB_FAILED = "JobFailed", "The job has failed; the message is the coordinator's."
    JOB_FINISHED = "JobFinished", "All ranks agreed on the last round and were released."

    QUORUM_REDUCED = (
        "QuorumReduced",
        "There are fewer active ranks than spec.collective.quorum, so rounds wait for all of them.",
    )
    WAITING_FOR_EVIDENCE = (
        "WaitingForEvidence",
        "Half or more of the ranks are silent, and nobody has yet seen that they are dead.",
    )
    BELOW_MIN_REPLICAS = (
        "BelowMinReplicas",
        "Fewer than minReplicas workers are there; training goes on, a start waits.",
    )
    SCRIPT_STARTS_OVER = (
        "ScriptStartsOver",
        "The script feeds itself and says no number of steps, so a late worker began at step 0.",
    )
    SCRIPT_TAKES_NO_PART = (
        "ScriptTakesNoPart",
        "A rank that the message names has run for a minute without pl.init(); it may work alone.",
    )
    CHECKPOINT_FAILED = (
        "CheckpointFailed",
        "A checkpoint could not be written; with spec.checkpoint.required the job fails for it.",
    )
    SCRIPT_STILL_RUNS = (
        "ScriptStillRuns",
        "The job is complete, and the script of a rank that the message names has not returned.",
    )
    SCRIPT_STUCK = (
        "ScriptStuck",
        "The script of a rank that the message names has not come back to step() for long.",
    )
    WAITING_FOR_RANK_0 = (
        "WaitingForRank0",
        "All scripts have ended but that of rank 0, which was lost; its replacement has to save.",
    )
    SAMPLES_SKIPPED = (
        "SamplesSkipped",
        "The script took samples from the loader and made no step of them.",
    )
    BATCH_SKIPPED = (
        "BatchSkipped",
        "The script failed twice with a batch, which failurePolicy.maxSkippedBatches gives up.",
    )
    RANK_BENCHED = "RankBenched", "A silent rank gets no data until it reports back."
    RANK_SLOW = "RankSlow", "A rank is slower than the others for long."
    RANK_REPLACED = (
        "RankReplaced",
        "A worker was replaced; the message says why and where it is now.",
    )
    MODE_CHANGED = "ModeChanged", "Rounds run in another mode from the round named in the message."
    SCALING = "Scaling", "spec.replicas was changed and workers are being added or taken away."

    TRANSPORT_MEASURED = (
        "TransportMeasured",
        "The transport was measured, and is what spec.fabric requires.",
    )
    TRANSPORT_DEGRADED = (
        "TransportDegraded",
        "The transport is not what spec.fabric requires; the message says on which ranks.",
    )
    TRANSPORT_PENDING = (
        "TransportPending",
        "What carries the gradients between pods is still being looked into.",
    )
    FABRIC_UNAVAILABLE = (
        "FabricUnavailable",
        "No fabric profile fits what the job asks for, or its namespace forbids the one that does.",
    )
    PREFLIGHT_FAILED = "PreflightFailed", "The network is not what spec.fabric requires."

    TEMPLATE_INVALID = "TemplateInvalid", "The API server refuses the pod; the message is its own."
    POD_SECURITY = (
        "PodSecurity",
        "A pod would break the namespace's level of pod security; the message names the fields.",
    )
    QUOTA_EXCEEDED = (
        "QuotaExceeded",
        "The namespace's quota leaves no room for a pod, Secret or Service; it is retried.",
    )
    CREATION_REFUSED = (
        "CreationRefused",
        "The operator cannot make what the job needs; the message is the API server's.",
    )
    OBJECT_MISSING = (
        "ObjectMissing",
        "A Secret or claim that the template names is not there; the message names the field.",
    )
    UNSCHEDULABLE = (
        "Unschedulable",
        "No node has room for a worker or the coordinator; the message is the scheduler's.",
    )
    SCHEDULER_UNAVAILABLE = (
        "SchedulerUnavailable",
        "What spec.scheduling.provider names cannot be used; the message says why and what to do.",
    )
    BUDGET_REFUSED = (
        "BudgetRefused",
        "The API server refuses the PodDisruptionBudget; the message is its own, it is retried.",
    )
    NAME_TAKEN = (
        "NameTaken",
        "An object that the job needs has the name of one of somebody else, which is left alone.",
    )
    QUEUED = "Queued", "The job waits in its queue for Kueue to admit it."
    SIZE_NOT_FIXED = (
        "SizeNotFixed",
        "Kueue admits a fixed size, but minReplicas or maxReplicas differ.",
    )

    PODS_PLACED = "PodsPlaced", "Enough workers have a node."
    STARTING = "Starting", "Pods are being made or have not started yet."
    TRAINING = "Training", "A membership stands and rounds run."
    RESOLVED = "Resolved", "What the condition was about is over."
    SPEC_INVALID = "SpecInvalid", "The spec breaks a rule; the message names the field and the fix."
    RUNTIME_NOT_FOUND = (
        "RuntimeNotFound",
        "There is no runtime that spec.runtimeRef names; the job waits for it, without pods.",
    )
    OVERRIDE_REFUSED = (
        "OverrideRefused",
        "The job sets what its runtime sets and does not let a job override; the message names it.",
    )
    RUNTIME_VALID = "RuntimeValid", "Of a runtime: a job that brings a command is valid with it."
    RUNTIME_INVALID = (
        "RuntimeInvalid",
        "Of a runtime: no job is valid with it; the message names the field and the fix.",
    )
    POD_NOT_STARTING = (
        "PodNotStarting",
        "A container of a worker or the coordinator cannot start; the message is the kubelet's.",
    )
    COORDINATOR_AWAY = (
        "CoordinatorAway",
        "The coordinator does not answer the operator; the message says why, and what to do.",
    )
    ANSWER_REFUSED = (
        "AnswerRefused",
        "The operator does not take what the coordinator answers; the message says why.",
    )
    SUSPENDING = "Suspending", "The job stops at an agreed round before its pods are removed."
    PROGRESS_LOST = "ProgressLost", "The job was suspended without a checkpoint and starts anew."

    BACKOFF_LIMIT_EXCEEDED = (
        "BackoffLimitExceeded",
        "Ranks failed more than backoffLimit times without progress in between.",
    )
    DATA_CHANNEL_FAILED = (
        "DataChannelFailed",
        "The ranks could not reduce, in one membership after the other; the message says why.",
    )
    DEADLINE_EXCEEDED = "DeadlineExceeded", "The job was active for activeDeadlineSeconds."
    START_DEADLINE_EXCEEDED = (
        "StartDeadlineExceeded",
        "The job did not train within scheduling.startDeadlineSeconds; the message says why.",
    )
    FAILURE_POLICY = "FailurePolicy", "A rule of spec.failurePolicy says that the job has failed."
    SCRIPT_FAILED = (
        "ScriptFailed",
        "The script failed on ranks alike, before a round, with exit code 2, or on an empty slot.",
    )
    SCRIPT_TOOK_NO_PART = (
        "ScriptTookNoPart",
        "The script ended with exit code 0, never called pl.init() and was not launched.",
    )
    SCRIPT_ENDED_EARLY = (
        "ScriptEndedEarly",
        "The script ended with exit code 0, or left its loop, before its data was applied.",
    )
    RANK_FAILED = (
        "RankFailed",
        "A rank or a pod ended in a way that no restart mends; the message says how.",
    )
    INTERRUPTED = "Interrupted", "All ranks were drained, and there is no checkpoint."
    WEIGHTS_DIFFER = "WeightsDiffer", "Ranks have different weights; the message names them."
    PARAMETERS_DIFFER = (
        "ParametersDiffer",
        "Ranks have built different models; the message names the ranks.",
    )
    DATA_DIFFERS = "DataDiffers", "Ranks have different data plans; the message says in what."
    CALLS_DIFFER = "CallsDiffer", "Ranks have called different operations at the same place."
    UNEVEN_PASSES = (
        "UnevenPasses",
        "A script made fewer backward passes than the others, in a mode with partial rounds.",
    )
    PLAN_DIFFERS = "PlanDiffers", "A rank has other data or batches than the job that it joins."
    GROUP_DISAGREES = (
        "GroupDisagrees",
        "The ranks that share one copy of the model differ; the message says in what.",
    )
    LOGS_DIVERGE = "LogsDiverge", "Ranks remember different rounds, so no state can be chosen."
    CHECKPOINT_UNUSABLE = (
        "CheckpointUnusable",
        "The checkpoint cannot be read; the message says which one and why.",
    )
    RUNTIME_BROKEN = "RuntimeBroken", "A defect of Paceline itself; the message is for a report."
    STATE_LOST = "StateLost", "All ranks are gone and there is no checkpoint."
    RANK_0_LOST = (
        "Rank0Lost",
        "Rank 0, which writes what a script saves, was lost before its end and did not come back.",
    )
    RESUMED_FROM_CHECKPOINT = (
        "ResumedFromCheckpoint",
        "The job went on from its last checkpoint: all ranks were gone, or it was suspended.",
    )
