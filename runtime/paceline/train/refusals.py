"""Refusals of what Paceline cannot train with, by name and with an alternative (D2, D9).

A refusal comes as early as possible: when the optimizer is wrapped, when training starts, or at the
first step after a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from paceline_api.names import TORCHELASTIC

from paceline.errors import ChangedLaterError, UnsupportedError, UsageError
from paceline.worker.state.buffers import overlaps_itself, persistent_buffers
from paceline.worker.state.shards import is_shard

UNCHANGED: Final = (
    "or leave a script for DDP, or for a framework that uses DDP, as it is, without pl, and start "
    "it by `paceline run SCRIPT` or `paceline launch SCRIPT`"
)
"""The way out for a script whose own way of stepping is to stay."""
REFUSED_OPTIMIZERS = {
    torch.optim.LBFGS: (
        "it evaluates the model several times in one step, each of which would be a round",
        "use SGD, Adam, AdamW or another optimizer that takes one gradient per step",
    ),
    torch.optim.SparseAdam: (
        "it needs sparse gradients, and gradients are reduced in dense flat buffers",
        "use Adam or AdamW, and Embedding(sparse=False)",
    ),
}
"""Optimizers that a job cannot use, each with the reason and the alternative."""

PLAIN: Final = "pass the plain model with the plain optimizer: each rank holds all of it"
SHARDED_MODULES: Final = {
    "FullyShardedDataParallel": f"leave out FullyShardedDataParallel(...), {PLAIN}",
    "FSDPModule": f"leave out fully_shard(...), {PLAIN}",
}
"""Hints by class name: a script that uses none of these classes must not import them."""
SHARDED_OPTIMIZERS: Final = {
    "ZeroRedundancyOptimizer": "create the optimizer_class that it was given, such as "
    "AdamW(model.parameters()), and pass that",
}


def check_process(env: Mapping[str, str], *, child: bool) -> None:
    """Refuse a process of a job that something other than its agent has started as a rank.

    Args:
        env: The environment of this process.
        child: True if multiprocessing has started this process.

    Raises:
        UsageError: Another launcher has started it, so several processes would claim the same rank.
    """
    launcher = "torchrun" if any(name.startswith(TORCHELASTIC) for name in env) else ""
    if child:
        launcher = "multiprocessing (such as mp.spawn)"
    if launcher:
        raise UsageError(
            f"pl.init() is called in a process that {launcher} has started: Paceline starts the "
            "ranks itself, one process each, and only that process is one",
            hint="let the job's command be the script of one rank, and procsPerReplica the number "
            "of processes; a data loader's workers need no pl.init(): put the script "
            'below `if __name__ == "__main__":`',
        )


def _kinds(thing: object) -> set[str]:
    """Return the names of all classes of torch.distributed that `thing` is an instance of."""
    return {k.__name__ for k in type(thing).__mro__ if k.__module__.startswith("torch.distributed")}


ORDER: Final = "pass the optimizer first, then the model: DistributedOptimizer(optimizer, model)"


def check_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Refuse an optimizer that cannot be rebound to other parameters.

    Args:
        optimizer: What the script has passed.

    Returns:
        The optimizer.

    Raises:
        UsageError: It is not a torch optimizer, or it has no parameters.
        UnsupportedError: It is of a kind that a job cannot use, or a scheduler was made for it.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"DistributedOptimizer got a {type(optimizer).__name__}, not a torch optimizer",
            hint=ORDER,
        )
    for name, hint in SHARDED_OPTIMIZERS.items():
        if name in _kinds(optimizer):
            raise UnsupportedError(
                f"{name} is not supported: its state is spread over a fixed group of ranks, and "
                "here ranks come and go, each with all of it",
                hint=hint,
            )
    if "param_groups" not in vars(optimizer):
        kind = type(optimizer)
        raise UnsupportedError(
            f"{kind.__module__.partition('.')[0]}'s {kind.__name__} wraps another optimizer",
            hint=f"hand over the torch optimizer inside; {UNCHANGED}",
        )
    for kind, (why, hint) in REFUSED_OPTIMIZERS.items():
        if isinstance(optimizer, kind):
            raise UnsupportedError(f"{kind.__name__} is not supported: {why}", hint=hint)
    if not any(group["params"] for group in optimizer.param_groups):
        raise UsageError(
            "the optimizer has no parameters", hint="create it from model.parameters()"
        )
    # A scheduler replaces the optimizer's step() by a counting one; torch checks it in this way.
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise UnsupportedError(
            "a learning-rate scheduler was already made for this optimizer",
            hint="hand over a function that makes it, as in "
            "scheduler=lambda opt: StepLR(opt, 30), and do not call its step()",
        )
    return optimizer


def check_model(
    model: object, optimizer: torch.optim.Optimizer, shards: int = 1
) -> torch.nn.Module:
    """Refuse a model that does not belong to the optimizer, and sparse gradients.

    Args:
        model: What the script has passed.
        optimizer: The optimizer of its parameters.
        shards: Number of ranks that hold the model together (`spec.parallelism.model`).

    Returns:
        The model; the original module if it was compiled.

    Raises:
        UsageError: It is not a model, or the optimizer has parameters that the model lacks.
        UnsupportedError: It reduces gradients on its own, is sharded or makes sparse gradients.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"DistributedOptimizer got a {type(model).__name__}, not a model",
            hint=ORDER,
        )
    if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        raise UnsupportedError(
            f"{type(model).__name__} reduces gradients on its own",
            hint=f"pass the plain model: Paceline does the reduction; {UNCHANGED}",
        )
    # torch.compile wraps the model. The original has the same parameters under their plain names.
    model = cast("torch.nn.Module", getattr(model, "_orig_mod", model))
    _check_whole(model, shards)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise UnsupportedError(
                f"{name or 'the model'} makes sparse gradients, which are not supported",
                hint=f"use {type(module).__name__}(sparse=False)",
            )
    known = set(model.parameters())
    for index, group in enumerate(optimizer.param_groups):
        strangers = [parameter for parameter in group["params"] if parameter not in known]
        if strangers:
            raise UsageError(
                f"param_groups[{index}] of the optimizer has {len(strangers)} parameters that the "
                "model does not have",
                hint="create the optimizer from the parameters of the model that you pass",
            )
    return model


