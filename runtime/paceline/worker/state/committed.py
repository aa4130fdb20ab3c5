"""The committed state of a rank: weights and optimizer state, owned by the communication thread.

Equal bits on all members at equal version (I5), because it changes only by `apply`, a function of
what the round log says and of the reduced sums. The model gets these weights while the main thread
is parked: as a copy, or where rounds wait for everybody by lying in the same memory (D2).

    accumulated  sum of the results since the optimizer's last step. It is never divided or clipped,
                 so it can be given to a rank that is behind until the next commit (R7): the
                 averaged gradient is made in the scratch of the reduction, which is free between
                 two rounds.
    weights      the committed weights; the parameters of the rebound optimizer are views of them.
                 For a bfloat16 or float16 parameter they are float32: its master, from which the
                 model's is rounded

With the scratch of `Gradients` these are the three parameter-size buffers that exist beside the
model, its gradients and the optimizer's state; where gradients wait, LATE is a fourth (D15).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import torch

from paceline.errors import StateError
from paceline.worker.state.bit_sums import hash_of, hash_of_model
from paceline.worker.state.buffers import first_difference, persistent_buffers
from paceline.worker.state.codec import Decoder, Encoder, Json, as_tensor
from paceline.worker.state.flat import as_reals, bytes_of, fill_from_bytes
from paceline.worker.state.gradients import Gradients
from paceline.worker.state.optimizer_binding import (
    OptimizerBinding,
    SchedulerFactory,
    clip,
    sum_of_squares,
)
from paceline.worker.state.shards import copies, is_spread, own_part

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview
BUFFERS = ("result", "accumulated", "weights")
"""Parameter-size buffers beside the model, its gradients and the optimizer's state; LATE comes when
a gradient first has to wait."""
RESIDUALS = ("residual", "next residual")
"""The same, where sums travel as bfloat16 (D18)."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What the runtime adds to a rank's memory in steady state (D15)."""

    names: tuple[str, ...]
    """Of the buffers."""
    parameters: int
    """Elements."""
    buffer_bytes: int
    """Of one parameter-size buffer, alignment included."""

    def __str__(self) -> str:
        names = ", ".join(self.names)
        mib = self.buffer_bytes / 2**20
        return (
            f"{len(self.names)} buffers of {mib:.1f} MiB ({names}) for {self.parameters} "
            "parameters; one more once a gradient has to wait for its round, and one once step() "
            "leaves a gradient to be added to"
        )


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The committed state of one version, copied: what a checkpoint is made of."""

    header: dict[str, Json]
    model: dict[str, torch.Tensor]
    """Parameters and buffers, by the names that the model gives them."""
    buffers: list[torch.Tensor]
    """Those that the header refers to."""
    weights: list[torch.Tensor]
    """Flat memory behind the parameters of `model`, for the hash."""
    frozen: list[torch.Tensor]
    """Those of `model` that are not trained, for the hash."""


@dataclass(frozen=True, slots=True)
class GroupSum:
    """What a rank that holds a shard of the model asks of the others of its group."""

    shard: int
    sum: Callable[[float], float]
    """Of a number of each of them, the same on all. Communication thread; all call it alike."""


class Committed:
    """Weights and optimizer state of one version. Calls change it between two updates only."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: Gradients,
        *,
        scheduler: SchedulerFactory | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self._model = model
        self._gradients = gradients
        self._layout = gradients.layout
        self._weights: list[torch.Tensor]
        self._views: list[torch.Tensor]
        self._inside: list[tuple[torch.nn.Parameter, torch.Tensor]]
        """Parameters that may lie in the committed weights, and where."""
        self._beside: tuple[list[torch.Tensor], list[torch.Tensor]]
        """The others, which are copied."""
        self._lay_out(self._layout.zeros())
        self._accumulated = gradients.new_sums()  # takes turns with the reduction's scratch
        self._accumulating = False
        self._average_views: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """Memory that averages were made in lately, and the parameters' shapes on it."""
        self._prepared: set[int] = set()
        """Segments of which the average is made, in the memory of the sum before."""
        self._lent = False
        """The main thread computes on the committed weights themselves."""
        self._together = False
        """The model lies in them, lent or taken back."""
        self._extras: list[torch.Tensor] | None = None
        self._frozen_sums: dict[str, tuple[tuple[int, int], int]] = {}
        """Of each frozen parameter: where it lay and how often it had been written, and its hash
        then."""
        # The main thread reads (state_dict) while the communication thread may apply a round.
        self._lock = threading.Lock()
        self._apart = copies(gradients.parameters)
        self.group: GroupSum | None = None
        self.take_model()
        seen = gradients.as_seen(self._views)
        self.binding = OptimizerBinding(optimizer, gradients.parameters, seen, scheduler)

    # ---- model <-> committed, while the main thread is parked -------------------------------

    def take_model(self) -> None:
        """The model's present weights become the committed ones: the state before version 0."""
        with torch.no_grad():
            for view, parameter in zip(self._views, self._gradients.own, strict=True):
                view.copy_(parameter)
        streams = self._gradients.streams
        streams.follow(streams.mark_gradients())  # the communication thread has another stream

    def copy_to_model(self, *, lend: bool = False) -> None:
        """Give the model the weights of this version, and the extras that `load` brought.

        With `lend` its parameters lie in the committed weights from now on, where they can, and no
        copy is made (D2). Whoever lends expects no update while the main thread computes: one that
        comes all the same leaves this memory to the model first."""
        with torch.no_grad():
            if lend:
                self._put_model_in()
                if self._beside[0]:
                    torch._foreach_copy_(*self._beside)
            else:
                self._part_from_model()
                torch._foreach_copy_(list(self._gradients.own), self._views)
            if self._extras is not None:
                for (_, target), source in zip(self._extra_tensors(), self._extras, strict=True):
                    target.copy_(source)
                self._extras = None

    def take_back(self) -> None:
        """The main thread is parked: what was lent may change in place."""
        self._lent = False

    def part_from_model(self) -> None:
        """The script goes on with memory of its own, and may do with it what it likes."""
        with self._lock:
            self._part_from_model()

    def _lay_out(self, weights: list[torch.Tensor]) -> None:
        """These are the committed weights from now on; whatever they hold."""
        self._weights, self._views = weights, self._layout.views(weights)
        pairs = list(zip(self._gradients.parameters, self._views, strict=True))
        self._inside = [(p, v) for p, v in pairs if _can_lie_in(p, v)]
        beside = [i for i, pair in enumerate(pairs) if not _can_lie_in(*pair)]
        self._beside = [self._gradients.own[i] for i in beside], [self._views[i] for i in beside]

    def _put_model_in(self) -> None:
        for parameter, view in self._inside:
            if parameter.data_ptr() != view.data_ptr():
                parameter.data = view
        # Updates do not go through these: a graph that the script keeps shall still be refused.
        torch.autograd.graph.increment_version([parameter for parameter, _ in self._inside])
        self._lent = self._together = bool(self._inside)

    def _part_from_model(self) -> None:
        if self._together:
            for parameter, view in self._inside:
                if parameter.data_ptr() == view.data_ptr():
                    parameter.data = parameter.data.clone()
        self._lent = self._together = False

    def _leave_to_model(self) -> None:
        """Before a change of the weights: the main thread may be computing on this memory."""
        if self._lent:
            left = self._weights
            self._lay_out([flat.clone() for flat in left])
            self.binding.move_to(self._gradients.as_seen(self._views))
            self._lent = self._together = False

    # ---- one round --------------------------------------------------------------------------

    def prepare(self, segment: int, divisor: float) -> None:
        """Make the average of a segment while others are still being summed, in a round that steps
        and begins anew. Nothing is updated (R21). It goes where the sum before lies: all members
        are in this round, so that none can lack that one (R7)."""
        torch.div(self._gradients.result[segment], divisor, out=self._accumulated[segment])
        self._prepared.add(segment)

    def accumulate(self, results: list[torch.Tensor], *, first: bool) -> None:
        """Add the result of a whole reduction (R21); `first` after a step of the optimizer."""
        if first and results is self._gradients.result:
            # The sum stays where it was made; the memory of the one before is the next scratch.
            self._gradients.result, self._accumulated = self._accumulated, results
        else:
            assert not self._prepared, "an average was made of what is not this sum"
            (torch._foreach_copy_ if first else torch._foreach_add_)(self._accumulated, results)
        self._accumulating = True

    def forget_prepared(self) -> None:
        """The round that segments were prepared for came to nothing."""
        self._prepared.clear()

    def last_result(self) -> list[memoryview]:
        """Bytes of a copy of the sum for a rank that is behind (R7)."""
        with self._gradients.streams.settled():
            return [bytes_of(as_tensor(flat)) for flat in self._accumulated]

    def install_result(self, data: Sequence[Bytes]) -> None:
        """Instead of `accumulate`, on the rank that is behind; `apply` follows as everywhere."""
        self._fill(self._accumulated, data)
        self._accumulating = True

    def apply(
        self,
        divisor: float,
        *,
        step: bool,
        scheduler_steps: int = 0,
        look: Callable[[list[torch.Tensor]], None] | None = None,
    ) -> None:
        """Turn this version into the next: with `step`, average = accumulated / divisor, clipped,
        and one step of the optimizer; then the scheduler. Uses the reduction's scratch. `look` is
        shown the average before it is clipped."""
        with self._lock:
            self.binding.check_unchanged()
            if step:
                self._leave_to_model()
                average = self._average(divisor)
                if look is not None:
                    look(average)
                clip(average, self)
                self.binding.optimizer.step()
                self._accumulating = False
            self.binding.step_scheduler(scheduler_steps)

    def sum_of_squares(self, average: list[torch.Tensor]) -> float:
        """Of the averaged gradient; in a group, of all its shards and of one of the copies."""
        if self.group is None:
            return sum_of_squares(average)
        views = enumerate(self._views_of(average))
        mine = [v.reshape(-1) for i, v in views if self.group.shard == 0 or i not in self._apart]
        return self.group.sum(sum_of_squares(mine))

    def _average(self, divisor: float) -> list[torch.Tensor]:
        average = self._gradients.result
        self.binding.point_gradients(self._gradients.as_seen(self._views_of(average)))
        left = [segment for segment in range(len(average)) if segment not in self._prepared]
        targets = [average[segment] for segment in left]
        sums = [self._accumulated[segment] for segment in left]
        if divisor == 1.0 or self._gradients.streams.devices:
            # On a device two passes by few kernels are quicker than one by a kernel per segment.
            torch._foreach_copy_(targets, sums)
            if divisor != 1.0:
                torch._foreach_div_(targets, divisor)
        else:
            for target, accumulated in zip(targets, sums, strict=True):
                torch.div(accumulated, divisor, out=target)
        self._prepared.clear()
        return average

    def _views_of(self, average: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sums and averages take turns with two sets of memory, so two are kept."""
        for known, views in self._average_views:
            if known is average:
                return views
        views = self._layout.views(average)
        self._average_views = [*self._average_views[-1:], (average, views)]
        return views

    # ---- evidence ---------------------------------------------------------------------------

    def hash(self) -> int:
        """Of the whole model, buffers apart; compared between ranks now and then (I5, R23)."""
        with self._gradients.streams.settled():
            return hash_of_model(self._weights, self._hashes_of_frozen())

    def hashes_of_copies(self) -> tuple[tuple[str, int], ...]:
        """Names and hashes of the parameters that all ranks of a group hold alike; empty where
        none is a shard."""
        if not self._apart:
            return ()
        with self._gradients.streams.settled():
            return tuple(
                (self._layout.slots[index].name, hash_of([self._views[index]]))
                for index in sorted(self._apart)
            )

    def _hashes_of_frozen(self) -> list[int]:
        """Of parameters that are not trained. They may be most of the model, so each is read again
        only when it was written."""
        frozen = self._frozen()
        if self._extras is not None:  # they are on their way into the model
            return [hash_of([tensor]) for tensor in self._extras[: len(frozen)]]
        sums = []
        for name, parameter in frozen:
            state = parameter.data_ptr(), parameter._version  # noqa: SLF001
            known = self._frozen_sums.get(name)
            if known is None or known[0] != state:
                known = state, hash_of([own_part(parameter.detach())])
                self._frozen_sums[name] = known
            sums.append(known[1])
        return sums

    def strong_hash(self) -> str:
        """Of weights, optimizer and scheduler: the whole state without the model's extras."""
        digest = blake2b(digest_size=16)
        header, buffers = self.snapshot(extras=False)
        digest.update(repr(header).encode())
        for buffer in buffers:
            digest.update(buffer)
        return digest.hexdigest()

    def memory_report(self) -> MemoryReport:
        names = BUFFERS + (RESIDUALS if self._gradients.rounded_away else ())
        return MemoryReport(names, self._layout.numel, self._layout.nbytes)

    def linear(self) -> tuple[bool, str]:
        """Whether the update is linear in the gradient, and why (docs/design/rounds.md)."""
        if self.clip_norm is not None or self.clip_value is not None:
            return False, "gradient clipping is not linear in the gradient"
        return self.binding.linear()

    # ---- state for joiners, checkpoints and the user ----------------------------------------

    def snapshot(self, *, extras: bool = True) -> tuple[dict[str, Json], list[memoryview]]:
        """A copy of everything that makes this version: a JSON header and byte buffers. Copied by
        torch, which holds up no thread of the interpreter.

        `extras`: with the model's tensors that no optimizer owns (frozen parameters, buffers)."""
        encoder = Encoder(as_tensor)
        with self._lock, self._gradients.streams.settled():
            header = {
                "layout": self._layout.fingerprint(),
                "weights": encoder.encode(self._weights, "weights"),
                **self._encode(encoder, self._accumulated),
            }
            if extras:
                own = dict(self._extra_tensors())
                header["extras"] = encoder.encode(own, "the model's buffers")
            return header, [bytes_of(tensor) for tensor in encoder.buffers]

    def copy(self) -> StateCopy:
        """The same for a checkpoint, on the host (D15): by parameter, so that it can be loaded into
        other segments; weights and the model's extras by name."""
        encoder = Encoder(as_tensor)
        with self._lock, self._gradients.streams.settled():
            flats = [as_tensor(flat) for flat in self._weights]
            accumulated = self._layout.views(self._accumulated)
            header = self._encode(encoder, accumulated)
            extras = {name: as_tensor(tensor) for name, tensor in self._extra_tensors()}
            for name, tensor in self._others():
                if tensor.is_complex():
                    extras[name] = torch.view_as_complex(extras[name])
            views = self._gradients.as_seen(self._layout.views(flats))
        model = {s.name: view for s, view in zip(self._layout.slots, views, strict=True)}
        frozen = [extras[name] for name, _ in self._frozen()]
        return StateCopy(header, model | extras, encoder.buffers, flats, frozen)

    def _encode(self, encoder: Encoder[T], accumulated: Sequence[torch.Tensor]) -> dict[str, Json]:
        """All but weights and extras."""
        return {
            "banked": encoder.encode(list(accumulated) if self._accumulating else [], "banked"),
            "groups": encoder.encode(self.binding.hyperparameters(), "param_groups"),
            "optimizer": encoder.encode(self._optimizer_state(), "the optimizer's state"),
            "scheduler": encoder.encode(self._scheduler_state(), "the scheduler's state"),
        }

    def load(self, header: dict[str, Json], buffers: Sequence[Bytes]) -> None:
        """Inverse of `snapshot`. StateError leaves this state as it was. The model's extras wait
        for `copy_to_model`, since the main thread may be using them."""
        if header.get("layout") != self._layout.fingerprint():
            raise StateError(
                "the state of the job has other parameters than this rank's model",
                hint="start every rank with the same script, model and versions",
            )
        decoder, device = Decoder(buffers), self._layout.segments[0].device
        self._take({name: decoder.decode(header.get(name), device) for name in header})

    def load_copy(
        self,
        header: dict[str, Json],
        model: dict[str, torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """Inverse of `copy`, under the same conditions as `load`."""
        decoder, device = Decoder([bytes_of(b) for b in buffers]), self._layout.segments[0].device
        part = {name: decoder.decode(header.get(name), device) for name in header}
        flats, rest = self._layout.zeros(), dict(model)
        try:
            for slot, view in zip(self._layout.slots, self._layout.views(flats), strict=True):
                view.copy_(as_reals(rest.pop(slot.name)))
        except (KeyError, RuntimeError) as error:
            raise StateError(f"a checkpoint lacks a parameter of this model: {error}") from None
        accumulated = self._layout.zeros()
        _copy(self._layout.views(accumulated), part["banked"])
        kept = accumulated if part["banked"] else []
        extras = {name: as_reals(tensor) for name, tensor in rest.items()}
        self._take({**part, "weights": flats, "banked": kept, "extras": extras})

    def _take(self, part: dict[str, Any]) -> None:
        extras = self._match_extras(part.get("extras"))
        parameters = self.binding.parameters
        if len(part["groups"]) != len(self.binding.optimizer.param_groups) or (
            any(index >= len(parameters) for index in part["optimizer"])
        ):
            raise StateError(
                "the state of the job comes from an optimizer with other parameter groups",
                hint="start every rank with the same script and versions",
            )
        with self._lock:
            self._leave_to_model()
            _copy(self._weights, part["weights"])
            _copy(self._accumulated, part["banked"])
            self._accumulating = bool(part["banked"])
            state = self.binding.optimizer.state
            state.clear()
            for index, values in part["optimizer"].items():
                state[parameters[index]] = values
            self.binding.set_hyperparameters(part["groups"])
            if self.binding.scheduler is not None and part["scheduler"] is not None:
                self.binding.scheduler.load_state_dict(part["scheduler"])
            if extras is not None:
                self._extras = extras

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as torch's own, copied: loads into the same optimizer elsewhere."""
        with self._lock, self._gradients.streams.settled():
            copied = copy.deepcopy(self.binding.optimizer.state_dict())
            self._gradients.streams.complete()  # the main thread goes on with it
            return copied

    # ---- buffers of the model (D10, R24) ----------------------------------------------------

    def float_buffers_flat(self) -> torch.Tensor:
        """All floating-point buffers of the model (BatchNorm statistics) in one new tensor."""
        buffers = list(self._float_buffers())
        device = self._layout.segments[0].device
        if not buffers:
            return torch.zeros(0, device=device)
        wide = torch.float64 if any(b.dtype is torch.float64 for b in buffers) else torch.float32
        return torch.cat([buffer.reshape(-1).to(device, wide) for buffer in buffers])

    def load_float_buffers(self, flat: torch.Tensor) -> None:
        """Inverse of `float_buffers_flat`, while the main thread is parked."""
        start = 0
        with torch.no_grad():
            for buffer in self._float_buffers():
                part = flat.narrow(0, start, buffer.numel())
                buffer.copy_(part.view(buffer.shape))
                start += buffer.numel()

    def _float_buffers(self) -> Iterator[torch.Tensor]:
        every = (as_reals(buffer.detach()) for _, buffer in persistent_buffers(self._model))
        return (buffer for buffer in every if buffer.is_floating_point())

    def _extra_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, own_part(tensor.detach())) for name, tensor in self._others()]

    def _others(self) -> list[tuple[str, torch.Tensor]]:
        return self._frozen() + persistent_buffers(self._model)

    def _frozen(self) -> list[tuple[str, torch.Tensor]]:
        own = set(self._gradients.parameters)
        return [(n, p) for n, p in self._model.named_parameters() if p not in own]

    def _match_extras(self, extras: dict[str, torch.Tensor] | None) -> list[torch.Tensor] | None:
        if extras is None:
            return None
        mine = {name: tensor.shape for name, tensor in self._extra_tensors()}
        others = {name: tensor.shape for name, tensor in extras.items()}
        if difference := first_difference(mine, others, "the model of the job"):
            raise StateError(
                f"the buffers or frozen parameters differ, first in {difference}",
                hint="start every rank with the same script and versions; register buffers in "
                "__init__ with the shape that they keep, and with persistent=False what each rank "
                "computes for itself",
            )
        return [extras[name] for name in mine]

    def _optimizer_state(self) -> dict[int, dict[str, Any]]:
        state = self.binding.optimizer.state
        return {
            index: dict(state[shadow])
            for index, shadow in enumerate(self.binding.parameters)
            if shadow in state
        }

    def _scheduler_state(self) -> dict[str, Any] | None:
        scheduler = self.binding.scheduler
        return None if scheduler is None else scheduler.state_dict()

    @staticmethod
    def _fill(flats: Sequence[torch.Tensor], data: Sequence[Bytes]) -> None:
        try:
            for flat, part in zip(flats, data, strict=True):
                fill_from_bytes(flat, part)
        except ValueError as error:
            raise StateError(f"a torn result: {error}") from error


def _can_lie_in(parameter: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a model's parameter may be a view of the committed weights. On a GPU a copy costs
    next to nothing, and its addresses may be part of a recorded graph."""
    return (
        parameter.device.type == "cpu"
        and not is_spread(parameter)
        and parameter.dtype is view.dtype
        and parameter.is_contiguous()
    )


def _copy(flats: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for flat, value in zip(flats, values, strict=False):  # of `accumulated` there may be none
        flat.copy_(value)
