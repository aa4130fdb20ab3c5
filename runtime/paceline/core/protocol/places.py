"""Where a script is in its program, and what it may do there while its rank follows (S3, S4, S9).

A script is in one *place* after the other: at a point (even numbers), then in a pass over the
training loader (odd numbers). Its operations are numbered within a place. So `Spot` names the same
operation on all ranks, also on one that started later.

A rank that joins starts its script at the first line, while the others are somewhere else. Until
it has come to where they are, it *follows*: it repeats the calls whose results were kept, goes
through a pass that is over with one batch and by itself, and asks for the state when it comes to
what the job has not completed. The state is loaded at the spot where the donor's was taken, so
nothing is done twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Spot(NamedTuple):
    """The place of an operation in the program of a script, and its number there."""

    place: int
    number: int

    @property
    def is_at_point(self) -> bool:
        """Return True if the operation is between two passes over the loader."""
        return self.place % 2 == 0


BEFORE: Final = Spot(-1, 0)
"""Spot before the first operation."""


class SpotAction(StrEnum):
    """What a script does at a spot."""

    TAKE_PART = "take part"
    """Make the operation, or the pass, with the others."""
    REPEAT = "repeat"
    """Take the result that was kept."""
    SKIP = "skip"
    """Give one batch: the others have finished this pass."""
    ALONE = "alone"
    """Make the operation with this rank alone: the pass is over, and what it computes is replaced
    by the state."""
    LOAD = "load"
    """Load the state that was received, then take part."""
    GO_ON = "go on"
    """Go on from the end of a pass that is over: the others have made operations behind the point
    that follows, so a state comes later."""
    ASK = "ask"
    """Wait until the rank is active and has the state, then decide again."""
    LOST = "lost"
    """The others have gone past this spot, and its result was not kept: the rank cannot join."""


@dataclass(slots=True)
class Path(Generic[T]):
    """The way of one script through its program; `T` is what an operation returns."""

    here: Spot = Spot(0, 0)  # noqa: RUF009 - immutable
    """Operation that the script makes next."""
    follows: bool = False
    """True until the script is where the others are."""
    done: Spot = BEFORE
    """Last operation that the job has completed."""
    kept: dict[Spot, T] = field(default_factory=dict)
    """Results of operations at points."""
    state: Spot | None = None
    """Operation in which the donor waited when it sent its state, or which would have been its next
    one if its script has ended; None before the state has come."""
    is_final: bool = False
    """True if the script of the donor has ended, so that `state` is its last one (S14)."""
    repeats_to: Spot = BEFORE
    """Operation up to which the script repeats kept results though it has the state: those behind
    the last pass, where it has loaded the state of a script that has ended."""
    skips: bool = False
    """True while the script goes through a pass that is over."""

    def operation(self) -> SpotAction:
        """Return what the script does now that it has come to its next operation."""
        if not self.follows:
            if self.here >= self.repeats_to:
                return SpotAction.TAKE_PART
            return SpotAction.REPEAT if self.here in self.kept else SpotAction.LOST
        if self.skips:
            return SpotAction.ALONE
        if self.state == self.here:
            return SpotAction.LOAD
        if self.here in self.kept:
            return SpotAction.REPEAT
        if self.state is not None or self.here <= self.done:
            return SpotAction.LOST
        return SpotAction.ASK

    def begin_pass(self) -> SpotAction:
        """Enter a pass over the loader, and return what the script does there."""
        self.here = Spot(self.here.place + 1, 0)
        return self.in_pass()

    def in_pass(self) -> SpotAction:
        """Return what the script does in the pass that it is in, before it takes a batch."""
        if not self.follows:
            return SpotAction.TAKE_PART
        job = self.done if self.state is None else self.state
        if job.place > self.here.place:
            self.skips = True
            return SpotAction.SKIP
        if self.state is None:
            return SpotAction.ASK
        return SpotAction.LOAD if job.place == self.here.place else SpotAction.LOST

    def end_pass(self) -> None:
        """Leave the pass: the script is at a point again."""
        self.skips = False
        self.here = Spot(self.here.place + 1, 0)

    def behind_pass(self) -> SpotAction:
        """Return what the script does behind a pass that is over and that it has left (S14).

        What it writes behind its last pass has to be the last state. So it asks for the state where
        the job is known to have come no farther than the point that follows.
        """
        if not self.follows:
            return SpotAction.GO_ON
        if self.state is None:
            return SpotAction.GO_ON if self.done.place > self.here.place else SpotAction.ASK
        return (
            SpotAction.LOAD
            if self.is_final and self.state.place == self.here.place
            else SpotAction.GO_ON
        )

    def load(self) -> None:
        """Go on where the donor was: the state is loaded."""
        assert self.state is not None
        self.here, self.state, self.follows = self.state, None, False

    def repeat_from(self, spot: Spot) -> None:
        """Go back to `spot` after the last state was loaded, and repeat what the others did then.

        Args:
            spot: Operation that the script makes next.
        """
        self.repeats_to, self.here = self.here, spot

    def made(self) -> None:
        """Count the operation that the script has made, or repeated."""
        self.here = Spot(self.here.place, self.here.number + 1)

    def completed(self, spot: Spot, result: T, *, keep: bool) -> None:
        """Record an operation that the job has completed.

        Args:
            spot: The operation.
            result: What it returned.
            keep: True if the result is small enough to be kept; results in passes never are.
        """
        self.done = spot
        if keep and spot.is_at_point:
            self.kept[spot] = result


@dataclass(slots=True)
class BufferTurns:
    """Tells a rank that joins whether the next forward pass of each model sends buffers (S5).

    DDP sends buffers, unless the forward pass before was one without gradients or in `no_sync()`.
    So whether a forward pass makes a call depends on what the script has done before. A rank that
    joins gets that from its donor, which waits in an operation and may have made a forward pass
    since it took its batch. There is one value for each model.
    """

    now: tuple[bool, ...] = ()
    """Values where the donor waits: for a rank that loads the state inside of that operation."""
    at_batch: tuple[bool, ...] = ()
    """Values when the script last took a batch: for a rank that begins with it."""
    behind: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    """Place of a pass -> values at its end: for a rank that goes through it with one batch."""
