"""Models that the script wraps in DistributedDataParallel (S5).

DDP stays in charge: it collects gradients in buckets, waits for the last one, and honors
`no_sync()`, unused parameters and `gradient_as_bucket_view`. A communication hook gives the buckets
of a backward pass to the job as one operation, and DDP copies the averages back into `p.grad`.

Two things are different from plain DDP. Buckets are final from the start, in the reverse order of
the parameters. DDP begins with a single one and makes others after its first backward pass, in an
order that a rank which joins later could not know. And float buffers come from the lowest slot
that is there, since slot 0 may be away.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.core.protocol.places import BEFORE, BufferTurns, Spot
from paceline.core.protocol.records import BACKWARD
from paceline.errors import UnsupportedError
from paceline.train.script.backend import JobBackend, where
from paceline.train.script.encode import HALVES
from paceline.train.script.passes import Passes
from paceline.train.script.sparse import from_flat, to_flat
from paceline.transport.base import HOST
from paceline.transport.native.copies import copy
from paceline.worker.operations import parts_of
from paceline.worker.script_engine import Parts, ScriptEngine

log = logging.getLogger("paceline.rank")

_INIT: Final = DistributedDataParallel.__init__
_SYNC: Final = DistributedDataParallel._sync_buffers  # noqa: SLF001
_HELPER: Final[Callable[..., None]] = DistributedDataParallel._ddp_init_helper  # noqa: SLF001
_HOOK: Final = DistributedDataParallel.register_comm_hook
HALF_NAMES: Final = [str(dtype).removeprefix("torch.") for dtype in HALVES]
"""Types of buckets that are summed in float32."""


class KnownLimits:
    """DDP's limits on the sizes of buckets, with those of the first buckets replaced."""

    def __init__(self, config: Any, limits: list[int]) -> None:
        self._config, self._limits = config, limits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def compute_bucket_size_limits(self, **options: Any) -> tuple[list[int], list[int]]:
        """Return the limits of the first buckets, and those of the buckets after them."""
        return self._limits, self._config.compute_bucket_size_limits(**options)[1]


def bucket_bytes(
    parameters: Sequence[torch.Tensor], sparse: Sequence[bool], first: int, cap: int
) -> list[int]:
    """Return the sizes of buckets in bytes, in the order of the parameters.

    They are filled from the last parameter on, whose gradient comes first, as DDP fills them after
    its first backward pass. The first one is small, so that its sum begins early.

    Args:
        parameters: Parameters of the model, in its order.
        sparse: For each of them, if its gradient is sparse.
        first: Size from which the first bucket takes no more, in bytes.
        cap: The same of the others.
    """
    back = list(reversed(parameters))
    buckets = buckets_of(back, list(reversed(sparse)), [first, cap])
    sizes = [sum(back[at].numel() * back[at].element_size() for at in bucket) for bucket in buckets]
    return [max(1, size) for size in reversed(sizes)]


def buckets_of(
    parameters: Sequence[torch.Tensor], sparse: Sequence[bool], limits: Sequence[int]
) -> list[list[int]]:
    """Return the indices of the parameters in each bucket, as DDP computes them."""
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined] # noqa: SLF001
    buckets: list[list[int]] = assign(list(parameters), list(limits), list(sparse))[0]
    return buckets