def _check_whole(model: torch.nn.Module, shards: int) -> None:
    """Refuse a model that is sharded over ranks outside of this rank's group.

    A joiner gets its state from the same shard of any other group, so each group must hold all of
    it.

    Raises:
        UnsupportedError: A module or a parameter is sharded in such a way.
    """
    for name, module in model.named_modules():
        for kind, hint in SHARDED_MODULES.items():
            if kind in _kinds(module):
                raise UnsupportedError(
                    f"{name or 'the model'} is sharded ({kind}): a rank that is lost would take "
                    "its part of the weights along",
                    hint=hint,
                )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, torch.Tensor) or "DTensor" not in _kinds(parameter):
            continue
        size = parameter.device_mesh.size()  # type: ignore[attr-defined]
        if size != shards:
            raise UnsupportedError(
                f"parameter {name} is a DTensor over a mesh of {size} ranks, and a group of this "
                f"job has {shards} (spec.parallelism.model): other ranks come and go",
                hint="set spec.parallelism.model to the number of ranks that share one copy of the "
                f"model, and spread it over pl.group() alone; or {PLAIN}",
            )


def check_scheduler(scheduler: object) -> None:
    """Raise UnsupportedError unless `scheduler` is None or a function."""
    if scheduler is not None and not callable(scheduler):
        raise UnsupportedError(
            f"scheduler= got a {type(scheduler).__name__}; the job steps schedulers, on parameters "
            "of its own",
            hint="hand over a function: scheduler=lambda opt: StepLR(opt, 30)",
        )


def check_made_scheduler(scheduler: object) -> None:
    """Refuse what the script's function has returned, unless it is a usable scheduler.

    Raises:
        UnsupportedError: It follows a metric of one rank.
        UsageError: It is not a scheduler.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UnsupportedError(
            "ReduceLROnPlateau is not supported: it follows a figure of one rank, and learning "
            "rates must be equal on all",
            hint="use a scheduler that follows progress alone, such as CosineAnnealingLR",
        )
    if scheduler is not None and not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise UsageError(
            f"the function in scheduler= returned a {type(scheduler).__name__}",
            hint="return a scheduler of torch.optim.lr_scheduler",
        )


def check_limits(loss_reduction: str, clip_norm: float | None, clip_value: float | None) -> None:
    """Raise UsageError unless the loss reduction and the clipping limits have valid values."""
    if loss_reduction not in ("mean", "sum"):
        raise UsageError(
            f"loss_reduction={loss_reduction!r}",
            hint='say "mean" or "sum", whichever the loss does over a batch',
        )
    for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if limit is not None and not limit > 0:
            raise UsageError(f"{name}={limit}", hint="give a number above 0, or leave it out")


def refuse_closure() -> UnsupportedError:
    """Return the error for a script that calls `step(closure)`."""
    return UnsupportedError(
        "step(closure) is not supported: a closure computes gradients inside the update, which "
        "happens on another thread, after the reduction",
        hint=f"call loss.backward() before optimizer.step(); {UNCHANGED}",
    )


def refuse_grad_scaler() -> UnsupportedError:
    """Return the error for a script that uses GradScaler (D9)."""
    return UnsupportedError(
        "GradScaler is not supported: it skips step() on one rank when its gradient overflows",
        hint="use bfloat16 autocast, which needs no scaling, and change three lines: "
        "torch.autocast(..., dtype=torch.bfloat16) around the forward pass; loss.backward() for "
        "scaler.scale(loss).backward(); optimizer.step() for scaler.step(optimizer) and "
        "scaler.update(). A gradient that is not finite is dropped and counted",
    )


ELEMENT_WISE: Final = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers that change an element by the gradients of that element alone."""


