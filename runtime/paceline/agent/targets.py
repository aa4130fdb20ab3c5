"""Where a pod of a local run can be scraped, in a file for Prometheus's file_sd; its last steps.

On a cluster the Prometheus operator finds the pods. On one machine each agent takes a free port, so
it says itself which one, with the labels that a scrape on a cluster would bring.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Final

import msgspec

from paceline.core.anatomy.samples import PodSamples

FOLDER: Final = "targets"
"""In the run folder."""
STEPS: Final = "steps"
"""In the run folder: what the agents that have ended leave of their ranks' last steps."""
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
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps([{"targets": [address], "labels": labels}]))
    draft.replace(path)
    return path


def leave_steps(run_dir: Path, pod: PodSamples) -> None:
    """For `paceline report`, in place of what the pod before it left."""
    path = run_dir / STEPS / f"{pod.slot}.json"
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_bytes(msgspec.json.encode(pod))
    draft.replace(path)
