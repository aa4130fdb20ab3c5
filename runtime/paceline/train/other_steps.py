"""Steps of other optimizers on the parameters of the job's model: found and refused, by name.

A job has one optimizer. What another one writes into the model on this rank reaches no other rank:
the next round writes over it, or the weights of the ranks drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from paceline.errors import UnsupportedError


def refuse_for(
    model: torch.nn.Module, called: str, is_jobs: Callable[[torch.optim.Optimizer], bool]
) -> RemovableHandle:
    """From now on a step of another optimizer on a parameter of `model` is an error.

    Args:
        model: The job's model.
        called: What the script has called to hand its optimizer over.
        is_jobs: Return True for an optimizer that is the job's own, under any of its names.

    Returns:
        What ends it.
    """

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_jobs(optimizer):
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                # Without a gradient the optimizer leaves it alone.
                if name is not None and (parameter.requires_grad or parameter.grad is not None):
                    raise UnsupportedError(
                        f"{type(optimizer).__name__}.step() of another optimizer on parameter "
                        f"{name} of the job's model: it would change the weights of this rank "
                        "alone",
                        hint="a job has one optimizer: put all parameters into one, in parameter "
                        f"groups, hand it to {called}, and leave out the other one's step()",
                    )

    return register_optimizer_step_pre_hook(before_step)
