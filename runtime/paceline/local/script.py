"""Whether the script that a job's command names is there, as far as that can be told beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Final

from paceline_api.errors import SpecError

FIELD: Final = "spec.template.spec.containers[trainer].command"
WITH_VALUE: Final = ("-X", "-W", "--check-hash-based-pycs")
"""Options of Python that take the next word."""


def missing_script(command: Sequence[str], folder: Path) -> str:
    """Return the Python script of `command` if it is not in `folder`, where it would be started.

    Empty if it is there, and for everything else that a command may be: a module, a program, a
    variable in a name.
    """
    if not command or not PurePath(command[0]).name.startswith("python"):
        return ""
    words = iter(command[1:])
    for word in words:
        if word in WITH_VALUE:
            next(words, "")
        elif not word.startswith("-"):
            is_told = word.endswith(".py") and "$(" not in word
            return word if is_told and not (folder / word).is_file() else ""
        elif not word.startswith("--") and ("c" in word or "m" in word):
            return ""
    return ""


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
