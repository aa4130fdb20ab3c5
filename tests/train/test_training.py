"""A script with Paceline trains bit for bit like plain torch (I10 for one rank)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paceline as pl
import pytest
import torch
from paceline.core.protocol.progress import Progress
from paceline.core.protocol.records import DataPlan, LoggedMetric
from paceline.core.protocol.sampling import batches_of, total_leases
from paceline.errors import DismissedError, JobStoppedError, UsageError
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import TensorDataset

from testing.lone_session import LoneSession, started

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
SAMPLES = 50


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, x[:, :2] * 2 - 1)


def decay(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, 3, gamma=0.9)


def plain_torch(
    make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    plan: DataPlan,
    *,
    per_sample: bool = False,
) -> list[torch.Tensor]:
    """Train the reference, which shares only the order of the samples with Paceline."""
    model, data = make_model(), make_data()
    optimizer = make(model.parameters())
    scheduler = decay(optimizer)
    for lease in range(total_leases(plan)):
        unit, samples = 0, 0
        for numbers in batches_of(plan, lease):
            size = 1 if per_sample else len(numbers)
            if unit not in (0, size):  # the mean of a smaller batch: rescale the sum so far
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(unit / size)
            x, y = data[numbers]
            loss = nn.functional.mse_loss(model(x), y, reduction="none").mean(1)
            (loss.sum() if per_sample else loss.mean()).backward()
            unit, samples = size, samples + len(numbers)
        if samples != unit:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(samples / unit)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: list[torch.Tensor], other: nn.Module) -> bool:
    return all(torch.equal(a, b.detach()) for a, b in zip(one, other.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("batch", "accumulate"), [(10, 1), (8, 1), (8, 2), (6, 3), (7, 4)])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_the_weights_equal_those_of_plain_torch(
    name: str, batch: int, accumulate: int, loss: str
) -> None:
    session = started(LoneSession())
    model = make_model()
    optimizer = pl.DistributedOptimizer(
        OPTIMIZERS[name](model.parameters()), model, scheduler=decay, loss_reduction=loss
    )
    loader = pl.DataLoader(make_data(), batch, accumulate=accumulate, seed=11)
    epochs = []
    for epoch in loader.epochs(3):
        epochs.append(epoch)
        for x, y in loader:
            errors = nn.functional.mse_loss(model(x), y, reduction="none").mean(1)
            (errors.mean() if loss == "mean" else errors.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    plan = DataPlan(samples=SAMPLES, batch=batch, accumulate=accumulate, epochs=3, seed=11)
    assert same(plain_torch(OPTIMIZERS[name], plan, per_sample=loss == "sum"), model)
    assert epochs == [0, 1, 2]
    assert session.ledger() == session.applied == list(range(total_leases(plan)))
    assert session.applied_samples == 3 * SAMPLES
    assert session.released
    assert optimizer.stopped


Step = Callable[[int, pl.DistributedOptimizer, nn.Module, Callable[[], None]], None]


def per_batch(
    index: int, optimizer: pl.DistributedOptimizer, model: nn.Module, go: Callable[[], None]
) -> None:
    optimizer.zero_grad()
    go()
    optimizer.step()


def model_zero_grad(
    index: int, optimizer: pl.DistributedOptimizer, model: nn.Module, go: Callable[[], None]
) -> None:
    if index % 2 == 0:
        model.zero_grad()  # detaches the views, so gradients get tensors of their own
    go()
    optimizer.step()


def once_per_lease(
    index: int, optimizer: pl.DistributedOptimizer, model: nn.Module, go: Callable[[], None]
) -> None:
    go()
    if index % 2 == 1:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("habit", [per_batch, model_zero_grad, once_per_lease])
def test_other_places_of_zero_grad_and_step_change_no_bit(habit: Step) -> None:
    started(LoneSession())
    model = make_model()
    optimizer = pl.DistributedOptimizer(
        OPTIMIZERS["momentum"](model.parameters()), model, scheduler=decay
    )
    plan = DataPlan(samples=SAMPLES, batch=5, accumulate=2, epochs=2)
    loader = pl.DataLoader(make_data(), 5, accumulate=2)
    for _ in loader.epochs(2):
        for index, (x, y) in enumerate(loader):
            habit(index, optimizer, model, lambda x=x, y=y: loss_of(model, x, y).backward())  # type: ignore[misc]
    assert same(plain_torch(OPTIMIZERS["momentum"], plan), model)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y, reduction="none").mean(1).mean()


def clone(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


def double(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 2


def double_in_place(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def without_nan(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = torch.nan_to_num(parameter.grad)


def as_constant(parameter: nn.Parameter) -> None:
    parameter.grad = torch.full_like(parameter, 0.25)


def as_data(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data = parameter.grad.data / 2


def take_away(parameter: nn.Parameter) -> None:
    parameter.grad = None


CHANGES = [clone, double, double_in_place, without_nan, as_constant, as_data, take_away]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fed", ["by itself", "by the loader"])
def test_a_changed_gradient_of_one_weight_steps_as_in_plain_torch(
    change: Callable[[nn.Parameter], None], fed: str
) -> None:
    def train(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        (-weight).sum().backward()
        change(weight)
        optimizer.step()

    plain, model = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    model.load_state_dict(plain.state_dict())
    reference = torch.optim.SGD(plain.parameters(), lr=1.0)
    started(LoneSession())
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    steps = 0
    if fed == "by itself":
        for _ in range(3):
            train(model.weight, optimizer)  # type: ignore[arg-type]
            steps += 1
    else:
        loader = pl.DataLoader(make_data(), 20)
        for _ in loader.epochs(1):
            for _ in loader:
                train(model.weight, optimizer)  # type: ignore[arg-type]
                steps += 1
    for _ in range(steps):
        reference.zero_grad()
        train(plain.weight, reference)  # type: ignore[arg-type]
    assert torch.equal(model.weight, plain.weight)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("accumulate", "announce_every", "step_each"), [(2, 1, True), (1, 2, True), (2, 1, False)]
)
def test_changing_a_gradient_keeps_the_sum_of_earlier_batches(
    change: Callable[[nn.Parameter], None], accumulate: int, announce_every: int, step_each: bool
) -> None:
    """Compare with a reference that keeps the gradient of each step in a tensor of its own."""
    started(LoneSession(announce_every=announce_every, scheduler_steps=0))
    model, other = make_model(), make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    loader = pl.DataLoader(make_data(), 5, accumulate=accumulate)
    sums = [torch.zeros_like(parameter) for parameter in other.parameters()]
    of_round = accumulate * announce_every
    for _ in loader.epochs(1):
        for index, (x, y) in enumerate(loader):
            if step_each or index % accumulate == 0:
                plain.zero_grad()
            for each in (model, other):
                loss_of(each, x, y).backward()
            if not step_each and index % accumulate != accumulate - 1:
                continue
            change(model[0].weight)  # type: ignore[arg-type]
            change(other[0].weight)  # type: ignore[arg-type]
            optimizer.step()
            for total, parameter in zip(sums, other.parameters(), strict=True):
                total += 0 if parameter.grad is None else parameter.grad
            if index % of_round == of_round - 1:
                for total, parameter in zip(sums, other.parameters(), strict=True):
                    parameter.grad = total / of_round
                    total.zero_()
                plain.step()
                for one, two in zip(model.parameters(), other.parameters(), strict=True):
                    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("erase", ["optimizer", "optimizer, in place", "model", "model, in place"])
@pytest.mark.parametrize("accumulate", [0, 1, 2])
def test_zero_grad_between_two_backward_passes_drops_the_first(erase: str, accumulate: int) -> None:
    """Erase the first gradient; with `accumulate` 0, the script feeds itself."""
    session = started(LoneSession())
    model, other = make_model(), make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        loss_of(model, x, y * 3).backward()
        what = optimizer if erase.startswith("optimizer") else model
        what.zero_grad(set_to_none="place" not in erase)
        loss_of(model, x, y).backward()
        optimizer.step()

    if not accumulate:
        x, y = make_data()[:]
        train(x, y)
        loss_of(other, x, y).backward()
        plain.step()
        assert same(list(other.parameters()), model)
        return
    loader = pl.DataLoader(make_data(), 5, accumulate=accumulate)
    for _ in loader.epochs(1):
        for index, (x, y) in enumerate(loader):
            train(x, y)
            (loss_of(other, x, y) / accumulate).backward()
            if index % accumulate == accumulate - 1:
                plain.step()
                plain.zero_grad()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    assert not session.dropped


def test_a_step_after_zero_grad_erased_the_gradient_is_an_error() -> None:
    started(LoneSession())
    model = make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = pl.DataLoader(make_data(), 5)

    def train() -> None:
        for _ in loader.epochs(1):
            for x, y in loader:
                loss_of(model, x, y).backward()
                optimizer.zero_grad()
                optimizer.step()

    with pytest.raises(UsageError, match=r"zero_grad\(\) had erased[^$]*hint: .*before backward"):
        train()


def test_waiting_gradients_are_weighted_by_their_samples() -> None:
    """Announce two steps as one; at an epoch's end their batches differ in size (D3)."""
    session = started(LoneSession(announce_every=2, scheduler_steps=0))
    model, reference = make_model(), make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = pl.DataLoader(make_data(), 20)  # 20, 20, 10 | 20, 20, 10: pairs 20+20, 10+20, 20+10
    taken, x_sum, y_sum = [], [], []
    for _ in loader.epochs(2):
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            x_sum.append(x)
            y_sum.append(y)
            taken.append(len(x))
            if len(taken) % 2 == 0:
                plain = torch.optim.SGD(reference.parameters(), lr=0.1)
                plain.zero_grad()
                loss_of(reference, torch.cat(x_sum), torch.cat(y_sum)).backward()
                plain.step()
                x_sum, y_sum = [], []
                for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(one, other)
    assert taken == [20, 20, 10, 20, 20, 10]
    assert session.version == 3
    assert session.applied_samples == 100


