"""Whether the script that a job's command names is there, as far as that can be told beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Final

from paceline_api.errors import SpecError
from paceline_api.rules.launchers import python_runs

FIELD: Final = "spec.template.spec.containers[trainer].command"


def missing_script(command: Sequence[str], folder: Path) -> str:
    """Return the Python script of `command` if it is not in `folder`, where it would be started.

    Empty if it is there, and for everything else that a command may be: a module, a program, a
    variable in a name.
    """
    if not command or not PurePath(command[0]).name.startswith("python"):
        return ""
    option, script = python_runs(command)
    is_told = not option and script.endswith(".py") and "$(" not in script
    return script if is_told and not (folder / script).is_file() else ""


def check_script(command: Sequence[str], folder: Path) -> None:
    """Raises SpecError if the script of a run on this machine is not there."""
    if script := missing_script(command, folder):
        raise SpecError(
            FIELD,
            script,
            f"is not in {folder}, where the ranks run",
            hint="a path in a command is relative to workingDir of the container, and that to the "
            "job file, whose folder is the default",
        )
