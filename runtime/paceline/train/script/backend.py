"""torch.distributed's backend in a job: each collective is an operation of the script (S2, S3).

It is registered under the names of torch's own backends, so `init_process_group("nccl")`,
functional collectives, DDP and `torch.distributed.checkpoint` arrive here, however the script has
imported them. A group has all slots or only this one; other groups are refused by name.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Work, _create_work_from_future

from paceline.errors import UnsupportedError
from paceline.train.script.encode import (
    COMBINES,
    HALVES,
    SUMMED,
    combine,
    gather_buffer,
    gathered,
    words_of,
)
from paceline.train.script.encode import pack as pack_words
from paceline.train.script.encode import unpack as unpack_words
from paceline.worker.operations import Result
from paceline.worker.script_engine import ScriptEngine
from paceline.worker.script_frames import is_own

log = logging.getLogger("paceline.rank")

NAMES: Final = ("gloo", "nccl", "mpi", "ucc", "xccl")
"""Names of torch's backends that a script may ask for."""
Tensors = Sequence[torch.Tensor]


def where() -> str:
    """Return file and line of the script's frame that makes the present call, or ""."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_own(name) and "/torch/" not in name and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def name_of(op: Any) -> str:
    """Return the name of a `ReduceOp`, such as "SUM"."""
    return next((name for name in COMBINES if op == getattr(dist.ReduceOp, name)), "of a kind")


def shape_of(tensors: Tensors) -> str:
    """Return types and shapes of tensors for people, such as `float32[2, 3]`."""
    texts = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors]
    return ", ".join(texts if len(texts) < 4 else [*texts[:2], f"... {len(texts)} tensors"])


def finished(value: object) -> Work:
    """Return the handle of a collective that is over."""
    future: torch.futures.Future[object] = torch.futures.Future()
    future.set_result(value)
    return _create_work_from_future(future)


def is_over(handle: Work) -> bool:
    """Return True if the collective of a handle is over, as each is that has returned one."""
    return handle.get_future().done()


class JobBackend(Backend):
    """One process group of the script."""

    def __init__(
        self,
        engine: ScriptEngine,
        slot: int,
        slots: int,
        size: int,
        is_training: Callable[[], bool] = lambda: True,
    ) -> None:
        """Create the backend of a group.

        Args:
            engine: Makes the operations.
            slot: Slot of this rank.
            slots: Number of slots of the job.
            size: Number of ranks in the group: `slots`, or 1 for this rank alone.
            is_training: Returns False while the script evaluates its models.
        """
        super().__init__(slot if size > 1 else 0, size)
        self._engine, self._slot, self._slots = engine, slot, slots
        self._has_one_rank = size == 1
        self.is_training = is_training

    @property
    def _is_alone(self) -> bool:
        """Return True if calls of this group concern this rank only."""
        return self._has_one_rank or self._engine.is_alone

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name for torch's messages."""
        return "paceline"

    def name(self) -> str:
        """Return the name for torch's messages."""
        return "paceline"

    @property
    def supports_splitting(self) -> bool:
        """Return False: a group has all slots, or this one."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """Return False: each call is one operation."""
        return False

    @property
    def options(self) -> Any:
        """Return torch's options of a backend."""
        return Backend.Options("paceline", timedelta(seconds=1800))

    # ---- sums ---------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce tensors over all ranks, in place."""
        op = name_of(opts.reduceOp) if opts is not None else "SUM"
        self._reduce("all_reduce", tensors, tensors, op)
        return finished(list(tensors))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce tensors over all ranks, in place, in one operation."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        """Reduce tensors over all ranks; the root gets the result."""
        root, op = opts.rootRank, name_of(opts.reduceOp)
        targets = tensors if self._slot == root else [t.clone() for t in tensors]
        self._reduce(f"reduce to {root}", tensors, targets, op)
        return finished(list(tensors))

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Reduce one tensor for each rank, and give each rank its own."""
        op = name_of(opts.reduceOp)
        for output, parts in zip(outputs, inputs, strict=True):
            whole = [part.clone() for part in parts]
            self._reduce("reduce_scatter", whole, whole, op)
            output.copy_(whole[self.rank()])
        return finished(list(outputs))

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> Work:
        """Reduce a tensor, and give each rank its part of the first dimension."""
        whole = source.clone()
        self._reduce("reduce_scatter", [whole], [whole], name_of(opts.reduceOp))
        output.copy_(whole.reshape(self.size(), *output.shape)[self.rank()])
        return finished([output])

    _reduce_scatter_base = reduce_scatter_single

    def _reduce(self, call: str, sources: Tensors, targets: Tensors, op: str) -> None:
        """Reduce `sources` over the ranks into `targets`."""
        if op not in COMBINES:
            raise UnsupportedError(f"{call} with the reduction {op}", hint="use SUM, AVG, MIN, MAX")
        if self._is_alone:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return
        sums = op in ("SUM", "AVG") and all(
            t.dtype in (*SUMMED, *HALVES) or t.is_complex() for t in sources
        )
        with torch.no_grad():
            if sums:
                self._sum(call, sources, targets, op)
                return
            parts = self._gather(f"{call}({op}, {shape_of(sources)})", sources, sources)
            there = [part for part in parts if part is not None]
            for index, target in enumerate(targets):
                target.copy_(combine(op, [part[index] for part in there]))

    def _sum(self, call: str, sources: Tensors, targets: Tensors, op: str) -> None:
        flats = [_as_real(source.detach()).contiguous().reshape(-1) for source in sources]
        flats = [flat.float() if flat.dtype in HALVES else flat for flat in flats]
        result = self._operate(f"{call}({op}, {shape_of(sources)})", flats)
        for target, total in zip(targets, result.sums, strict=True):
            real = _as_real(target)
            value = total / result.contributors if op == "AVG" else total
            real.copy_(value.to(real.device).reshape(real.shape))

    # ---- gathers ------------------------------------------------------------------------------

    def allgather(
        self, outputs: Sequence[list[torch.Tensor]], inputs: Tensors, _: Any = None
    ) -> Work:
        """Collect a tensor of each rank on all ranks."""
        for own, parts in zip(inputs, outputs, strict=True):
            for part, received in zip(parts, self._all("all_gather", [own], [own]), strict=True):
                part.copy_(received[0].reshape(part.shape))
        return finished([list(parts) for parts in outputs])

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, _: Any = None) -> Work:
        """Collect a tensor of each rank in one tensor on all ranks."""
        received = self._all("all_gather", [source], [source])
        output.copy_(torch.cat([part[0].reshape(-1) for part in received]).reshape(output.shape))
        return finished([output])

    _allgather_base = all_gather_single

    def allgather_coalesced(
        self, outputs: Sequence[list[torch.Tensor]], inputs: Tensors, _: Any = None
    ) -> Work:
        """Collect tensors of each rank on all ranks, in one operation."""
        for parts, received in zip(outputs, self._all("all_gather", inputs, inputs), strict=True):
            for part, value in zip(parts, received, strict=True):
                part.copy_(value)
        return finished([list(parts) for parts in outputs])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Collect several tensors of each rank, each in one tensor."""
        for output, source in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, source, opts)
        return finished(list(outputs))

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        """Reduce several tensors, and give each rank its part of each."""
        for output, source in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, source, opts)
        return finished(list(outputs))

    def gather(self, outputs: Sequence[list[torch.Tensor]], inputs: Tensors, opts: Any) -> Work:
        """Collect a tensor of each rank on the root."""
        received = self._all(f"gather to {opts.rootRank}", inputs, inputs)
        if self.rank() == opts.rootRank:
            for index, parts in enumerate(outputs):
                for part, values in zip(parts, received, strict=True):
                    part.copy_(values[index])
        return finished([list(parts) for parts in outputs])

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Give all ranks the tensors of the root."""
        root = opts.rootRank
        if not self._is_alone:
            own = tensors if self._slot == root else None
            received = self._from_one(f"broadcast from {root}", own, tensors)
            with torch.no_grad():
                for tensor, value in zip(tensors, received, strict=True):
                    tensor.copy_(value)
        return finished(list(tensors))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Give each rank its tensor of those that the root has."""
        root = opts.rootRank
        for index, output in enumerate(outputs):
            if self._is_alone:
                output.copy_(inputs[index][0] if inputs else output)
                continue
            likes = [output] * self._slots
            own = list(inputs[index]) if self._slot == root else None
            received = self._from_one(f"scatter from {root}", own, likes)
            output.copy_(received[self._slot])
        return finished(list(outputs))

    def alltoall(self, outputs: Tensors, inputs: Tensors, _: Any = None) -> Work:
        """Give each rank one tensor of every rank."""
        received = self._all("all_to_all", inputs, inputs)
        for output, values in zip(outputs, received, strict=True):
            output.copy_(values[self.rank()].reshape(output.shape))
        return finished(list(outputs))

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        _: Any = None,
    ) -> Work:
        """Give each rank a part of one tensor of every rank."""
        if input_sizes and len(set(input_sizes)) > 1:
            raise UnsupportedError(
                f"all_to_all_single with parts of different sizes {list(input_sizes)}",
                hint="use parts of equal sizes, or all_gather",
            )
        del output_sizes
        parts = list(source.chunk(self.size()))
        received = self._all("all_to_all", parts, parts)
        output.copy_(torch.cat([values[self.rank()] for values in received]).reshape(output.shape))
        return finished([output])

    all_to_all_single = alltoall_base

    def barrier(self, _: Any = None) -> Work:
        """Block until all ranks have come."""
        if not self._is_alone:
            self._operate("barrier", [torch.zeros(1)])
        return finished([])

    def monitored_barrier(self, _: Any = None, __: bool = False) -> None:
        """Block until all ranks have come."""
        self.barrier()

    def send(self, *_: Any) -> Work:
        """Refuse: a message between two ranks is no operation of all."""
        raise _refused("send")

    def recv(self, *_: Any) -> Work:
        """Refuse: a message between two ranks is no operation of all."""
        raise _refused("recv")

    recv_anysource = recv

    def _all(self, call: str, own: Tensors, likes: Tensors) -> list[list[torch.Tensor]]:
        """Return the tensors of every rank of the group, in rank order."""
        if self._is_alone:
            return [[tensor.detach().clone() for tensor in own]] * self.size()
        engine = self._engine
        engine.needs_all = engine.needs_all or not engine.is_at_point
        parts = self._gather(f"{call}({shape_of(own)})", own, likes)
        there = [part for part in parts if part is not None]
        missing = [str(slot) for slot, part in enumerate(parts) if part is None]
        are_figures = all(like.numel() <= 1 for like in likes)
        if missing and there and (are_figures or not self.is_training()):
            first = next(slot for slot, part in enumerate(parts) if part is not None)
            log.warning(
                "%s without rank %s, which has left: its part is missing, and that of rank %d "
                "stands for it",
                *(call, ", ".join(missing), first),
            )
        elif missing:
            raise UnsupportedError(
                f"{call} without rank {', '.join(missing)}, which has left the job: its part of "
                "the result is missing",
                hint="a rank that is replaced comes back; or use all_reduce, which goes on without",
            )
        return [part if part is not None else there[0] for part in parts]

    def _gather(self, call: str, own: Tensors, likes: Tensors) -> list[list[torch.Tensor] | None]:
        buffer = gather_buffer(own, self._slot, self._slots, likes)
        result = self._operate(call, [buffer])
        return gathered(result.sums[0].to(likes[0].device), self._slots, likes)

    def _from_one(self, call: str, own: Tensors | None, likes: Tensors) -> list[torch.Tensor]:
        """Return the tensors of the one rank that has them, on all ranks.

        Raises:
            UnsupportedError: That rank has left the job.
        """
        received = self._sent(call, own, likes)
        if received is None:
            raise UnsupportedError(
                f"{call}, which has left the job",
                hint="a rank that is replaced comes back; let another rank be the root",
            )
        return received

    def _sent(self, call: str, own: Tensors | None, likes: Tensors) -> list[torch.Tensor] | None:
        """Return the tensors of the one rank that has them; None if it took no part."""
        size = sum(words_of(like.numel(), like.dtype) for like in likes)
        buffer = torch.zeros(1 + size, dtype=torch.float32, device=likes[0].device)
        if own is not None:
            buffer[0] = 1
            buffer[1:] = pack_words(own)
        result = self._operate(f"{call}({shape_of(likes)})", [buffer])
        total = result.sums[0].to(likes[0].device)
        return unpack_words(total[1:], likes) if total[0] else None

    def from_lowest(self, call: str, likes: Tensors) -> list[torch.Tensor]:
        """Return the tensors of the lowest slot that is there, on all ranks."""
        if self._is_alone:
            return [like.clone() for like in likes]
        received = None
        while received is None:  # again if that slot has left since; all ranks see that it has
            own = likes if self._slot == self._engine.lowest_slot() else None
            received = self._sent(call, own, likes)
        return received

    def _operate(self, name: str, buffers: list[torch.Tensor]) -> Result:
        opens = self._engine.opens_here()
        return self._engine.operate_with_all(name, buffers, opens=opens, where=where())


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _refused(call: str) -> UnsupportedError:
    return UnsupportedError(
        f"torch.distributed.{call}: a job has no messages between two of its ranks",
        hint="use broadcast, all_gather or all_reduce, which all ranks call",
    )


class Joins(Protocol):
    """A process that joins its job when the script makes its first process group."""

    engine: ScriptEngine

    def start(self) -> None:
        """Join the job, unless it has; blocks until the script may go on."""


def register(
    process: Joins, slot: int, slots: int, is_training: Callable[[], bool] = lambda: True
) -> None:
    """Register the backend under the names of torch's own.

    Args:
        process: Joins the job with the first group.
        slot: Slot of this rank.
        slots: Number of slots of the job.
        is_training: Returns False while the script evaluates its models.
    """

    def create(dist_options: Any, _: Any) -> JobBackend:
        size = dist_options.group_size
        if size not in (1, slots):
            members = getattr(dist_options, "global_ranks_in_group", [])
            raise UnsupportedError(
                f"a process group of {size} of {slots} ranks {list(members)}",
                hint="use a group of all ranks; a model that is spread over some ranks needs "
                "spec.parallelism and pl.group()",
            )
        process.start()
        return JobBackend(process.engine, slot, slots, size, is_training)

    # torch hands a backend's handles on in others, which never say that they are complete.
    for method in ("is_completed", "is_success"):
        setattr(Work, method, is_over)
    for name in NAMES:
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
