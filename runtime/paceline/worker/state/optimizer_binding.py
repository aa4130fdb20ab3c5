"""Rebinds the user's optimizer to parameters that the communication thread owns (D2).

The optimizer remains the user's own object. Only the tensors that it updates are exchanged: in the
place of the model's parameters stand parameters of our own, views of the flat committed weights.
Those of a bfloat16 or float16 model are float32, so that small updates are not rounded away. From
the first round on, the hyper-parameters belong to the round log: only the scheduler changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch

from paceline.errors import ChangedLaterError

Scheduler = torch.optim.lr_scheduler.LRScheduler
SchedulerFactory = Callable[[torch.optim.Optimizer], Scheduler]

NORM_BLOCK: Final = 16_384
"""Number of elements that one norm is taken over. Torch splits a single long sum by its number of
threads, so ranks with different numbers of cores would get different bits. It never splits the
rows of a matrix."""


class Clipping(Protocol):
    """Limits of the averaged gradient, applied once, after the reduction."""

    clip_norm: float | None
    clip_value: float | None

    def sum_of_squares(self, average: list[torch.Tensor]) -> float:
        """Return the sum of squares of the whole averaged gradient, over all shards."""


class OptimizerBinding:
    """The user's optimizer with parameters of our own, one for each of the model's.

    Made by the main thread, then used by the communication thread. The main thread may read `known`
    at any time, and copies the optimizer's state under the lock of `Committed`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        originals: Sequence[torch.nn.Parameter],
        weights: Sequence[torch.Tensor],
        scheduler: SchedulerFactory | None,
    ) -> None:
        """Rebind the optimizer, and make the scheduler.

        Args:
            optimizer: The user's optimizer. State that it has already moves to the new parameters.
            originals: The model's trained parameters.
            weights: Views of the committed weights, one for each of them.
            scheduler: Makes the scheduler; None for a constant learning rate.
        """
        self.parameters = [torch.nn.Parameter(weight) for weight in weights]
        self.optimizer = optimizer
        exchange = dict(zip(originals, self.parameters, strict=True))
        for group in optimizer.param_groups:
            # A frozen parameter stays as it is: without a gradient the optimizer skips it.
            group["params"] = [exchange.get(original, original) for original in group["params"]]
        for original, own in exchange.items():
            if original in optimizer.state:
                state = optimizer.state.pop(original)
                optimizer.state[own] = {k: _like(own, original, v) for k, v in state.items()}
        self.scheduler = scheduler(optimizer) if scheduler is not None else None
        self._known: list[dict[str, Any]] = []
        self.remember()

    def move_to(self, weights: Sequence[torch.Tensor]) -> None:
        """Let the parameters lie in other memory, which already holds their values."""
        for own, weight in zip(self.parameters, weights, strict=True):
            own.data = weight

    def point_gradients(self, views: Sequence[torch.Tensor]) -> None:
        """Make these tensors the gradients of the next step, one for each parameter."""
        for own, view in zip(self.parameters, views, strict=True):
            own.grad = view

    def step_scheduler(self, times: int) -> None:
        """Step the scheduler, if there is one, this many times."""
        if self.scheduler is not None and times:
            for _ in range(times):
                self.scheduler.step()
            self.remember()

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return each group without its parameters; tensors (a learning rate) are copied."""
        return [
            {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self.optimizer.param_groups
        ]

    def set_hyperparameters(self, groups: Sequence[dict[str, Any]]) -> None:
        """Set the hyper-parameters of each group, from a donor or a checkpoint."""
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(values)
        self.remember()

    @property
    def known(self) -> list[dict[str, Any]]:
        """The hyper-parameters that the job has set; a new list whenever they change."""
        return self._known

    def remember(self) -> None:
        """Take the present hyper-parameters for those that the job has set."""
        self._known = self.hyperparameters()

    def check_unchanged(self) -> None:
        """Raise ChangedLaterError if the user has changed the optimizer's hyper-parameters."""
        difference = changed(self._known, self.optimizer.param_groups)
        if difference:
            raise changed_later("the optimizer that was handed to DistributedOptimizer", difference)

    def linear(self) -> tuple[bool, str]:
        """Decide whether many thin updates equal one full one (docs/design/rounds.md).

        Returns:
            The answer, and the reason for it. An optimizer that is not known counts as not linear.
        """
        name = type(self.optimizer).__name__
        if type(self.optimizer) is not torch.optim.SGD:
            return False, f"{name} is not known to be linear in the gradient"
        if any(group["weight_decay"] for group in self.optimizer.param_groups):
            return False, f"{name} with weight decay also shrinks weights in thin rounds"
        return True, f"{name} is linear in the gradient"