def test_a_script_that_feeds_itself_trains_like_plain_torch() -> None:
    session = started(LoneSession(stop_at=4, scheduler_steps=0))
    model, reference = make_model(), make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    x, y = make_data()[:16]
    while not optimizer.stopped:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step(samples=16)
        plain.zero_grad()
        loss_of(reference, x, y).backward()
        plain.step()
        assert same([p.detach() for p in reference.parameters()], model)
    pl.finish()
    assert session.released
    assert session.applied_samples == 64


def test_pl_steps_starts_at_the_step_of_the_job() -> None:
    session = started(LoneSession())
    session.version, session.progress = 3, Progress(step=3)  # it joins late
    model = make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(UsageError, match="before training has started"):
        pl.progress()
    steps = []
    for step in pl.steps(6):
        steps.append((step, pl.progress().step))
        loss_of(model, *make_data()[:4]).backward()
        optimizer.step()
    assert steps == [(3, 3), (4, 4), (5, 5)]
    assert session.released


@pytest.mark.parametrize("count", [0, 2.5, True])
def test_a_number_of_steps_that_is_not_a_positive_integer_is_an_error(count: int) -> None:
    started(LoneSession())
    with pytest.raises(UsageError, match="steps="):
        next(pl.steps(count))


def test_a_loop_that_starts_at_zero_in_a_running_job_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = started(LoneSession())
    session.version, session.progress = 7, Progress(step=7)
    model = make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss_of(model, *make_data()[:4]).backward()
    optimizer.step()
    assert "the job has made 7" in caplog.text
    assert "pl.steps(N)" in caplog.text


