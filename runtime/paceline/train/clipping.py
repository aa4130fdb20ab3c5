"""torch's gradient clipping, left in a script: found and refused, like a learning rate set by hand.

Before the reduction it would clip what one rank has, together with earlier work that waits in the
same buffer; the job clips the average, once (`clip_norm=`, `clip_value=`). Scripts import these
functions by name, so the references that modules already hold are replaced too.
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
"""The argument of the job's optimizer for each."""
LIMITS: Final = ("max_norm", "clip_value")
"""The name that each has for its second argument."""

_of_the_job: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""By `id`: tensors compare element by element."""


def refuse_for(parameters: Iterable[torch.nn.Parameter]) -> Callable[[], None]:
    """Make clipping the gradients of these an error; return what ends that."""
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
        # With an infinite limit nothing is clipped: scripts read the norm that way.
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
