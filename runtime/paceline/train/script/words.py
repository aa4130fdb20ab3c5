"""What a script for torchrun may add: `pl.attach`, `pl.step`, `pl.keep` (S10, S15, S16)."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

from paceline.environment import ENV_MEMBER
from paceline.errors import UsageError


class LaunchedScript(Protocol):
    """The script of this process, as `train.script.launch` runs it."""

    def step(self) -> int:
        """Return the number of the step that the script makes next."""

    def keep(self, objects: dict[str, Any]) -> None:
        """Add objects to the state that a rank gets when it joins."""


class Alone:
    """A script that is run without a job: by torchrun, or by Python."""

    def __init__(self) -> None:
        self._steps = -1

    def step(self) -> int:
        """Count the calls."""
        self._steps += 1
        return self._steps

    def keep(self, objects: dict[str, Any]) -> None:
        """Do nothing: nobody joins."""


_script: LaunchedScript = Alone()


def install(script: LaunchedScript) -> None:
    """Let the words ask this script from now on."""
    global _script
    _script = script


def attach() -> None:
    """Run this script as `paceline launch` runs one; call it in the script's first lines.

    In a rank of a job whose command is `python SCRIPT`, the script begins again, with the rank and
    world size of the job, and its process ends with it. Under `paceline run SCRIPT`, `paceline
    launch`, torchrun and Python alone the call does nothing. Main thread only.

    Raises:
        UsageError: The script takes part in the job already, or its file is not known.
    """
    if not isinstance(_script, Alone) or ENV_MEMBER not in os.environ:
        return
    from paceline.train import context
    from paceline.train.script.launch import main

    if context.session() is not None:
        raise UsageError(
            "pl.attach() after pl.init(), by which the script takes part in its job",
            hint="remove one of them: pl.init() is for scripts with pl.DistributedOptimizer",
        )
    started = sys.modules["__main__"]
    spec, path = getattr(started, "__spec__", None), getattr(started, "__file__", None)
    if spec is None and path is None:
        raise UsageError(
            "pl.attach() in a script without a file", hint="write the script into a file"
        )
    script = [str(path)] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    sys.exit(main([*script, *sys.argv[1:]]))


def step() -> int:
    """Return the number of the step that the script makes next, counted from the job's start.

    A training loop without a DataLoader says it at its top: `step = pl.step()`. On a rank that
    joins a running job, the first call loads the job's state and returns the job's present step.
    Without a job it counts its calls. Main thread only, once per synchronizing `backward()`.

    Returns:
        The number of the step, from 0.
    """
    return _script.step()


def keep(**objects: Any) -> None:
    """Add objects to the state that a rank gets when it joins a running job.

    Models in DistributedDataParallel, their optimizers, schedulers, GradScalers and averaged copies
    belong to it already.

    Args:
        objects: Objects with `state_dict()` and `load_state_dict()`, by a name that is the same on
            all ranks.

    Raises:
        UsageError: An object lacks one of these methods.
    """
    for name, each in objects.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise UsageError(
                f"keep({name}=...): a {type(each).__name__} has no state_dict() and "
                "load_state_dict()",
                hint="wrap it in a class that has them",
            )
    _script.keep(objects)
