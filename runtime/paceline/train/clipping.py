"""Refusal of torch's gradient clipping inside a script, as of a learning rate set by hand.

Before the reduction, clipping would see the gradient of one rank, together with earlier work that
waits in the same buffer. The job clips the average, once (`clip_norm=`, `clip_value=`). Scripts
import these functions by name, so the references that modules already hold are replaced too.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.nn.utils import clip_grad

from paceline.errors import UnsupportedError

CLIPPING: Final = {
    "clip_grad_norm_": "clip_norm",
    "clip_grad_norm": "clip_norm",
    "clip_grad_value_": "clip_value",
}
"""torch's clipping functions, each with the argument of the job's optimizer that replaces it."""
LIMITS: Final = ("max_norm", "clip_value")
"""Names that torch's functions have for their second argument, the limit."""

_of_the_job: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Parameters of the job, by `id`, because `==` on tensors compares element by element."""


def refuse_for(parameters: Iterable[torch.nn.Parameter]) -> Callable[[], None]:
    """Make clipping the gradients of these parameters an error.

    Args:
        parameters: The parameters that the job trains.

    Returns:
        A function that puts torch's functions back.
    """
    replaced = []
    _of_the_job.update((id(parameter), parameter) for parameter in parameters)
    for name, argument in CLIPPING.items():
        function = getattr(clip_grad, name, None)
        if function is not None and not hasattr(function, "paceline_refuses"):
            refusing = _refusing(name, function, argument)
            _replace(name, function, refusing)
            replaced.append((name, refusing, function))

    def end() -> None:
        _of_the_job.clear()
        for name, refusing, function in replaced:
            _replace(name, refusing, function)

    return end


def _refusing(name: str, function: Callable[..., Any], argument: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def refusing(parameters: Any, *more: Any, **options: Any) -> Any:
        limit = more[0] if more else next((options[k] for k in LIMITS if k in options), math.inf)
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # An infinite limit clips nothing: scripts use it to read the norm.
        if not math.isinf(float(limit)) and any(
            _of_the_job.get(id(each)) is each for each in given
        ):
            raise UnsupportedError(
                f"{name}() in a job would clip this rank's own gradient, before the reduction",
                hint=f"leave the line out and say {argument}={float(limit):g} to "
                "pl.DistributedOptimizer() or pl.ddp(): the job clips the average",
            )
        return function(given, *more, **options)

    refusing.paceline_refuses = True  # type: ignore[attr-defined]
    return refusing


def _replace(name: str, old: object, new: object) -> None:
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(name) is old:
            names[name] = new
