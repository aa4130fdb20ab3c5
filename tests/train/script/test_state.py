"""A rank that joins gets the state of the script bit by bit (S6, S8)."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paceline.core.protocol.places import BEFORE
from paceline.errors import UnsupportedError
from paceline.train.script.models import Models
from paceline.train.script.own_counts import OwnCounts
from paceline.train.script.state import ScriptStates
from paceline.worker.operations import ScriptState
from paceline.worker.peer_sockets import Bytes
from paceline.worker.state.flat import bytes_of
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedule
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "fused AdamW": lambda p: AdamW(p, lr=0.01, fused=True),
    "tensor rate": lambda p: AdamW(p, lr=torch.tensor(0.01)),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedule.LambdaLR(o, lambda step: 0.9**step),
    "OneCycleLR": lambda o: schedule.OneCycleLR(o, max_lr=0.5, total_steps=20),
    "StepLR": lambda o: schedule.StepLR(o, 2),
    "ReduceLROnPlateau": lambda o: schedule.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedule.SequentialLR(
        o, [schedule.LinearLR(o, 0.1), schedule.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "CosineAnnealingWarmRestarts": lambda o: schedule.CosineAnnealingWarmRestarts(o, 3),
}


@pytest.fixture(autouse=True)
def _no_other_objects() -> Iterator[None]:
    """Leave no optimizers of other tests, which would be found by the collector."""
    gc.collect()
    yield
    gc.collect()


class Process:
    """One process of a script: a wrapped model, and what the script makes of it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.ddp: Any = SimpleNamespace(
            module=self.model,
            modules=self.model.modules,
            parameters=self.model.parameters,
            require_forward_param_sync=True,
        )
        passes: Any = SimpleNamespace(
            training={},
            epochs={},
            cursors={},
            steps=0,
            step_at=BEFORE,
            read_own=lambda: ([], {}),
            read_held=int,
            counts=OwnCounts(),
        )
        engine: Any = SimpleNamespace(waits=[False, 0, 0], set_waits=list)
        self.models = Models(engine, passes)
        adopted: list[Any] = self.models.adopted
        adopted.append(self.ddp)
        self.states = ScriptStates(engine, self.models, passes)

    def train(self, optimizer: Optimizer, steps: int = 3, after: Any = None) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            self.model(torch.randn(5, 3, generator=generator)).square().mean().backward()
            optimizer.step()
            if isinstance(after, schedule.ReduceLROnPlateau):
                after.step(1.0)
            elif after is not None:
                after.step()


