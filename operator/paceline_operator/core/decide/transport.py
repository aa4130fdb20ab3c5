"""The network that carries gradients between pods, compared with what `spec.fabric` requires.

The coordinator reports what the agents have measured (`paceline.core.agent.network`). A job must
not run for hours on a network that is known to lack what is required. With `fabric.preflight` such
a job fails before. Once the carrier was observed to be as required, `status.transport.verifiedAt`
records it. A later loss of the carrier only changes TransportVerified and writes an Event, since
the job has work to lose by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from paceline_api.reasons import Reason
from paceline_api.types.enums import FabricRequirement

from paceline_operator.core.clocks import CarrierUnknown
from paceline_operator.core.job import JobObject
from paceline_operator.core.observed import Observed

OVER: Final = " over "
"""Separator between transport and carrier in status.transport.kind."""
MOVING_ROUNDS: Final = 10
"""Number of rounds after which missing traffic no longer explains an unknown carrier."""
NAMED_MAX: Final = 4
"""Upper bound on the number of ranks that a message names."""
ENOUGH: Final = {
    FabricRequirement.RDMA: ("RDMA", "GPUDirect"),
    FabricRequirement.GPU_DIRECT: ("GPUDirect",),
}
"""Carriers that satisfy each requirement of `spec.fabric.required`."""
CHECK: Final = (
    "check that the pods ask for the device plugin's resource and may lock memory (IPC_LOCK), and "
    "FI_PROVIDER or NCCL_IB_* of the fabric profile"
)
"""Advice for a user whose job runs on the wrong network."""


class Standing(Enum):
    """Result of comparing the carrier with what is required."""

    MET = auto()
    MISSED = auto()
    LOOKING = auto()
    """The carrier is not known yet."""
    UNTOLD = auto()
    """The job's runtime is of a release that does not measure the carrier."""


@dataclass(frozen=True, slots=True)
class Carried:
    """Transport and carrier of a job, and whether they are as required."""

    standing: Standing
    transport: str
    carrier: str
    required: FabricRequirement

    @property
    def kind(self) -> str:
        """Transport and carrier in one text, such as status.transport.kind has it."""
        return f"{self.transport}{OVER}{self.carrier}" if self.carrier else self.transport


def carried(job: JobObject, observed: Observed) -> Carried | None:
    """Compare the carrier of a job's gradients with what the job requires.

    Args:
        job: The job.
        observed: Everything observed besides the job.

    Returns:
        The result; None if the coordinator has not reported a transport yet.
    """
    coordinator = observed.coordinator
    if coordinator is None or not coordinator.transport:
        return None
    required = FabricRequirement(job.resolved["fabric"]["required"])
    carrier = coordinator.carrier or _known(job, coordinator.transport)
    if required is FabricRequirement.ANY or carrier in ENOUGH[required]:
        standing = Standing.MET
    elif carrier:
        standing = Standing.MISSED
    elif coordinator.carrier is None:
        standing = Standing.UNTOLD
    elif _one_pod(job):
        standing = Standing.MET
    else:
        standing = Standing.LOOKING
    return Carried(standing, coordinator.transport, carrier, required)


def _known(job: JobObject, transport: str) -> str:
    before, _, carrier = _stored(job).get("kind", "").partition(OVER)
    return carrier if before == transport else ""


def _stored(job: JobObject) -> dict[str, str]:
    return dict(job.status.get("transport") or {})


def _one_pod(job: JobObject) -> bool:
    return job.settings is not None and job.settings.replicas == 1


def verified_at(job: JobObject) -> str | None:
    """Return the time at which the carrier was first observed to be as required, as stored."""
    return _stored(job).get("verifiedAt")


# ---- TransportVerified --------------------------------------------------------------------------


