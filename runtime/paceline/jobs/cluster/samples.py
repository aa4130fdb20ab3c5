"""Samples of the last steps, read from the agents in a job's pods through the API server."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from paceline.core.anatomy.samples import (
    PodSamples,
    SamplesError,
    SilentPod,
    bytes_max,
    read_samples,
)
from paceline.core.anatomy.steps_token import STEPS_HEADER, steps_token
from paceline.jobs.cluster.server import ApiServer, NotFoundError, SlowError
from paceline.jobs.core import sampled
from paceline.jobs.core.from_cluster import Object
from paceline.jobs.errors import JobsError, NotAllowedError

AT_ONCE: Final = 32
"""Pods that are asked at the same time. A rank keeps 64 rounds; if fast ranks were asked one after
the other, their samples would have no round in common."""
LIMIT_S: Final = 10.0
"""Seconds until an answer must begin, and again until it must be complete."""
WHY_CHARS_MAX: Final = 300
"""Upper bound on the characters that are kept of a pod's error message, because it is shown on the
report page."""


def ask(
    server: ApiServer, namespace_path: str, pods: Sequence[Object]
) -> tuple[list[PodSamples], list[SilentPod]]:
    """Return the samples of all pods that answer, and the reasons of those that do not.

    The pods are asked in parallel. NotAllowedError and RefusedError are raised at once, because
    what is forbidden for one pod is forbidden for all.

    Args:
        server: The API server.
        namespace_path: Path of the namespace in the API, such as `/api/v1/namespaces/a`.
        pods: Worker pods whose containers run.

    Returns:
        The samples in the order of `pods`, and the pods without usable samples with the reason.
    """
    tokens = {
        reference: _token(server, namespace_path, *reference)
        for reference in {sampled.token_reference(pod) for pod in pods}
    }
    pods_path = f"{namespace_path}/pods"
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        # Read all answers before decoding any, so that the pods are asked at about the same time.
        answers = list(
            pool.map(
                lambda pod: _answer(server, pods_path, pod, tokens[sampled.token_reference(pod)]),
                pods,
            )
        )
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    known: list[PodSamples] = []
    silent: list[SilentPod] = []
    for pod, answer in zip(pods, answers, strict=True):
        name = pod["metadata"]["name"]
        if isinstance(answer, str):
            silent.append(SilentPod(name, answer))
            continue
        try:
            known.append(sampled.checked(pod, read_samples(answer)))
        except SamplesError as error:
            silent.append(SilentPod(name, f"it answers with something else: {error}"))
    return known, silent


def _token(server: ApiServer, namespace_path: str, secret: str, field: str) -> str:
    """Return the token for /steps; empty if the job and its Secret were deleted meanwhile.

    A user who may not read Secrets gets NotAllowedError.

    Args:
        server: The API server.
        namespace_path: Path of the namespace in the API.
        secret: Name of the Secret.
        field: Field of the Secret that holds the token of the job's ranks.

    Returns:
        The token that the agents of the job accept.
    """
    try:
        answer = server.get(f"{namespace_path}/secrets/{secret}")
        token = base64.b64decode(answer["data"][field], validate=True).decode("ascii")
    except (NotFoundError, KeyError, ValueError):
        return ""
    return steps_token(token)


def _answer(server: ApiServer, pods_path: str, pod: Object, token: str) -> bytes | str:
    """Return the answer of a pod's agent as bytes, or as text the reason why there is none."""
    path = f"{pods_path}/{sampled.path(pod)}"
    try:
        return server.body(
            path,
            limit_s=LIMIT_S,
            size_max=bytes_max(sampled.procs(pod)),
            headers={STEPS_HEADER: token},
        )
    except NotAllowedError:
        raise
    except SlowError:
        return f"no answer within {LIMIT_S:g} s"
    except JobsError as error:
        return error.message.rpartition("error trying to reach service: ")[2][:WHY_CHARS_MAX]
