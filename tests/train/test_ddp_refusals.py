"""The errors of `pl.ddp` for unsupported scripts, which name the cause and a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paceline as pl
import pytest
import torch
from paceline.errors import ChangedLaterError, UnsupportedError, UsageError
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from testing.lone_session import LoneSession, started
from tests.train.ddp_script import BATCH, SAMPLES, Net, data, loss_of, script_loader, sgd

pytestmark = pytest.mark.usefixtures("group_of_one")


def test_a_learning_rate_set_by_hand_is_refused() -> None:
    started(LoneSession())
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(model)
    loader = pl.ddp(model, optimizer, script_loader(), epochs=1)
    batches = iter(loader)
    loss_of(model, *next(batches)).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(ChangedLaterError, match="lr") as refused:
        optimizer.step()
    assert "pl.ddp(..., scheduler=" in refused.value.hint, "by the name that the script knows"


def test_the_scripts_own_scheduler_is_refused_before_and_after_the_call() -> None:
    started(LoneSession())
    model = DistributedDataParallel(Net())
    optimizer = sgd(model)
    StepLR(optimizer, 1)
    with pytest.raises(UnsupportedError, match="scheduler was already made"):
        pl.ddp(model, optimizer, script_loader(), epochs=1)
    other = sgd(model)
    loader = pl.ddp(model, other, script_loader(), epochs=1)
    StepLR(other, 1)
    with pytest.raises(ChangedLaterError, match="a scheduler was made"):
        next(iter(loader))


def test_a_grad_scaler_is_refused() -> None:
    started(LoneSession())
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(model)
    loader = pl.ddp(model, optimizer, script_loader(), epochs=1)
    scaler = torch.amp.GradScaler("cpu")
    batches = iter(loader)
    x, y = next(batches)
    scaler.scale(loss_of(model, x, y)).backward()
    with pytest.raises(UnsupportedError, match="GradScaler"):
        scaler.step(optimizer)


def hooked() -> nn.Module:
    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    return model


def with_sync_batch_norm() -> nn.Module:
    model = DistributedDataParallel(Net())
    model.module.normal = nn.SyncBatchNorm(2)  # DDP itself requires a GPU for it
    return model


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a plain model": (lambda: pl.ddp(Net(), sgd(Net())), "not a DistributedDataParallel"),
    "the other order": (lambda: pl.ddp(sgd(n := Net()), n), "the model first"),  # type: ignore[call-overload]
    "no optimizer": (
        lambda: pl.ddp(DistributedDataParallel(Net()), 0.1),  # type: ignore[call-overload]
        "pl.ddp got a float, not a torch optimizer",
    ),
    "a hook": (lambda: pl.ddp(m := hooked(), sgd(m)), "communication hook"),
    "sync batch norm": (lambda: pl.ddp(m := with_sync_batch_norm(), sgd(m)), "SyncBatchNorm"),
    "no epochs": (lambda: with_loader(script_loader()), "no number of epochs"),
    "no loader": (
        lambda: pl.ddp(m := DistributedDataParallel(Net()), sgd(m), epochs=3),  # type: ignore[call-overload]
        "without a loader",
    ),
    "steps and loader": (
        lambda: with_loader(script_loader(), steps=3),
        "a loader and a number of steps",
    ),
    "half a step": (
        lambda: pl.ddp(m := DistributedDataParallel(Net()), sgd(m), steps=0.5),  # type: ignore[call-overload]
        "steps=0.5",
    ),
    "weighted": (
        lambda: with_loader(
            DataLoader(data(), BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
            epochs=1,
        ),
        "WeightedRandomSampler",
    ),
    "with replacement": (
        lambda: with_loader(
            DataLoader(data(), BATCH, sampler=RandomSampler(data(), replacement=True)), epochs=1
        ),
        "RandomSampler",
    ),
    "no batches": (
        lambda: with_loader(DataLoader(data(), batch_size=None), epochs=1),
        "makes no batches",
    ),
    "our own loader": (
        lambda: with_loader(pl.DataLoader(data(), BATCH), epochs=1),
        "got a DataLoader as loader",
    ),
}


def with_loader(loader: Any, **options: Any) -> Any:
    model = DistributedDataParallel(Net())
    return pl.ddp(model, sgd(model), loader, **options)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_unsupported_arguments_are_refused_by_name(mistake: str) -> None:
    started(LoneSession())
    make, text = MISTAKES[mistake]
    with pytest.raises(UsageError, match=text):
        make()


def test_a_missing_step_is_refused_and_names_the_argument_accumulate() -> None:
    started(LoneSession())
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(model)
    loader = pl.ddp(model, optimizer, script_loader(), epochs=1)
    for (x, y), _ in zip(loader, range(2), strict=False):
        loss_of(model, x, y).backward()
    with pytest.raises(UsageError, match="accumulate=K"):
        optimizer.step()
