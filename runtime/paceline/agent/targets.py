"""Files in the run folder of a local run: where each pod can be scraped, and its last steps.

On a cluster the Prometheus operator finds the pods. On one machine each agent takes a free port. So
it writes the port into a file for Prometheus's file_sd, with the labels that a scrape on a cluster
would add. It also leaves the token with which the user's commands may ask for steps.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from paceline_api.bounded import read_file
from paceline_api.decoding import UNDECODABLE

from paceline import private_files
from paceline.core.anatomy.samples import PodSamples
from paceline.core.anatomy.steps_token import steps_token

FOLDER: Final = "targets"
"""Folder for the targets, in the run folder."""
STEPS: Final = "steps"
"""Folder in the run folder, in which agents that have ended leave the last steps of their ranks."""
TOKEN_FILE: Final = "steps-token"
"""File in the run folder with the token for the /steps of living agents. Only its user may read it.
"""
NAMESPACE: Final = "local"
PORT_MAX: Final = 65535
TARGET_BYTES_MAX: Final = 64 * 1024
TOKEN_CHARACTERS: Final = 64
"""Length of the token for /steps, in hexadecimal digits."""

Address = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.\-]{1,255}:[0-9]{1,5}\Z")]
"""Host and port, with no other part of a URL."""


class TargetError(OSError):
    """Raised for a file in the run folder that no agent can have left.

    The message names the file.
    """


class Labels(Struct, frozen=True):
    """Labels that Prometheus adds to the samples of a pod."""

    namespace: str
    paceline_dev_job_name: str
    pod: str
    node: str


class ScrapeTarget(Struct, frozen=True):
    """One pod that can be scraped."""

    targets: tuple[Address]
    labels: Labels


def publish(run_dir: Path, *, job: str, slot: int, attempt: int, address: str) -> Path:
    """Write the target of this pod, and replace the target of the pod before it.

    Args:
        run_dir: Run folder.
        job: Name of the job.
        slot: Number of the replica.
        attempt: Number of the pod in this slot, from 0.
        address: HOST:PORT of the agent's server.

    Returns:
        Path of the file.
    """
    labels = Labels(NAMESPACE, job, f"{job}-{slot}-{attempt + 1}", socket.gethostname())
    path = run_dir / FOLDER / f"{slot}.json"
    path.parent.mkdir(private_files.FOLDER_MODE, exist_ok=True)
    private_files.write(path, msgspec.json.encode([ScrapeTarget((address,), labels)]))
    return path


def read_target(path: Path) -> ScrapeTarget:
    """Return the target in an agent's file. Raise TargetError if it holds anything else."""
    try:
        (target,) = msgspec.json.decode(read_file(path, TARGET_BYTES_MAX), type=tuple[ScrapeTarget])
    except (OSError, *UNDECODABLE) as error:
        raise _damaged(path, "the address of a pod", error) from None
    address = target.targets[0]
    if int(address.rpartition(":")[2]) > PORT_MAX:
        raise _damaged(path, "the address of a pod", ValueError(f"{address} has no such port"))
    return target


def read_token(run_dir: Path) -> str:
    """Return the run's token for /steps, or an empty text. Raise TargetError if it is damaged."""
    path = run_dir / TOKEN_FILE
    try:
        token = read_file(path, TOKEN_CHARACTERS).decode("ascii")
        bytes.fromhex(token)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise _damaged(path, "a token for steps", error) from None
    return token


def leave_token(run_dir: Path, token: str) -> None:
    """Write the token for /steps, for commands of this user.

    All agents of a run write the same token.

    Args:
        run_dir: Run folder.
        token: Token of the run's ranks, from which the one for /steps is derived.
    """
    private_files.write(run_dir / TOKEN_FILE, steps_token(token).encode())


def leave_steps(run_dir: Path, pod: PodSamples) -> None:
    """Write the last steps of a pod for `paceline report`, in place of the previous pod's."""
    path = run_dir / STEPS / f"{pod.slot}.json"
    path.parent.mkdir(private_files.FOLDER_MODE, exist_ok=True)
    private_files.write(path, msgspec.json.encode(pod))


def _damaged(path: Path, what: str, error: Exception) -> TargetError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return TargetError(f"{path} does not hold {what} ({why}): remove it")
