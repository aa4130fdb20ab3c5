"""Unsupported training setups are refused by name, with the reason and a way out (D2, D9)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import paceline as pl
import pytest
import torch
from paceline.errors import ChangedLaterError, UnsupportedError, UsageError
from paceline.train.context import current
from paceline.train.refusals import check_process
from paceline.worker.state.shards import own_part
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

from testing.lone_session import LoneSession, started


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wrap(model: nn.Module | None = None, **options: Any) -> pl.DistributedOptimizer:
    model = net() if model is None else model
    return pl.DistributedOptimizer(sgd(model), model, **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 3)).mean().backward()


def scheduled_before() -> None:
    model = net()
    optimizer = sgd(model)
    StepLR(optimizer, 3)
    pl.DistributedOptimizer(optimizer, model)


def frozen() -> None:
    model = net().requires_grad_(False)
    optimizer = pl.DistributedOptimizer(sgd(model), model)
    optimizer.step()


def empty() -> None:
    optimizer = sgd(net())
    optimizer.param_groups[0]["params"] = []
    pl.DistributedOptimizer(optimizer, net())


def twice() -> None:
    wrap()
    wrap()


def plateau() -> None:
    wrap(scheduler=lambda opt: ReduceLROnPlateau(opt)).step()


AT_THE_START: dict[str, tuple[Callable[[], object], type[UsageError], str]] = {
    "LBFGS": (
        lambda: pl.DistributedOptimizer(torch.optim.LBFGS((m := net()).parameters()), m),
        UnsupportedError,
        "LBFGS is not supported",
    ),
    "SparseAdam": (
        lambda: pl.DistributedOptimizer(torch.optim.SparseAdam(list((m := net()).parameters())), m),
        UnsupportedError,
        "SparseAdam is not supported",
    ),
    "sparse gradients": (
        lambda: wrap(nn.Sequential(nn.Embedding(3, 2, sparse=True))),
        UnsupportedError,
        "0 makes sparse gradients",
    ),
    "no optimizer": (
        lambda: pl.DistributedOptimizer(net(), net()),  # type: ignore[arg-type]
        UsageError,
        "got a Sequential, not a torch optimizer",
    ),
    "no model": (
        lambda: pl.DistributedOptimizer(sgd(net()), 3),  # type: ignore[arg-type]
        UsageError,
        "got a int, not a model",
    ),
    "DataParallel": (
        lambda: pl.DistributedOptimizer(sgd(m := nn.DataParallel(net())), m),
        UnsupportedError,
        "DataParallel reduces gradients on its own",
    ),
    "another model": (
        lambda: pl.DistributedOptimizer(sgd(net()), net()),
        UsageError,
        "4 parameters that the model does not have",
    ),
    "no parameters": (empty, UsageError, "no parameters"),
    "all frozen": (frozen, UsageError, "is frozen"),
    "a second one": (twice, UsageError, "a second DistributedOptimizer"),
    "a scheduler made before": (scheduled_before, UnsupportedError, "already made"),
    "a scheduler, not a function": (
        lambda: wrap(scheduler=StepLR(sgd(net()), 3)),
        UnsupportedError,
        "got a StepLR",
    ),
    "a scheduler that follows a metric": (plateau, UnsupportedError, "ReduceLROnPlateau"),
    "a function that makes no scheduler": (
        lambda: wrap(scheduler=id).step(),
        UsageError,
        "returned a int",
    ),
    "loss reduction": (lambda: wrap(loss_reduction="none"), UsageError, "loss_reduction='none'"),
    "clip_norm": (lambda: wrap(clip_norm=0.0), UsageError, "clip_norm=0.0"),
    "clip_value": (lambda: wrap(clip_value=-1.0), UsageError, "clip_value=-1.0"),
}


@pytest.mark.parametrize("name", AT_THE_START)
def test_unsupported_setups_are_refused_at_the_start(name: str) -> None:
    started(LoneSession())
    call, kind, words = AT_THE_START[name]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert type(caught.value) is kind
    assert caught.value.hint
    assert caught.value.exit_code == 2
    assert caught.value.hint in str(caught.value)


def test_calls_before_init_are_an_error() -> None:
    for call in (wrap, pl.rank, pl.size, pl.is_publisher, pl.finish, lambda: pl.log("x", 1.0)):
        with pytest.raises(UsageError, match=r"before init\(\)"):
            call()


def later_lr(model: nn.Sequential, optimizer: pl.DistributedOptimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def later_group(model: nn.Sequential, optimizer: pl.DistributedOptimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def later_scheduler(model: nn.Sequential, optimizer: pl.DistributedOptimizer) -> None:
    StepLR(optimizer, 1)


def later_stepped_scheduler(model: nn.Sequential, optimizer: pl.DistributedOptimizer) -> None:
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    ConstantLR(optimizer, 0.5)


def later_unfrozen(model: nn.Sequential, optimizer: pl.DistributedOptimizer) -> None:
    model[0].weight.requires_grad_(True)


def later_frozen(model: nn.Sequential, optimizer: pl.DistributedOptimizer) -> None:
    model[1].weight.requires_grad_(False)


def later_state(model: nn.Sequential, optimizer: pl.DistributedOptimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


LATER: dict[Any, str] = {
    later_lr: r"param_groups\[0\]\['lr'\] changed from 0.1 to 0.5",
    later_group: r"add_param_group\(\) after training had started",
    later_scheduler: r"'initial_lr'\] changed from None to 0.1",
    later_stepped_scheduler: "changed from",
    later_unfrozen: "requires_grad of 0.weight was changed",
    later_frozen: "requires_grad of 1.weight was changed",
    later_state: r"load_state_dict\(\) after training had started",
}


@pytest.mark.parametrize("change", LATER)
def test_changes_after_training_has_started_are_refused(
    change: Callable[[nn.Sequential, pl.DistributedOptimizer], None],
) -> None:
    started(LoneSession())
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = wrap(model)
    backward(model)
    optimizer.step()
    backward(model)

    def change_and_step() -> None:
        change(model, optimizer)
        optimizer.step()

    with pytest.raises(ChangedLaterError, match=LATER[change]) as caught:
        change_and_step()
    assert caught.value.hint


def halves(model: nn.Sequential) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Make an optimizer for each part of one model, as scripts that train a GAN do."""
    one = torch.optim.SGD(model[0].parameters(), lr=0.1)
    return one, torch.optim.Adam(model[1].parameters(), lr=0.1)


