"""Where a pod of a local run can be scraped, in a file for Prometheus's file_sd; its last steps.

On a cluster the Prometheus operator finds the pods. On one machine each agent takes a free port, so
it says itself which one, with the labels that a scrape on a cluster would bring, and leaves the
token with which the commands of its user ask for steps.
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
"""In the run folder."""
STEPS: Final = "steps"
"""In the run folder: what the agents that have ended leave of their ranks' last steps."""
TOKEN_FILE: Final = "steps-token"
"""In the run folder: with it the agents that live are asked for steps. Nobody else may read it."""
NAMESPACE: Final = "local"
PORT_MAX: Final = 65535
TARGET_BYTES_MAX: Final = 64 * 1024
TOKEN_CHARACTERS: Final = 64
"""Of the token for /steps, in hexadecimal digits."""

Address = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.\-]{1,255}:[0-9]{1,5}\Z")]
"""Host and port, and nothing else that could stand in a URL."""


class TargetError(OSError):
    """Raised for a file below the run folder that is not what an agent has left; says which."""


class Labels(Struct, frozen=True):
    """What Prometheus writes on the samples of a pod."""

    namespace: str
    paceline_dev_job_name: str
    pod: str
    node: str


class Target(Struct, frozen=True):
    """A pod that can be scraped."""

    targets: tuple[Address]
    labels: Labels


def publish(run_dir: Path, *, job: str, slot: int, attempt: int, address: str) -> Path:
    """Leave the file of this pod, in place of that of the pod before it; returns its path."""
    labels = Labels(NAMESPACE, job, f"{job}-{slot}-{attempt + 1}", socket.gethostname())
    path = run_dir / FOLDER / f"{slot}.json"
    path.parent.mkdir(private_files.FOLDER_MODE, exist_ok=True)
    private_files.write(path, msgspec.json.encode([Target((address,), labels)]))
    return path


def read_target(path: Path) -> Target:
    """Return what an agent has left in its file of targets.

    Raises:
        TargetError: The file cannot be read, or holds something else.
    """
    try:
        (found,) = msgspec.json.decode(read_file(path, TARGET_BYTES_MAX), type=tuple[Target])
    except (OSError, *UNDECODABLE) as error:
        raise _damaged(path, "the address of a pod", error) from None
    address = found.targets[0]
    if int(address.rpartition(":")[2]) > PORT_MAX:
        raise _damaged(path, "the address of a pod", ValueError(f"{address} has no such port"))
    return found


def read_token(run_dir: Path) -> str:
    """Return the run's token for /steps, or nothing where no agent has left one.

    Raises:
        TargetError: The file cannot be read, or holds something else.
    """
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


def _damaged(path: Path, what: str, error: Exception) -> TargetError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return TargetError(f"{path} does not hold {what} ({why}): remove it")
