"""The gradients of one rank, in flat memory that the runtime owns.

Shape legend: every buffer is one flat tensor per data type and device (`flat.Layout`).

    GRAD     where backward() adds: each `p.grad` is a view of it, so that announcing copies nothing
    HELD     what is announced, or waits to be, until its round is committed (R7, R22)
    result   scratch of the reduction; an abandoned reduction may still write to it
             (docs/design/data-channel.md)

A gradient changes its place by repointing the views (`swap`), and the two places are merged right
after a commit. GRAD belongs to the main thread while it computes; everything else, and GRAD while
the main thread is parked, belongs to the communication thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from paceline.core.protocol.pending import BufferOp, Merge, Place, Scale, Swap, Zero
from paceline.worker.state.flat import Layout
from paceline.worker.state.streams import Streams


@dataclass(slots=True)
class Memory:
    """What one rank has in its buffers, for a process that plays several (`paceline replay`)."""

    flats: dict[Place, list[torch.Tensor]]
    views: dict[Place, list[torch.Tensor]]
    occupied: bool = False
    unit: int = 0


class GradientBuckets:
    """Gradients of the given parameters, in this order; the same on every rank (`fingerprint`)."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        named = list(parameters)
        assert named, "buckets without a parameter"
        self.layout = Layout(named)
        self.parameters = tuple(parameter for _, parameter in named)
        self.streams = Streams(kind.device for kind in self.layout.kinds)
        self.result = self.layout.zeros()
        self.unit = 0
        """GRAD holds sum(per-sample gradients) / unit; 0 = nothing finished is in GRAD. Kept by the
        training layer, which rescales GRAD before a batch of another size is computed (D3)."""
        self.copied_in = 0
        """Gradients that arrived outside the buffers and had to be copied (D3)."""
        self._flats = {place: self.layout.zeros() for place in Place}
        self._views = {place: self.layout.views(flats) for place, flats in self._flats.items()}
        self._occupied = False
        self._untouched: list[int] = []
        self.attach()
        self.mark_untouched()

    def fingerprint(self) -> str:
        return self.layout.fingerprint()

    @property
    def held(self) -> bool:
        """Whether HELD is in use."""
        return self._occupied

    # ---- main thread ------------------------------------------------------------------------

    def attach(self) -> int:
        """Make every `p.grad` a view of GRAD again; returns how many gradients lay outside.

        `model.zero_grad()` detaches the views, and backward() then makes tensors of its own: those
        are added to what GRAD has.
        """
        outside = 0
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._views[Place.GRAD], strict=True):
                gradient = parameter.grad
                if gradient is view:
                    continue
                if gradient is not None:
                    view.add_(gradient)
                    outside += 1
                parameter.grad = view
        self.copied_in += outside
        return outside

    def detached(self) -> bool:
        """True if the user's code has removed every gradient (`model.zero_grad()`)."""
        return all(parameter.grad is None for parameter in self.parameters)

    def mark_untouched(self) -> None:
        """From here on `touched` looks for a backward pass."""
        self._untouched = self._versions()

    def touched(self) -> bool:
        """True if a gradient has been added since `mark_untouched`, inside GRAD or beside it."""
        if self._untouched != self._versions():
            return True
        views = self._views[Place.GRAD]
        return any(
            parameter.grad is not None and parameter.grad is not view
            for parameter, view in zip(self.parameters, views, strict=True)
        )

    def finite(self, place: Place) -> bool:
        """False if there is a NaN or an Inf. One pass: a finite sum has finite terms only; a sum
        that is not finite may have overflowed, so then each element is looked at."""
        for flat in self._flats[place]:
            if not flat.is_floating_point():
                continue
            wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
            if not bool(torch.isfinite(flat.sum(dtype=wide))) and not bool(
                torch.isfinite(flat).all()
            ):
                return False
        return True

    # ---- communication thread, while the main thread is parked ------------------------------

    def swap(self) -> None:
        """What GRAD has becomes HELD; the new GRAD is zero. Only when HELD is empty."""
        assert not self._occupied, "HELD is in use: merge instead"
        flats, views = self._flats, self._views
        flats[Place.GRAD], flats[Place.HELD] = flats[Place.HELD], flats[Place.GRAD]
        views[Place.GRAD], views[Place.HELD] = views[Place.HELD], views[Place.GRAD]
        for parameter, view in zip(self.parameters, views[Place.GRAD], strict=True):
            parameter.grad = view
        self._occupied = True
        self.unit = 0
        self.mark_untouched()

    def merge(self, held_factor: float, grad_factor: float) -> None:
        """HELD = HELD x held_factor + GRAD x grad_factor; GRAD is zero afterwards."""
        self.scale(Place.HELD, held_factor)
        for held, grad in zip(self._flats[Place.HELD], self._flats[Place.GRAD], strict=True):
            # alpha = 1 adds without multiplying: equal units leave the bits alone (D3).
            held.add_(grad, alpha=grad_factor)
        self._occupied = True
        self.zero(Place.GRAD)

    def scale(self, place: Place, factor: float) -> None:
        """Multiply in place; 1.0 touches nothing."""
        if factor != 1.0:
            for flat in self._flats[place]:
                flat.mul_(factor)
        if place is Place.GRAD:
            self.mark_untouched()

    def zero(self, place: Place) -> None:
        """Empty this place."""
        for flat in self._flats[place]:
            flat.zero_()
        if place is Place.HELD:
            self._occupied = False
        else:
            self.unit = 0
            self.mark_untouched()

    def carry_out(self, op: BufferOp) -> None:
        """What the protocol has decided about the buffers."""
        match op:
            case Swap():
                self.swap()
            case Merge(held_factor=held, grad_factor=grad):
                self.merge(held, grad)
            case Scale(place=place, factor=factor):
                self.scale(place, factor)
            case Zero(place=place):
                self.zero(place)

    # ---- several ranks in one process --------------------------------------------------------

    def new_memory(self) -> Memory:
        """That of a rank that has computed nothing yet."""
        flats = {place: self.layout.zeros() for place in Place}
        return Memory(flats, {place: self.layout.views(flats[place]) for place in Place})

    def exchange(self, memory: Memory) -> Memory:
        """Go on as the rank that `memory` is of; returns that of the rank before."""
        before = Memory(self._flats, self._views, self._occupied, self.unit)
        self._flats, self._views = memory.flats, memory.views
        self._occupied, self.unit = memory.occupied, memory.unit
        for parameter, view in zip(self.parameters, self._views[Place.GRAD], strict=True):
            parameter.grad = view
        self.mark_untouched()
        return before

    # ---- communication thread ---------------------------------------------------------------

    def load_result(self, place: Place | None, factor: float = 1.0) -> list[torch.Tensor]:
        """Fill the scratch from `place` times `factor`, or with zeros; returns what to reduce."""
        for index, result in enumerate(self.result):
            if place is None:
                result.zero_()
            elif factor == 1.0:
                result.copy_(self._flats[place][index])
            else:
                torch.mul(self._flats[place][index], factor, out=result)
        return self.result

    def renew_result(self) -> None:
        """Take fresh memory: an abandoned reduction may still write to the old one."""
        self.result = self.layout.zeros()

    def _versions(self) -> list[int]:
        # The version counter that autograd keeps is shared by all views of a flat tensor and grows
        # with each addition in place; a hook per parameter would cost the hot path more.
        return [flat._version for flat in self._flats[Place.GRAD]]  # noqa: SLF001
