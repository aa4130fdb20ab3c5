"""The two words that an unchanged script may add: `pl.step` and `pl.keep` (S10, S15)."""

from __future__ import annotations

from typing import Any, Protocol

from paceline.errors import UsageError


class Launched(Protocol):
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


_script: Launched = Alone()


def install(script: Launched) -> None:
    """Let the words ask this script from now on."""
    global _script
    _script = script


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
