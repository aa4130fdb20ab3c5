"""Hooks on the script's model that separate forward from backward, for the anatomy of a step.

The hooks are functions of this module, so that a model can be copied and pickled while it trains.
They are removed when the job is over. A copy of the model carries them too: what the copy computes
in training mode counts like the model's own work. Inside torch.compile the hooks do nothing,
because compiled code has no point at which it could read the clock.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from paceline.core.anatomy.samples import StepPhase
from paceline.train.context import session


def follow(model: torch.nn.Module) -> list[RemovableHandle]:
    """Report to the session when `model` computes, from now on.

    Returns:
        The handles of the hooks; `remove()` on each ends the reports.
    """
    return [
        model.register_forward_pre_hook(_forward_begins),
        model.register_forward_hook(_forward_ends),
    ]


def _forward_begins(model: torch.nn.Module, _: Any) -> None:
    _enter(model, StepPhase.FORWARD)


def _forward_ends(model: torch.nn.Module, *_: Any) -> None:
    _enter(model, StepPhase.BACKWARD)


def _enter(model: torch.nn.Module, phase: StepPhase) -> None:
    if torch.compiler.is_compiling() or not model.training:
        return
    now = session()
    if now is not None:
        now.enters(phase)
