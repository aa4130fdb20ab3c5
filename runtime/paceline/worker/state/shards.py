"""Parameters of which a rank holds a part: DTensors of torch's tensor parallelism (R53).

Paceline sums, steps, hashes and sends the rank's own part, which is a plain tensor. torch makes the
gradient of a DTensor as a new DTensor, which cannot be a view of flat memory, so it is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from paceline.worker.state.flat import as_reals


def is_spread(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor, without loading the module that defines it."""
    return hasattr(tensor, "to_local")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself; complex numbers as reals."""
    part = cast("torch.Tensor", cast("Any", tensor).to_local()) if is_spread(tensor) else tensor
    return as_reals(part)


def own_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter's `own_part`. Main thread.

    If torch has left the gradient to be summed over the group, the ranks of the group do that here,
    in a collective call.

    Args:
        parameter: A parameter of the model.

    Returns:
        The gradient as a plain tensor; None if there is none.
    """
    gradient = parameter.grad
    if gradient is None or not is_spread(gradient):
        return gradient
    spread = cast("Any", gradient)
    wanted = cast("Any", parameter).placements
    if spread.placements != wanted:
        spread = spread.redistribute(placements=wanted)
    return cast("torch.Tensor", spread.to_local())


def is_shard(parameter: torch.Tensor) -> bool:
    """Return True if this rank holds only a shard of the parameter."""
    return is_spread(parameter) and any(p.is_shard() for p in cast("Any", parameter).placements)


def copies(parameters: Sequence[torch.Tensor]) -> frozenset[int]:
    """Find the parameters that all ranks of the group hold alike.

    In a model with DTensors these are all parameters that are not shards. In a model without, such
    as a stage of a pipeline, each rank has its own parameters.

    Args:
        parameters: The parameters of the model.

    Returns:
        Indices of these parameters; empty for a model without DTensors.
    """
    if not any(is_spread(parameter) for parameter in parameters):
        return frozenset()
    return frozenset(i for i, parameter in enumerate(parameters) if not is_shard(parameter))
