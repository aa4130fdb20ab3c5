"""The committed state of a rank: weights and optimizer state, owned by the communication thread.

It has equal bits on all members at equal version (I5). It changes only by `apply`, a function of
the round log and of the reduced sums, or is replaced as a whole by the state of a donor or a
checkpoint. The model gets these weights while the main thread is parked: as a copy, or, where
rounds wait for all ranks, by lying in the same memory (D2).

    accumulated  sum of the results since the optimizer's last step. It is never divided or clipped,
                 so it can be given to a rank that is behind until the next commit (R7): the
                 averaged gradient is made in the scratch of the reduction, which is free between
                 two rounds.
    weights      the committed weights; the parameters of the rebound optimizer are views of them.
                 For a bfloat16 or float16 parameter they are its float32 master, from which the
                 model's parameter is rounded.

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
"""Names of the parameter-size buffers beside the model, its gradients and the optimizer's state.
LATE is added when a gradient first has to wait."""
RESIDUALS = ("residual", "next residual")
"""Names of two more of them, which exist where sums travel as bfloat16 (D18)."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The buffers that the runtime adds to a rank's memory in steady state (D15)."""

    names: tuple[str, ...]
    """Names of the buffers."""
    parameters: int
    """Number of elements of the parameters."""
    buffer_bytes: int
    """Size of one parameter-size buffer in bytes, alignment included."""

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
    """A copy of the committed state of one version, from which a checkpoint is made."""

    header: dict[str, Json]
    model: dict[str, torch.Tensor]
    """Parameters and buffers, by the names that the model gives them."""
    buffers: list[torch.Tensor]
    """Tensors that the header refers to by index."""
    weights: list[torch.Tensor]
    """Flat memory behind the parameters of `model`, for the hash."""
    frozen: list[torch.Tensor]
    """Parameters of `model` that are not trained, for the hash."""


@dataclass(frozen=True, slots=True)
class GroupSum:
    """Access of a rank that holds a shard of the model to the other ranks of its group."""

    shard: int
    sum: Callable[[float], float]
    """Returns the sum of one number of each rank, the same on all. Communication thread; all ranks
    call it in the same order."""