def explained(job: JobObject, observed: Observed, carried_by: Carried) -> tuple[bool, Reason, str]:
    """Explain the condition TransportVerified.

    Args:
        job: The job.
        observed: Everything observed besides the job.
        carried_by: The result of `carried`.

    Returns:
        Whether the condition holds, its reason, and its message for the user.
    """
    moves = f"{carried_by.kind} moves the gradients"
    wants = f"spec.fabric.required is {carried_by.required}"
    if carried_by.standing is Standing.MET:
        if carried_by.required is FabricRequirement.ANY:
            return True, Reason.TRANSPORT_MEASURED, f"{moves}, chosen by measurement at the start"
        if not carried_by.carrier:
            text = f"{moves}, within one pod: no network carries them"
            return True, Reason.TRANSPORT_MEASURED, text
        return True, Reason.TRANSPORT_MEASURED, f"{moves}, as measured; {wants}"
    if carried_by.standing is Standing.MISSED:
        where = _named(job, observed, lacking=ENOUGH[carried_by.required])
        return False, Reason.TRANSPORT_DEGRADED, f"{moves}, but {wants}{where}; {CHECK}"
    if carried_by.standing is Standing.UNTOLD:
        text = f"{moves}; {wants}, and the image's release of Paceline does not look into it"
        return False, Reason.TRANSPORT_DEGRADED, text
    return False, Reason.TRANSPORT_PENDING, f"{moves}; what carries them is being looked into"


def _named(
    job: JobObject, observed: Observed, *, lacking: tuple[str, ...], unknown: bool = False
) -> str:
    """Name the ranks with a carrier outside `lacking`, or, if `unknown`, without a known one."""
    ranks = (
        [r for r in observed.coordinator.ranks if r.rank is not None]
        if observed.coordinator
        else []
    )
    texts = [
        f"rank {rank.rank} in {job.name}-{rank.pod[0]}-{rank.pod[1]}"
        + (f" uses {rank.carrier}" if rank.carrier else "")
        for rank in ranks
        if (not rank.carrier if unknown else rank.carrier and rank.carrier not in lacking)
    ]
    if not texts:
        return ""
    more = f" and {len(texts) - NAMED_MAX} more" if len(texts) > NAMED_MAX else ""
    return f": {', '.join(texts[:NAMED_MAX])}{more}"


# ---- preflight ----------------------------------------------------------------------------------


def carrier_unknown(job: JobObject, observed: Observed, now_s: float) -> CarrierUnknown | None:
    """Return the clock `Clocks.carrier_unknown`, which runs only if a carrier is required.

    Args:
        job: The job.
        observed: Everything observed besides the job.
        now_s: The present time.

    Returns:
        The clock; None if it does not run.
    """
    comparison = carried(job, observed)
    if observed.coordinator is None:
        return observed.clocks.carrier_unknown
    if (
        comparison is None
        or comparison.standing is not Standing.LOOKING
        or not _in_two_pods(observed)
    ):
        return None
    return observed.clocks.carrier_unknown or CarrierUnknown(now_s, observed.coordinator.version)


def _in_two_pods(observed: Observed) -> bool:
    """Return True if members of the membership run in at least two slots, so data crosses pods."""
    coordinator = observed.coordinator
    return (
        coordinator is not None
        and len({r.member.slot for r in coordinator.ranks if r.rank is not None}) > 1
    )


def preflight(job: JobObject, observed: Observed, now_s: float) -> str | float | None:
    """Decide whether the job must end because its network is not as required.

    Args:
        job: The job.
        observed: Everything observed besides the job.
        now_s: The present time.

    Returns:
        The reason why the job must not continue; or the time at which to check again; or None if
        time alone decides nothing.
    """
    checks = job.spec.fabric.preflight if job.spec and job.spec.fabric else None
    if checks is None or not checks.enabled or verified_at(job):
        return None
    comparison = carried(job, observed)
    if comparison is None or observed.coordinator is None or observed.coordinator.stopping:
        return None
    if comparison.standing is Standing.MISSED:
        _, _, text = explained(job, observed, comparison)
        return f"{text}; fabric.preflight.enabled: false lets the job go on"
    unknown = carrier_unknown(job, observed, now_s)
    if unknown is None or not checks.timeout_seconds:
        return None
    due_s = unknown.since_s + checks.timeout_seconds
    if now_s < due_s:
        return due_s
    if observed.coordinator.version < unknown.since_round + MOVING_ROUNDS:
        return None  # the next round triggers the next decision
    where = _named(job, observed, lacking=(), unknown=True)
    return (
        f"after {checks.timeout_seconds} s (fabric.preflight.timeoutSeconds) it is not known what "
        f"carries the gradients, and spec.fabric.required is {comparison.required}{where}; less "
        "than 4 MiB were reduced, or the agent cannot see the counters or the files of its ranks"
    )
