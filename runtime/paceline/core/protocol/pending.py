"""Contributions of one rank, from the batch that made them to the round that applies them.

Two gradient buffers are enough (R22). backward() adds to GRAD. LATE keeps a gradient that has to
wait for a round while the next one is computed: it missed its round, or there is a pipeline (R36).
A fresh gradient is otherwise announced and reduced in place, in GRAD. This module tracks which step
is in which buffer, and returns the operations on the buffers that the driver has to carry out. It
never touches a number of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from msgspec import Struct
from msgspec import field as msgspec_field
from msgspec.structs import replace
from paceline_api.ids import MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import MaxAgePolicy

from paceline.core.protocol.records import Drop, DropReason, LoggedMetric, Share, summed


class BufferName(StrEnum):
    """Name of a gradient buffer."""

    GRAD = "grad"
    """Buffer to which backward() adds."""
    LATE = "held"
    """Buffer of gradients that wait for a round while the next one is computed. Its value is the
    name that old journals use."""


# ---- operations on the buffers, carried out by the driver in the order given ---------------------


class Swap(Struct, frozen=True, tag="swap"):
    """Turn the memory of GRAD into LATE, which is empty.

    The gradient views move to the other memory, which is zero.
    """


class Merge(Struct, frozen=True, tag="merge"):
    """Set LATE to LATE x late_factor + GRAD x grad_factor, and GRAD to zero."""

    late_factor: float = msgspec_field(name="held_factor")
    grad_factor: float


class Scale(Struct, frozen=True, tag="scale"):
    """Multiply a buffer by `factor`."""

    which: BufferName = msgspec_field(name="place")
    factor: float


class Zero(Struct, frozen=True, tag="zero"):
    """Set a buffer to zero."""

    which: BufferName = msgspec_field(name="place")


BufferOp = Swap | Merge | Scale | Zero


class StepGradient(Struct, frozen=True):
    """Gradient of one optimizer step of this rank."""

    seq: int
    """Sequence number of the step on this rank, from 1."""
    version: int
    """Version of the weights on which it was computed."""
    leases: tuple[int, ...]
    """Leases that it works off; empty if the script feeds itself."""
    samples: int
    metrics: tuple[LoggedMetric, ...] = ()


@dataclass(slots=True)
class Buffer:
    """Content of one buffer: the sum of its steps' sample gradients, times discount / unit."""

    steps: list[StepGradient] = field(default_factory=list)
    unit: int = 1
    discount: float = 1.0

    @property
    def samples(self) -> int:
        """Samples of all steps in the buffer."""
        return sum(p.samples for p in self.steps)

    def take_from(self, other: Buffer) -> None:
        """Move all steps of `other` here, together with its unit and discount."""
        self.steps += other.steps
        self.unit, self.discount = other.unit, other.discount
        other.steps = []
        other.discount = 1.0


