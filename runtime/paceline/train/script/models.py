"""Models that the script wraps in DistributedDataParallel (S5).

DDP stays in charge: it collects gradients in buckets, waits for the last one, and honors
`no_sync()`, unused parameters and `gradient_as_bucket_view`. A communication hook gives the buckets
of a backward pass to the job as one operation, and DDP copies the averages back into `p.grad`.

Two things are different from plain DDP. Buckets keep the order that they are made in, since a rank
that joins later could not know another one. And float buffers come from the lowest slot that is
there, since slot 0 may be away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.core.protocol.places import Spot
from paceline.core.protocol.records import BACKWARD
from paceline.errors import UnsupportedError
from paceline.train.script.backend import JobBackend, where
from paceline.train.script.encode import HALVES
from paceline.train.script.passes import Passes
from paceline.worker.script_engine import ScriptEngine

_INIT: Final = DistributedDataParallel.__init__
_SYNC: Final = DistributedDataParallel._sync_buffers  # noqa: SLF001
_HOOK: Final = DistributedDataParallel.register_comm_hook


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
        self._engine, self._passes = engine, passes
        self.adopted: list[DistributedDataParallel] = []
        self.spans: dict[int, Spot] = {}
        """Operation that comes after the construction of each model."""
        self.on_adopted: Callable[[int], None] = lambda _: None
        """Called with the index of a model that a following rank has made."""

    def install(self) -> None:
        """Wrap the methods of DDP that have no hook."""
        models = self

        def init(ddp: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            index, path = len(models.adopted), models._engine.operations.path
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

        def sync_buffers(ddp: Any) -> None:
            if not models._sync_buffers(ddp):
                _SYNC(ddp)  # type: ignore[no-untyped-call]

        def hook(*_: Any, **__: Any) -> None:
            raise UnsupportedError(
                "DistributedDataParallel.register_comm_hook: a job averages the gradients itself",
                hint="leave the hook out; collective.wire: bfloat16 halves what travels",
            )

        kind: Any = DistributedDataParallel
        kind.__init__, kind._sync_buffers = init, sync_buffers  # noqa: SLF001
        kind.register_comm_hook = hook

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
        _HOOK(ddp, Buckets(self._engine, self._passes), average)
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
            found = backend.from_lowest("broadcast of buffers", buffers)
            for buffer, value in zip(buffers, found, strict=True):
                buffer.copy_(value)
        return True


class Buckets:
    """The buckets of one model in the present backward pass."""

    def __init__(self, engine: ScriptEngine, passes: Passes) -> None:
        self._engine, self._passes = engine, passes
        self._buffers: list[torch.Tensor] = []
        self._futures: list[torch.futures.Future[torch.Tensor]] = []

    def add(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket; the last one of a backward pass makes the operation."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._buffers.append(bucket.buffer())
        self._futures.append(future)
        if bucket.is_last():
            buffers, self._buffers = self._buffers, []
            futures, self._futures = self._futures, []
            self._average(buffers)
            for each, buffer in zip(futures, buffers, strict=True):
                each.set_result(buffer)
        return future

    def _average(self, buffers: list[torch.Tensor]) -> None:
        flats = [b.float() if b.dtype in HALVES else b.detach() for b in buffers]
        opens = self._passes.before_backward()
        samples = self._passes.samples()
        result = self._engine.operate(BACKWARD, flats, samples=samples, opens=opens, where=where())
        self._passes.after_backward()
        for buffer, total in zip(buffers, result.sums, strict=True):
            if buffer.dtype in HALVES:
                buffer.copy_(total.to(buffer.device) / result.contributors)
            else:
                torch.div(total.to(buffer.device), result.contributors, out=buffer)


def average(buckets, bucket):  # type: ignore[no-untyped-def] # torch reads annotations, not texts
    """Average a bucket over the job: DDP's communication hook."""
    return buckets.add(bucket)