@pytest.mark.parametrize("fed", ["by itself", "by the loader"])
def test_a_trainable_parameter_without_an_optimizer_is_an_error(fed: str) -> None:
    started(LoneSession())
    model = net()
    optimizer = pl.DistributedOptimizer(halves(model)[0], model)
    backward(model)
    loader = pl.DataLoader(TensorDataset(torch.ones(4, 2)), 2)

    def train() -> None:
        if fed == "by itself":
            optimizer.step()
        else:
            next(iter(loader.epochs(1)))

    words = r"lacks the trainable parameter 1\.weight and 1 more[^$]*hint: .*requires_grad=False"
    with pytest.raises(UsageError, match=words):
        train()


def test_a_frozen_parameter_needs_no_optimizer() -> None:
    started(LoneSession())
    model = net()
    model[1].requires_grad_(False)
    optimizer = pl.DistributedOptimizer(halves(model)[0], model)
    backward(model)
    optimizer.step()
    model[1].bias.requires_grad_(True)
    with pytest.raises(ChangedLaterError, match=r"requires_grad of 1\.bias was changed"):
        optimizer.step()


class Growing(nn.Module):
    """A model that makes a layer in its first forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.later: nn.Linear | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.later is None:
            self.later = nn.Linear(2, 1)
        output: torch.Tensor = self.later(self.first(x))
        return output


def test_a_parameter_made_in_forward_is_an_error_at_the_first_step() -> None:
    started(LoneSession())
    model = Growing()
    optimizer = pl.DistributedOptimizer(sgd(model.first), model)
    loader = pl.DataLoader(TensorDataset(torch.ones(4, 2)), 2)

    def train() -> None:
        for _ in loader.epochs(1):
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()

    with pytest.raises(UsageError, match=r"lacks the trainable parameter later\.weight"):
        train()


@pytest.mark.parametrize("second", ["of a part", "of all", "of a frozen part"])
def test_a_step_of_another_optimizer_on_the_model_is_refused(second: str) -> None:
    started(LoneSession())
    plain = net()
    if second == "of a frozen part":
        plain[1].requires_grad_(False)
    other = sgd(plain) if second == "of all" else halves(plain)[1]
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(trained, lr=0.1), plain)

    def train() -> None:
        for _ in range(2):
            backward(plain)
            optimizer.step()
            other.step()

    if second == "of a frozen part":
        train()
    else:
        name = "0.weight" if second == "of all" else "1.weight"
        with pytest.raises(UnsupportedError, match=rf"another optimizer on parameter {name}"):
            train()


def test_optimizers_of_other_models_can_step_and_any_after_the_job() -> None:
    started(LoneSession())
    model, other = net(), net()
    optimizer, more, again = wrap(model), sgd(other), sgd(model)
    backward(model)
    backward(other)
    optimizer.step()
    more.step()
    pl.finish()
    again.step()


@pytest.mark.parametrize("kind", ["buffer", "frozen parameter", "own buffer"])
def test_an_expanded_buffer_that_cannot_be_written_is_an_error(kind: str) -> None:
    started(LoneSession())
    model, wide = net(), torch.ones(1, 3).expand(4, 3)
    optimizer = wrap(model)
    if kind == "frozen parameter":
        model.wide = nn.Parameter(wide, requires_grad=False)
    else:
        model.register_buffer("wide", wide, persistent=kind == "buffer")
    model[0](torch.ones(4, 3)).sum().backward()
    if kind == "own buffer":
        optimizer.step()
        return
    words = r"wide is a view[^$]*expand\(\)[^$]*hint: add \.clone\(\)"
    with pytest.raises(UsageError, match=words):
        optimizer.step()


def test_a_scheduler_in_the_users_loop_is_refused() -> None:
    started(LoneSession())
    model = net()
    optimizer = wrap(model)
    StepLR(optimizer, 1)
    backward(model)
    with pytest.raises(ChangedLaterError, match="a scheduler was made for it") as caught:
        optimizer.step()
    assert "scheduler=lambda" in caught.value.hint


def test_closures_are_refused() -> None:
    started(LoneSession())
    with pytest.raises(UnsupportedError, match=r"step\(closure\)"):
        wrap().step(lambda: 0.0)


@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_is_refused(unscale_first: bool) -> None:
    started(LoneSession())
    model = net()
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4, 3)).mean()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    with pytest.raises(UnsupportedError, match="GradScaler is not supported") as caught:
        scaler.step(optimizer)
    for line in ("autocast(..., dtype=torch.bfloat16)", "loss.backward()", "optimizer.step()"):
        assert line in caught.value.hint


def test_bfloat16_autocast_trains_without_a_scaler() -> None:
    session = started(LoneSession(stop_at=2))
    model = net()
    optimizer = wrap(model)
    while not optimizer.stopped:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(4, 3)).mean()
        loss.backward()
        optimizer.step()
    assert session.version == 2


def test_an_optimizer_that_wraps_another_is_refused_by_name() -> None:
    """Use the form of accelerate's optimizer, which has no parameter groups of its own.

    It used to end in a KeyError.
    """

    class AcceleratedOptimizer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer = inner

        @property
        def param_groups(self) -> list[dict[str, object]]:  # type: ignore[override]
            return self.optimizer.param_groups

    started(LoneSession())
    model = net()
    with pytest.raises(UnsupportedError, match="AcceleratedOptimizer wraps") as refused:
        pl.DistributedOptimizer(AcceleratedOptimizer(sgd(model)), model)
    assert "paceline launch SCRIPT" in refused.value.hint


def test_the_closure_of_lightning_is_refused_by_name() -> None:
    started(LoneSession())
    with pytest.raises(UnsupportedError, match="closure") as refused:
        wrap().step(lambda: 1.0)
    assert "paceline launch SCRIPT" in refused.value.hint


def sharded_in_the_old_way() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of world size 1 and deprecation
        model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    wrap(model)


def sharded() -> None:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    wrap(model)


def tensor_parallel() -> None:
    current("a test").session.shards = 2  # type: ignore[misc]
    mesh = init_device_mesh("cpu", (1,))
    wrap(parallelize_module(net(), mesh, {"0": ColwiseParallel()}))


def one_part_sharded() -> None:
    current("a test").session.shards = 2  # type: ignore[misc]
    model = net()
    weight = distribute_tensor(model[1].weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])  # type: ignore[operator]
    model[1].weight = nn.Parameter(weight)
    wrap(model)


def zero() -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    pl.DistributedOptimizer(optimizer, model)


SHARDED: dict[Callable[[], None], tuple[str, str]] = {
    sharded_in_the_old_way: (
        r"the model is sharded \(FullyShardedDataParallel\)",
        "leave out FullyShardedDataParallel",
    ),
    sharded: (r"the model is sharded \(FSDPModule\)", "leave out fully_shard"),
    tensor_parallel: ("0.weight is a DTensor over a mesh of 1 ranks", "over pl.group() alone"),
    one_part_sharded: ("1.weight is a DTensor over a mesh of 1 ranks", "spec.parallelism.model"),
    zero: ("ZeroRedundancyOptimizer is not supported", "AdamW"),
}


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("make", SHARDED)
def test_unsupported_sharding_is_refused_by_name(make: Callable[[], None]) -> None:
    started(LoneSession())
    words, hint = SHARDED[make]
    with pytest.raises(UnsupportedError, match=words) as caught:
        make()
    assert hint in caught.value.hint


@pytest.mark.usefixtures("group_of_one")
def test_a_tensor_parallel_model_trains_like_the_plain_one() -> None:
    """Train on one rank, which holds all of each DTensor (D20)."""
    ends = []
    for spread in (False, True):
        session = started(LoneSession(stop_at=3))
        torch.manual_seed(2)
        model: Any = net()
        if spread:
            model = parallelize_module(model, pl.group(), {"0": ColwiseParallel()})
        optimizer = wrap(model)
        while not optimizer.stopped:
            model(torch.ones(4, 3)).mean().backward()
            optimizer.step()
        assert session.version == 3
        ends.append([own_part(p.detach()).clone() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


class Norms(torch.optim.SGD):
    """An optimizer that scales its step by the norm of the whole gradient, like LAMB."""


@pytest.mark.parametrize("kind", [Norms, torch.optim.Adafactor, torch.optim.Muon])
@pytest.mark.parametrize("spread", [True, False])
def test_optimizers_that_need_whole_tensors_are_refused_on_shards(kind: Any, spread: bool) -> None:
    started(LoneSession())
    model: Any = nn.Sequential(nn.Linear(3, 2, bias=False))
    if spread:
        model = parallelize_module(model, pl.group(), {"0": ColwiseParallel()})
    optimizer = pl.DistributedOptimizer(kind(model.parameters(), lr=0.1), model)
    model(torch.ones(4, 3)).sum().backward()
    if not spread:
        optimizer.step()
        return
    with pytest.raises(UnsupportedError, match=rf"{kind.__name__} on parameter 0\.weight"):
        optimizer.step()


@pytest.mark.long
@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model_trains_like_a_plain_one(compiled_first: bool) -> None:
    """Check that the plain names are kept, so that ranks and checkpoints need not compile alike."""
    ends, prints = [], []
    for compiles in (False, True):
        session = started(LoneSession(stop_at=3))
        torch.manual_seed(2)
        plain = net()
        model: Any = torch.compile(plain, backend="eager") if compiles else plain
        optimizer = wrap(model if compiled_first else plain)
        while not optimizer.stopped:
            model(torch.ones(4, 3)).mean().backward()
            optimizer.step()
        assert session.version == 3
        ends.append([parameter.detach().clone() for parameter in plain.parameters()])
        prints.append(session.gradients.fingerprint())
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
    assert prints[0] == prints[1]


def test_unequal_means_without_our_loader_are_refused() -> None:
    started(LoneSession())
    model = net()
    optimizer = wrap(model)
    backward(model)
    optimizer.step(samples=4)
    backward(model)
    with pytest.raises(UsageError, match=r"step\(samples=3\) after step\(samples=4\)"):
        optimizer.step(samples=3)


def test_unequal_sums_without_our_loader_are_accepted() -> None:
    session = started(LoneSession(stop_at=2))
    model = net()
    optimizer = wrap(model, loss_reduction="sum")
    for samples in (4, 3):
        model(torch.ones(samples, 3)).sum().backward()
        optimizer.step(samples=samples)
    assert session.applied_samples == 7


def test_an_unannounced_sparse_gradient_counts_like_a_dense_one() -> None:
    """Use `functional.embedding(sparse=True)`, whose gradient is added to the flat buffer."""
    ends = []
    for sparse in (False, True):
        started(LoneSession(stop_at=3))
        table = nn.Parameter(torch.arange(15.0).view(5, 3))
        model = nn.ParameterList([table])
        optimizer = wrap(model)
        while not optimizer.stopped:
            numbers = torch.tensor([1, 3, 3])
            nn.functional.embedding(numbers, model[0], sparse=sparse).sum().backward()
            optimizer.step()
        ends.append(model[0].detach().clone())
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], torch.arange(15.0).view(5, 3))


@pytest.mark.parametrize(
    ("env", "child", "names"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, False, "torchrun"),
        ({}, True, "mp.spawn"),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, True, "mp.spawn"),
    ],
)
def test_a_process_that_no_agent_started_is_refused_as_a_rank(
    env: dict[str, str], child: bool, names: str
) -> None:
    """Check the environment; copies of one rank used to train side by side silently."""
    with pytest.raises(UsageError, match=re.escape(names)) as refused:
        check_process(env, child=child)
    assert "procsPerReplica" in refused.value.hint
    check_process({"RANK": "1", "WORLD_SIZE": "2"}, child=False)
