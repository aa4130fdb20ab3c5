"""Detection of optimizers other than the job's that step parameters of the job's model.

A job has one optimizer. What another one writes into the model on this rank reaches no other rank:
the next round overwrites it, or the weights of the ranks drift apart. So such a step is an error
that names the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from paceline.errors import UnsupportedError


def refuse_for(
    model: torch.nn.Module, is_jobs: Callable[[torch.optim.Optimizer], bool]
) -> RemovableHandle:
    """Make a step of another optimizer on a parameter of `model` an error, from now on.

    Args:
        model: The job's model.
        is_jobs: Returns True for an optimizer that is the job's own, under any of its names.

    Returns:
        A handle; `remove()` ends the check.
    """

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_jobs(optimizer):
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                # An optimizer skips a parameter without a gradient.
                if name is not None and (parameter.requires_grad or parameter.grad is not None):
                    raise UnsupportedError(
                        f"{type(optimizer).__name__}.step() of another optimizer on parameter "
                        f"{name} of the job's model: it would change the weights of this rank "
                        "alone",
                        hint="a job has one optimizer: put all parameters into one, in parameter "
                        "groups, hand it to DistributedOptimizer, and leave out the other's step()",
                    )

    return register_optimizer_step_pre_hook(before_step)
