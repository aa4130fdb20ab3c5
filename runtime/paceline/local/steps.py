"""The samples of a run's ranks: asked of the agents that live, read from what the others have left.

Each agent serves them at /steps. One of a local run leaves them in the run folder when it ends,
`steps/SLOT.json`, so that a run which has ended can be reported on.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

import msgspec

from paceline.agent.targets import FOLDER as TARGETS
from paceline.agent.targets import STEPS
from paceline.core.anatomy.samples import STEPS_PATH, PodSamples, SilentPod

TIMEOUT_S: Final = 10.0


def of_run(run_dir: Path) -> tuple[list[PodSamples], list[SilentPod]]:
    """What its pods have left or tell now, and those that neither have left nor tell anything."""
    found = {pod.slot: pod for pod in map(_read, sorted((run_dir / STEPS).glob("*.json")))}
    silent = []
    for target in sorted((run_dir / TARGETS).glob("*.json")):
        (told,) = json.loads(target.read_text())
        try:
            pod = of_agent(f"http://{told['targets'][0]}{STEPS_PATH}")
        except OSError as error:
            # It ends just now, or was killed and left its target.
            if int(target.stem) not in found:
                silent.append(SilentPod(told["labels"]["pod"], str(error)))
            continue
        found[pod.slot] = pod
    return list(found.values()), silent


def of_agent(url: str) -> PodSamples:
    """What one agent serves at `url`. OSError if it does not answer, or with something else."""
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(), type=PodSamples)
    except URLError as error:
        raise OSError(f"{url}: {error.reason}") from error
    except (http.client.HTTPException, msgspec.DecodeError) as error:
        raise OSError(f"{url}: {error}") from error


def _read(path: Path) -> PodSamples:
    return msgspec.json.decode(path.read_bytes(), type=PodSamples)
