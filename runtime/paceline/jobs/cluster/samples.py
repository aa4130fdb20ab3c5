"""The last steps of a job's ranks, from the agents in its pods, by way of the API server."""

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
from paceline.jobs.cluster.server import NotFoundError, Server, SlowError
from paceline.jobs.core import sampled
from paceline.jobs.core.from_cluster import Object
from paceline.jobs.errors import JobsError, NotAllowedError

AT_ONCE: Final = 32
"""A rank keeps 64 rounds: of fast ones pods that are asked one after the other share none."""
LIMIT_S: Final = 10.0
"""Until an answer begins, and again until it is there."""
WHY_CHARS_MAX: Final = 300
"""Of what a pod that refuses says: it stands on the page."""


def ask(
    server: Server, namespace_path: str, pods: Sequence[Object]
) -> tuple[list[PodSamples], list[SilentPod]]:
    """Of all `pods` at once, as far as they answer. Raises NotAllowedError and RefusedError: what
    is refused for one is refused for all."""
    tokens = {
        reference: _token(server, namespace_path, *reference)
        for reference in {sampled.token_reference(pod) for pod in pods}
    }
    pods_path = f"{namespace_path}/pods"
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        # Read before anything is decoded, so that all are asked at about one moment.
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


def _token(server: Server, namespace_path: str, secret: str, field: str) -> str:
    """Return the token for /steps; empty if the job was deleted meanwhile, and its Secret with it.

    Raises NotAllowedError for a user who may not read Secrets.
    """
    try:
        found = server.get(f"{namespace_path}/secrets/{secret}")
        token = base64.b64decode(found["data"][field], validate=True).decode("ascii")
    except (NotFoundError, KeyError, ValueError):
        return ""
    return steps_token(token)


def _answer(server: Server, pods_path: str, pod: Object, token: str) -> bytes | str:
    """Or why there is none."""
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
