"""The user's optimizer, rebound to parameters that the communication thread owns (D2).

The optimizer instance stays the user's own; only the tensors that it updates are exchanged:
parameters of our own, views of the flat committed weights, stand where the model's were; for those
of a bfloat16 or float16 model they are float32, so that small updates are not rounded away. Its
hyper-parameters belong to the round log from the first round on: the scheduler changes them, and
nobody else.
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
"""Elements that one norm is taken over. Torch splits a single long sum by its number of threads, so
ranks with other numbers of cores would get other bits; it never splits the rows of a matrix."""


class Clipping(Protocol):
    """Limits of the averaged gradient, applied once, after the reduction."""

    clip_norm: float | None
    clip_value: float | None

    def sum_of_squares(self, average: list[torch.Tensor]) -> float:
        """Of the whole averaged gradient."""


class OptimizerBinding:
    """Parameters of our own in the user's optimizer, one for each of the model's."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        originals: Sequence[torch.nn.Parameter],
        weights: Sequence[torch.Tensor],
        scheduler: SchedulerFactory | None,
    ) -> None:
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
        """The parameters lie there from now on."""
        for own, weight in zip(self.parameters, weights, strict=True):
            own.data = weight

    def point_gradients(self, views: Sequence[torch.Tensor]) -> None:
        for own, view in zip(self.parameters, views, strict=True):
            own.grad = view

    def step_scheduler(self, times: int) -> None:
        if self.scheduler is not None and times:
            for _ in range(times):
                self.scheduler.step()
            self.remember()

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Each group without its parameters; tensors (a learning rate) copied."""
        return [
            {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self.optimizer.param_groups
        ]

    def set_hyperparameters(self, groups: Sequence[dict[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(values)
        self.remember()

    @property
    def known(self) -> list[dict[str, Any]]:
        """The right hyper-parameters; a new list whenever they change."""
        return self._known

    def remember(self) -> None:
        """What the hyper-parameters are now is right."""
        self._known = self.hyperparameters()

    def check_unchanged(self) -> None:
        """ChangedLaterError if the user has changed the optimizer that was handed over."""
        difference = changed(self._known, self.optimizer.param_groups)
        if difference:
            raise changed_later("the optimizer that was handed to DistributedOptimizer", difference)

    def linear(self) -> tuple[bool, str]:
        """Whether many thin updates equal one full one, and why (docs/design/rounds.md)."""
        name = type(self.optimizer).__name__
        if type(self.optimizer) is not torch.optim.SGD:
            return False, f"{name} is not known to be linear in the gradient"
        if any(group["weight_decay"] for group in self.optimizer.param_groups):
            return False, f"{name} with weight decay also shrinks weights in thin rounds"
        return True, f"{name} is linear in the gradient"


def _like(own: torch.Tensor, original: torch.Tensor, value: Any) -> Any:
    """What the optimizer keeps in the type of the parameter stays in the type of the parameter."""
    if isinstance(value, torch.Tensor) and value.dtype is original.dtype:
        return value.to(own.dtype)
    return value


def changed(known: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> str:
    """The first difference between two lists of parameter groups, in words; empty without one."""
    if len(known) != len(groups):
        return f"{len(known)} parameter groups became {len(groups)}"
    for index, (before, after) in enumerate(zip(known, groups, strict=True)):
        # Asked twice in each step: nearly always these are the very objects.
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
    """`call`: what the script has called, which takes the scheduler."""
    return ChangedLaterError(
        f"{what}: {difference} after training had started",
        hint="hyper-parameters follow the job's progress, not one rank's steps: hand a scheduler "
        f"over as {call}(..., scheduler=lambda opt: StepLR(opt, 30)) and do not "
        "call its step() in the loop",
    )


def clip(flats: list[torch.Tensor], clipping: Clipping) -> None:
    """Clip the averaged gradient in place; the same bits on every rank of equal hardware."""
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
    return math.fsum(_squares(flats))


def _squares(flats: Sequence[torch.Tensor]) -> Iterator[float]:
    """Sums of squares of blocks, each block summed in one fixed order."""
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
