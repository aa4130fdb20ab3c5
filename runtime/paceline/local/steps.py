"""The samples of a run's ranks: asked of the agents that live, read from what the others have left.

Each agent serves them at /steps. One of a local run leaves them in the run folder when it ends,
`steps/SLOT.json`, so that a run which has ended can be reported on.
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
BYTES_MAX: Final = bytes_max(64)
"""Of one pod. Its port may have gone to somebody else since it was written down."""


def of_run(run_dir: Path) -> tuple[list[PodSamples], list[SilentPod]]:
    """What its pods have left or tell now, and those that neither have left nor tell anything."""
    found: dict[int, PodSamples] = {}
    silent: list[SilentPod] = []
    for left in sorted((run_dir / STEPS).glob("*.json")):
        try:
            pod = _read(left)
        except OSError as error:
            silent.append(SilentPod(left.name, str(error)))
            continue
        found[pod.slot] = pod
    for target in sorted((run_dir / TARGETS).glob("*.json")):
        name = target.name
        try:
            told = read_target(target)
            name = told.labels.pod
            pod = of_agent(f"http://{told.targets[0]}{STEPS_PATH}", read_token(run_dir))
        except OSError as error:
            # It ends just now, or was killed and left its target; or the file is damaged.
            if target.stem not in map(str, found):
                silent.append(SilentPod(name, str(error)))
            continue
        found[pod.slot] = pod
    return list(found.values()), silent


def of_agent(url: str, token: str) -> PodSamples:
    """What one agent serves at `url`. OSError if it does not answer, or with something else."""
    asked = Request(url, headers={STEPS_HEADER: token})
    try:
        with urlopen(asked, timeout=TIMEOUT_S) as answer:
            return read_samples(read_at_most(answer, BYTES_MAX))
    except URLError as error:
        raise OSError(f"{url}: {error.reason}") from error
    except (http.client.HTTPException, TooLargeError, ValueError) as error:
        raise OSError(f"{url}: {error}") from error


def _read(path: Path) -> PodSamples:
    """Raises OSError, also if the file holds something else."""
    try:
        return read_samples(read_file(path, BYTES_MAX))
    except (OSError, SamplesError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OSError(f"{path} does not hold the steps of a pod ({why}): remove it") from None
