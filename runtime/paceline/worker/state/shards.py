"""Parameters of which a rank holds a part: DTensors of torch's tensor parallelism (R53).

What Paceline sums, steps, hashes and sends is the rank's own part, a plain tensor. torch makes the
gradient of a DTensor as a DTensor of its own, which cannot be a view of flat memory: it is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from paceline.worker.state.flat import as_reals


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor; asked without loading the module that has them."""
    return hasattr(tensor, "to_local")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank, as reals; of a plain tensor, the tensor."""
    part = cast("torch.Tensor", cast("Any", tensor).to_local()) if is_spread(tensor) else tensor
    return as_reals(part)


def own_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of `own_part`. Main thread: where torch left it to be summed over the group, the
    group does so here."""
    gradient = parameter.grad
    if gradient is None or not is_spread(gradient):
        return gradient
    spread = cast("Any", gradient)
    wanted = cast("Any", parameter).placements
    if spread.placements != wanted:
        spread = spread.redistribute(placements=wanted)
    return cast("torch.Tensor", spread.to_local())


def is_shard(parameter: torch.Tensor) -> bool:
    return is_spread(parameter) and any(p.is_shard() for p in cast("Any", parameter).placements)


def copies(parameters: Sequence[torch.Tensor]) -> frozenset[int]:
    """Indices of those that all ranks of the group hold alike. In a model with DTensors that is all
    that is no shard; in one without, such as a stage of a pipeline, each rank has its own."""
    if not any(is_spread(parameter) for parameter in parameters):
        return frozenset()
    return frozenset(i for i, parameter in enumerate(parameters) if not is_shard(parameter))