@dataclass(slots=True)
class Pending:
    """Contributions of this rank that no committed round has applied, and its counts of samples."""

    grad: Buffer = field(default_factory=Buffer)
    late: Buffer = field(default_factory=Buffer)
    seq: int = 0
    """Sequence number of the last step; 0 before the first one."""
    produced: int = 0
    """Samples of all steps that this rank has made."""
    lost: int = 0
    """Samples made here that no log will count, because this rank was left out or benched (R8)."""
    void: bool = False
    """True if the backward pass that is running adds to a sum that was given up. Its step then
    drops all of GRAD."""
    drops: list[Drop] = field(default_factory=list)
    """Drops that were decided here and are not in the log yet."""
    unsaid: tuple[LoggedMetric, ...] = ()
    """User metrics of steps that were applied after no more than COMING, which carries none."""
    unsaid_rounds: int = 0
    """Number of rounds whose metrics are in `unsaid`."""

    def buffer(self, which: BufferName) -> Buffer:
        """Return the bookkeeping of one buffer."""
        return self.grad if which is BufferName.GRAD else self.late

    @property
    def steps(self) -> list[StepGradient]:
        """Steps in both buffers, oldest first."""
        return self.late.steps + self.grad.steps

    @property
    def empty(self) -> bool:
        """Return True if there is nothing to apply and no drop to announce."""
        return not self.steps and not self.drops

    def leases(self) -> set[int]:
        """Return the leases that are worked off and not applied, dropped ones included."""
        return {x for p in self.steps for x in p.leases} | {x for d in self.drops for x in d.leases}

    def add(
        self,
        *,
        version: int,
        leases: tuple[int, ...],
        samples: int,
        unit: int,
        metrics: tuple[LoggedMetric, ...],
    ) -> StepGradient:
        """Record a finished step, whose gradient was added to GRAD.

        Args:
            version: Version of the weights on which it was computed.
            leases: Leases that it works off; empty if the script feeds itself.
            samples: Number of samples in it.
            unit: Unit of all of GRAD, which holds sum(sample gradients) / unit.
            metrics: User metrics of the step.

        Returns:
            The step with its sequence number.
        """
        self.seq += 1
        self.produced += samples
        step = StepGradient(self.seq, version, leases, samples, metrics)
        self.grad.steps.append(step)
        self.grad.unit = unit
        return step

    # ---- dropping -------------------------------------------------------------------------

    def drop(
        self, which: BufferName, reason: DropReason, holds: Callable[[int], bool]
    ) -> list[BufferOp]:
        """Give up all of a buffer.

        Leases that the log still gives to this rank are announced as drops. Other leases were dealt
        again, so their samples only count as lost here (R9, R14). The same holds for all of GRAD if
        `void` is set.

        Args:
            which: Buffer to empty.
            reason: Why its steps are dropped.
            holds: Returns True for a lease that the log gives to this rank.

        Returns:
            Operations on the buffers.
        """
        buffer = self.buffer(which)
        given_up = self.void and which is BufferName.GRAD
        for step in buffer.steps:
            mine = tuple(x for x in step.leases if holds(x))
            if (mine or not step.leases) and not given_up:
                self.drops.append(Drop(reason, step.samples, mine))
            else:
                self.lost += step.samples
        had = bool(buffer.steps)
        buffer.steps, buffer.discount = [], 1.0
        if which is BufferName.GRAD:
            self.void = False
        return [Zero(which)] if had else []

    def drop_revoked(self, holds: Callable[[int], bool], *, grad_in_use: bool) -> list[BufferOp]:
        """Drop what the log no longer gives to this rank; called after each record (R14).

        While backward() adds to GRAD, that buffer is kept until the step ends.

        Args:
            holds: Returns True for a lease that the log gives to this rank.
            grad_in_use: True while a backward pass may add to GRAD.

        Returns:
            Operations on the buffers.
        """
        ops: list[BufferOp] = []
        for which in (BufferName.LATE,) if grad_in_use else (BufferName.LATE, BufferName.GRAD):
            steps = self.buffer(which).steps
            if any(not holds(x) for p in steps for x in p.leases):
                ops += self.drop(which, DropReason.REVOKED, holds)
        if self.drops:
            revoked = [d for d in self.drops if any(not holds(x) for x in d.leases)]
            self.drops = [d for d in self.drops if d not in revoked]
            self.lost += sum(d.samples for d in revoked)
        return ops

    def lose_all(self, *, grad_in_use: bool) -> list[BufferOp]:
        """Give up everything, because this rank was left out and returns as a joiner (R8).

        Args:
            grad_in_use: True while a backward pass may add to GRAD, which is then zeroed when its
                step ends.

        Returns:
            Operations on the buffers.
        """
        ops = self.drop(BufferName.LATE, DropReason.REVOKED, lambda _: False)
        grad_ops = self.drop(BufferName.GRAD, DropReason.REVOKED, lambda _: False)
        # A buffer to which backward() still adds is zeroed when its step ends.
        ops += [] if grad_in_use else grad_ops
        self.void = grad_in_use
        self.lost += sum(d.samples for d in self.drops)
        self.drops = []
        self.unsaid, self.unsaid_rounds = (), 0
        return ops

    # ---- announcing (R11, D4) -------------------------------------------------------------

    def share(
        self,
        member: MemberId,
        *,
        round_: int,
        age: Callable[[int], int],
        settings: RoundSettings,
        with_grad: bool,
        fresh: bool,
        holds: Callable[[int], bool],
    ) -> tuple[Share, list[BufferOp]]:
        """Return what GO may name of this rank: LATE, and GRAD if backward() has ended (R11).

        The owner itself weighs or drops what is too old, and names it as such (D4, I7).

        Args:
            member: This rank.
            round_: The round in question, which is `oldest` of an empty share.
            age: Returns the age of a gradient that was computed on a version (`Log.age`).
            settings: Settings of the round.
            with_grad: True to name GRAD as well.
            fresh: True if the share is fresh in this round.
            holds: Returns True for a lease that the log gives to this rank.

        Returns:
            The share, and operations on the buffers that must come before it is reduced.
        """
        ops: list[BufferOp] = []
        buffers = [BufferName.LATE, BufferName.GRAD] if with_grad else [BufferName.LATE]
        if settings.max_age:
            for which in buffers:
                ops += self._age(which, age, settings, holds)
        filled = [b for b in map(self.buffer, buffers) if b.steps]
        steps = [p for b in filled for p in b.steps]
        units = {b.unit for b in filled}
        kept = sum([b.samples * b.discount for b in filled])
        samples = sum([p.samples for p in steps])
        return Share(
            member=member,
            upto=self.seq if with_grad else max((p.seq for p in steps), default=0),
            count=len(steps),
            oldest=min([p.version for p in steps], default=round_),
            fresh=fresh,
            samples=samples,
            unit=units.pop() if len(units) == 1 else 1,
            discount=kept / samples if samples else 1.0,
            leases=tuple([x for p in steps for x in p.leases]),
            drops=tuple(self.drops),
            metrics=summed(chain(self.unsaid if with_grad else (), *(p.metrics for p in steps))),
        ), ops

    def age_late(
        self,
        age: Callable[[int], int],
        settings: RoundSettings,
        holds: Callable[[int], bool],
    ) -> list[BufferOp]:
        """Weigh or drop LATE if it is too old, before a fresh gradient is merged into it.

        The merged buffer would otherwise be as old as what was in LATE.

        Args:
            age: Returns the age of a gradient that was computed on a version (`Log.age`).
            settings: Settings of the round.
            holds: Returns True for a lease that the log gives to this rank.

        Returns:
            Operations on the buffers.
        """
        return self._age(BufferName.LATE, age, settings, holds) if settings.max_age else []

    def _age(
        self,
        which: BufferName,
        age: Callable[[int], int],
        s: RoundSettings,
        holds: Callable[[int], bool],
    ) -> list[BufferOp]:
        buffer = self.buffer(which)
        if not buffer.steps:
            return []
        over = age(min(p.version for p in buffer.steps)) - s.max_age
        if over <= 0 or s.late is MaxAgePolicy.WAIT:
            return []
        if s.late is MaxAgePolicy.DROP:
            return self.drop(which, DropReason.STALE, holds)
        factor = s.decay_factor**over / buffer.discount
        if factor >= 1.0:
            return []
        buffer.discount *= factor
        return [Scale(which, factor)]

    # ---- a round with this rank in it -----------------------------------------------------

    def contribute(self, upto: int) -> tuple[BufferName | None, list[BufferOp]]:
        """Return the buffer that holds the steps up to a sequence number.

        Args:
            upto: Sequence number that GO names. If it covers both buffers, they are merged.

        Returns:
            The buffer, None if there are no such steps; and operations on the buffers.
        """
        if self.grad.steps and self.grad.steps[-1].seq <= upto:
            if not self.late.steps:
                return BufferName.GRAD, []
            return BufferName.LATE, self.merge()
        return (BufferName.LATE if self.late.steps else None), []

    def merge(self) -> list[BufferOp]:
        """Move the sum of GRAD into LATE; returns the operation on the buffers (R22)."""
        if not self.grad.steps:
            return []
        if not self.late.steps:
            self.late.take_from(self.grad)
            return [Swap()]
        late, grad = self.late, self.grad
        same = late.unit == grad.unit
        op = Merge(1.0, 1.0) if same else Merge(float(late.unit), float(grad.unit))
        total = late.samples * late.discount + grad.samples * grad.discount
        late.discount = total / (late.samples + grad.samples)
        late.unit = late.unit if same else 1
        late.steps += grad.steps
        grad.steps, grad.discount = [], 1.0
        return [op]

    def applied(self, share: Share, *, was_coming: bool = False) -> list[BufferOp]:
        """Forget what a committed round took from this rank.

        Args:
            share: What the round named of this rank.
            was_coming: True if this rank had announced no more than COMING. COMING carries no
                metrics, so those of the batch go with the next ARRIVE.

        Returns:
            Operations on the buffers.
        """
        ops: list[BufferOp] = []
        if was_coming:
            self.unsaid = summed(chain(self.unsaid, *(p.metrics for p in self.steps)))
            self.unsaid_rounds += 1
        elif share.fresh or share.idle:
            self.unsaid, self.unsaid_rounds = (), 0
        for which in (BufferName.LATE, BufferName.GRAD):
            buffer = self.buffer(which)
            if share.count and buffer.steps and buffer.steps[-1].seq <= share.upto:
                buffer.steps, buffer.discount = [], 1.0
                ops.append(Zero(which))
        for drop in share.drops:
            self.drops.remove(drop)
        return ops

    def lift(self) -> None:
        """Raise the versions of all steps by one after a void round, which keeps weights (R32)."""
        for buffer in (self.grad, self.late):
            buffer.steps = [replace(p, version=p.version + 1) for p in buffer.steps]

    def recount(self, counted: int) -> None:
        """Count as lost what neither the log of the group nor this rank has (R8, V17).

        It was applied in a round that the group has abandoned, for example.

        Args:
            counted: Samples of this rank that the log of the group has applied or dropped.
        """
        pending = sum(p.samples for p in self.steps) + sum(d.samples for d in self.drops)
        self.lost = self.produced - counted - pending
