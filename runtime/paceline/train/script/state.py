"""The state of a script: what a rank that joins needs to go on where the others are (S6, S8, S15).

It is read while the main thread waits in an operation, and loaded by the main thread of the rank
that joins. Models are those that DDP has wrapped. Optimizers, schedulers, GradScalers and averaged
copies of a model are found among the objects of the process by what they hold, and are matched by
their class, by the names of their parameters, and by the order in which the script reaches them.
What a script keeps beside its models is found and matched by how the script reaches it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from paceline.core.protocol.places import Spot
from paceline.errors import PacelineError, UnsupportedError
from paceline.train.script.beside import Beside, names_beside
from paceline.train.script.counters import COUNTING, CounterState, EpochLoop
from paceline.train.script.models import Models
from paceline.train.script.passes import Passes
from paceline.train.script.reach import reach
from paceline.worker.operations import ScriptState
from paceline.worker.script_engine import ScriptEngine
from paceline.worker.state.codec import Decoder, Encoder

log = logging.getLogger("paceline.rank")

Found = dict[str, CounterState]
"""Objects with `state_dict()` and `load_state_dict()`, by a key that is equal on all ranks."""


class ScriptStates:
    """Reads and loads the state of the script in this process."""

    def __init__(self, engine: ScriptEngine, models: Models, passes: Passes) -> None:
        self._engine, self._models, self._passes = engine, models, passes
        self.kept: dict[str, Any] = {}
        """Objects that the script has given to `pl.keep`."""
        self._beside = Beside()
        models.on_training = self._begin
        self._left_out: set[str] = set()
        self._counts: list[tuple[CounterState, dict[str, Any]]] = []
        """Counts of frameworks, and what was loaded into them."""

    def _begin(self) -> None:
        reached = reach()
        self._beside.begin(reached, [ddp.module for ddp in self._models.adopted])
        self._passes.counts.begin(reached)

    # ---- reading ------------------------------------------------------------------------------

    def read(self) -> tuple[Any, list[torch.Tensor]]:
        """Return the state as JSON and tensors. The main thread waits in an operation.

        UnsupportedError is raised if an object of the script does not give its state.
        """
        encoder: Encoder[torch.Tensor] = Encoder(lambda tensor: tensor.detach())
        models = [
            encoder.encode(dict(_tensors(ddp.module)), "a model") for ddp in self._models.adopted
        ]
        others = {}
        for key, each in self._beside.changed(self._find()).items():
            state = _state_of(key, each)
            try:
                others[key] = encoder.encode(state, key)
            except PacelineError as error:
                self._leave_out(key, error)
        passes = self._passes
        counts, arrays = passes.read_own()
        header = {
            "models": models,
            "others": others,
            "training": sorted(passes.training.items()),
            "epochs": sorted(passes.epochs.items()),
            "cursors": sorted(passes.cursors.items()),
            "steps": passes.steps,
            "waits": self._engine.waits,
            "step_at": list(passes.step_at),
            "own_counts": counts,
            "own_arrays": encoder.encode(arrays, "what the script carries"),
            "held": passes.read_held(),
            "buffer_turns": self._models.read_turns(),
            "spans": sorted((index, list(spot)) for index, spot in self._models.spans.items()),
        }
        return header, encoder.buffers

    def _leave_out(self, key: str, error: PacelineError) -> None:
        if key not in self._left_out:
            self._left_out.add(key)
            log.warning("the state of %s does not go to ranks that join: %s", key, error.message)

    # ---- loading ------------------------------------------------------------------------------

    def begin_to_follow(self, received: ScriptState) -> None:
        """Take from a first copy what a script needs on its way to where the others are."""
        header, passes = received.header, self._passes
        passes.training = {int(number): int(index) for number, index in header["training"]}
        passes.epochs = {int(place): int(epoch) for place, epoch in header["epochs"]}
        self._models.load_turns(header["buffer_turns"])
        self._models.spans = {index: Spot(*spot) for index, spot in header["spans"]}

    def load_models(self, received: ScriptState) -> None:
        """Load the weights of all models again, after a pass that this rank made alone."""
        for index in range(len(self._models.adopted)):
            self.load_model(received, index)

    def places(self, header: Any) -> dict[int, torch.Tensor]:
        """Return the tensors of models in which a state can be received, by buffer.

        The main thread waits in an operation. StateError is raised if the header is torn.

        Args:
            header: The JSON of the state that is about to arrive.
        """
        tensors: dict[int, torch.Tensor] = {}
        for ddp, model in zip(self._models.adopted, header["models"], strict=False):
            tensors |= Decoder.places(model, dict(_tensors(ddp.module)))
        return tensors

    @torch.inference_mode(mode=False)
    def load_model(self, received: ScriptState, index: int) -> None:
        """Load the weights of one model, if the state has them."""
        models = received.header["models"]
        if index < len(models):
            self._load_tensors(Decoder(received.buffers), models[index], index)

    @torch.inference_mode(mode=False)
    def load(self, received: ScriptState) -> None:
        """Load the whole state. Main thread, at the spot where the donor's was read."""
        self.begin_to_follow(received)
        header, decoder = received.header, Decoder(received.buffers, adopts=received.is_own)
        self._passes.cursors = {int(number): int(n) for number, n in header["cursors"]}
        self._passes.steps = header["steps"]
        self._engine.set_waits(header["waits"])
        self._passes.step_at = Spot(*header["step_at"])
        self._passes.own_counts, self._passes.held = header["own_counts"], header["held"]
        self._passes.own_arrays = decoder.decode(header["own_arrays"], self._device())
        for index, model in enumerate(header["models"][: len(self._models.adopted)]):
            self._load_tensors(decoder, model, index)
        self._models.set_sending(self._models.turns.now)
        own = self._find()
        for key, state in header["others"].items():
            if key not in own:
                log.warning("this rank has no %s, whose state the job has", key)
                continue
            decoded = decoder.decode(state, self._device())
            own[key].load_state_dict(decoded)
            if isinstance(own[key], EpochLoop):
                self._counts.append((own[key], decoded))

    def begun(self) -> None:
        """Load counts again: a framework may have reset them before it took its first batch."""
        while self._counts:
            counts, state = self._counts.pop()
            counts.load_state_dict(state)

    def _load_tensors(self, decoder: Decoder, model: Any, index: int) -> None:
        with torch.no_grad():
            decoder.fill(model, dict(_tensors(self._models.adopted[index].module)))

    def _device(self) -> torch.device:
        for ddp in self._models.adopted:
            for parameter in ddp.parameters():
                return parameter.device
        return torch.device("cpu")

    # ---- finding ------------------------------------------------------------------------------

    def _find(self) -> Found:
        reached = reach()
        names = names_beside(reached) | {
            id(parameter): f"{index}.{name}"
            for index, ddp in enumerate(self._models.adopted)
            for name, parameter in ddp.module.named_parameters()
        }
        inside = {id(m) for ddp in self._models.adopted for m in ddp.modules()}
        kinds = {AveragedModel, *(type(ddp.module) for ddp in self._models.adopted)}
        optimizers: list[Optimizer] = []
        schedulers: list[Any] = []
        others: list[Any] = []
        counting: list[Any] = []
        lists: dict[type, list[Any]] = {}
        # The others wait for this, and a process has some 300,000 objects of few types.
        # isinstance() would ask lazy objects for their class.
        objects = gc.get_objects()
        order = {number: at for at, number in enumerate(reached)}
        for kind in set(map(type, objects)):
            if issubclass(kind, Optimizer):
                lists[kind] = optimizers
            elif issubclass(kind, LRScheduler | ReduceLROnPlateau):
                lists[kind] = schedulers
            elif issubclass(kind, torch.amp.GradScaler) or kind in kinds:
                lists[kind] = others
            elif (kind.__module__, kind.__name__) in COUNTING:
                lists[kind] = counting
        of_kinds = [each for each in objects if type(each) in lists and id(each) not in inside]
        for each in sorted(of_kinds, key=lambda each: order.get(id(each), len(order))):
            lists[type(each)].append(each)
        states: Found = {}
        keys: dict[int, str] = {}
        for optimizer in optimizers:
            parameters = [names.get(id(p), "") for g in optimizer.param_groups for p in g["params"]]
            if any(parameters) or not names:
                first = f"{parameters[0]}+{len(parameters)}" if parameters else "nothing"
                keys[id(optimizer)] = _add(
                    states, f"{type(optimizer).__name__}({first})", optimizer
                )
        for scheduler in schedulers:
            owner = keys.get(id(scheduler.optimizer))
            if owner is not None:
                _add(states, f"{type(scheduler).__name__} of {owner}", scheduler)
        for each in _outermost(others):
            _add(states, type(each).__name__, each)
        cursor = max(self._passes.cursors.values(), default=None)
        for each in counting:
            kind = type(each)
            counts = COUNTING[kind.__module__, kind.__name__](each, cursor)
            _add(states, kind.__name__, counts)
        for name, each in self.kept.items():
            states[f"kept {name}"] = each
        taken = {id(each) for each in (*optimizers, *schedulers, *others, *self.kept.values())}
        modules = [ddp.module for ddp in self._models.adopted]
        return states | self._beside.find(reached, modules, taken)


