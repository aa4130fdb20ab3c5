"""Hooks on the script's model that tell forward from backward, for the anatomy of a step.

They are functions of this module, so that a model can be copied and pickled while it trains, and
are taken off at the end. A copy of the model carries them too: what it computes in training mode
counts like the model's. Inside of torch.compile they are nothing: what is compiled has no moment at
which it could tell the time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from paceline.core.anatomy.samples import Phase
from paceline.train.context import session


def follow(model: torch.nn.Module) -> list[RemovableHandle]:
    """From now on the session hears when `model` computes."""
    return [
        model.register_forward_pre_hook(_forward_begins),
        model.register_forward_hook(_forward_ends),
    ]


def _forward_begins(model: torch.nn.Module, _: Any) -> None:
    _enter(model, Phase.FORWARD)


def _forward_ends(model: torch.nn.Module, *_: Any) -> None:
    _enter(model, Phase.BACKWARD)


def _enter(model: torch.nn.Module, phase: Phase) -> None:
    if torch.compiler.is_compiling() or not model.training:
        return
    now = session()
    if now is not None:
        now.enters(phase)
