"""The samples of a run's ranks: asked of the agents that live, read from what the others have left.

Each agent serves them at /steps. One of a local run leaves them in the run folder when it ends,
`steps/SLOT.json`, so that a run which has ended can be reported on.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Final, Protocol
from urllib.error import URLError
from urllib.request import Request, urlopen

from paceline.agent.targets import FOLDER as TARGETS
from paceline.agent.targets import STEPS, TOKEN_FILE
from paceline.core.anatomy.samples import (
    STEPS_PATH,
    PodSamples,
    SamplesError,
    SilentPod,
    bytes_max,
    read_samples,
)
from paceline.core.anatomy.steps_token import STEPS_HEADER


class Readable(Protocol):
    """A file or an answer."""

    def read(self, size: int, /) -> bytes: ...


TIMEOUT_S: Final = 10.0
BYTES_MAX: Final = bytes_max(64)
"""Of one pod. Its port may have gone to somebody else since it was written down."""


def of_run(run_dir: Path) -> tuple[list[PodSamples], list[SilentPod]]:
    """What its pods have left or tell now, and those that neither have left nor tell anything."""
    found: dict[int, PodSamples] = {}
    silent: list[SilentPod] = []
    token = _token(run_dir)
    for left in sorted((run_dir / STEPS).glob("*.json")):
        try:
            pod = _read(left)
        except OSError as error:
            silent.append(SilentPod(left.name, str(error)))
            continue
        found[pod.slot] = pod
    for target in sorted((run_dir / TARGETS).glob("*.json")):
        (told,) = json.loads(target.read_text())
        try:
            pod = of_agent(f"http://{told['targets'][0]}{STEPS_PATH}", token)
        except OSError as error:
            # It ends just now, or was killed and left its target.
            if int(target.stem) not in found:
                silent.append(SilentPod(told["labels"]["pod"], str(error)))
            continue
        found[pod.slot] = pod
    return list(found.values()), silent


def of_agent(url: str, token: str) -> PodSamples:
    """What one agent serves at `url`. OSError if it does not answer, or with something else."""
    asked = Request(url, headers={STEPS_HEADER: token})
    try:
        with urlopen(asked, timeout=TIMEOUT_S) as answer:
            return _samples(answer)
    except URLError as error:
        raise OSError(f"{url}: {error.reason}") from error
    except (http.client.HTTPException, SamplesError) as error:
        raise OSError(f"{url}: {error}") from error


def _read(path: Path) -> PodSamples:
    """Raises OSError, also if the file holds something else."""
    with path.open("rb") as file:
        try:
            return _samples(file)
        except SamplesError as error:
            raise OSError(f"{path}: {error}") from error


def _samples(file: Readable) -> PodSamples:
    found = file.read(BYTES_MAX + 1)
    if len(found) > BYTES_MAX:
        raise SamplesError(f"it is larger than {BYTES_MAX:,} bytes")
    return read_samples(found)


def _token(run_dir: Path) -> str:
    """Return the run's token for /steps, or nothing where no agent has left one."""
    try:
        return (run_dir / TOKEN_FILE).read_text()
    except FileNotFoundError:
        return ""
