"""The gradients of one rank, in flat memory that the runtime owns.

Every buffer is a list with one flat tensor per segment (`flat.FlatLayout`).

    GRAD     where backward() adds: each `p.grad` is a view of it, so that announcing copies nothing
    EARLIER  the part of GRAD that was there when the last step() returned: gradients of earlier
             batches of the same contribution, or of steps that no round has taken yet. It is kept
             apart, so that `p.grad` holds only what was added since, as in plain torch. It is made
             when a step() first returns with something left in GRAD
    LATE     a gradient that is announced, or waits to be, until its round is committed (R7, R22).
             It is made when a gradient first has to wait while the next one is computed
    result   scratch of the reduction, at least float32. It lies in memory of the transport, if that
             has memory that it sums without a copy. An abandoned reduction may still write to it
             (docs/design/data-channel.md)
    residual what rounding took away here in the last committed round, if sums travel as bfloat16;
             the next round adds it (D18)

Whatever reads GRAD adds EARLIER to it. A gradient changes its buffer by repointing the views
(`swap`), and the two buffers are merged right after a commit.

GRAD belongs to the main thread while it computes. Everything else, and GRAD while the main thread
is parked, belongs to the communication thread. During a streamed round the memory thread reads the
segments of GRAD that were handed over and fills `result`, and the data thread sums `result`. The
data thread may also set GRAD to zero while the optimizer steps (`Reducer.beside`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from paceline_api.types.enums import Wire
from torch.utils.hooks import RemovableHandle

from paceline.core.protocol.pending import BufferName, BufferOp, Merge, Scale, Swap, Zero
from paceline.errors import UnsupportedError
from paceline.worker.state.flags import Flags
from paceline.worker.state.flat import FlatLayout, Zeros, plain_zeros
from paceline.worker.state.optimizer_binding import sum_of_squares
from paceline.worker.state.shards import is_spread, own_gradient, own_part
from paceline.worker.state.streams import DeviceStreams


def _graph_kept() -> UnsupportedError:
    # With create_graph autograd puts a new tensor into p.grad. If p.grad was the view, the tensor
    # includes what the view held; if it was None, it does not. The two cases cannot be told apart,
    # and adding the tensor to GRAD in the first one would count GRAD's contents twice.
    return UnsupportedError(
        "backward(create_graph=True) is not supported: it replaces p.grad, where gradients are "
        "added that this rank has announced or will announce",
        hint="take the gradients of a penalty with torch.autograd.grad(..., create_graph=True), "
        "which leaves p.grad alone, and end with a plain loss.backward()",
    )


@dataclass(slots=True)
class GradientMemory:
    """The buffers of one rank, for a process that plays several ranks (`paceline replay`)."""

    flats: dict[BufferName, list[torch.Tensor]]
    views: dict[BufferName, list[torch.Tensor]]
    earlier: list[torch.Tensor] | None = None
    has_earlier: bool = False
    occupied: bool = False
    unit: int = 0


class Gradients:
    """Gradients of the given parameters, in this order; the same on every rank (`fingerprint`)."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        segment_bytes: int | None = None,
        *,
        zeros: Zeros = plain_zeros,
        wire: Wire = Wire.FLOAT32,
    ) -> None:
        """Make the buffers, and let every `p.grad` be a view of GRAD. Main thread.

        Args:
            parameters: Names and trained parameters, in the model's order; at least one.
            segment_bytes: Upper bound on a segment, in bytes; None for the default of the device.
            zeros: Makes the memory that is reduced.
            wire: Data type in which float32 sums travel.
        """
        named = list(parameters)
        assert named, "gradients without a parameter"
        self.parameters = tuple(parameter for _, parameter in named)
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.is_conj():  # lazy: conjugated when it is read
                    parameter.data = parameter.data.resolve_conj()
            self.own = tuple(own_part(parameter) for parameter in self.parameters)
        """This rank's part of each parameter: all of it, or a shard."""
        self._spread = [is_spread(parameter) for parameter in self.parameters]
        self.layout = FlatLayout(
            [(name, own) for (name, _), own in zip(named, self.own, strict=True)], segment_bytes
        )
        self.devices = frozenset(segment.device for segment in self.layout.segments)
        self.streams = DeviceStreams(self.devices)
        self.flags = Flags(self.layout.segments, self.streams.devices)
        self._zeros = zeros
        self.result = self.new_sums()
        self.rounded_away = self._new_residuals(wire)
        """Residuals that the round in flight makes: one for each segment, or None where nothing is
        rounded. Empty if sums travel as they are."""
        self._residuals = self._new_residuals(wire)
        self._residual_unit = 1
        """Unit of the sum of the residuals' round, in which they are counted (D3)."""
        self._wire = wire
        self.unit = 0
        """GRAD holds sum(per-sample gradients) / unit; 0 = nothing finished is in GRAD. The
        training layer sets it, and rescales GRAD before a batch of another size is computed
        (D3)."""
        self.copied_in = 0
        """Number of gradients that were made outside the buffers and had to be copied (D3)."""
        self._flats = {BufferName.GRAD: self.layout.gradient_zeros()}
        self._views = {which: self._views_on(flats) for which, flats in self._flats.items()}
        self._earlier: list[torch.Tensor] | None = None
        self._has_earlier = False
        """True if EARLIER holds something; otherwise its contents mean nothing."""
        self._occupied = False
        self._untouched: list[int] = []
        self._members: list[list[int]] = [[] for _ in self.layout.segments]
        """Indices of the parameters of each segment."""
        self._left: list[int] | None = None
        """Number of gradients of each segment that the batch in hand has not added yet; None while
        nothing is watched."""
        self._begun: list[int] = []
        """Result of `written` for each segment before these gradients."""
        self._tell: Callable[[int], None] | None = None
        for index, slot in enumerate(self.layout.slots):
            self._members[slot.segment].append(index)
        self._hooks: list[RemovableHandle] = []
        if len(self.layout.segments) > 1:  # a single one is not streamed (`worker.reduction`)
            self._add_hooks()
        self._know_addresses()
        self.mark_untouched()
        self.attach()
        self.mark_untouched()

    def fingerprint(self) -> str:
        """Return a text that is equal on all ranks that can reduce together."""
        return f"{self.layout.fingerprint()}:{self._wire}"

    @property
    def late_in_use(self) -> bool:
        """Return True if LATE holds a gradient."""
        return self._occupied

    # ---- main thread ------------------------------------------------------------------------

    def attach(self) -> int:
        """Make every `p.grad` a view of GRAD again, with what the script has put there instead.

        As in plain torch, what stands in `p.grad` is the gradient. A tensor that the script has
        assigned replaces what backward() had added, and None counts as zero. If nothing was written
        to GRAD since `mark_untouched`, backward() has made the tensor after `model.zero_grad()`.
        Then it is added to what earlier batches have left in the view.

        Returns:
            The number of gradients that lay outside of GRAD.
        """
        return self._attach(range(len(self.parameters)))

    def _attach(self, indices: Iterable[int]) -> int:
        parameters, views, outside = self.parameters, self._views[BufferName.GRAD], 0
        written: list[bool] | None = None
        for index in indices:
            gradient, view = parameters[index].grad, views[index]
            if gradient is not view or gradient.data_ptr() != self._addresses[index]:
                if written is None:  # once, before this loop writes
                    now = zip(self._versions(), self._untouched, strict=True)
                    written = [version != before for version, before in now]
                outside += gradient is not None
                self._take_in(index, replace=written[self.layout.slots[index].segment])
        return outside

    def erase(self) -> None:
        """Drop what `backward()` has added since `mark_untouched`; EARLIER stays."""
        if self.touched():
            for flat in self._flats[BufferName.GRAD]:
                flat.zero_()
        self._point_all()
        self.mark_untouched()

    def lay_by(self) -> None:
        """Move what is in GRAD to EARLIER, or add it there; every `p.grad` is zero afterwards.

        Called when step() returns to the script and GRAD is not empty.
        """
        grad = self._flats[BufferName.GRAD]
        if self._earlier is None:
            self._earlier = self.layout.gradient_zeros()
        for earlier, flat in zip(self._earlier, grad, strict=True):
            if self._has_earlier:
                earlier.add_(flat)
            else:
                earlier.copy_(flat)
            flat.zero_()
        self._has_earlier = True
        self.mark_untouched()

    def watch(self, tell: Callable[[int], None] | None) -> None:
        """Report each segment of the next backward pass once it is complete.

        Args:
            tell: Called with the segment's index, once, when backward() has added its last
                gradient, on the thread of autograd that did so. None ends the watch.
        """
        self._tell, self._begun = tell, self._versions()
        self._left = None if tell is None else [len(members) for members in self._members]

    def _add_hooks(self) -> None:
        """Add a hook to every parameter. Autograd calls it for each gradient, so it only counts."""
        for segment, members in enumerate(self._members):

            def added(_: torch.Tensor, segment: int = segment) -> None:
                left = self._left
                if left is not None:
                    left[segment] -= 1
                    if left[segment] == 0:
                        self._complete(segment)

            for index in members:
                add = self.parameters[index].register_post_accumulate_grad_hook
                self._hooks.append(add(added))  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Remove hooks and gradients at the end of the job; the parameters are the script's."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def _complete(self, segment: int) -> None:
        """Report a segment whose last gradient was just added."""
        members = self._members[segment]
        if self.written(segment) != self._begun[segment] + len(members):
            self._attach(members)  # some were added twice, or elsewhere
        if self._tell is not None:
            self._tell(segment)

    def _take_in(self, index: int, *, replace: bool) -> None:
        """Bring a `p.grad` that is not the view into the view, by a copy or an addition."""
        parameter, view = self.parameters[index], self._views[BufferName.GRAD][index]
        with torch.no_grad():
            gradient = own_gradient(parameter)
            if gradient is not None and gradient.requires_grad:
                raise _graph_kept()
            if self._spread[index]:  # backward() makes a new DTensor each time
                if gradient is not None:
                    view.add_(gradient)
            else:
                if gradient is view:  # `p.grad.data = ...`: it lies elsewhere now
                    gradient = gradient.detach()
                    view = self._renew_view(index)
                if gradient is not None:
                    dense = gradient.to_dense() if gradient.layout != view.layout else gradient
                    (view.copy_ if replace else view.add_)(dense)
                elif replace:
                    view.zero_()
                self.copied_in += gradient is not None
            self._point(index, view)

    def _renew_view(self, index: int) -> torch.Tensor:
        """Replace a view that the script has moved elsewhere by a new view of GRAD."""
        view = self._views_on(self._flats[BufferName.GRAD])[index]
        self._views[BufferName.GRAD][index] = view
        return view

    def as_seen(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views as the script and its optimizer see them: complex where the parameter is.

        Args:
            views: Views of flat memory, one for each parameter; pairs of reals for a complex one.

        Returns:
            Views of the same memory.
        """
        return [
            torch.view_as_complex(view) if parameter.is_complex() else view
            for view, parameter in zip(views, self.parameters, strict=True)
        ]

    def _views_on(self, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a script finds in `p.grad` for these buffers."""
        return self.as_seen(self.layout.views(flats))

    def _point_all(self) -> None:
        for index, view in enumerate(self._views[BufferName.GRAD]):
            if view.data_ptr() != self._addresses[index]:
                view = self._renew_view(index)
            self._point(index, view)

    def _point(self, index: int, view: torch.Tensor) -> None:
        """Let backward() add to `view`, or make a new tensor for a DTensor (`shards`)."""
        self.parameters[index].grad = None if self._spread[index] else view

    def _whole(self, segment: int) -> torch.Tensor:
        """Return a segment of GRAD plus EARLIER; a new tensor if EARLIER holds something."""
        flat = self._flats[BufferName.GRAD][segment]
        if not self._has_earlier or self._earlier is None:
            return flat
        return self._earlier[segment] + flat

    def _segments_of(self, which: BufferName, segments: Iterable[int]) -> Iterator[torch.Tensor]:
        for segment in segments:
            if which is BufferName.GRAD:
                yield self._whole(segment)
            else:
                yield self._flats[which][segment]

    def written(self, segment: int) -> int:
        """Return how often a segment of GRAD was written, EARLIER apart. Any thread.

        Args:
            segment: Index of the segment.

        Returns:
            Autograd's version counter, which grows with every addition.
        """
        return self._flats[BufferName.GRAD][segment]._version  # noqa: SLF001

    def detached(self) -> bool:
        """Return True if the script has removed every gradient (`model.zero_grad()`)."""
        return all(parameter.grad is None for parameter in self.parameters)

    def mark_untouched(self) -> None:
        """Let `touched` look for a backward pass from here on."""
        self._untouched = self._versions()

    def touched(self) -> bool:
        """Return True if a gradient was added since `mark_untouched`, inside GRAD or beside it."""
        if self._untouched != self._versions():
            return True
        views = self._views[BufferName.GRAD]
        return any(
            parameter.grad is not None and parameter.grad is not view
            for parameter, view in zip(self.parameters, views, strict=True)
        )

    def finite(self, which: BufferName, segments: Iterable[int] | None = None) -> bool:
        """Check a buffer for NaN and Inf on the host.

        One pass suffices if the sum is finite, since then all terms are. Otherwise the sum may have
        overflowed, so each element is checked.

        Args:
            which: The buffer.
            segments: Indices of the segments; None for all.

        Returns:
            False if there is a NaN or an Inf.
        """
        asked = range(len(self.layout.segments)) if segments is None else segments
        for flat in self._segments_of(which, asked):
            wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
            if isfinite(flat.sum(dtype=wide).item()) or bool(torch.isfinite(flat).all()):
                continue
            return False
        return True

    def sum_of_squares(self) -> float:
        """Return the sum of squares of GRAD."""
        every = range(len(self.layout.segments))
        return sum_of_squares(list(self._segments_of(BufferName.GRAD, every)))

    def find(self, segments: Iterable[int]) -> None:
        """Queue the check of segments of GRAD that lie on a device, in the current stream.

        The results are in `flags`; segments on the host are left out.

        Args:
            segments: Indices of the segments.
        """
        for segment in segments:
            if segment in self.flags:
                self.flags.find(segment, self._whole(segment))

    # ---- communication thread, while the main thread is parked ------------------------------

    def swap(self) -> None:
        """Let the contents of GRAD become LATE, which must be empty; the new GRAD is zero."""
        assert not self._occupied, "LATE is in use: merge instead"
        flats, views = self._flats, self._views
        if self._has_earlier and self._earlier is not None:
            torch._foreach_add_(flats[BufferName.GRAD], self._earlier)
            self._has_earlier = False
        if BufferName.LATE not in flats:
            flats[BufferName.LATE] = self.layout.gradient_zeros()
            views[BufferName.LATE] = self._views_on(flats[BufferName.LATE])
        for held in (flats, views):
            held[BufferName.GRAD], held[BufferName.LATE] = (
                held[BufferName.LATE],
                held[BufferName.GRAD],
            )
        self._know_addresses()
        self._point_all()
        self.unit = 0
        self._occupied = True
        self.mark_untouched()

    def merge(self, late_factor: float, grad_factor: float) -> None:
        """Set LATE = LATE x late_factor + GRAD x grad_factor, and GRAD = 0."""
        assert self._occupied, "nothing is in LATE: swap instead"
        self.scale(BufferName.LATE, late_factor)
        for segment, late in enumerate(self._flats[BufferName.LATE]):
            # alpha = 1 adds without multiplying: equal units leave the bits alone (D3).
            late.add_(self._whole(segment), alpha=grad_factor)
        self.zero(BufferName.GRAD)

    def scale(self, which: BufferName, factor: float) -> None:
        """Multiply a buffer in place; a factor of 1.0 touches nothing."""
        if factor != 1.0:
            torch._foreach_mul_(self._flats[which], factor)
            if which is BufferName.GRAD and self._has_earlier and self._earlier is not None:
                torch._foreach_mul_(self._earlier, factor)
        if which is BufferName.GRAD:
            self.mark_untouched()

    def zero(self, which: BufferName) -> None:
        """Empty a buffer."""
        torch._foreach_zero_(self._flats[which])
        if which is BufferName.LATE:
            self._occupied = False
        else:
            self.unit = 0
            self._has_earlier = False
            self.mark_untouched()

    def carry_out(self, op: BufferOp) -> None:
        """Carry out a decision of the protocol about the buffers."""
        match op:
            case Swap():
                self.swap()
            case Merge(late_factor=late, grad_factor=grad):
                self.merge(late, grad)
            case Scale(which=which, factor=factor):
                self.scale(which, factor)
            case Zero(which=which):
                self.zero(which)

    # ---- several ranks in one process --------------------------------------------------------

    def new_memory(self) -> GradientMemory:
        """Return the buffers of a rank that has computed nothing yet."""
        flats = self.layout.gradient_zeros()
        return GradientMemory({BufferName.GRAD: flats}, {BufferName.GRAD: self._views_on(flats)})

    def exchange(self, memory: GradientMemory) -> GradientMemory:
        """Go on with the buffers of another rank, in a process that plays several.

        Args:
            memory: The buffers of that rank.

        Returns:
            The buffers that were in use before.
        """
        before = GradientMemory(
            *(self._flats, self._views, self._earlier, self._has_earlier),
            *(self._occupied, self.unit),
        )
        self._flats, self._views = memory.flats, memory.views
        self._earlier, self._has_earlier = memory.earlier, memory.has_earlier
        self._occupied, self.unit = memory.occupied, memory.unit
        self._know_addresses()
        self._point_all()
        self.mark_untouched()
        return before

    # ---- communication thread or memory thread ----------------------------------------------

    def load_results(
        self,
        source: BufferName | None,
        factor: float = 1.0,
        unit: int = 0,
        *,
        segments: Sequence[int] | None = None,
    ) -> None:
        """Fill the scratch of the reduction with this rank's contribution.

        The communication thread calls this for a round that is not streamed, the memory thread for
        a segment of a streamed one. Where sums travel as bfloat16, the residual is added. Passing
        all segments in one call costs a device the launch of a few kernels only.

        Args:
            source: The buffer to contribute; None for zeros.
            factor: Factor of the contribution.
            unit: Unit of the round's sum, to which the residual is scaled; 0 to leave the residual
                out.
            segments: Indices of the segments to fill; None for all.
        """
        asked = range(len(self.result)) if segments is None else segments
        results = [self.result[segment] for segment in asked]
        if source is None:
            torch._foreach_zero_(results)
        elif source is BufferName.GRAD and self._has_earlier:
            # One at a time: each is the sum of two buffers, in new memory.
            for result, held in zip(results, self._segments_of(source, asked), strict=True):
                result.copy_(held)
        else:
            torch._foreach_copy_(results, list(self._segments_of(source, asked)))
        if source is not None and factor != 1.0:
            torch._foreach_mul_(results, factor)
        for segment, result in zip(asked, results, strict=True):
            if not self.rounded_away:
                break
            away, residual = self.rounded_away[segment], self._residuals[segment]
            if away is not None and residual is not None:
                away.zero_()
                if unit:
                    result.add_(residual, alpha=self._residual_unit / unit)

    def keep_residuals(self, unit: int) -> None:
        """Exchange the residuals after the last loaded round is committed.

        The residual that the round took along is now applied. What the round rounded away is added
        to the next one.

        Args:
            unit: The unit with which the round was loaded; 0 changes nothing.
        """
        if unit:
            self._residuals, self.rounded_away = self.rounded_away, self._residuals
            self._residual_unit = unit

    def forget_residuals(self) -> None:
        """Drop the rounding residuals; called when this rank loads another rank's state."""
        for residual in self._residuals:
            if residual is not None:
                residual.zero_()

    def _new_residuals(self, wire: Wire) -> list[torch.Tensor | None]:
        if wire is Wire.FLOAT32:
            return []
        return [
            flat if flat.dtype is torch.float32 else None  # float64 travels as it is
            for flat in self.layout.zeros()
        ]

    def renew_result(self) -> None:
        """Take fresh scratch, because an abandoned reduction may still write to the old one."""
        self.result = self.new_sums()

    def new_sums(self) -> list[torch.Tensor]:
        """Return memory for one whole reduction."""
        return self.layout.zeros(self._zeros)

    def _know_addresses(self) -> None:
        self._addresses = [view.data_ptr() for view in self._views[BufferName.GRAD]]
        """Addresses of the views of GRAD; a script can move one by `p.grad.data = ...`."""

    def _versions(self) -> list[int]:
        # The version counter that autograd keeps is shared by all views of a flat tensor and grows
        # with each addition in place; a hook per parameter would cost the hot path more.
        return [flat._version for flat in self._flats[BufferName.GRAD]]  # noqa: SLF001
