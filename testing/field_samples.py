"""Sample values for each field of a TrainingJob that the runtime obeys, which make a difference."""

from __future__ import annotations

from paceline_api.reading.load import parse_job
from paceline_api.resolve import resolve
from paceline_api.settings import ResolvedJob

from testing.bad_specs import GOOD

TRAINER = "template.spec.containers[0]"
CHECKPOINT = "checkpoint={path: kept}"
DEADLINE = "collective={mode: Deadline, deadline: auto}"
RULE = "failurePolicy.rules=[{action: FailJob, onExitCodes: [7]}]"
SAMPLES = {
    "replicas": ("replicas=5",),
    "minReplicas": ("minReplicas=2",),
    "maxReplicas": ("maxReplicas=9",),
    "procsPerReplica": ("procsPerReplica=4",),
    "parallelism.model": ("collective.quorum=2", "parallelism.model=2"),
    "suspend": ("suspend=true",),
    "activeDeadlineSeconds": ("activeDeadlineSeconds=60",),
    "finishDeadlineSeconds": ("finishDeadlineSeconds=60",),
    "stepDeadlineSeconds": ("stepDeadlineSeconds=60",),
    "backoffLimit": ("backoffLimit=1",),
    "collective.backend": ("collective.backend=gloo",),
    "collective.mode": ("collective.mode=Solo",),
    "collective.quorum": ("collective.quorum=2",),
    "collective.randomInitiator": ("collective.mode=Majority", "collective.randomInitiator=true"),
    "collective.deadline": (DEADLINE, "collective.deadline=20ms"),
    "collective.deadlineFactor": (DEADLINE, "collective.deadlineFactor=5"),
    "collective.grace": ("collective.grace=7ms",),
    "collective.warmupRounds": ("collective.warmupRounds=11",),
    "collective.fullEvery": ("collective.fullEvery=12",),
    "collective.maxAge": ("collective.maxAge=7",),
    "collective.maxAgePolicy": ("collective.maxAgePolicy=Wait",),
    "collective.decayFactor": ("collective.maxAgePolicy=Decay", "collective.decayFactor=0.25"),
    "collective.normalisation": ("collective.normalisation=Applied",),
    "collective.pacing": ("collective.pacing=Samples",),
    "collective.benchAfter": ("collective.benchAfter=33s",),
    "collective.freezeTimeout": ("collective.freezeTimeout=44s",),
    "collective.buffers.policy": ("collective.buffers.policy=Local",),
    "collective.buffers.everyRounds": ("collective.buffers.everyRounds=7",),
    "collective.segmentBytes": ("collective.segmentBytes=1048576",),
    "collective.wire": ("collective.wire=BFloat16",),
    "collective.overlap": ("collective.overlap=Never",),
    "collective.pipeline": ("collective.pipeline=1",),
    "collective.hashEveryRounds": ("collective.hashEveryRounds=9",),
    "straggler.detect.windowRounds": ("straggler.detect.windowRounds=7",),
    "straggler.detect.slowdownFactor": ("straggler.detect.slowdownFactor=3",),
    "straggler.respond": ("straggler.respond=[Replace]",),
    "straggler.cooldownSeconds": ("straggler.cooldownSeconds=7",),
    "elasticity.settleSeconds": ("elasticity.settleSeconds=7",),
    "elasticity.stabilizationSeconds": ("elasticity.stabilizationSeconds=7",),
    "elasticity.drainGraceSeconds": ("elasticity.drainGraceSeconds=7",),
    "elasticity.nodeLostSeconds": ("elasticity.nodeLostSeconds=7",),
    "elasticity.allowedSizes": ("elasticity.allowedSizes=[2, 4]",),
    "checkpoint.path": (CHECKPOINT, "checkpoint.path=elsewhere"),
    "checkpoint.everyRounds": (CHECKPOINT, "checkpoint.everyRounds=7"),
    "checkpoint.keep": (CHECKPOINT, "checkpoint.keep=7"),
    "checkpoint.required": (CHECKPOINT, "checkpoint.required=true"),
    "logging.tensorBoard": ("logging.tensorBoard=/events",),
    "metrics.port": ("metrics.port=9999",),
    "failurePolicy.rules.action": (RULE, "failurePolicy.rules[0].action=Ignore"),
    "failurePolicy.rules.onExitCodes": (RULE, "failurePolicy.rules[0].onExitCodes=[8]"),
    "failurePolicy.rules.onReasons": (RULE, "failurePolicy.rules[0].onReasons=[Evicted]"),
    "failurePolicy.maxSkippedBatches": ("failurePolicy.maxSkippedBatches=3",),
    "template.spec.containers.command": (f"{TRAINER}.command=[other]",),
    "template.spec.containers.args": (f"{TRAINER}.args=[--other]",),
    "template.spec.containers.workingDir": (f"{TRAINER}.workingDir=other",),
    "template.spec.containers.env.name": (f"{TRAINER}.env=[{{name: A, value: b}}]",),
    "template.spec.containers.env.value": (
        f"{TRAINER}.env=[{{name: A, value: b}}]",
        f"{TRAINER}.env[0].value=c",
    ),
    "template.spec.containers.env.valueFrom": (
        f"{TRAINER}.env=[{{name: A, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}]",
    ),
}
"""Field -> overrides below `spec`. Only the last override may be what makes the difference."""


def resolved(overrides: tuple[str, ...]) -> ResolvedJob:
    """Return the job of GOOD with these overrides."""
    return resolve(parse_job(GOOD, overrides=[f"spec.{each}" for each in overrides]))
