"""Construction of a TrainingJob that runs a training script unchanged, without a job file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from paceline_api.names import JOB_NAME_MAX
from paceline_api.reading.load import job_from_mapping, with_overrides
from paceline_api.runtimes.merge import Runtime
from paceline_api.types.enums import Mode
from paceline_api.types.job import API_VERSION, KIND, TrainingJob
from paceline_api.types.template import TRAINER

LAUNCH: Final = ("paceline", "launch")
"""Beginning of the command of a container that runs a training script."""


def default_image() -> str:
    """Return the name of the image that the target `worker` builds, at this version."""
    return f"paceline/worker:{version('paceline')}"


def job_name(program: str, suffix: str = "") -> str:
    """Return the name of a function, script or module as a valid job name.

    Args:
        program: The name.
        suffix: Lower-case letters and digits that the name shall end with. Empty for none.

    Returns:
        At most `JOB_NAME_MAX` characters.
    """
    words = re.sub(r"[^a-z0-9]+", "-", program.lower()).strip("-")
    words = words if words[:1].isalpha() else f"job-{words}".rstrip("-")
    end = f"-{suffix}" if suffix else ""
    return f"{words[: JOB_NAME_MAX - len(end)].rstrip('-')}{end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptJob:
    """A job in mode Full that runs a script; `overrides` may change any field of it."""

    name: str
    command: Sequence[str]
    """Words before the script, such as `LAUNCH`."""
    words: Sequence[str]
    """The script, or `-m` and a module, and its arguments."""
    image: str
    """Empty for that of the job's runtime."""
    replicas: int = 1
    gpus: int = 0
    """GPUs of each replica."""

    def mapping(self) -> dict[str, Any]:
        """Return the job as in YAML."""
        container: dict[str, Any] = {
            "name": TRAINER,
            **({"image": self.image} if self.image else {}),
            # The agent expands $(NAME), and the words belong to the script as they are.
            "command": [*self.command, *(word.replace("$", "$$") for word in self.words)],
        }
        if self.gpus:
            container["resources"] = {"limits": {"nvidia.com/gpu": self.gpus}}
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": self.name},
            "spec": {
                "replicas": self.replicas,
                "collective": {"mode": str(Mode.FULL)},
                "template": {"spec": {"containers": [container]}},
            },
        }

    def changed(self, overrides: Iterable[str]) -> Mapping[str, Any]:
        """Return the job as in YAML with changed fields; a wrong one raises InvalidJobError."""
        return with_overrides(self.mapping(), overrides)

    def job(self, overrides: Iterable[str], runtime: Runtime | None = None) -> TrainingJob:
        """Return the valid job with changed fields; a wrong one raises InvalidJobError.

        Args:
            overrides: Changes, as `path=value`.
            runtime: Runtime to merge the job with; None merges nothing.

        Returns:
            The job.
        """
        return job_from_mapping(self.changed(overrides), runtime)
