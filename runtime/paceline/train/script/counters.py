"""Counts that frameworks keep of batches and steps, on a rank that joins (S8, S9).

By these counts a framework decides when it steps, evaluates, saves and ends, so they have to be
equal on all ranks. They are found among the objects of the process by the names of their classes:
a script that uses no framework pays nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol


class CounterState(Protocol):
    """What a rank that joins gets of one object."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take the state of another rank."""


@dataclass(frozen=True)
class Attributes:
    """Attributes of one object, as a state."""

    owner: Any
    names: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        """Return the values that the object has."""
        return {name: getattr(self.owner, name) for name in self.names if hasattr(self.owner, name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the values."""
        for name, value in state.items():
            setattr(self.owner, name, value)


TRAINER_STATE: Final = (
    *("global_step", "epoch", "num_input_tokens_seen", "total_flos", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint", "stateful_callbacks"),
)
"""Attributes of transformers' TrainerState that are equal on all ranks."""


@dataclass(frozen=True)
class EpochLoop:
    """Counts of Lightning's loop over the batches of an epoch, as a state.

    The donor waits in the middle of a step. So a rank that joins has completed as many steps, and
    as many batches of the epoch as are averaged, and takes the next batch itself.
    """

    loop: Any
    cursor: int | None
    """Batches of the epoch that are averaged; None before the first pass."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counts for a rank that takes the batch that comes next."""
        loop, batches = self.loop, self.loop.batch_progress
        completed = batches.current.completed
        used = completed if self.cursor is None else min(self.cursor, completed)
        return {
            "batches": used,
            "all_batches": batches.total.completed - completed + used,
            "steps": _steps(loop).completed,
            "logged": loop._batches_that_stepped,  # noqa: SLF001
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counts."""
        batches = self.loop.batch_progress
        _set(batches.current, state["batches"])
        _set(batches.total, state["all_batches"])
        _set(_steps(self.loop), state["steps"])
        self.loop._batches_that_stepped = state["logged"]  # noqa: SLF001


def _steps(loop: Any) -> Any:
    """Return the count of all steps of the optimizers."""
    module = loop.trainer.lightning_module
    if module is None or module.automatic_optimization:
        return loop.automatic_optimization.optim_progress.optimizer.step.total
    return loop.manual_optimization.optim_step_progress.total


def _set(tracker: Any, count: int) -> None:
    """Set all parts of a count of Lightning: ready, started, processed and completed."""
    for name in vars(tracker):
        setattr(tracker, name, count)


_EPOCH_LOOP: Final = "loops.training_epoch_loop"
COUNTING: Final[dict[tuple[str, str], Callable[[Any, int | None], CounterState]]] = {
    ("transformers.trainer_callback", "TrainerState"): lambda state, _: Attributes(
        state, TRAINER_STATE
    ),
    (f"lightning.pytorch.{_EPOCH_LOOP}", "_TrainingEpochLoop"): EpochLoop,
    (f"pytorch_lightning.{_EPOCH_LOOP}", "_TrainingEpochLoop"): EpochLoop,
}
"""Module and name of a class that counts -> its state, given the averaged batches of the pass."""


class Joined(Protocol):
    """The iteration over a loader that a rank has joined."""

    rest: int | None
    """Number of batches that were not averaged yet when it joined; None if nobody knows it."""
    handed: int
    """Number of these that a Trainer has taken."""


class LastSteps:
    """Lets transformers' Trainer make the last step of an epoch that a rank has joined.

    Trainer averages over `gradient_accumulation_steps` batches, and over fewer at the end of the
    epoch. It finds that end by the number of batches of the whole epoch, of which a rank that joins
    takes only those behind the averaged ones. So without this, it would ask for more batches than
    the others there, and make no step of those that it gets.
    """

    def __init__(self, joined: Callable[[], Joined | None]) -> None:
        """Begin without a Trainer.

        Args:
            joined: Returns the iteration that this rank has joined, until its pass has ended.
        """
        self._joined = joined
        self._is_installed = False
        self._changed: list[tuple[Any, int]] = []
        """Arguments of Trainers that were changed, with what they were."""

    def install(self) -> None:
        """Wrap the method with which Trainer takes the batches of a step, if there is a Trainer."""
        kind = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
        if kind is None or self._is_installed:
            return
        self._is_installed = True
        take = kind.get_batch_samples

        def get_batch_samples(trainer: Any, batches: Iterator[Any], *args: Any, **kw: Any) -> Any:
            self.restore()
            result = take(trainer, StepBatches(batches, self._joined), *args, **kw)
            if result[0]:
                self._took(trainer.args)
            return result

        kind.get_batch_samples = get_batch_samples

    def _took(self, arguments: Any) -> None:
        joined, size = self._joined(), arguments.gradient_accumulation_steps
        if joined is not None and joined.rest == joined.handed and joined.rest % size:
            self._changed.append((arguments, size))
            arguments.gradient_accumulation_steps = joined.rest

    def restore(self) -> None:
        """Give Trainers what they had: the step is made, or another one begins."""
        while self._changed:
            arguments, size = self._changed.pop()
            arguments.gradient_accumulation_steps = size


class StepBatches(Iterator[Any]):
    """Batches of an epoch for one step. It ends where those of the epoch do, and not behind it.

    Asking for one more batch would end the pass on this rank before the last step.
    """

    def __init__(self, batches: Iterator[Any], joined: Callable[[], Joined | None]) -> None:
        self._batches, self._joined = batches, joined

    def __next__(self) -> Any:
        """Return the next batch."""
        joined = self._joined()
        if joined is not None and joined.rest == joined.handed:
            raise StopIteration
        batch = next(self._batches)
        if (joined := self._joined()) is not None:  # the rank may have joined with this batch
            joined.handed += 1
        return batch