def sent(process: Process) -> ScriptState:
    """Return the state of a process as another one receives it."""
    header, tensors = process.states.read()
    copies: list[Bytes] = [bytes(bytes_of(tensor.cpu().contiguous().clone())) for tensor in tensors]
    return ScriptState(json.loads(json.dumps(header)), copies)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_with_the_same_bits(name: str) -> None:
    donor = Process(1)
    ours = OPTIMIZERS[name](donor.model.parameters())
    donor.train(ours)
    received = sent(donor)
    donor.train(ours)
    expected = deepcopy([donor.model.state_dict(), ours.state_dict()])
    del donor, ours
    gc.collect()
    joiner = Process(2)
    theirs = OPTIMIZERS[name](joiner.model.parameters())
    joiner.states.load(received)
    joiner.train(theirs)
    assert same(expected, [joiner.model.state_dict(), theirs.state_dict()])


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_with_the_same_rates(name: str) -> None:
    donor, joiner = Process(1), Process(2)
    ours, theirs = (SGD(p.model.parameters(), lr=0.1) for p in (donor, joiner))
    first, second = SCHEDULERS[name](ours), SCHEDULERS[name](theirs)
    donor.train(ours, 3, first)
    joiner.states.load(sent(donor))
    assert same(ours.state_dict(), theirs.state_dict())
    for _ in range(3):
        donor.train(ours, 1, first)
        joiner.train(theirs, 1, second)
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_an_averaged_model_is_part_of_the_state() -> None:
    donor = Process(1)
    ours = AveragedModel(donor.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    donor.train(SGD(donor.model.parameters(), lr=0.1))
    ours.update_parameters(donor.model)
    received, expected = sent(donor), {k: v.clone() for k, v in ours.state_dict().items()}
    del ours, donor
    gc.collect()
    joiner = Process(2)
    theirs = AveragedModel(joiner.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    joiner.states.load(received)
    assert same(expected, dict(theirs.state_dict()))


def scalers(*scales: float) -> list[torch.amp.GradScaler]:
    return [torch.amp.GradScaler("cpu", init_scale=scale) for scale in scales]


def test_a_grad_scaler_is_part_of_the_state() -> None:
    donor, ours = Process(1), scalers(4.0)
    received = sent(donor)
    del ours, donor
    gc.collect()
    joiner, [theirs] = Process(2), scalers(8.0)
    joiner.states.load(received)
    assert theirs.get_scale() == 4.0


@pytest.mark.long
def test_two_objects_of_one_class_are_not_exchanged_after_a_collection() -> None:
    donor, first = Process(1), scalers(2.0)
    gc.collect()  # moves the first one to the oldest generation, which is listed last
    second = scalers(4.0)
    received = sent(donor)
    del first, second, donor
    gc.collect()
    joiner, both = Process(2), scalers(8.0, 8.0)
    joiner.states.load(received)
    assert [scaler.get_scale() for scaler in both] == [2.0, 4.0]


@pytest.mark.long
def test_a_state_that_is_loaded_during_an_evaluation_can_be_trained_further() -> None:
    donor, joiner = Process(1), Process(2)
    ours, theirs = (SGD(p.model.parameters(), lr=0.1, momentum=0.9) for p in (donor, joiner))
    donor.train(ours)
    received = sent(donor)
    with torch.inference_mode():
        joiner.states.load(received)
    joiner.train(theirs)


@pytest.mark.long
def test_a_model_sends_its_buffers_next_where_that_of_the_donor_does() -> None:
    """The donor has made its forward pass, without sending, since it took its batch (S5)."""
    donor, joiner = Process(1), Process(2)
    donor.ddp.require_forward_param_sync = False  # as behind an evaluation
    donor.models.ended_pass(1)
    donor.models.took_batch()
    donor.ddp.require_forward_param_sync = True
    joiner.states.load(sent(donor))
    assert joiner.ddp.require_forward_param_sync
    assert joiner.models.turns.at_batch == (False,)
    joiner.models.ended_pass(1)
    assert not joiner.ddp.require_forward_param_sync


def test_kept_objects_belong_to_the_state() -> None:
    donor, joiner = Process(1), Process(2)
    meters = [nn.Linear(2, 2), nn.Linear(2, 2)]
    donor.states.kept["meter"], joiner.states.kept["meter"] = meters
    joiner.states.load(sent(donor))
    assert same(*(dict(meter.state_dict()) for meter in meters))


class TrainerState:
    """What transformers' Trainer knows of its progress."""

    def __init__(self, step: int) -> None:
        self.global_step, self.epoch, self.max_steps = step, step / 10, 100
        self.log_history = [{"loss": 1 / (step + 1), "step": step}]
        self.best_metric: float | None = None
        self.is_world_process_zero = step == 0


TrainerState.__module__ = "transformers.trainer_callback"


def test_the_steps_that_a_framework_has_counted_go_along() -> None:
    donor, joiner = Process(1), Process(2)
    own = TrainerState(7)
    state = sent(donor)
    del own
    counted = TrainerState(0)
    joiner.states.load(state)
    assert (counted.global_step, counted.epoch) == (7, 0.7)
    assert counted.log_history == [{"loss": 1 / 8, "step": 7}]
    assert counted.is_world_process_zero, "which rank this is stays as it is"


def test_an_object_that_fails_to_give_its_state_is_named() -> None:
    class Mine(SGD):
        def state_dict(self) -> dict[str, Any]:
            raise LookupError("not now")

    process = Process(seed=1)
    optimizer = Mine(process.model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"the state of Mine\(0.0.weight\+6\) #1 cannot be"):
        process.states.read()
    assert optimizer.param_groups


class Loss(nn.Module):
    """A loss whose centre is replaced in each step, and that counts."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
        self.calls = 0

    def step(self) -> None:
        self.center = self.center * 0.9 + 1
        self.calls += 1


class Shadow:
    """Averages in a dict, with a count of updates and the number of the rank."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.rank, self.updates = rank, 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        self.updates += 1
        self.shadow = {name: tensor + 1 for name, tensor in self.shadow.items()}


def begun(process: Process) -> None:
    """Let a process begin its training."""
    assert process.models.on_training is not None
    process.models.on_training()


def test_a_module_that_is_no_model_goes_on_if_it_has_changed() -> None:
    donor = Process(1)
    loss, teacher = Loss(), nn.Linear(2, 2)
    begun(donor)
    loss.step()
    received, center = sent(donor), loss.center.clone()
    assert [key for key in received.header["others"] if "Linear" in key] == []
    del donor, teacher
    joiner, loss = Process(2), Loss()
    begun(joiner)
    joiner.states.load(received)
    assert torch.equal(loss.center, center)
    assert loss.calls == 1


def test_averages_in_a_dict_go_on_with_their_count_but_not_the_number_of_the_rank() -> None:
    donor = Process(1)
    shadow = Shadow(donor.model, 0)
    begun(donor)
    shadow.update()
    received, kept = sent(donor), deepcopy(shadow.shadow)
    del donor
    joiner = Process(2)
    shadow = Shadow(joiner.model, 1)
    begun(joiner)
    joiner.states.load(received)
    assert same(shadow.shadow, kept)
    assert (shadow.updates, shadow.rank) == (1, 1)


def trained_alone(process: Process, steps: int) -> tuple[torch.Tensor, Optimizer, nn.Module, Any]:
    """Train a tensor and a module beside the model, each by an optimizer of its own."""
    temperature, head = torch.ones(2, requires_grad=True), nn.Linear(2, 1)
    first, second = Adam([temperature], lr=0.1), SGD(head.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.ones(2, requires_grad=True)
    begun(process)
    for _ in range(steps):
        inputs = torch.ones(2, requires_grad=True)
        head(inputs * temperature).sum().backward()
        first.step()
        second.step()
    return temperature, first, head, (second, inputs)


def test_tensors_and_modules_that_are_trained_beside_the_models_go_on() -> None:
    donor = Process(1)
    temperature, first, head, more = trained_alone(donor, 3)
    received = sent(donor)
    assert not any("inputs" in key or "more" in key for key in received.header["others"])
    states = [temperature.detach(), first.state_dict(), head.state_dict(), more[0].state_dict()]
    expected = deepcopy(states)
    del donor, temperature, first, head, more, states
    gc.collect()
    joiner = Process(2)
    temperature, first, head, more = trained_alone(joiner, 0)
    joiner.states.load(received)
    now = [temperature.detach(), first.state_dict(), head.state_dict(), more[0].state_dict()]
    assert same(now, expected)
    assert temperature.requires_grad


def test_averages_in_a_list_inside_of_a_closure_go_on() -> None:
    def make(process: Process) -> tuple[Callable[[], None], Callable[[], list[torch.Tensor]]]:
        averages = [parameter.detach().clone() for parameter in process.model.parameters()]

        def update() -> None:
            for average in averages:
                average.add_(1)

        return update, lambda: averages

    donor = Process(1)
    update, read = make(donor)
    begun(donor)
    update()
    received, kept = sent(donor), deepcopy(read())
    del donor
    joiner = Process(2)
    update, read = make(joiner)
    joiner.states.load(received)
    assert same(read(), kept)


def test_weights_gradients_and_lists_of_other_shapes_are_no_copies() -> None:
    donor = Process(1)
    donor.train(SGD(donor.model.parameters(), lr=0.1))
    lists = [
        list(donor.model.parameters()),
        [parameter.grad for parameter in donor.model.parameters()],
        [torch.zeros(3) for _ in donor.model.parameters()],
        donor.model.state_dict(),
    ]
    assert [key for key in sent(donor).header["others"] if "copy" in key] == []
    assert len(lists) == 4


def test_an_average_that_has_a_state_of_its_own_gives_that() -> None:
    class Average(Shadow):
        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow, "updates": self.updates}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow, self.updates = state["shadow"], state["updates"] + 100

    donor = Process(1)
    average = Average(donor.model, 0)
    average.update()
    received = sent(donor)
    del donor
    joiner = Process(2)
    average = Average(joiner.model, 1)
    joiner.states.load(received)
    assert average.updates == 101
