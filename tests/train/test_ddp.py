"""For one rank, a DDP script with `pl.ddp` trains bit for bit as it would without (D14)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import paceline as pl
import pytest
import torch
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import batches_of, total_leases
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, StepLR

from testing.lone_session import LoneSession, started
from tests.train.ddp_script import BATCH, EPOCHS, SAMPLES, Net, data, loss_of, script_loader, sgd

pytestmark = pytest.mark.usefixtures("group_of_one")


def without_paceline(accumulate: int, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Train on the same batches in a plain script, and return the model."""
    net, samples = Net(), data()
    model = wrap(net)
    optimizer = sgd(model)
    plan = DataPlan(samples=SAMPLES, batch=BATCH, accumulate=accumulate, epochs=EPOCHS, seed=7)
    for lease in range(total_leases(plan)):
        optimizer.zero_grad(set_to_none=False)  # D2: an unused parameter contributes zeros
        for numbers in batches_of(plan, lease):
            (loss_of(model, *samples[numbers]) / accumulate).backward()
        optimizer.step()
    return net


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


WRAPPINGS: dict[str, dict[str, Any]] = {
    "unused": {"find_unused_parameters": True},
    "views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_adding_pl_ddp_to_a_script_changes_no_bit(wrapping: str) -> None:
    session = started(LoneSession())
    net = Net()
    model = DistributedDataParallel(net, **WRAPPINGS[wrapping])
    optimizer = sgd(model)
    loader = pl.ddp(model, optimizer, script_loader(), epochs=EPOCHS)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
    reference = without_paceline(1, lambda net: net)
    assert same(net, reference)
    assert session.ledger() == session.applied == list(range(EPOCHS * SAMPLES // BATCH))
    assert session.released
    assert len(loader) == SAMPLES // BATCH
    assert loader.batch_size == BATCH


def test_a_plain_model_with_paceline_equals_plain_ddp() -> None:
    started(LoneSession())
    net = Net()
    optimizer = pl.DistributedOptimizer(sgd(net), net)
    loader = pl.DataLoader(data(), BATCH, seed=7)
    for _ in loader.epochs(EPOCHS):
        for x, y in loader:
            loss_of(net, x, y).backward()
            optimizer.step()
    assert same(
        net,
        without_paceline(1, lambda net: DistributedDataParallel(net, find_unused_parameters=True)),
    )


Micro = Callable[[DistributedDataParallel, bool], Any]


def no_sync(model: DistributedDataParallel, last: bool) -> Any:
    return nullcontext() if last else model.no_sync()


def by_attribute(model: DistributedDataParallel, last: bool) -> Any:
    model.require_backward_grad_sync = last
    return nullcontext()


@pytest.mark.parametrize("micro", [no_sync, by_attribute])
@pytest.mark.parametrize("as_view", [False, True])
def test_accumulation_gives_the_bits_of_plain_torch(micro: Micro, as_view: bool) -> None:
    """Run K backward passes of loss / K, all but the last in no_sync(), and one step."""
    accumulate = 3
    session = started(LoneSession())
    net = Net()
    model = DistributedDataParallel(
        net, find_unused_parameters=True, gradient_as_bucket_view=as_view
    )
    optimizer = sgd(model)
    loader = pl.ddp(model, optimizer, script_loader(), epochs=EPOCHS, accumulate=accumulate)
    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(loader):
            last = (index + 1) % accumulate == 0
            with micro(model, last):
                (loss_of(model, x, y) / accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    assert same(net, without_paceline(accumulate, lambda net: net))
    assert session.steps == EPOCHS * SAMPLES // (BATCH * accumulate)


def test_no_lease_is_lost_if_the_scripts_count_is_out_of_step() -> None:
    """Revoke a lease, after which the script's `index % K` and the leases stay out of step."""
    accumulate = 2
    taken: list[int] = []

    def revoke_the_third(version: int, held: list[int]) -> list[int]:
        if version == 1 and not taken and held:
            taken.append(held[0])
        return [lease for lease in held if lease in taken]

    session = started(LoneSession(revoke=revoke_the_third))
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(model)
    loader = pl.ddp(model, optimizer, script_loader(), epochs=1, accumulate=accumulate)
    count = 1  # out of step from the first batch
    for _ in range(1):
        for x, y in loader:
            count += 1
            (loss_of(model, x, y) / accumulate).backward()
            if count % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()  # what many scripts do with the rest of an epoch
    leases = SAMPLES // (BATCH * accumulate)
    assert session.ledger() == list(range(leases))
    assert session.dropped == []
    assert session.applied == [lease for lease in range(leases) if lease not in taken]


def test_past_epochs_are_empty_for_a_rank_that_joins_late() -> None:
    session = started(LoneSession())
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(model)
    begin = session.begin

    def begin_late(*arguments: Any) -> None:
        begin(*arguments)
        for lease in range(SAMPLES // BATCH):  # other ranks have done epoch 0
            if lease in session.held:
                session.held.remove(lease)
            else:
                session.pool.remove(lease)
            session.elsewhere.append(lease)
        session._deal()

    setattr(session, "begin", begin_late)  # noqa: B010
    loader = pl.ddp(model, optimizer, script_loader(), epochs=EPOCHS)
    batches = []
    for _ in range(EPOCHS + 1):  # the extra loop yields nothing
        batches.append(0)
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
            batches[-1] += 1
    assert batches == [0, SAMPLES // BATCH, 0]
    assert session.released


def test_looking_at_one_batch_does_not_count_as_an_epoch() -> None:
    """Look at a batch in each epoch, as the official tutorial does.

    It calls `b_sz = len(next(iter(self.train_data))[0])`.
    """
    session = started(LoneSession())
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(model)
    loader = pl.ddp(model, optimizer, script_loader(), epochs=EPOCHS)
    for _ in range(EPOCHS):
        assert len(next(iter(loader))[0]) == BATCH
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
    assert session.ledger() == session.applied == list(range(EPOCHS * SAMPLES // BATCH))
    assert session.released


def test_leaving_an_epoch_early_drops_the_rest_of_it() -> None:
    session = started(LoneSession())
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(model)
    loader = pl.ddp(model, optimizer, script_loader(), epochs=EPOCHS)
    for epoch in range(EPOCHS):
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
            if epoch == 0:
                break
    each = SAMPLES // BATCH
    assert session.applied == [0, *range(each, 2 * each)]
    assert sorted(session.dropped) == list(range(1, each))


def test_without_a_loader_the_job_counts_the_steps() -> None:
    session = started(LoneSession())
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(model)
    seen = []
    for step in pl.ddp(model, optimizer, steps=3):
        seen.append(step)
        assert not optimizer.stopped  # type: ignore[attr-defined]
        loss_of(model, *data()[:4]).backward()
        optimizer.step()
    assert seen == [0, 1, 2]
    assert optimizer.stopped  # type: ignore[attr-defined]
    assert session.plan == DataPlan(steps=3)
    assert session.released


def test_pl_stop_ends_the_job() -> None:
    session = started(LoneSession())
    model = DistributedDataParallel(Net())
    optimizer = sgd(model)
    loader = pl.ddp(model, optimizer, torch.utils.data.DataLoader(data(), 4), epochs=9)
    seen = []
    for epoch in range(9):
        for x, y in loader:
            seen.append(epoch)
            loss_of(model, x, y).backward()
            optimizer.step()
            if len(seen) == 3:
                pl.stop()
    assert seen == [0, 0, 0]
    assert optimizer.stopped  # type: ignore[attr-defined]
    assert session.released


def test_without_a_loader_the_script_feeds_itself() -> None:
    session = started(LoneSession(stop_at=3))
    net, samples = Net(), data()
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = sgd(model)
    assert pl.ddp(model, optimizer) is None
    for start in range(0, 12, 4):
        optimizer.zero_grad()
        loss_of(model, *samples[start : start + 4]).backward()
        optimizer.step()
    pl.finish()
    assert session.version == 3
    assert session.released
    reference = Net()
    plain = sgd(reference)
    for start in range(0, 12, 4):
        plain.zero_grad(set_to_none=False)
        loss_of(reference, *samples[start : start + 4]).backward()
        plain.step()
    assert same(net, reference)


def test_the_optimizer_keeps_its_type_rates_and_state_dict() -> None:
    started(LoneSession())
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(model)

    def decay(of: torch.optim.Optimizer) -> LRScheduler:
        return StepLR(of, 1, gamma=0.5)

    loader = pl.ddp(model, optimizer, script_loader(), epochs=1, scheduler=decay)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert isinstance(model, DistributedDataParallel)
    rates = []
    for x, y in loader:
        rates.append(optimizer.param_groups[0]["lr"])
        loss_of(model, x, y).backward()
        optimizer.step()
    assert rates[:3] == [0.05, 0.025, 0.0125]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    fresh = sgd(Net())
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.state


def test_the_options_of_the_scripts_loader_are_kept() -> None:
    session = started(LoneSession())
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = sgd(model)
    loader = pl.ddp(model, optimizer, script_loader(num_workers=1, drop_last=True), epochs=1)
    for x, y in loader:
        loss_of(model, x, y).backward()
        optimizer.step()
    assert session.applied == list(range(SAMPLES // BATCH))
    assert session.plan.drop_last
    assert session.plan.seed == 7
