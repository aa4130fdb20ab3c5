"""Rules across fields, which the type and bounds of a single field cannot express.

Each rule is written twice, side by side: in Python for a job file on a laptop, and in CEL for the
API server. `crdgen` takes the CEL from this table, so that the CRD cannot lack a rule. All rules
are checked, and all errors are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from paceline_api.defaults import fixed_by_queue, procs_of
from paceline_api.errors import SpecError
from paceline_api.names import JOB_NAME_MAX, JOB_NAME_PATTERN
from paceline_api.rules.rule import Rule, Violation
from paceline_api.rules.template import TEMPLATE_RULES
from paceline_api.types.enums import (
    ABLE_BACKENDS,
    Backend,
    FabricRequirement,
    MaxAgePolicy,
    Mode,
    SchedulingProvider,
    Wire,
)
from paceline_api.types.job import TrainingJob
from paceline_api.types.template import TRAINER

_GPUS_CEL: Final = "c.resources.limits.nvidia__dot__com__slash__gpu"
_PROCS_CEL: Final = "(has(self.procsPerReplica) ? self.procsPerReplica : 1)"
_MODEL_CEL: Final = (
    "(has(self.parallelism) && has(self.parallelism.model) && self.parallelism.model > 1 ? "
    "self.parallelism.model : 1)"
)


def _or_by_gpus(condition: str) -> str:
    """Return CEL for a condition on the ranks of a worker that its GPUs determine.

    Args:
        condition: The condition, in terms of _GPUS_CEL.

    Returns:
        An expression that is true if procsPerReplica is not set, the trainer has a GPU limit, and
        the condition holds.
    """
    return (
        f"(!has(self.procsPerReplica) && self.template.spec.containers.exists(c, "
        f"c.name == '{TRAINER}' && has(c.resources) && has(c.resources.limits) && "
        f"has({_GPUS_CEL}) && {condition}))"
    )


def validate(job: TrainingJob) -> list[SpecError]:
    """Return the errors that the rules find in a well-formed job; empty if it is valid.

    Of a job that names a runtime only what holds before the merge is checked.
    """
    whole = job.spec.runtime_ref is None
    return [
        error
        for rule in RULES
        if whole or rule.of_parts or not rule.path.startswith("spec.")
        for error in rule.errors(job)
    ]


def _name_is_a_label(job: TrainingJob) -> Iterator[Violation]:
    name = job.metadata.name
    if len(name) > JOB_NAME_MAX or re.fullmatch(JOB_NAME_PATTERN, name) is None:
        yield Violation(name)


def _at_least_min(job: TrainingJob) -> Iterator[Violation]:
    low, replicas = job.spec.min_replicas, job.spec.replicas
    if low is not None and low > replicas:
        yield Violation(
            low,
            problem=f"is more than replicas = {replicas}",
            hint=f"use 1 to {replicas}, or set spec.replicas to {low} or more",
        )


def _at_most_max(job: TrainingJob) -> Iterator[Violation]:
    high, replicas = job.spec.max_replicas, job.spec.replicas
    if high is not None and high < replicas:
        yield Violation(
            high,
            problem=f"is less than replicas = {replicas}",
            hint=f"use {replicas} or more, or set spec.replicas to {high} or less",
        )


def _quorum_can_be_met(job: TrainingJob) -> Iterator[Violation]:
    quorum = job.spec.collective.quorum if job.spec.collective else None
    procs, model = procs_of(job), _model(job)
    members = job.spec.replicas * procs // model
    if isinstance(quorum, int) and quorum > members and procs % model == 0:
        span = "1" if members == 1 else f"1 to {members}"
        groups = " / parallelism.model" if model > 1 else ""
        yield Violation(
            quorum,
            problem=f"is more than replicas x procsPerReplica{groups} = {members}",
            hint=f"use {span}, or a percentage such as 75%",
        )


def _model(job: TrainingJob) -> int:
    """Return the number of ranks that hold one copy of the model together."""
    return (job.spec.parallelism.model if job.spec.parallelism else None) or 1


def _groups_fill_a_pod(job: TrainingJob) -> Iterator[Violation]:
    procs, model = procs_of(job), _model(job)
    if procs % model:
        yield Violation(
            model,
            problem=f"does not divide procsPerReplica = {procs}, and a group is within one pod",
            hint=f"set spec.procsPerReplica to {model} or a multiple of it, or model to a divisor "
            f"of {procs}",
        )


def _groups_have_no_pipeline(job: TrainingJob) -> Iterator[Violation]:
    collective = job.spec.collective
    if _model(job) > 1 and collective and collective.pipeline:
        yield Violation(collective.pipeline)


def _groups_send_whole_floats(job: TrainingJob) -> Iterator[Violation]:
    collective = job.spec.collective
    if _model(job) > 1 and collective and collective.wire is Wire.BFLOAT16:
        yield Violation(collective.wire)


def _deadline_is_given(job: TrainingJob) -> Iterator[Violation]:
    collective = job.spec.collective
    if collective and collective.mode is Mode.DEADLINE and collective.deadline is None:
        yield Violation()


def _only_majority_draws(job: TrainingJob) -> Iterator[Violation]:
    collective = job.spec.collective
    if collective and collective.random_initiator and collective.mode is not Mode.MAJORITY:
        yield Violation(True)


def _shadow_has_no_pipeline(job: TrainingJob) -> Iterator[Violation]:
    collective = job.spec.collective
    if collective and collective.pipeline and collective.mode is Mode.SHADOW:
        yield Violation(collective.pipeline)


def _pipeline_leaves_time_to_be_late(job: TrainingJob) -> Iterator[Violation]:
    collective = job.spec.collective
    if collective is None or not collective.pipeline or collective.max_age != 1:
        return
    if collective.max_age_policy is MaxAgePolicy.WAIT:
        yield Violation(1)


def _size_is_allowed(job: TrainingJob) -> Iterator[Violation]:
    sizes = job.spec.elasticity.allowed_sizes if job.spec.elasticity else None
    if sizes is not None and job.spec.replicas not in sizes:
        listed = ", ".join(str(size) for size in sorted(set(sizes)))
        yield Violation(
            problem=f"does not contain replicas = {job.spec.replicas} (found: {listed})",
            hint=f"add {job.spec.replicas}, or set spec.replicas to one of {listed}",
        )


def _backend_can_use_rdma(job: TrainingJob) -> Iterator[Violation]:
    if unable := _unable_backend(job, FabricRequirement.RDMA):
        uses = "no network" if unable is Backend.SHM else "TCP only"
        yield Violation(unable, problem=f"uses {uses}, and spec.fabric.required is RDMA")


def _backend_can_use_gpu_direct(job: TrainingJob) -> Iterator[Violation]:
    if unable := _unable_backend(job, FabricRequirement.GPU_DIRECT):
        problem = "sums host memory, and spec.fabric.required is GPUDirect"
        yield Violation(unable, problem=problem)


def _unable_backend(job: TrainingJob, network: FabricRequirement) -> Backend | None:
    """Return the backend that is set and cannot use a network that the job requires.

    Args:
        job: The job.
        network: The network.

    Returns:
        The backend; None if the job does not require this network, or the backend can use it.
    """
    collective, fabric = job.spec.collective, job.spec.fabric
    backend = collective.backend if collective else None
    required = fabric.required if fabric else None
    able = (None, Backend.AUTO, *ABLE_BACKENDS[network])
    return backend if required is network and backend not in able else None


def _wire_has_a_transport(job: TrainingJob) -> Iterator[Violation]:
    collective, fabric = job.spec.collective, job.spec.fabric
    if collective is None or collective.wire is not Wire.BFLOAT16:
        return
    gpu_direct = fabric is not None and fabric.required is FabricRequirement.GPU_DIRECT
    if collective.backend not in (None, Backend.AUTO, Backend.MPI) or gpu_direct:
        yield Violation(collective.wire)


def _claim_has_a_place(job: TrainingJob) -> Iterator[Violation]:
    checkpoint = job.spec.checkpoint
    if checkpoint and checkpoint.claim_name and not checkpoint.path.startswith("/"):
        yield Violation(checkpoint.path)


def _queue_fixes_the_size(job: TrainingJob) -> Iterator[Violation]:
    spec = job.spec
    bounds = {spec.min_replicas, spec.max_replicas} - {None}
    if fixed_by_queue(job) and bounds - {spec.replicas}:
        yield Violation()


def _gang_has_a_provider(job: TrainingJob) -> Iterator[Violation]:
    scheduling = job.spec.scheduling
    if scheduling is None or scheduling.gang is None or fixed_by_queue(job):
        return
    if scheduling.provider in (None, SchedulingProvider.AUTO, SchedulingProvider.NONE):
        yield Violation()


def _gang_can_be_whole(job: TrainingJob) -> Iterator[Violation]:
    gang = job.spec.scheduling.gang if job.spec.scheduling else None
    count, replicas = (gang.min_count if gang else None), job.spec.replicas
    if count is None:
        return
    if count > replicas:
        hint = f"use 1 to {replicas}, or set spec.replicas to {count} or more"
        yield Violation(count, problem=f"is more than replicas = {replicas}", hint=hint)
    elif count < replicas and fixed_by_queue(job):
        yield Violation(count, problem="is less than replicas, and Kueue admits all or none")


def _failure_rules_match_something(job: TrainingJob) -> Iterator[Violation]:
    policy = job.spec.failure_policy
    for index, rule in enumerate((policy.rules or ()) if policy else ()):
        if rule.on_exit_codes is None and rule.on_reasons is None:
            yield Violation(path=f"spec.failurePolicy.rules[{index}]")


RULES: Final = (
    Rule(
        path="metadata.name",
        problem="is not a name for a job",
        hint=f"use at most {JOB_NAME_MAX} lower-case letters, digits and dashes, beginning with a "
        "letter and not ending with a dash",
        check=_name_is_a_label,
        cel=f"size(self.metadata.name) <= {JOB_NAME_MAX} && "
        f"self.metadata.name.matches('{JOB_NAME_PATTERN}')",
    ),
    Rule(
        path="spec.minReplicas",
        problem="is more than replicas",
        hint="lower minReplicas, or raise replicas to minReplicas or more",
        check=_at_least_min,
        cel="!has(self.minReplicas) || self.minReplicas <= self.replicas",
    ),
    Rule(
        path="spec.maxReplicas",
        problem="is less than replicas",
        hint="raise maxReplicas, or lower replicas to maxReplicas or less",
        check=_at_most_max,
        cel="!has(self.maxReplicas) || self.maxReplicas >= self.replicas",
    ),
    Rule(
        path="spec.collective.quorum",
        problem="is more than replicas x procsPerReplica / parallelism.model",
        hint="use a smaller number, or a percentage such as 75%",
        check=_quorum_can_be_met,
        cel="!has(self.collective) || !has(self.collective.quorum) || "
        "type(self.collective.quorum) != int || "
        f"int(self.collective.quorum) * {_MODEL_CEL} <= self.replicas * {_PROCS_CEL} || "
        + _or_by_gpus(
            f"int(self.collective.quorum) * {_MODEL_CEL} <= self.replicas * int({_GPUS_CEL})"
        ),
        of_template=True,
    ),
    Rule(
        path="spec.parallelism.model",
        problem="does not divide procsPerReplica",
        hint="set procsPerReplica to a multiple of it, since a group of ranks is within one pod",
        check=_groups_fill_a_pod,
        cel=f"{_PROCS_CEL} % {_MODEL_CEL} == 0 || "
        + _or_by_gpus(f"int({_GPUS_CEL}) > 0 && int({_GPUS_CEL}) % {_MODEL_CEL} == 0"),
        of_template=True,
    ),
    Rule(
        path="spec.collective.pipeline",
        problem="does not go with parallelism.model above 1 yet",
        hint="remove it, or remove spec.parallelism",
        check=_groups_have_no_pipeline,
        cel=f"{_MODEL_CEL} == 1 || !has(self.collective) || "
        "!has(self.collective.pipeline) || self.collective.pipeline == 0",
    ),
    Rule(
        path="spec.collective.wire",
        problem="is BFloat16, which does not go with parallelism.model above 1 yet",
        hint="remove it, or remove spec.parallelism",
        check=_groups_send_whole_floats,
        cel=f"{_MODEL_CEL} == 1 || !has(self.collective) || "
        "!has(self.collective.wire) || self.collective.wire != 'BFloat16'",
    ),
    Rule(
        path="spec.collective.deadline",
        problem="is missing, and mode Deadline needs it",
        hint="set a duration such as 50ms, or auto",
        check=_deadline_is_given,
        cel="!has(self.collective) || !has(self.collective.mode) || "
        "self.collective.mode != 'Deadline' || has(self.collective.deadline)",
    ),
    Rule(
        path="spec.collective.randomInitiator",
        problem="has a meaning in mode Majority only",
        hint="remove it, or set spec.collective.mode to Majority",
        check=_only_majority_draws,
        cel="!has(self.collective) || !has(self.collective.randomInitiator) || "
        "!self.collective.randomInitiator || "
        "(has(self.collective.mode) && self.collective.mode == 'Majority')",
    ),
    Rule(
        path="spec.collective.pipeline",
        problem="does not go with mode Shadow, which measures how long ranks wait in step()",
        hint="remove it, or set spec.collective.mode to another one",
        check=_shadow_has_no_pipeline,
        cel="!has(self.collective) || !has(self.collective.pipeline) || "
        "self.collective.pipeline == 0 || !has(self.collective.mode) || "
        "self.collective.mode != 'Shadow'",
    ),
    Rule(
        path="spec.collective.maxAge",
        problem="lets each round wait for all ranks, since with pipeline: 1 and maxAgePolicy: Wait "
        "every gradient has that age",
        hint="use 2 or more, or 0 for any age; or set spec.collective.mode to Full and remove "
        "maxAgePolicy",
        check=_pipeline_leaves_time_to_be_late,
        cel="!has(self.collective) || !has(self.collective.pipeline) || "
        "self.collective.pipeline == 0 || !has(self.collective.maxAge) || "
        "self.collective.maxAge != 1 || !has(self.collective.maxAgePolicy) || "
        "self.collective.maxAgePolicy != 'Wait'",
    ),
    Rule(
        path="spec.collective.backend",
        problem="is gloo, which uses TCP only, or shm, which uses no network, and "
        "spec.fabric.required is RDMA",
        hint="use mpi, nccl or auto, or remove spec.fabric.required",
        check=_backend_can_use_rdma,
        cel="!has(self.fabric) || !has(self.fabric.required) || "
        "self.fabric.required != 'RDMA' || !has(self.collective) || "
        "!has(self.collective.backend) || !(self.collective.backend in ['gloo', 'shm'])",
    ),
    Rule(
        path="spec.collective.backend",
        problem="is mpi, gloo or shm, which sum host memory, and spec.fabric.required is GPUDirect",
        hint="use nccl or auto, or remove spec.fabric.required",
        check=_backend_can_use_gpu_direct,
        cel="!has(self.fabric) || !has(self.fabric.required) || "
        "self.fabric.required != 'GPUDirect' || !has(self.collective) || "
        "!has(self.collective.backend) || self.collective.backend in ['auto', 'nccl']",
    ),
    Rule(
        path="spec.collective.wire",
        problem="travels over mpi only",
        hint="use the backends mpi or auto and no spec.fabric.required: GPUDirect, or remove wire",
        check=_wire_has_a_transport,
        cel="!has(self.collective) || !has(self.collective.wire) || "
        "self.collective.wire != 'BFloat16' || ((!has(self.collective.backend) || "
        "self.collective.backend in ['auto', 'mpi']) && (!has(self.fabric) || "
        "!has(self.fabric.required) || self.fabric.required != 'GPUDirect'))",
    ),
    Rule(
        path="spec.elasticity.allowedSizes",
        problem="does not contain replicas",
        hint="add the value of replicas, or set replicas to one of the sizes",
        check=_size_is_allowed,
        cel="!has(self.elasticity) || !has(self.elasticity.allowedSizes) || "
        "self.replicas in self.elasticity.allowedSizes",
    ),
    Rule(
        path="spec.checkpoint.path",
        problem="is not absolute, and claimName is mounted there",
        hint="use a path that begins with /, such as /checkpoints",
        check=_claim_has_a_place,
        cel="!has(self.checkpoint) || !has(self.checkpoint.claimName) || "
        "self.checkpoint.path.startsWith('/')",
    ),
    Rule(
        path="spec.scheduling.provider",
        problem="is Kueue (or Auto with Kueue's queue label), which admits a fixed size only",
        hint="remove minReplicas and maxReplicas, or set both to the value of replicas",
        check=_queue_fixes_the_size,
        # CEL on the spec sees no labels, so the API server checks an explicit provider only. The
        # operator reports a conflict with the label in a condition.
        cel="!has(self.scheduling) || !has(self.scheduling.provider) || "
        "self.scheduling.provider != 'Kueue' || "
        "((!has(self.minReplicas) || self.minReplicas == self.replicas) && "
        "(!has(self.maxReplicas) || self.maxReplicas == self.replicas))",
    ),
    Rule(
        path="spec.scheduling.gang",
        problem="has no effect without a provider that schedules gangs",
        hint="set spec.scheduling.provider to Native, Kueue, Volcano, Coscheduling or KAI, give "
        "the job Kueue's queue label, or remove gang",
        check=_gang_has_a_provider,
        # Only the operator knows whether Auto means Kueue.
        cel="!has(self.scheduling) || !has(self.scheduling.gang) || "
        "!has(self.scheduling.provider) || self.scheduling.provider != 'None'",
    ),
    Rule(
        path="spec.scheduling.gang.minCount",
        problem="is more than replicas, or less with Kueue, which admits all or none",
        hint="use 1 to the value of replicas, and with Kueue remove it",
        check=_gang_can_be_whole,
        cel="!has(self.scheduling) || !has(self.scheduling.gang) || "
        "!has(self.scheduling.gang.minCount) || "
        "self.scheduling.gang.minCount == self.replicas || "
        "(self.scheduling.gang.minCount < self.replicas && "
        "(!has(self.scheduling.provider) || self.scheduling.provider != 'Kueue'))",
    ),
    Rule(
        path="spec.failurePolicy.rules",
        problem="has a rule without onExitCodes and onReasons",
        hint="say which deaths the rule is about, such as onExitCodes: [2] or "
        "onReasons: [OOMKilled]",
        check=_failure_rules_match_something,
        cel="!has(self.failurePolicy) || !has(self.failurePolicy.rules) || "
        "self.failurePolicy.rules.all(r, has(r.onExitCodes) || has(r.onReasons))",
        of_parts=True,
    ),
    *TEMPLATE_RULES,
)