class Committed:
    """Weights and optimizer state of one version.

    The communication thread makes all changes, between two updates. The other threads call little:
    the main thread makes the object, separates the model from it, takes the final weights and reads
    `state_dict`; the memory thread calls `prepare`; in a streamed round the data thread calls
    `float_buffers_flat`.
    """

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
        """Take over the model's weights, and rebind the optimizer to them. Main thread.

        Args:
            model: The user's model.
            optimizer: The user's optimizer; it steps parameters of this object from now on.
            gradients: Buffers for the gradients of the trained parameters.
            scheduler: Makes the scheduler; None for none.
            clip_norm: Upper bound on the norm of the averaged gradient; None for no clipping.
            clip_value: Upper bound on the magnitude of its elements; None for no clipping.
        """
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self._model = model
        self._gradients = gradients
        self._layout = gradients.layout
        self._weights: list[torch.Tensor]
        self._views: list[torch.Tensor]
        self._inside: list[tuple[torch.nn.Parameter, torch.Tensor]]
        """Parameters that may lie in the committed weights, and their views there."""
        self._beside: tuple[list[torch.Tensor], list[torch.Tensor]]
        """The other parameters, which are copied, and their views."""
        self._lay_out(self._layout.zeros())
        self._accumulated = gradients.new_sums()  # takes turns with the reduction's scratch
        self._accumulating = False
        self._average_views: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        """Memory in which averages were recently made, with the parameters' shapes on it."""
        self._prepared: set[int] = set()
        """Segments whose average is already made, in the memory of the sum before."""
        self._lent = False
        """True while the main thread computes on the committed weights themselves."""
        self._together = False
        """True while the model lies in the committed weights, lent or taken back."""
        self._extras: list[torch.Tensor] | None = None
        self._frozen_sums: dict[str, tuple[tuple[int, int], int]] = {}
        """Hash of each frozen parameter, with the address and the version counter that it had when
        the hash was computed."""
        # The main thread reads (state_dict) while the communication thread may apply a round.
        self._lock = threading.Lock()
        self._apart = copies(gradients.parameters)
        self.group: GroupSum | None = None
        self.take_model()
        weights = gradients.as_seen(self._views)
        self.binding = OptimizerBinding(optimizer, gradients.parameters, weights, scheduler)

    # ---- model <-> committed, while the main thread is parked -------------------------------

    def take_model(self) -> None:
        """Make the model's present weights the committed ones: the state before version 0."""
        with torch.no_grad():
            for view, parameter in zip(self._views, self._gradients.own, strict=True):
                view.copy_(parameter)
        streams = self._gradients.streams
        streams.follow(streams.mark_gradients())  # the communication thread has another stream

    def copy_to_model(self, *, lend: bool = False) -> None:
        """Give the model the weights of this version, and the extras that `load` brought.

        Called while the main thread is parked, or by the main thread at the end. With `lend` no
        update is expected while the main thread computes. If one comes all the same, the model
        keeps this memory, and the committed weights move to a copy.

        Args:
            lend: True to let the model's parameters lie in the committed weights from now on, where
                they can, so that nothing is copied (D2).
        """
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
        """Allow what was lent to change in place, because the main thread is parked."""
        self._lent = False

    def part_from_model(self) -> None:
        """Give the model memory of its own, which the script may change. Main thread."""
        with self._lock:
            self._part_from_model()

    def _lay_out(self, weights: list[torch.Tensor]) -> None:
        """Use this memory for the committed weights from now on, whatever it holds."""
        self._weights, self._views = weights, self._layout.views(weights)
        pairs = list(zip(self._gradients.parameters, self._views, strict=True))
        self._inside = [(p, v) for p, v in pairs if _can_lie_in(p, v)]
        beside = [i for i, pair in enumerate(pairs) if not _can_lie_in(*pair)]
        self._beside = [self._gradients.own[i] for i in beside], [self._views[i] for i in beside]

    def _put_model_in(self) -> None:
        for parameter, view in self._inside:
            if parameter.data_ptr() != view.data_ptr():
                parameter.data = view
        # Updates bypass these parameters. Count a write, so that autograd refuses a kept graph.
        torch.autograd.graph.increment_version([parameter for parameter, _ in self._inside])
        self._lent = self._together = bool(self._inside)

    def _part_from_model(self) -> None:
        if self._together:
            for parameter, view in self._inside:
                if parameter.data_ptr() == view.data_ptr():
                    parameter.data = parameter.data.clone()
        self._lent = self._together = False

    def _leave_to_model(self) -> None:
        """Move the weights to a copy before a change if the main thread may compute on them."""
        if self._lent:
            left = self._weights
            self._lay_out([flat.clone() for flat in left])
            self.binding.move_to(self._gradients.as_seen(self._views))
            self._lent = self._together = False

    # ---- one round --------------------------------------------------------------------------

    def prepare(self, segment: int, divisor: float) -> None:
        """Make the average of a segment while others are still being summed. Memory thread.

        For a round that steps and starts a new sum. Nothing is updated (R21). The average goes
        where the sum before lies. All members are in this round, so no rank can still need that sum
        (R7).

        Args:
            segment: Index of a segment that is summed.
            divisor: Divisor of the sum.
        """
        torch.div(self._gradients.result[segment], divisor, out=self._accumulated[segment])
        self._prepared.add(segment)

    def accumulate(self, results: list[torch.Tensor], *, first: bool) -> None:
        """Add the result of a whole reduction (R21).

        Args:
            results: The reduced sums, one flat tensor per segment. If this is the scratch of the
                reduction and `first` is set, it is taken over, and the memory of the sum before
                becomes the scratch.
            first: True after a step of the optimizer: the sum starts anew.
        """
        if first and results is self._gradients.result:
            # The sum stays where it was made; the memory of the one before is the next scratch.
            self._gradients.result, self._accumulated = self._accumulated, results
        else:
            assert not self._prepared, "an average was made of what is not this sum"
            (torch._foreach_copy_ if first else torch._foreach_add_)(self._accumulated, results)
        self._accumulating = True

    def forget_prepared(self) -> None:
        """Drop the averages of `prepare`, because their round has failed or was void."""
        self._prepared.clear()

    def last_result(self) -> list[memoryview]:
        """Return the bytes of a copy of the sum, for a rank that is behind (R7)."""
        with self._gradients.streams.settled():
            return [bytes_of(as_tensor(flat)) for flat in self._accumulated]

    def install_result(self, data: Sequence[Bytes]) -> None:
        """Replace the sum by that of another rank, on a rank that is behind (R7).

        Called instead of `accumulate`; `apply` follows as usual. StateError is raised if the sizes
        differ.

        Args:
            data: The bytes of `last_result`, one buffer per segment.
        """
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
        """Turn this version into the next. Uses the reduction's scratch.

        With `step` the average is accumulated / divisor, clipped, and the optimizer makes one step.
        Then the scheduler is stepped. ChangedLaterError is raised if the user has changed the
        optimizer.

        Args:
            divisor: Divisor of the accumulated sum.
            step: True if the optimizer steps in this round.
            scheduler_steps: Number of steps of the scheduler.
            look: Called with the average before it is clipped, one flat tensor per segment.
        """
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
        """Return the sum of squares of the averaged gradient, for clipping.

        In a group it covers all shards, and one of the copies of a parameter that all ranks hold
        alike (R54).

        Args:
            average: The averaged gradient of this rank, one flat tensor per segment.

        Returns:
            The sum, with the same bits on all ranks of the group.
        """
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
            # On a device two passes with few kernels are faster than one with a kernel per segment.
            torch._foreach_copy_(targets, sums)
            if divisor != 1.0:
                torch._foreach_div_(targets, divisor)
        else:
            for target, accumulated in zip(targets, sums, strict=True):
                torch.div(accumulated, divisor, out=target)
        self._prepared.clear()
        return average

    def _views_of(self, average: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters' shapes on the memory of an average.

        Sums and averages take turns with two sets of memory, so the views of two are kept.

        Returns:
            One view for each parameter.
        """
        for known, views in self._average_views:
            if known is average:
                return views
        views = self._layout.views(average)
        self._average_views = [*self._average_views[-1:], (average, views)]
        return views

    # ---- hashes and reports -----------------------------------------------------------------

    def hash(self) -> int:
        """Return a hash of the whole model without its buffers.

        Ranks compare it now and then (I5, R23).

        Returns:
            A number of 32 bits.
        """
        with self._gradients.streams.settled():
            return hash_of_model(self._weights, self._hashes_of_frozen())

    def hashes_of_copies(self) -> tuple[tuple[str, int], ...]:
        """Return the hashes of the parameters that all ranks of a group hold alike.

        Returns:
            Names and hashes; empty if no parameter is sharded.
        """
        if not self._apart:
            return ()
        with self._gradients.streams.settled():
            return tuple(
                (self._layout.slots[index].name, hash_of([self._views[index]]))
                for index in sorted(self._apart)
            )

    def _hashes_of_frozen(self) -> list[int]:
        """Return the hashes of the parameters that are not trained.

        They may be most of the model, so each is read again only after it was written.

        Returns:
            One hash for each of them, in the model's order.
        """
        frozen = self._frozen()
        if self._extras is not None:  # not copied into the model yet
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
        """Return a hash of weights, optimizer and scheduler, without the model's extras."""
        digest = blake2b(digest_size=16)
        header, buffers = self.snapshot(extras=False)
        digest.update(repr(header).encode())
        for buffer in buffers:
            digest.update(buffer)
        return digest.hexdigest()

    def memory_report(self) -> MemoryReport:
        """Return what the runtime adds to this rank's memory."""
        names = BUFFERS + (RESIDUALS if self._gradients.rounded_away else ())
        return MemoryReport(names, self._layout.numel, self._layout.nbytes)

    def linear(self) -> tuple[bool, str]:
        """Decide whether the update is linear in the gradient (docs/design/rounds.md).

        Returns:
            The answer, and the reason for it.
        """
        if self.clip_norm is not None or self.clip_value is not None:
            return False, "gradient clipping is not linear in the gradient"
        return self.binding.linear()

    # ---- state for joiners, checkpoints and the user ----------------------------------------

    def snapshot(self, *, extras: bool = True) -> tuple[dict[str, Json], list[memoryview]]:
        """Copy everything that makes this version, for a joiner.

        torch makes the copies, without holding the interpreter lock.

        Args:
            extras: True to include the model's tensors that no optimizer owns (frozen parameters,
                buffers).

        Returns:
            A JSON header, and the byte buffers that it refers to.
        """
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
        """Copy everything that makes this version to the host, for a checkpoint (D15).

        Unlike `snapshot` it is made by parameter, so that it can be loaded into other segments.
        Weights and the model's extras are stored by name.

        Returns:
            A copy that nothing else refers to.
        """
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
        """Return the header of everything but weights and extras."""
        return {
            "banked": encoder.encode(list(accumulated) if self._accumulating else [], "banked"),
            "groups": encoder.encode(self.binding.hyperparameters(), "param_groups"),
            "optimizer": encoder.encode(self._optimizer_state(), "the optimizer's state"),
            "scheduler": encoder.encode(self._scheduler_state(), "the scheduler's state"),
        }

    def load(self, header: dict[str, Json], buffers: Sequence[Bytes]) -> None:
        """Replace this state by one that `snapshot` has made on another rank.

        The model's extras wait for `copy_to_model`, since the main thread may be using them.

        Args:
            header: The header of the snapshot.
            buffers: The byte buffers that the header refers to.

        Raises:
            StateError: The state does not fit this rank's model or optimizer, and was not changed.
        """
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
        """Replace this state by one that `copy` has made, under the same conditions as `load`.

        Args:
            header: The header of the copy.
            model: Parameters and buffers, by name.
            buffers: Tensors that the header refers to.

        Raises:
            StateError: The state does not fit this rank's model or optimizer, and was not changed.
        """
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
        """Return a copy of the optimizer's state in torch's own form. Main thread.

        Returns:
            A dict that `load_state_dict` of the same optimizer takes elsewhere.
        """
        with self._lock, self._gradients.streams.settled():
            copied = copy.deepcopy(self.binding.optimizer.state_dict())
            self._gradients.streams.complete()  # the main thread has another stream
            return copied

    # ---- buffers of the model (D10, R24) ----------------------------------------------------

    def float_buffers_flat(self) -> torch.Tensor:
        """Return a copy of the model's floating-point buffers, such as BatchNorm's statistics.

        Returns:
            One new flat tensor, float32, or float64 if a buffer is; empty without such buffers.
        """
        buffers = list(self._float_buffers())
        device = self._layout.segments[0].device
        if not buffers:
            return torch.zeros(0, device=device)
        wide = torch.float64 if any(b.dtype is torch.float64 for b in buffers) else torch.float32
        return torch.cat([buffer.reshape(-1).to(device, wide) for buffer in buffers])

    def load_float_buffers(self, flat: torch.Tensor) -> None:
        """Load what `float_buffers_flat` returned, while the main thread is parked."""
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
    """Decide whether a model's parameter may be a view of the committed weights.

    On a GPU a copy costs next to nothing, and the parameter's address may be part of a recorded
    graph.

    Returns:
        True for a plain, contiguous parameter on the CPU that has the type of the committed
        weights.
    """
    return (
        parameter.device.type == "cpu"
        and not is_spread(parameter)
        and parameter.dtype is view.dtype
        and parameter.is_contiguous()
    )


def _copy(flats: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for flat, value in zip(flats, values, strict=False):  # nothing may be accumulated
        flat.copy_(value)
