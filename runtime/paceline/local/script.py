"""Check that the script in a job's command exists, as far as that is known before the start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Final

from paceline_api.errors import SpecError
from paceline_api.rules.launchers import launched_script, python_runs

FIELD: Final = "spec.template.spec.containers[trainer].command"


def missing_script(command: Sequence[str], folder: Path) -> str:
    """Return the Python script of `command` if it is not in `folder`, where it would be started.

    Args:
        command: The job's command.
        folder: Working directory of the ranks.

    Returns:
        Empty if the script exists, and for anything else that a command may be: a module, a
        program, a name with a variable.
    """
    if launched := launched_script(command):
        option, script = ("-m", "") if launched[0] == "-m" else ("", launched[0])
        script = script.replace("$$", "$")
    elif command and PurePath(command[0]).name.startswith("python"):
        option, script = python_runs(command)
    else:
        return ""
    is_known = not option and script.endswith(".py") and "$(" not in script
    return script if is_known and not (folder / script).is_file() else ""


def check_script(command: Sequence[str], folder: Path) -> None:
    """Check that the script of a run on this machine exists.

    Args:
        command: The job's command.
        folder: Working directory of the ranks.

    Raises:
        SpecError: It does not exist.
    """
    if script := missing_script(command, folder):
        raise SpecError(
            FIELD,
            script,
            f"is not in {folder}, where the ranks run",
            hint="a path in a command is relative to workingDir of the container, and that to the "
            "job file, whose folder is the default",
        )
