"""What a script keeps beside its models: other modules, averages, tensors trained by themselves.

A rank that joins needs the center of a loss, the teacher of a student, the averages that a class of
the script keeps as tensors, or a temperature with an optimizer of its own. Nothing tells torch that
they belong to training. They are found by how the script reaches them.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.train.script.counters import CounterState
from paceline.train.script.reach import Reached

Number = int | float
NUMBERS: Final = (int, float, bool)


@dataclass(frozen=True)
class TensorsBeside:
    """Tensors by name, and numbers of the object that has them, as a state."""

    tensors: Mapping[str, torch.Tensor]
    owner: Any
    at_start: Mapping[str, Number]
    """Numbers of the owner when training began. One that has not changed, such as a rank's own
    number, is no state."""

    def state_dict(self) -> dict[str, Any]:
        """Return both."""
        start = self.at_start
        now = {name: value for name, value in _numbers(self.owner).items() if name in start}
        changed = {name: value for name, value in now.items() if value != start[name]}
        return {"tensors": dict(self.tensors), "numbers": changed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy the tensors of another rank that fit, and set its numbers."""
        with torch.no_grad():
            for name, tensor in state["tensors"].items():
                own = self.tensors.get(name)
                if own is not None and own.shape == tensor.shape:
                    own.copy_(tensor)
        for name, number in state["numbers"].items():
            if name in _numbers(self.owner):
                setattr(self.owner, name, number)


class TrainedAlone(TensorsBeside):
    """A tensor with a gradient that is part of no module."""


def _numbers(owner: Any) -> dict[str, Number]:
    """Return the numbers among the attributes of an object, without those of torch's own."""
    named = {} if owner is None else vars(owner)
    own = {name: value for name, value in named.items() if type(value) in NUMBERS}
    if not _is_module(owner):
        return own
    return {name: own[name] for name in own if not name.startswith("_") and name != "training"}


