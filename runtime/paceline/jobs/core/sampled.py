"""Choice of the pods that are asked for samples, and the errors if there are none to ask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from paceline_api.names import ENV_METRICS_PORT, ENV_PROCS, ENV_TOKEN
from paceline_api.status import RankPhase
from paceline_api.types.template import TRAINER

from paceline.core.anatomy.samples import STEPS_PATH, PodSamples, SamplesError
from paceline.jobs.core.from_cluster import Object, latest, place, pod_phase
from paceline.jobs.errors import NoSamplesError
from paceline.jobs.interface import SUSPENDED, JobStatus

DIGITS_MAX: Final = 6
"""Digits from which on a pod's number of processes is not believed."""


def asked(pods: Iterable[Object]) -> list[Object]:
    """Return the latest worker pod of each slot, if its container runs."""
    return [pod for pod in latest(pods) if pod_phase(pod) is RankPhase.ACTIVE]


def path(pod: Object) -> str:
    """Return the path of a pod's /steps through the API server, relative to the pods' path."""
    return f"{pod['metadata']['name']}:{_values(pod)[ENV_METRICS_PORT]}/proxy{STEPS_PATH}"


def procs(pod: Object) -> int:
    """Return the number of processes that the pod starts; it bounds the size of its answer.

    Args:
        pod: A worker pod.

    Returns:
        The number in the pod's environment; 1 if it is not usable.
    """
    value = _values(pod).get(ENV_PROCS, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < DIGITS_MAX else 1


def checked(pod: Object, samples: PodSamples) -> PodSamples:
    """Return the samples if they are those of the pod's own slot.

    Args:
        pod: The worker pod that was asked.
        samples: Its answer.

    Returns:
        `samples`.

    Raises:
        SamplesError: The answer names another slot.
    """
    slot = place(pod)[0]
    if samples.slot != slot:
        raise SamplesError(f"slot {samples.slot}, and it is slot {slot}")
    return samples


def _values(pod: Object) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in _environment(pod)}


def token_reference(pod: Object) -> tuple[str, str]:
    """Return the Secret and its field that hold the token of a worker pod."""
    (entry,) = (e for e in _environment(pod) if e["name"] == ENV_TOKEN)
    reference = entry["valueFrom"]["secretKeyRef"]
    return reference["name"], reference["key"]


def _environment(pod: Object) -> list[Any]:
    containers = {one["name"]: one for one in pod["spec"]["containers"]}
    variables: list[Any] = containers[TRAINER]["env"]
    return variables


def nobody(status: JobStatus, *, flags: str) -> NoSamplesError:
    """Return the error for a job without a pod to ask.

    Args:
        status: Status of the job.
        flags: Options with which a command finds the job, such as ' -n team'.

    Returns:
        An error that says why there is no pod, and what to do.
    """
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
    """Return the error for a job whose pods have all answered, without a single step."""
    return NoSamplesError(
        f"no rank of job {status.name} has made a step yet ({status.state})",
        hint="ask again when it has made some",
    )