def _like(own: torch.Tensor, original: torch.Tensor, value: Any) -> Any:
    """Return the value, in the master's type if it had the type of the model's parameter."""
    if isinstance(value, torch.Tensor) and value.dtype is original.dtype:
        return value.to(own.dtype)
    return value


def changed(known: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> str:
    """Return the first difference between two lists of parameter groups.

    Args:
        known: The groups as the job has set them, without parameters.
        groups: The groups of an optimizer.

    Returns:
        A text with the key and both values; empty if there is no difference.
    """
    if len(known) != len(groups):
        return f"{len(known)} parameter groups became {len(groups)}"
    for index, (before, after) in enumerate(zip(known, groups, strict=True)):
        # Called twice in each step, and nearly always with the very same objects.
        if len(after) == len(before) + 1 and all(after.get(k) is v for k, v in before.items()):
            continue
        for key in before.keys() | after.keys() - {"params"}:
            if not _same(before.get(key), after.get(key)):
                old, new = _show(before.get(key)), _show(after.get(key))
                return f"param_groups[{index}][{key!r}] changed from {old} to {new}"
    return ""


def changed_later(
    what: str, difference: str, call: str = "DistributedOptimizer"
) -> ChangedLaterError:
    """Return the error for hyper-parameters that were changed after the start.

    Args:
        what: The object that was changed.
        difference: What has changed.
        call: The call of the script that takes a scheduler, for the hint.

    Returns:
        An error with a hint.
    """
    return ChangedLaterError(
        f"{what}: {difference} after training had started",
        hint="hyper-parameters follow the job's progress, not one rank's steps: hand a scheduler "
        f"over as {call}(..., scheduler=lambda opt: StepLR(opt, 30)) and do not "
        "call its step() in the loop",
    )


def clip(flats: list[torch.Tensor], clipping: Clipping) -> None:
    """Clip the averaged gradient in place, with the same bits on every rank of equal hardware."""
    if clipping.clip_value is not None:
        for flat in flats:
            flat.clamp_(-clipping.clip_value, clipping.clip_value)
    if clipping.clip_norm is not None:
        norm = math.sqrt(clipping.sum_of_squares(flats))
        factor = clipping.clip_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        if factor < 1.0:
            for flat in flats:
                flat.mul_(factor)


def sum_of_squares(flats: Sequence[torch.Tensor]) -> float:
    """Return the sum of squares of flat tensors, independent of the number of threads."""
    return math.fsum(_squares(flats))


def _squares(flats: Sequence[torch.Tensor]) -> Iterator[float]:
    """Yield sums of squares of blocks, each block summed in one fixed order.

    Yields:
        The sum of squares of the next block of NORM_BLOCK elements, or of the rest.
    """
    for flat in flats:
        whole = flat.numel() // NORM_BLOCK * NORM_BLOCK
        for rows in (flat[:whole].view(-1, NORM_BLOCK), flat[whole:].view(1, -1)):
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
            yield from norms.square().tolist()


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _show(value: object) -> str:
    return (
        str(value.item()) if isinstance(value, torch.Tensor) and value.numel() == 1 else repr(value)
    )