class Beside:
    """Finds what a script keeps beside its wrapped models."""

    def __init__(self) -> None:
        self._at_start: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Tensors of other modules when training began, with the number of their changes."""
        self._numbers: dict[int, dict[str, Number]] = {}
        """Numbers of the owners of tensors when training began."""

    def begin(self, reached: Mapping[int, Reached], models: Sequence[nn.Module]) -> None:
        """Note what there is when training begins: what stays so is no state.

        Args:
            reached: What the script reaches.
            models: The wrapped models.
        """
        for each in self.find(reached, models, ()).values():
            if not isinstance(each, TensorsBeside):
                continue
            self._numbers[id(each.owner)] = _numbers(each.owner)
            for tensor in each.tensors.values():
                if not tensor.is_inference():
                    self._at_start[id(tensor)] = weakref.ref(tensor), tensor._version  # noqa: SLF001

    def find(
        self, reached: Mapping[int, Reached], models: Sequence[nn.Module], taken: Collection[int]
    ) -> dict[str, CounterState]:
        """Return the objects with a state, by how the script reaches them.

        Args:
            reached: What the script reaches.
            models: The wrapped models.
            taken: `id`s of objects whose state is known otherwise.

        Returns:
            The objects; none without a wrapped model, since such a script repeats all calls.
        """
        if not models:
            return {}
        known = {t.data_ptr() for model in models for t in tensors_of(model).values()}
        gradients = [parameter.grad for model in models for parameter in model.parameters()]
        known |= {grad.data_ptr() for grad in gradients if grad is not None and _has_memory(grad)}
        states: dict[str, CounterState] = {}
        modules = [each for each in reached.values() if _is_module(each.value)]
        parts = {id(part) for model in models for part in model.modules()}
        parts |= {id(part) for e in modules for part in e.value.modules() if part is not e.value}
        for each in modules:
            tensors = tensors_of(each.value)
            own = {k: t for k, t in tensors.items() if t.data_ptr() not in known}
            if own and id(each.value) not in parts and id(each.value) not in taken:
                name = f"{type(each.value).__name__} at {each.path}"
                states[name] = self._tensors(own, each.value)
            known |= {tensor.data_ptr() for tensor in tensors.values()}
        for each in reached.values():
            tensor = each.value
            if is_trained_alone(tensor) and tensor.data_ptr() not in known:
                states[f"tensor at {each.path}"] = TrainedAlone({"tensor": tensor}, None, {})
        kinds = [Copied(model) for model in models]
        whole = set(taken)
        for each in reached.values():
            copied = next((c for kind in kinds if (c := kind.tensors(each.value, known))), None)
            if copied is None or id(each.owner) in whole:
                continue
            state = each.owner if _has_state(each.owner) else self._tensors(copied, each.owner)
            if state is each.owner:
                whole.add(id(each.owner))
            states[f"copy of a model at {each.path}"] = state
        return states

    def changed(self, states: Mapping[str, CounterState]) -> dict[str, CounterState]:
        """Return the objects without those whose tensors are as they were at the beginning.

        A tensor that is trained by itself is the same object then; others with a gradient, such as
        the images of an attack, belong to one batch.
        """
        return {key: each for key, each in states.items() if self._has_changed(each)}

    def _has_changed(self, state: CounterState) -> bool:
        if not isinstance(state, TensorsBeside):
            return True
        tensors = state.tensors.values()
        is_kept = not isinstance(state, TrainedAlone) or all(map(self._is_old, tensors))
        return is_kept and any(map(self._is_changed, tensors))

    def _tensors(self, tensors: Mapping[str, torch.Tensor], owner: Any) -> TensorsBeside:
        return TensorsBeside(tensors, owner, self._numbers.get(id(owner), {}))

    def _is_old(self, tensor: torch.Tensor) -> bool:
        """Return True if the script had a tensor already when training began."""
        noted, _ = self._at_start.get(id(tensor), (lambda: None, -1))
        return noted() is tensor

    def _is_changed(self, tensor: torch.Tensor) -> bool:
        noted, version = self._at_start.get(id(tensor), (lambda: None, -1))
        return noted() is not tensor or tensor._version != version  # noqa: SLF001


def names_beside(reached: Mapping[int, Reached]) -> dict[int, str]:
    """Return how the script reaches what it may train beside its wrapped models, by `id`."""
    names: dict[int, str] = {}
    for each in reached.values():
        if _is_module(each.value):
            for name, parameter in each.value.named_parameters():
                names.setdefault(id(parameter), f"{each.path}.{name}")
        elif is_trained_alone(each.value):
            names.setdefault(id(each.value), each.path)
    return names


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of a module by name."""
    every = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in every.items() if _has_memory(tensor)}


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_lazy(tensor)


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor) and _has_memory(value)


def is_trained_alone(value: Any) -> bool:
    """Return True for a tensor that an optimizer may change, and that no operation has made."""
    return _is_tensor(value) and value.requires_grad and value.is_leaf


def _is_module(value: Any) -> bool:
    return issubclass(type(value), nn.Module)


def _has_state(owner: Any) -> bool:
    """Return True if an object of the script says itself what its state is."""
    methods = [getattr(owner, name, None) for name in ("state_dict", "load_state_dict")]
    return all(map(callable, methods)) and not _is_module(owner)


class Copied:
    """Recognizes a container with copies of a model's tensors."""

    def __init__(self, model: nn.Module) -> None:
        named = tensors_of(model)
        self._shapes = {name: tensor.shape for name, tensor in named.items()}
        every = [parameter.shape for parameter in model.parameters()]
        trained = [p.shape for p in model.parameters() if p.requires_grad]
        self._lists = [every, trained]
        self._least = max(1, len(trained))

    def tensors(self, value: Any, known: Collection[int]) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a container by name; None if it is no copy of the model.

        Args:
            value: Any object.
            known: Addresses of tensors that are no copies.
        """
        kind = type(value)
        if issubclass(kind, dict) and dict.__len__(value) >= self._least:
            named = {str(k).removeprefix("module."): each for k, each in dict.items(value)}
            fits = named.keys() <= self._shapes.keys() and all(
                _is_tensor(each) and each.shape == self._shapes[name]
                for name, each in named.items()
            )
        elif issubclass(kind, list | tuple) and len(value) in map(len, self._lists):
            if not value or not all(map(_is_tensor, value)):
                return None
            named = {str(at): each for at, each in enumerate(value)}
            fits = [each.shape for each in value] in self._lists
        else:
            return None
        is_copy = fits and not any(each.data_ptr() in known for each in named.values())
        return named if is_copy else None