class FixedBuckets:
    """DDP's reducer, which keeps its buckets as they are."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


class Models:
    """All models of the script that DDP has wrapped, in order."""

    def __init__(self, engine: ScriptEngine, passes: Passes) -> None:
        self.engine, self.passes = engine, passes
        self.adopted: list[DistributedDataParallel] = []
        self._count = 1
        """Number of buckets of the model that is being made."""
        self.spans: dict[int, Spot] = {}
        """Operation that comes after the construction of each model."""
        self.turns = BufferTurns()
        self._steps = 0
        """Steps of the script's optimizers, whatever they are of."""
        self._averaged_at: int | None = None
        """The same when a backward pass was averaged last; None before the first one."""
        self._averaged: int | None = None
        """Number of the model whose backward pass was averaged last; None before the first one."""
        self._scaled: tuple[int, bool] = (-1, False)
        """Place at which GradScalers were looked for last, and whether there was one."""
        self._has_warned = False
        """True once the log says why no gradient of this script may be late."""
        self.on_training: Callable[[], None] | None = None
        """Called once, when the first backward pass of a model is about to be averaged."""
        self.on_adopted: Callable[[int], None] = lambda _: None
        """Called with the index of a model that a following rank has made."""

    def install(self) -> None:
        """Wrap the methods of DDP that have no hook."""
        models = self

        def init(ddp: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            index, path = len(models.adopted), models.engine.operations.path
            after = models.spans.get(index) if path.follows else None
            if after is not None:
                kwargs["init_sync"] = False  # the others have done this
            _INIT(ddp, module, *args, **kwargs)
            if after is not None:
                path.here = after
            models.spans[index] = path.here
            models._adopt(ddp)
            if after is not None:
                models.on_adopted(index)

        def init_helper(ddp: Any, parameters: Any, sparse: Any, *rest: Any) -> None:
            models._count = 1
            # A torch without these limits begins with a single bucket, which then stays.
            config = vars(ddp).get("_bucket_config")
            if config is not None and models._backend_of(ddp) is not None:
                spec = models.engine.spec
                cap = (spec.segment_bytes if spec else None) or config.bucket_bytes_cap
                first = min(config.first_bucket_bytes_cap, cap)
                limits = bucket_bytes(parameters, sparse, first, cap)
                vars(ddp)["_bucket_config"] = KnownLimits(config, limits)
                models._count = len(buckets_of(parameters, sparse, limits))
            try:
                _HELPER(ddp, parameters, sparse, *rest)
            finally:
                vars(ddp)["_bucket_config"] = config

        def sync_buffers(ddp: Any) -> None:
            if not models._sync_buffers(ddp):
                _SYNC(ddp)  # type: ignore[no-untyped-call]

        def hook(*_: Any, **__: Any) -> None:
            raise UnsupportedError(
                "DistributedDataParallel.register_comm_hook: a job averages the gradients itself",
                hint="leave the hook out; collective.wire: bfloat16 halves what travels",
            )

        def count(*_: Any) -> None:
            models._steps += 1

        register_optimizer_step_post_hook(count)
        kind: Any = DistributedDataParallel
        kind.__init__, kind._sync_buffers = init, sync_buffers  # noqa: SLF001
        kind.register_comm_hook, kind._ddp_init_helper = hook, init_helper  # noqa: SLF001

    def are_training(self) -> bool:
        """Return False if the script evaluates all of its models."""
        return not self.adopted or any(ddp.module.training for ddp in self.adopted)

    def settles(self, number: int, where: str) -> bool:
        """Return `Operation.settles` of a backward pass that is about to be averaged (S17.5).

        The first one that settles is logged, with the reason.

        Args:
            number: Number of the model.
            where: File and line of the script, for the log.
        """
        if not self.engine.is_partial:
            return False
        place = self.engine.spot.place
        if self._scaled[0] != place:
            self._scaled = place, has_scaler()
        if self._averaged not in (None, number):
            why = "it trains several models in turn"
        elif self._averaged_at == self._steps:
            why = "it averages several backward passes for one step of its optimizer"
        elif self._scaled[1]:  # a late gradient would have the scale of another step
            why = "it has a GradScaler that scales"
        else:
            return False
        if not self._has_warned:
            text = "%s: each step waits for all ranks from here on, because of what the script "
            log.warning(text + "does: %s (docs/scripts.md)", where, why)
            self._has_warned = True
        return True

    @property
    def _sending(self) -> tuple[bool, ...]:
        return tuple(ddp.require_forward_param_sync for ddp in self.adopted)

    def set_sending(self, values: Sequence[bool]) -> None:
        """Let the next forward pass of each model send its buffers, or not."""
        for ddp, value in zip(self.adopted, values, strict=False):
            ddp.require_forward_param_sync = value

    def took_batch(self) -> None:
        """Note that the script has come to where a rank that joins may begin."""
        self.turns.at_batch = self._sending

    def ended_pass(self, place: int) -> None:
        """Note that a pass has ended.

        A rank that has gone through it with one batch goes on as the others did.

        Args:
            place: Place of the pass.
        """
        self.turns.behind.setdefault(place, self._sending)
        self.set_sending(self.turns.behind[place])

    def read_turns(self) -> dict[str, Any]:
        """Return `turns` as JSON, for a rank that joins."""
        turns = self.turns
        return {
            "now": self._sending,
            "at_batch": turns.at_batch,
            "behind": sorted(turns.behind.items()),
        }

    def load_turns(self, turns: dict[str, Any]) -> None:
        """Set `turns` to those of another rank."""
        behind = {int(place): tuple(values) for place, values in turns["behind"]}
        self.turns = BufferTurns(tuple(turns["now"]), tuple(turns["at_batch"]), behind)

    def averaged(self, number: int) -> None:
        """Note that a backward pass of a model was averaged."""
        self._averaged, self._averaged_at = number, self._steps

    def parameters(self) -> list[torch.Tensor]:
        """Return the trained parameters of all models, for the hash that ranks compare."""
        return [
            parameter.detach()
            for ddp in self.adopted
            for parameter in ddp.module.parameters()
            if parameter.requires_grad
        ]

    def _adopt(self, ddp: Any) -> None:
        self.adopted.append(ddp)
        if self._backend_of(ddp) is None:
            return
        ddp.reducer = FixedBuckets(ddp.reducer)
        has_views = ddp.gradient_as_bucket_view
        buckets = Buckets(self, len(self.adopted) - 1, self._count, has_views=has_views)
        _HOOK(ddp, buckets, average)
        ddp._comm_hooks.clear()  # noqa: SLF001 # a list for people, which would be pickled

    def _backend_of(self, ddp: Any) -> JobBackend | None:
        """Return the backend of a model's group; None if the group is this rank alone."""
        group = ddp.process_group
        backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001
        return backend if isinstance(backend, JobBackend) and group.size() > 1 else None

    def _sync_buffers(self, ddp: Any) -> bool:
        """Give all ranks the buffers of the lowest slot; return False for DDP's own way."""
        backend = self._backend_of(ddp)
        if backend is None:
            return False
        buffers = list(ddp.modules_buffers)
        with torch.no_grad():
            values = backend.from_lowest("broadcast of buffers", buffers)
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)
        return True


