"""The samples of a run's ranks: asked of the agents that live, read from what the others have left.

Each agent serves them at /steps. One of a local run leaves them in the run folder when it ends,
`steps/SLOT.json`, so that a run which has ended can be reported on.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Final
from urllib.request import urlopen

import msgspec
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from paceline.agent.targets import FOLDER as TARGETS
from paceline.agent.targets import STEPS
from paceline.core.anatomy.samples import PodSamples

TIMEOUT_S: Final = 10.0
PATH: Final = "/steps"


class NoSamplesError(PacelineError):
    def __init__(self, run_dir: Path, why: str) -> None:
        super().__init__(
            f"{run_dir}: {why}",
            hint="name the folder of a run that has made rounds, such as runs/first-1",
            exit_code=EXIT_BAD_INPUT,
        )


def of_run(run_dir: Path) -> list[PodSamples]:
    """Of all pods whose samples are known. NoSamplesError."""
    if not run_dir.is_dir():
        raise NoSamplesError(run_dir, "there is no such run folder")
    found = {pod.slot: pod for pod in map(_read, sorted((run_dir / STEPS).glob("*.json")))}
    for target in sorted((run_dir / TARGETS).glob("*.json")):
        address = json.loads(target.read_text())[0]["targets"][0]
        try:
            pod = of_agent(f"http://{address}{PATH}")
        except OSError:
            continue  # it ends just now, or was killed and left its target
        found[pod.slot] = pod
    pods = [pod for _, pod in sorted(found.items()) if any(rank.steps for rank in pod.ranks)]
    if not pods:
        raise NoSamplesError(run_dir, "no steps are known of this run")
    return pods


def of_agent(url: str) -> PodSamples:
    """What one agent serves at `url`. OSError if it does not answer, or with something else."""
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(), type=PodSamples)
    except (http.client.HTTPException, msgspec.DecodeError) as error:
        raise OSError(f"{url}: {error}") from error


def _read(path: Path) -> PodSamples:
    return msgspec.json.decode(path.read_bytes(), type=PodSamples)