def _state_of(key: str, each: CounterState) -> dict[str, Any]:
    """Return the state of an object of the script.

    Raises:
        UnsupportedError: The object has no whole state on this rank, or fails to give it.
    """
    if type(each).__name__ == "ZeroRedundancyOptimizer":
        raise UnsupportedError(
            f"the state of {key} is spread over the ranks, and a lost rank takes its part with it",
            hint="write the optimizer that it wraps, such as Adam(model.parameters()): all ranks "
            "then have the whole state; or resume from the last checkpoint of the script",
        )
    try:
        return dict(each.state_dict())
    except Exception as error:
        raise UnsupportedError(
            f"the state of {key} cannot be read for a rank that joins: "
            f"{type(error).__name__}: {error}",
            hint="its state_dict() is called on any rank and after any step, so it may not need "
            "the other ranks",
        ) from error


def _outermost(objects: Iterable[Any]) -> list[Any]:
    """Return the objects without the modules that are part of another one of them."""
    listed = list(objects)
    parts = {
        id(part)
        for each in listed
        if isinstance(each, torch.nn.Module)
        for part in each.modules()
        if part is not each
    }
    return [each for each in listed if id(each) not in parts]


def _add(states: Found, key: str, each: Any) -> str:
    """Add an object under a key that no other has, and return the key."""
    number = 1
    while (name := f"{key} #{number}") in states:
        number += 1
    states[name] = each
    return name


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers of a module by name."""
    return [*module.named_parameters(), *module.named_buffers()]