class Buckets:
    """The buckets of one model in the present backward pass.

    The first backward pass shows which buckets there are. From the second one on they are summed
    while backward() computes the next ones.
    """

    def __init__(self, models: Models, number: int, count: int, *, has_views: bool) -> None:
        """Begin without a bucket.

        Args:
            models: All models of the script.
            number: Number of this one.
            count: Number of buckets. In the first backward pass of a static graph, DDP numbers them
                all as the first.
            has_views: True if the gradients that the script sees are views of the buckets.
        """
        self._models, self._number, self._count = models, number, count
        self._has_views = has_views
        self._engine, self._passes = models.engine, models.passes
        self._gradients: list[torch.Tensor] = []
        """The buckets so far, as DDP has them."""
        self._buffers: list[torch.Tensor] = []
        """The same, with sparse ones as dense vectors."""
        self._first = 0
        """Address by which the first bucket is recognized."""
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self._parts: Parts = ()
        """Types and sizes in which the buckets are summed; empty before the first backward pass."""
        self._samples, self._where = 0, ""
        self._opens = self._announced = False
        self._spot = BEFORE
        """Operation that this backward pass is, if nothing else comes before its last bucket."""
        self._is_interrupted = False
        """True once a call or another model came inside of an announced backward pass. Such a pass
        is a void round each time, so this model's are not announced any more."""

    def add(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket; the last one of a backward pass makes the operation."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        gradient = bucket.buffer().detach()
        is_sparse = gradient.is_sparse
        address = (bucket.parameters()[0] if is_sparse else gradient).data_ptr()
        buffer = to_flat(gradient) if is_sparse else gradient
        if not self._buffers or address == self._first:
            self._first = address
            self._begin(buffer)
        self._gradients.append(gradient)
        self._buffers.append(buffer)
        self._futures.append(future)
        if self._announced:
            self._engine.hand_over(buffer)
        if len(self._buffers) == self._count:
            futures, self._futures = self._futures, []
            gradients, self._gradients = self._gradients, []
            buffers, self._buffers = self._buffers, []
            sums = self._average(buffers)
            for each, taken, result in zip(futures, gradients, sums, strict=True):
                each.set_result(self._averaged(taken, result))
        return future

    def _begin(self, first: torch.Tensor) -> None:
        self._gradients, self._buffers, self._futures = [], [], []  # of a pass that has failed
        if self._models.on_training is not None:
            self._models.on_training()
            self._models.on_training = None
        self._opens = self._passes.before_backward()
        self._samples, self._where = self._passes.samples(), where()
        if self._opens:
            self._engine.wait_for_missing(self._where)
        self._spot = self._engine.spot
        # On a device the buckets are filled by kernels that may still be queued.
        can_stream = len(self._parts) > 1 and first.device == HOST and not self._is_interrupted
        self._announced = can_stream and self._engine.backward_comes(
            self._parts,
            self,
            model=self._number,
            samples=self._samples,
            opens=self._opens,
            where=self._where,
        )

    def _average(self, buffers: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the averages of the buckets. DDP copies them into `p.grad` at once."""
        self._parts = self._parts or tuple(
            ("float32" if dtype in HALF_NAMES else dtype, count)
            for dtype, count in parts_of(buffers)
        )
        if self._spot != self._engine.spot:  # something else came in between
            self._opens = False
            self._is_interrupted |= self._announced
        result = self._engine.operate(
            BACKWARD,
            buffers,
            parts=self._parts,
            model=self._number,
            settles=self._models.settles(self._number, self._where),
            samples=self._samples,
            opens=self._opens,
            where=self._where,
        )
        self._passes.after_backward()
        self._models.averaged(self._number)
        return result.sums

    def _averaged(self, bucket: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Return the average of a bucket: the bucket itself where the script sees its memory."""
        if bucket.is_sparse:
            return from_flat(sums, bucket)
        if sums.dtype is not bucket.dtype or sums.device != bucket.device:
            return bucket.copy_(sums)  # the script sees half precision, and its devices' memory
        if not self._has_views:
            return sums
        copy(sums, bucket)  # DDP would do so with one parameter after the other
        return bucket


def has_scaler() -> bool:
    """Return True if the script has a GradScaler that scales."""
    return any(
        issubclass(type(each), torch.amp.GradScaler) and each.is_enabled()
        for each in gc.get_objects()
    )


def average(buckets, bucket):  # type: ignore[no-untyped-def] # torch reads annotations, not texts
    """Average a bucket over the job: DDP's communication hook."""
    return buckets.add(bucket)
