"""`pl.ddp`: adapts a script that is written for torch's DistributedDataParallel (D14).

    loader = pl.ddp(model, optimizer, loader, epochs=10)      # the line that is added

torch's process group has one rank, this process: what joins the processes is the job, whose
membership changes while it runs. DDP's own reduction is switched off, so that backward() adds into
the runtime's buckets as it does for a plain model. The script's optimizer gets a `step()` that
makes a round. The loop over the returned loader takes leases. Weights, gradients and rounds are
those of `DistributedOptimizer`: there is one engine.

A communication hook is not used (D14). For a hook DDP would copy the gradients out of the runtime's
buffers and back: two passes over the gradients that change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.core.protocol.records import DataPlan
from paceline.errors import UnsupportedError, UsageError
from paceline.train import refusals
from paceline.train.context import current, init
from paceline.train.contribution import ContributionBuilder
from paceline.train.ddp_loader import ScriptLoader, adopt
from paceline.train.optimizer import DistributedOptimizer
from paceline.train.steps import check_count
from paceline.train.steps import steps as count_steps
from paceline.worker.state.optimizer_binding import SchedulerFactory, changed_later

T = TypeVar("T")
log = logging.getLogger("paceline.rank")

REDUCING = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
"""Functions of torch.distributed whose result would silently be that of one rank (D11)."""


@overload
def ddp(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: SchedulerFactory | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> None: ...


@overload
def ddp(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    scheduler: SchedulerFactory | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> Iterator[int]: ...


@overload
def ddp(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: torch.utils.data.DataLoader[T],
    *,
    epochs: int,
    accumulate: int = 1,
    scheduler: SchedulerFactory | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> ScriptLoader[T]: ...


def ddp(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: torch.utils.data.DataLoader[T] | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    accumulate: int = 1,
    scheduler: SchedulerFactory | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> ScriptLoader[T] | Iterator[int] | None:
    """Let a script with a DDP model train in a job; call it once, before the first batch.

    If it refuses an argument, model and optimizer are left as they were. Main thread only.

    Args:
        model: The DistributedDataParallel model; the script continues to use it.
        optimizer: The optimizer of its parameters. From now on `optimizer.step()` makes a round.
        loader: The training DataLoader, with any DistributedSampler. The returned loader replaces
            it and gives each sample to one rank, even if ranks join, leave or are slow. Without a
            loader each rank draws its own batches, and every step has the same weight.
        epochs: Number of loops that the script makes over the loader. When the last loop ends, the
            model holds the final weights and the job is over.
        steps: Number of steps that the job makes; only without a loader. The result is the loop
            over them (`pl.steps`). Without this number the script ends with `pl.finish()`, and a
            rank that joins late begins its loop at step 0.
        accumulate: Number of batches per `step()`, for scripts with `no_sync()`.
        scheduler: As for `DistributedOptimizer`.
        clip_norm: As for `DistributedOptimizer`.
        clip_value: As for `DistributedOptimizer`.

    Returns:
        With a loader, the loader to use instead. With `steps`, the iterator over the steps. Else
        None.

    Raises:
        UnsupportedError: Several ranks share one model (`spec.parallelism`), or the model uses a
            DDP feature that a job cannot honor.
        UsageError: The combination of arguments makes no sense.
    """
    init()
    context = current("ddp()")
    if context.session.shards > 1:
        raise UnsupportedError(
            f"pl.ddp where {context.session.shards} ranks share a model (spec.parallelism.model): "
            "with DDP each rank holds the whole model",
            hint="remove spec.parallelism; or spread the plain model over pl.group(), and use "
            "pl.DistributedOptimizer and pl.DataLoader",
        )
    module = check_model(model)
    if loader is None and (epochs is not None or accumulate != 1):
        raise UsageError(
            "pl.ddp(epochs=... or accumulate=...) without a loader",
            hint="hand the training DataLoader over: "
            "loader = pl.ddp(model, optimizer, loader, epochs=10)",
        )
    if loader is not None and steps is not None:
        raise UsageError(
            "pl.ddp() got a loader and a number of steps",
            hint="say how often the script loops over the loader: epochs=...; or leave the loader "
            "out, if each rank draws its own batches",
        )
    if steps is not None:
        check_count(steps)
    if loader is not None and epochs is None:
        raise UsageError(
            "pl.ddp() got a loader and no number of epochs",
            hint="say how often the script loops over it: "
            "loader = pl.ddp(model, optimizer, loader, epochs=10)",
        )
    refusals.check_optimizer(optimizer, "pl.ddp")
    # This comes first: if it refuses the loader, model and optimizer are unchanged.
    elastic = None if loader is None else adopt(loader, epochs=epochs or 0, accumulate=accumulate)
    ScriptOptimizer(
        optimizer, module, scheduler=scheduler, clip_norm=clip_norm, clip_value=clip_value
    )
    put_to_sleep(model)
    if context.session.size > 1:
        refuse_reductions()
        if loader is None and context.session.place == 0:
            log.warning(
                "pl.ddp() without a loader: each rank feeds itself. A DistributedSampler sees one "
                "rank and gives every rank all samples; hand the loader over to deal them"
            )
    return elastic if steps is None else count_steps(steps)


class ScriptOptimizer(DistributedOptimizer):
    """The job's optimizer that acts for the optimizer object which the script still holds.

    Args:
        optimizer: The optimizer of the script; its class changes so that its calls come here.
        module: The plain model inside the script's model.
        called: Name of the call that the script, or a framework on its behalf, has made; used in
            hints.
        options: Further arguments of `DistributedOptimizer`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module,
        *,
        called: str = "pl.ddp",
        **options: Any,
    ) -> None:
        self.called = called
        super().__init__(_twin(optimizer), module, **options)
        self._script_holds = _hand_over(optimizer, self)

    def start(self, plan: DataPlan, lookahead: int) -> None:
        """Join the job, unless a scheduler was made for the script's optimizer."""
        if hasattr(self._script_holds.step, "_wrapped_by_lr_sched"):
            what = f"the optimizer of {self.called}()"
            raise changed_later(what, "a scheduler was made for it", self.called)
        super().start(plan, lookahead)

    def _make_builder(self, plan: DataPlan) -> ContributionBuilder:
        # DDP averages what the ranks have in p.grad at step(). It does not matter how many batches
        # are in it, or whether the script has divided the loss by their number. We do the same.
        return ContributionBuilder(
            self._context.session,
            self._gradients,
            mean=True,
            parts=plan.accumulate,
            announce=self._announce if plan.accumulate > 1 else None,
        )


