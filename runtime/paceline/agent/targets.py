"""Where a pod of a local run can be scraped, in a file for Prometheus's file_sd; its last steps.

On a cluster the Prometheus operator finds the pods. On one machine each agent takes a free port, so
it says itself which one, with the labels that a scrape on a cluster would bring, and leaves the
token with which the commands of its user ask for steps.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Final

import msgspec

from paceline import private_files
from paceline.core.anatomy.samples import PodSamples
from paceline.core.anatomy.steps_token import steps_token

FOLDER: Final = "targets"
"""In the run folder."""
STEPS: Final = "steps"
"""In the run folder: what the agents that have ended leave of their ranks' last steps."""
TOKEN_FILE: Final = "steps-token"
"""In the run folder: with it the agents that live are asked for steps. Nobody else may read it."""
NAMESPACE: Final = "local"


def publish(run_dir: Path, *, job: str, slot: int, attempt: int, address: str) -> Path:
    """Leave the file of this pod, in place of that of the pod before it; returns its path."""
    labels = {
        "namespace": NAMESPACE,
        "paceline_dev_job_name": job,
        "pod": f"{job}-{slot}-{attempt + 1}",
        "node": socket.gethostname(),
    }
    path = run_dir / FOLDER / f"{slot}.json"
    path.parent.mkdir(private_files.FOLDER_MODE, exist_ok=True)
    told = [{"targets": [address], "labels": labels}]
    private_files.write(path, json.dumps(told).encode())
    return path


def leave_token(run_dir: Path, token: str) -> None:
    """Leave the token for /steps to commands of this user. All agents of a run leave the same one.

    Args:
        run_dir: Run folder.
        token: Of the run's ranks; the one for /steps follows from it.
    """
    private_files.write(run_dir / TOKEN_FILE, steps_token(token).encode())


def leave_steps(run_dir: Path, pod: PodSamples) -> None:
    """For `paceline report`, in place of what the pod before it left."""
    path = run_dir / STEPS / f"{pod.slot}.json"
    path.parent.mkdir(private_files.FOLDER_MODE, exist_ok=True)
    private_files.write(path, msgspec.json.encode(pod))
