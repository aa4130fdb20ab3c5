"""Which pods are asked for the last steps of their ranks, and what is said where there are none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from paceline_api.names import ENV_METRICS_PORT, ENV_PROCS, ENV_TOKEN
from paceline_api.types.template import TRAINER

from paceline.core.anatomy.samples import STEPS_PATH, PodSamples, SamplesError
from paceline.core.status import RankPhase
from paceline.jobs.core.from_cluster import Object, latest, place, pod_phase
from paceline.jobs.errors import NoSamplesError
from paceline.jobs.interface import SUSPENDED, JobStatus

DIGITS_MAX: Final = 6


def asked(pods: Iterable[Object]) -> list[Object]:
    """The latest worker of each slot, if its container runs."""
    return [pod for pod in latest(pods) if pod_phase(pod) is RankPhase.ACTIVE]


def path(pod: Object) -> str:
    """Below that of the namespace's pods, through the API server."""
    return f"{pod['metadata']['name']}:{_values(pod)[ENV_METRICS_PORT]}/proxy{STEPS_PATH}"


def procs(pod: Object) -> int:
    """Return how many processes the pod was told to start; what it may tell depends on it."""
    told = _values(pod).get(ENV_PROCS, "")
    return int(told) if told.isascii() and told.isdigit() and len(told) < DIGITS_MAX else 1


def checked(pod: Object, samples: PodSamples) -> PodSamples:
    """Return the samples, or raise SamplesError if they are said to be those of another pod."""
    slot = place(pod)[0]
    if samples.slot != slot:
        raise SamplesError(f"slot {samples.slot}, and it is slot {slot}")
    return samples


def _values(pod: Object) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in _environment(pod)}


def token_reference(pod: Object) -> tuple[str, str]:
    """Return the Secret and its field from which a worker's pod has the token of its job."""
    (entry,) = (e for e in _environment(pod) if e["name"] == ENV_TOKEN)
    reference = entry["valueFrom"]["secretKeyRef"]
    return reference["name"], reference["key"]


def _environment(pod: Object) -> list[Any]:
    containers = {one["name"]: one for one in pod["spec"]["containers"]}
    found: list[Any] = containers[TRAINER]["env"]
    return found


def nobody(status: JobStatus, *, flags: str) -> NoSamplesError:
    """There is no pod to ask. `flags`: what a command needs to find the job, such as ' -n team'."""
    name, state = status.name, status.state
    if status.ended:
        return NoSamplesError(
            f"job {name} is {state}, and what was known of its last steps went with its pods",
            hint="ask while it trains; where Prometheus scrapes its pods, "
            "paceline_anatomy_* still says what its steps were made of",
        )
    if state == SUSPENDED:
        return NoSamplesError(
            f"job {name} is {state} and has no pods",
            hint=f"`paceline resume {name}{flags}`, and ask again when it trains",
        )
    return NoSamplesError(
        f"no worker of job {name} runs ({state})",
        hint=f"`paceline wait {name}{flags} --for training`, then again; "
        f"`paceline explain {name}{flags}` says what it waits for",
    )


def not_yet(status: JobStatus) -> NoSamplesError:
    """All have answered, and none knows a step."""
    return NoSamplesError(
        f"no rank of job {status.name} has made a step yet ({status.state})",
        hint="ask again when it has made some",
    )
