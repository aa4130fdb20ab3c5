"""A rank's own contributions between the batch that made them and the round that applies them.

Two gradient buffers are enough (R22). GRAD is where the backward pass adds; LATE is where a
gradient waits that its round left behind. A fresh gradient is announced and reduced where it
lies, in GRAD. The bookkeeping here says what is in which buffer and which operation the driver
has to carry out; it never touches a number of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from msgspec import Struct
from msgspec import field as msgspec_field
from msgspec.structs import replace
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import MaxAgePolicy

from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.records import Drop, DropReason, LoggedMetric, Share, summed


class BufferName(StrEnum):
    GRAD = "grad"
    """Where the backward pass adds."""
    LATE = "held"
    """Where a gradient waits that its round left behind. Written as in journals of old."""


# ---- operations on the buffers, carried out by the driver in the order given ---------------------


class Swap(Struct, frozen=True, tag="swap"):
    """LATE is empty: GRAD's memory becomes LATE, the views move to the other, which is zero."""


class Merge(Struct, frozen=True, tag="merge"):
    """LATE = LATE x late_factor + GRAD x grad_factor; GRAD is zero."""

    late_factor: float = msgspec_field(name="held_factor")
    grad_factor: float


class Scale(Struct, frozen=True, tag="scale"):
    which: BufferName = msgspec_field(name="place")
    factor: float


class Zero(Struct, frozen=True, tag="zero"):
    which: BufferName = msgspec_field(name="place")


BufferOp = Swap | Merge | Scale | Zero


class StepGradient(Struct, frozen=True):
    """One step's gradient."""

    seq: int
    version: int
    leases: tuple[int, ...]
    samples: int
    metrics: tuple[LoggedMetric, ...] = ()


@dataclass(slots=True)
class Buffer:
    """What one buffer contains: the sum of its steps' sample gradients, times discount / unit."""

    steps: list[StepGradient] = field(default_factory=list)
    unit: int = 1
    discount: float = 1.0

    @property
    def samples(self) -> int:
        return sum(p.samples for p in self.steps)

    def take_from(self, other: Buffer) -> None:
        self.steps += other.steps
        self.unit, self.discount = other.unit, other.discount
        other.steps = []
        other.discount = 1.0


@dataclass(slots=True)
class Pending:
    grad: Buffer = field(default_factory=Buffer)
    late: Buffer = field(default_factory=Buffer)
    seq: int = 0
    """Of the last step; 0 before the first one."""
    produced: int = 0
    """Samples of all steps ever made here."""
    lost: int = 0
    """Samples made here that no log will count: this rank was left out or benched (R8)."""
    void: bool = False
    """The backward pass under way adds to a sum that was given up: its step drops all of GRAD."""
    drops: list[Drop] = field(default_factory=list)
    """Decided here, not yet in the log."""
    unsaid: tuple[LoggedMetric, ...] = ()
    """The user's figures of steps that were applied after no more than COMING."""
    unsaid_rounds: int = 0

    def buffer(self, which: BufferName) -> Buffer:
        return self.grad if which is BufferName.GRAD else self.late

    @property
    def steps(self) -> list[StepGradient]:
        return self.late.steps + self.grad.steps

    @property
    def empty(self) -> bool:
        return not self.steps and not self.drops

    def leases(self) -> set[int]:
        """Leases that are worked off but not applied."""
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
        """A finished step; its gradient was added to what was in GRAD, all of it in `unit`."""
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
        """Give up all of a buffer. Leases that the log still gives to this rank are announced as
        drops; the others were dealt again, so their samples are only lost here (R9, R14)."""
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
        """After a record: what the log no longer gives to this rank is dropped at once (R14).
        While the backward pass adds to GRAD, that buffer waits for the end of the step."""
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
        """This rank was left out and returns as a joiner: it brings nothing (R8)."""
        ops = self.drop(BufferName.LATE, DropReason.REVOKED, lambda _: False)
        grad_ops = self.drop(BufferName.GRAD, DropReason.REVOKED, lambda _: False)
        # What the backward pass is still adding to is zeroed when its step is over.
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
        """What may be named in this round: LATE, and GRAD where nobody is adding to it.

        What is too old is weighed or dropped here, by its owner, and named as such (D4, I7). `age`:
        of what was computed on a version (`Log.age`)."""
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
        """Before a fresh gradient is merged into LATE, which would be as old as what lies there."""
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
        """Where the steps up to `upto` lie, after both buffers were merged if both are named."""
        if self.grad.steps and self.grad.steps[-1].seq <= upto:
            if not self.late.steps:
                return BufferName.GRAD, []
            return BufferName.LATE, self.merge()
        return (BufferName.LATE if self.late.steps else None), []

    def merge(self) -> list[BufferOp]:
        """Right after a commit, or when both are named: GRAD's sum goes into LATE (R22)."""
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
        """The round that named `share` is committed: forget what it took. `was_coming`: it was
        named after COMING, which has no figures; they go with the next ARRIVE."""
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
        """A round has changed no weights: its version and the next are the same (R32)."""
        for buffer in (self.grad, self.late):
            buffer.steps = [replace(p, version=p.version + 1) for p in buffer.steps]

    def recount(self, counted: int) -> None:
        """The log of the group says `counted` of this rank's samples: what neither it nor this
        rank has was lost, be it applied in a round that the group abandoned (R8, V17)."""
        pending = sum(p.samples for p in self.steps) + sum(d.samples for d in self.drops)
        self.lost = self.produced - counted - pending