# ---- the model -----------------------------------------------------------------------------------


def check_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a DDP model; refuse what DDP does besides adding gradients.

    Raises:
        UsageError: It is no DDP model, or its process group has more than one rank.
        UnsupportedError: It has a communication hook, mixed precision or a SyncBatchNorm.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile
    if isinstance(model, torch.optim.Optimizer):
        raise UsageError(
            f"pl.ddp() got a {type(model).__name__} for the model",
            hint=f"pass {refusals.IN_ORDER['pl.ddp']}",
        )
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"pl.ddp() got a {type(model).__name__}, not a DistributedDataParallel model",
            hint="for a plain model use pl.DistributedOptimizer(optimizer, model)",
        )
    ranks = dist.get_world_size(model.process_group)
    if ranks != 1:
        raise UsageError(
            f"the process group of the DDP model has {ranks} ranks",
            hint="a job has one process group per rank: start the script with `paceline run`, not "
            "torchrun, and let init_process_group() take rank and size from the environment",
        )
    if model._comm_hooks:  # noqa: SLF001  (DDP has no public way to ask)
        raise UnsupportedError(
            "the DDP model has a communication hook, which would never be called",
            hint="leave register_comm_hook() out: Paceline moves the gradients itself",
        )
    if model.mixed_precision is not None:
        raise UnsupportedError(
            "DistributedDataParallel(mixed_precision=...) is not supported",
            hint="use torch.autocast(..., dtype=torch.bfloat16) around forward and loss",
        )
    for name, part in model.module.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise UnsupportedError(
                f"{name or 'the model'} is a SyncBatchNorm, which needs all ranks in each forward "
                "pass",
                hint="use BatchNorm; spec.collective.buffers averages its statistics now and then",
            )
    return cast("torch.nn.Module", model.module)


def put_to_sleep(model: torch.nn.Module) -> None:
    """Switch off DDP's reduction for good, as `no_sync()` does inside its block."""
    model = getattr(model, "_orig_mod", model)
    kind = type(model)
    model.__class__ = type(kind.__name__, (_Asleep, kind), {"__module__": kind.__module__})
    # Either flag would make DDP prepare a reduction and search for unused parameters.
    model.static_graph = False
    model.find_unused_parameters = False


class _Asleep:
    """Mixin for a DDP class that pins the attribute which scripts and `no_sync()` set."""

    @property
    def require_backward_grad_sync(self) -> bool:
        return False

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, _: bool) -> None:
        """Ignore the value: DDP has no reduction that could be waited for."""


# ---- the optimizer -------------------------------------------------------------------------------


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a second object for the same optimizer, for the communication thread."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = [
        {**group, "params": list(group["params"])} for group in optimizer.param_groups
    ]
    return twin


def _hand_over(optimizer: torch.optim.Optimizer, to: DistributedOptimizer) -> torch.optim.Optimizer:
    """Turn the optimizer that the script holds into another name of `to`, and return it."""
    kind = type(optimizer)
    name = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    optimizer.__class__ = type(kind.__name__, (_HandedOver, kind), name)
    for attribute in ("param_groups", "state"):
        del optimizer.__dict__[attribute]
    optimizer.__dict__["paced"] = to
    return optimizer


class _HandedOver:
    """Mixin for the class of the script's optimizer: forwards all calls to the job's optimizer."""

    paced: DistributedOptimizer
    """The optimizer of the job that calls go to."""

    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> None:
        """Announce the gradient, as `DistributedOptimizer.step` does."""
        self.paced.step(closure, **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what backward() has added since the last step."""
        self.paced.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of the optimizer that the script made."""
        return self.paced.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state before training starts."""
        self.paced.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group before training starts."""
        self.paced.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters of the model, with the present learning rate; to be read only."""
        return self.paced.param_groups

    @property
    def state(self) -> Any:
        """State of the job's optimizer."""
        return self.paced.state

    @property
    def stopped(self) -> bool:
        """True when the job's last round is committed."""
        return self.paced.stopped

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Attribute that only GradScaler.step() reads; it raises UnsupportedError (D9)."""
        raise refusals.refuse_grad_scaler()


# ---- torch.distributed ---------------------------------------------------------------------------


def refuse_reductions() -> None:
    """Make the reducing functions of torch.distributed raise UnsupportedError (D11).

    Over the group of one rank they would return that rank's value without an error. The same is
    true after the job has ended, so nothing takes the refusal back.
    """
    for name in REDUCING:
        if hasattr(dist, name):
            setattr(dist, name, _refuse(name))


def _refuse(name: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"torch.distributed.{name}() in a job: torch knows of one rank only, so the result "
            "would be this rank's own",
            hint="report figures with pl.log(name, value, weight), which sums them over all ranks; "
            "let pl.is_publisher() tell who evaluates or writes",
        )

    return refused
