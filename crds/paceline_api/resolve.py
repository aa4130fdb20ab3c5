"""Resolution of a TrainingJob to its settings: defaults filled in, durations in nanoseconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, TypeVar

from paceline_api.defaults import with_defaults
from paceline_api.settings import (
    CheckpointSettings,
    CollectiveSettings,
    ElasticitySettings,
    FailureRuleSettings,
    ResolvedJob,
    StragglerSettings,
    Trainer,
)
from paceline_api.times import NS_PER_S
from paceline_api.types.collective import Collective
from paceline_api.types.durations import parse_duration, parse_percent
from paceline_api.types.enums import BufferPolicy
from paceline_api.types.job import TrainingJob, TrainingJobSpec
from paceline_api.types.policies import Elasticity, Straggler
from paceline_api.types.template import Container

_REFERENCE: Final = re.compile(r"\$\$|\$\(([^)]+)\)")


def resolve(job: TrainingJob) -> ResolvedJob:
    """Return the settings of a valid job; a pure function.

    Args:
        job: A job that `validate` has accepted.

    Returns:
        The settings; the same for the same job.
    """
    spec = with_defaults(job).spec
    checkpoint = spec.checkpoint
    trainer = spec.trainer()
    assert trainer is not None, "validate a job before it is resolved"
    model = (spec.parallelism.model if spec.parallelism else None) or 1
    return ResolvedJob(
        name=job.metadata.name,
        namespace=job.metadata.namespace or "default",
        replicas=spec.replicas,
        min_replicas=_set(spec.min_replicas),
        max_replicas=spec.max_replicas,
        procs_per_replica=_set(spec.procs_per_replica) // model,
        model=model,
        suspend=spec.suspend,
        backoff_limit=_set(spec.backoff_limit),
        active_deadline_ns=_seconds(spec.active_deadline_seconds),
        finish_deadline_ns=_set(spec.finish_deadline_seconds) * NS_PER_S,
        step_deadline_ns=_set(spec.step_deadline_seconds) * NS_PER_S,
        metrics_port=_set(_set(spec.metrics).port),
        collective=resolve_collective(_set(spec.collective)),
        straggler=_straggler(_set(spec.straggler)),
        elasticity=_elasticity(_set(spec.elasticity)),
        checkpoint=CheckpointSettings(
            path=checkpoint.path,
            every_rounds=_set(checkpoint.every_rounds),
            keep=_set(checkpoint.keep),
            required=_set(checkpoint.required),
        )
        if checkpoint
        else None,
        failure_rules=_failure_rules(spec),
        tensor_board=spec.logging.tensor_board if spec.logging else "",
        max_skipped_batches=_max_skipped_batches(spec),
        trainer=_trainer(trainer),
    )


def resolve_collective(collective: Collective) -> CollectiveSettings:
    """Return the settings of a `spec.collective` whose defaults are filled in."""
    quorum, grace = _set(collective.quorum), _set(collective.grace)
    buffers = _set(collective.buffers)
    shared = isinstance(grace, str) and grace.endswith("%")
    return CollectiveSettings(
        backend=_set(collective.backend),
        mode=_set(collective.mode),
        quorum_count=quorum if isinstance(quorum, int) else None,
        quorum_percent=parse_percent(quorum) if isinstance(quorum, str) else None,
        random_initiator=_set(collective.random_initiator),
        deadline_ns=_auto_ns(collective.deadline or "auto"),
        deadline_factor=_set(collective.deadline_factor),
        grace_ns=None if shared else parse_duration(grace),
        grace_share=parse_percent(grace) / 100 if shared else None,
        warmup_rounds=_set(collective.warmup_rounds),
        full_every=_set(collective.full_every),
        max_age=_set(collective.max_age),
        max_age_policy=_set(collective.max_age_policy),
        decay_factor=_set(collective.decay_factor),
        normalisation=_set(collective.normalisation),
        pacing=_set(collective.pacing),
        bench_after_ns=_auto_ns(_set(collective.bench_after)),
        freeze_timeout_ns=parse_duration(_set(collective.freeze_timeout)),
        buffers_every=_set(buffers.every_rounds) if buffers.policy is BufferPolicy.AVERAGE else 0,
        segment_bytes=collective.segment_bytes,
        wire=_set(collective.wire),
        overlap=_set(collective.overlap),
        pipeline=_set(collective.pipeline),
        hash_every=_set(collective.hash_every_rounds),
    )


def _straggler(straggler: Straggler) -> StragglerSettings:
    detect = _set(straggler.detect)
    return StragglerSettings(
        window_rounds=_set(detect.window_rounds),
        slowdown_factor=_set(detect.slowdown_factor),
        respond=_set(straggler.respond),
        cooldown_ns=_set(_seconds(straggler.cooldown_seconds)),
    )


def _elasticity(elasticity: Elasticity) -> ElasticitySettings:
    return ElasticitySettings(
        settle_ns=_set(_seconds(elasticity.settle_seconds)),
        stabilization_ns=_set(_seconds(elasticity.stabilization_seconds)),
        drain_grace_ns=_set(_seconds(elasticity.drain_grace_seconds)),
        node_lost_ns=_set(_seconds(elasticity.node_lost_seconds)),
        allowed_sizes=tuple(sorted(set(elasticity.allowed_sizes or ()))),
    )


def _failure_rules(spec: TrainingJobSpec) -> tuple[FailureRuleSettings, ...]:
    rules = (spec.failure_policy.rules or ()) if spec.failure_policy else ()
    return tuple(
        FailureRuleSettings(rule.action, rule.on_exit_codes or (), rule.on_reasons or ())
        for rule in rules
    )


def _max_skipped_batches(spec: TrainingJobSpec) -> int:
    policy = spec.failure_policy
    return (policy.max_skipped_batches or 0) if policy else 0


def _trainer(container: Container) -> Trainer:
    env: dict[str, str] = {}
    from_cluster: list[str] = []
    for variable in container.env or ():
        if variable.value_from is not None:
            from_cluster.append(variable.name)
        else:
            env[variable.name] = expand(variable.value or "", env)
    words = (*(container.command or ()), *(container.args or ()))
    return Trainer(
        command=tuple(expand(word, env) for word in words),
        env=env,
        env_from_cluster=tuple(from_cluster),
        working_dir=container.working_dir,
    )


def expand(text: str, env: Mapping[str, str]) -> str:
    """Return `text` with $(NAME) replaced from `env`, as a kubelet does it, but with $$ left.

    The agent, which knows more names, expands the text once more and makes $$ a dollar sign.

    Args:
        text: The text. An unknown name and $$(NAME) stay as they are.
        env: Values of the variables.

    Returns:
        The text.
    """

    def fill(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$$"
        return env.get(match.group(1), match.group(0))

    return _REFERENCE.sub(fill, text)


def _auto_ns(text: str) -> int | None:
    return None if text == "auto" else parse_duration(text)


def _seconds(seconds: int | None) -> int | None:
    return None if seconds is None else seconds * NS_PER_S


_Value = TypeVar("_Value")


def _set(value: _Value | None) -> _Value:
    assert value is not None, "with_defaults left a field open"
    return value
