"""Samples of a run's ranks: fetched from agents that are alive, read from the files of the others.

Each agent serves its samples at /steps. An agent of a local run writes them to `steps/SLOT.json` in
the run folder when it ends, so that `paceline report` works on a run that has ended.
"""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Final
from urllib.error import URLError
from urllib.request import Request, urlopen

from paceline_api.bounded import TooLargeError, read_at_most, read_file

from paceline.agent.targets import FOLDER as TARGETS
from paceline.agent.targets import STEPS, read_target, read_token
from paceline.core.anatomy.samples import (
    STEPS_PATH,
    PodSamples,
    SamplesError,
    SilentPod,
    bytes_max,
    read_samples,
)
from paceline.core.anatomy.steps_token import STEPS_HEADER

TIMEOUT_S: Final = 10.0
"""Timeout of a request to an agent, in seconds."""
BYTES_MAX: Final = bytes_max(64)
"""Upper bound on the samples of one pod. Another program may have its port by now."""


def of_run(run_dir: Path) -> tuple[list[PodSamples], list[SilentPod]]:
    """Return the samples of all pods of a run, and the pods without any.

    Args:
        run_dir: The run folder.

    Returns:
        The samples of each pod, from its agent or from its file, and the pods that have left no
        file and do not answer.
    """
    by_pod: dict[int, PodSamples] = {}
    silent: list[SilentPod] = []
    for left in sorted((run_dir / STEPS).glob("*.json")):
        try:
            pod = _read(left)
        except OSError as error:
            silent.append(SilentPod(left.name, str(error)))
            continue
        by_pod[pod.slot] = pod
    for target in sorted((run_dir / TARGETS).glob("*.json")):
        name = target.name
        try:
            answer = read_target(target)
            name = answer.labels.pod
            pod = of_agent(f"http://{answer.targets[0]}{STEPS_PATH}", read_token(run_dir))
        except OSError as error:
            # The agent has just ended or was killed, or the file is damaged.
            if target.stem not in map(str, by_pod):
                silent.append(SilentPod(name, str(error)))
            continue
        by_pod[pod.slot] = pod
    return list(by_pod.values()), silent


def of_agent(url: str, token: str) -> PodSamples:
    """Return the samples that one agent serves.

    Args:
        url: Address of the samples.
        token: Token that the agent accepts.

    Returns:
        The samples of the agent's pod.

    Raises:
        OSError: It does not answer, or it answers with something else.
    """
    asked = Request(url, headers={STEPS_HEADER: token})
    try:
        with urlopen(asked, timeout=TIMEOUT_S) as answer:
            return read_samples(read_at_most(answer, BYTES_MAX))
    except URLError as error:
        raise OSError(f"{url}: {error.reason}") from error
    except (http.client.HTTPException, TooLargeError, ValueError) as error:
        raise OSError(f"{url}: {error}") from error


def _read(path: Path) -> PodSamples:
    """Return the samples in a file.

    Raises:
        OSError: The file cannot be read or holds something else.
    """
    try:
        return read_samples(read_file(path, BYTES_MAX))
    except (OSError, SamplesError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OSError(f"{path} does not hold the steps of a pod ({why}): remove it") from None