def check_shards(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.nn.Parameter]]
) -> None:
    """Refuse an optimizer that looks at whole tensors if this rank holds parts of tensors.

    It would silently take the norm, rank or factors of a part for those of the parameter.

    Raises:
        UnsupportedError: Such an optimizer trains a parameter of which this rank holds a part.
    """
    if type(optimizer) in ELEMENT_WISE:
        return
    for name, parameter in named:
        if is_shard(parameter):
            raise UnsupportedError(
                f"{type(optimizer).__name__} on parameter {name}, of which each rank of the group "
                "holds a part: it is not known to treat each element by itself, and would take "
                "the part for the whole",
                hint="use an optimizer of torch that does, such as AdamW or SGD, or share the "
                "model by whole layers (a pipeline)",
            )


def check_memory(model: torch.nn.Module) -> None:
    """Refuse parameters and buffers whose elements share memory, so they cannot be written.

    They must be writable, because a joiner loads both from a donor and buffers are averaged.

    Raises:
        UsageError: There is such a parameter or buffer.
    """
    for kind, named in (
        ("parameter", model.named_parameters()),
        ("buffer", persistent_buffers(model)),
    ):
        for name, tensor in named:
            if overlaps_itself(tensor):
                raise UsageError(
                    f"{kind} {name} is a view in which several elements share their memory, as "
                    f"expand() makes it (shape {tuple(tensor.shape)}, strides {tensor.stride()}): "
                    "the job's values cannot be written into it",
                    hint="add .clone() behind expand(), or for a buffer that each rank computes "
                    "for itself say register_buffer(..., persistent=False)",
                )


class Trainables:
    """The trainable parameters as they were at the start; later changes are refused (D2).

    Args:
        model: The job's model.
        groups: The parameter groups of the job's optimizer.
    """

    def __init__(self, model: torch.nn.Module, groups: Sequence[dict[str, Any]]) -> None:
        """Record the trainable parameters; UsageError if none or if the optimizer lacks one."""
        self._model = model
        self._held = {parameter for group in groups for parameter in group["params"]}
        self._all = list(model.named_parameters())
        self._flags = [parameter.requires_grad for _, parameter in self._all]
        self.named = [(n, p) for n, p in self._all if p.requires_grad and p in self._held]
        if not self.named:
            raise UsageError(
                "every parameter of the optimizer is frozen (requires_grad=False)",
                hint="leave something to train before the first step",
            )
        self._stepped = False
        self._check_held()

    def check_unchanged(self) -> None:
        """Check that the trainable parameters are still those of the start; called at each step.

        The first call raises UsageError if the model has made a trainable parameter since the
        start.

        Raises:
            ChangedLaterError: The script has frozen or unfrozen a parameter.
        """
        if not self._stepped:  # a module may create parameters in its first forward()
            self._stepped = True
            self._check_held()
        flags = [parameter.requires_grad for _, parameter in self._all]
        if flags == self._flags:
            return
        name = next(
            n for (n, _), new, old in zip(self._all, flags, self._flags, strict=True) if new != old
        )
        raise ChangedLaterError(
            f"requires_grad of {name} was changed after training had started",
            hint="freeze and unfreeze before the first step; to train in stages, run two jobs",
        )

    def _check_held(self) -> None:
        """Check that the optimizer holds every trainable parameter.

        Without a place in the job's buffers the gradient of a parameter would stay on its rank.

        Raises:
            UsageError: The optimizer lacks one.
        """
        lacking = [
            name
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and parameter not in self._held
        ]
        if not lacking:
            return
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise UsageError(
            f"the optimizer of the job lacks the trainable parameter {lacking[0]}{more} of its "
            "model: no other rank would get its gradient",
            hint="a job has one optimizer: hand one with all trainable parameters to "
            "DistributedOptimizer, in parameter groups if they differ in settings; set "
            "requires_grad=False for what is not trained",
        )
