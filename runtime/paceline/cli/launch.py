"""`paceline launch`: runs a training script unchanged, in a rank of a job or alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from paceline_api.rules.launchers import LAUNCH_MODULE

from paceline.cli.options import IsModule, Script, Words
from paceline.cli.program import Program, UnrunnableScriptError


def launch(file: Script, words: Words = None, is_module: IsModule = False) -> int:
    """Run a script as one rank: the command of a pod in place of torchrun. Else it trains alone."""
    become(script_of(file, words, is_module=is_module).words())
    return 0


def script_of(file: str, words: Sequence[str] | None, *, is_module: bool) -> Program:
    """Return the script that a rank shall run, after a check that it can be.

    Args:
        file: Path of the script, or name of a module.
        words: Its arguments.
        is_module: True for a module.

    Returns:
        The script.

    Raises:
        UnrunnableScriptError: It is a job file.
    """
    program = Program.of(file, words, is_module=is_module)
    if not program.is_script:
        raise UnrunnableScriptError(
            f"{file} is a job file, and `paceline launch` runs a script in a rank of a job",
            hint=f"paceline run {file}",
        )
    return program


def become(words: Sequence[str]) -> None:
    """Replace this process by the launcher, so that no frame of the command line is in between.

    Args:
        words: The script, or `-m` and a module, and its arguments.
    """
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", LAUNCH_MODULE, *words])