def test_a_first_gradient_on_other_weights_is_dropped_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Compute the first gradient on weights that the job replaces (I1).

    It used to be zeroed and counted as applied.
    """

    class Elsewhere(LoneSession):
        def begin(
            self, gradients: Gradients, committed: Committed, plan: DataPlan, lookahead: int
        ) -> None:
            committed.load(*others)
            super().begin(gradients, committed, plan, lookahead)

    def job(session: LoneSession) -> tuple[nn.Module, pl.DistributedOptimizer]:
        started(session)
        model = make_model()
        return model, pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    model, optimizer = job(LoneSession())
    for _ in range(2):
        loss_of(model, *make_data()[:4]).backward()
        optimizer.step()
    header, buffers = optimizer.committed.snapshot()
    others = (header, [bytes(x) for x in buffers])
    wanted = [parameter.detach().clone() for parameter in model.parameters()]

    session = Elsewhere()
    model, optimizer = job(session)
    loss_of(model, *make_data()[:4]).backward()
    optimizer.step()
    assert (session.foreign, session.applied_samples) == (1, 0)
    assert same(wanted, model)
    assert "its first gradient is dropped" in caplog.text
    loss_of(model, *make_data()[:4]).backward()
    optimizer.step()
    assert (session.foreign, session.applied_samples) == (1, 1)
    assert not same(wanted, model)


def test_steps_after_the_stop_have_no_effect_and_the_second_is_an_error() -> None:
    started(LoneSession(stop_at=1))
    model = make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss_of(model, *make_data()[:4]).backward()
    optimizer.step()
    after = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(model, *make_data()[:4]).backward()
    optimizer.step()
    assert same(after, model)
    with pytest.raises(JobStoppedError):
        optimizer.step()


@pytest.mark.parametrize("place", ["looked", "backward", "part", "stepped", "epoch"])
def test_pl_stop_works_anywhere_in_the_loop(place: str) -> None:
    session = started(LoneSession())
    model = make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = pl.DataLoader(make_data(), 5, accumulate=2)
    steps = 0
    for epoch in loader.epochs(9):
        for x, y in loader:
            if steps == 4 and place == "looked":
                pl.stop()
                break
            loss_of(model, x, y).backward()
            if steps == 4 and place == "backward":
                pl.stop()
            optimizer.step()
            steps += 1
            if steps == (5 if place == "part" else 4) and place in ("part", "stepped"):
                pl.stop()
                pl.stop()  # a second call has no effect
        if epoch == 1 and place == "epoch":
            pl.stop()
    pl.finish()
    assert optimizer.stopped
    assert session.released
    assert session.applied == list(range(10 if place == "epoch" else 2))
    assert session.dropped == ([2] if place in ("backward", "part") else [])


def test_pl_stop_before_training_has_started_is_an_error() -> None:
    started(LoneSession())
    model = make_model()
    pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(UsageError, match="before training has started"):
        pl.stop()


def test_a_script_exits_with_code_0_after_another_rank_ended_the_job() -> None:
    session = started(LoneSession(stop_at=1))
    session.stopped_by_another = True
    model = make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(2):
        loss_of(model, *make_data()[:4]).backward()
        optimizer.step()
    with pytest.raises(DismissedError) as end:
        optimizer.step()
    assert end.value.code == 0
    assert session.released


def test_a_batch_with_a_non_finite_gradient_is_dropped() -> None:
    session = started(LoneSession(), faults="nan:rank=0,at=round:2")
    model = make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = pl.DataLoader(make_data(), 10)
    for _ in loader.epochs(1):
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
    assert (session.applied, session.dropped) == ([0, 1, 3, 4], [2])
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_param_groups_show_the_models_parameters_and_the_jobs_rates() -> None:
    started(LoneSession())
    model = make_model()
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}]
    groups.append({"params": model[2].parameters(), "lr": 0.5})
    inner = torch.optim.SGD(groups, lr=0.1)
    optimizer = pl.DistributedOptimizer(
        inner, model, scheduler=lambda opt: StepLR(opt, 1, gamma=0.5)
    )
    optimizer.param_groups[0]["lr"] = 0.2  # allowed before the start
    loader = pl.DataLoader(make_data(), 25)
    rates = []
    for _ in loader.epochs(1):
        for x, y in loader:
            rates.append([group["lr"] for group in optimizer.param_groups])
            loss_of(model, x, y).backward()
            shown = {id(p) for group in optimizer.param_groups for p in group["params"]}
            assert shown == {id(p) for p in model.parameters()}
            nn.utils.clip_grad_norm_(model.parameters(), float("inf"))  # only reads the norm
            optimizer.step()
    assert rates == [[0.2, 0.5], [0.1, 0.25]]


def test_state_dicts_are_compatible_with_plain_torch() -> None:
    started(LoneSession(stop_at=2))
    model = make_model()
    model[0].bias.requires_grad_(False)
    optimizer = pl.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
    earlier = make_model()
    plain = torch.optim.Adam(earlier.parameters(), lr=0.3)
    earlier[0].bias.requires_grad_(False)
    loss_of(earlier, *make_data()[:4]).backward()
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3
    for _ in range(2):
        loss_of(model, *make_data()[:4]).backward()
        optimizer.step()
    state = optimizer.state_dict()
    assert sorted(state["state"]) == [0, 2, 3]
    assert state["state"][0]["step"] == 3
    plain.load_state_dict(state)
    assert plain.state_dict()["state"][3]["exp_avg"].shape == (2,)


def test_a_frozen_parameter_is_not_changed() -> None:
    started(LoneSession(stop_at=3))
    model = make_model()
    model[0].weight.requires_grad_(False)
    before = model.get_parameter("0.weight").clone()
    optimizer = pl.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model
    )
    while not optimizer.stopped:
        loss_of(model, *make_data()[:4]).backward()
        optimizer.step()
    assert torch.equal(model.get_parameter("0.weight"), before)


def test_logged_metrics_are_sent_with_the_step() -> None:
    session = started(LoneSession(stop_at=2))
    model = make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for value in (1.0, 2.0):
        pl.log("loss", torch.tensor(value), weight=2)
        pl.log("loss", value)
        loss_of(model, *make_data()[:4]).backward()
        optimizer.step()
    assert session.metrics == [LoggedMetric("loss", 3.0, 3.0), LoggedMetric("loss", 6.0, 3.0)]


def test_evaluating_returns_the_leases() -> None:
    session = started(LoneSession())
    model = make_model()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pl.evaluating():  # before the start it has no effect
        assert pl.is_publisher()
    loader = pl.DataLoader(make_data(), 10)
    for _ in loader.epochs(2):
        for step, (x, y) in enumerate(loader):
            if step == 1:
                with pl.evaluating():
                    assert session.resting
                    assert not session.held
                assert not session.resting
            loss_of(model, x, y).backward()
            if step == 3:
                with pytest.raises(UsageError, match="between backward"), pl.evaluating():
                    pass
            optimizer.step()
        with pl.evaluating():
            pass
    assert sorted(session.applied) == list(range(10))
    assert not session.dropped
