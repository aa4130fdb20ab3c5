"""A rank's own contributions between the batch that made them and the round that applies them.

Two gradient buffers are enough (R22). GRAD is where the backward pass adds; HELD is where a
gradient waits that its round left behind. A fresh gradient is announced and reduced where it
lies, in GRAD. The bookkeeping here says what is in which buffer and which operation the driver
has to carry out; it never touches a number of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct
from paceline_api.enums import MaxAgePolicy
from paceline_api.rounds import Settings

from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.records import Drop, DropReason, Metric, Share


class Place(StrEnum):
    GRAD = "grad"
    HELD = "held"


# ---- operations on the buffers, carried out by the driver in the order given ---------------------


class Swap(Struct, frozen=True, tag="swap"):
    """HELD is empty: GRAD's memory becomes HELD, the views move to the other, which is zero."""


class Merge(Struct, frozen=True, tag="merge"):
    """HELD = HELD x held_factor + GRAD x grad_factor; GRAD is zero."""

    held_factor: float
    grad_factor: float


class Scale(Struct, frozen=True, tag="scale"):
    place: Place
    factor: float


class Zero(Struct, frozen=True, tag="zero"):
    place: Place


BufferOp = Swap | Merge | Scale | Zero


class Piece(Struct, frozen=True):
    """One step's gradient."""

    seq: int
    version: int
    leases: tuple[int, ...]
    samples: int
    metrics: tuple[Metric, ...] = ()


@dataclass(slots=True)
class Buffer:
    """What one place contains: the sum of its pieces' sample gradients, times discount / unit."""

    pieces: list[Piece] = field(default_factory=list)
    unit: int = 1
    discount: float = 1.0

    @property
    def samples(self) -> int:
        return sum(p.samples for p in self.pieces)

    def take_from(self, other: Buffer) -> None:
        self.pieces += other.pieces
        self.unit, self.discount = other.unit, other.discount
        other.pieces = []
        other.discount = 1.0


@dataclass(slots=True)
class Pending:
    grad: Buffer = field(default_factory=Buffer)
    held: Buffer = field(default_factory=Buffer)
    seq: int = 0
    """Of the last piece; 0 before the first one."""
    produced: int = 0
    """Samples of all pieces ever made here."""
    lost: int = 0
    """Samples made here that no log will count: this rank was left out or benched (R8)."""
    void: bool = False
    """The backward pass under way adds to a sum that was given up: its step drops all of GRAD."""
    drops: list[Drop] = field(default_factory=list)
    """Decided here, not yet in the log."""

    def buffer(self, place: Place) -> Buffer:
        return self.grad if place is Place.GRAD else self.held

    @property
    def pieces(self) -> list[Piece]:
        return self.held.pieces + self.grad.pieces

    @property
    def empty(self) -> bool:
        return not self.pieces and not self.drops

    def leases(self) -> set[int]:
        """Leases that are worked off but not applied."""
        return {x for p in self.pieces for x in p.leases} | {
            x for d in self.drops for x in d.leases
        }

    def add(
        self,
        *,
        version: int,
        leases: tuple[int, ...],
        samples: int,
        unit: int,
        metrics: tuple[Metric, ...],
    ) -> Piece:
        """A finished step; its gradient was added to what GRAD held, all of it in `unit`."""
        self.seq += 1
        self.produced += samples
        piece = Piece(self.seq, version, leases, samples, metrics)
        self.grad.pieces.append(piece)
        self.grad.unit = unit
        return piece

    # ---- dropping -------------------------------------------------------------------------

    def drop(
        self, place: Place, reason: DropReason, holds: Callable[[int], bool]
    ) -> list[BufferOp]:
        """Give up all of a buffer. Leases that the log still gives to this rank are announced as
        drops; the others were dealt again, so their samples are only lost here (R9, R14)."""
        buffer = self.buffer(place)
        given_up = self.void and place is Place.GRAD
        for piece in buffer.pieces:
            mine = tuple(x for x in piece.leases if holds(x))
            if (mine or not piece.leases) and not given_up:
                self.drops.append(Drop(reason, piece.samples, mine))
            else:
                self.lost += piece.samples
        had = bool(buffer.pieces)
        buffer.pieces, buffer.discount = [], 1.0
        if place is Place.GRAD:
            self.void = False
        return [Zero(place)] if had else []

    def drop_revoked(self, holds: Callable[[int], bool], *, grad_in_use: bool) -> list[BufferOp]:
        """After a record: what the log no longer gives to this rank is dropped at once (R14).
        While the backward pass adds to GRAD, that buffer waits for the end of the step."""
        ops: list[BufferOp] = []
        for place in (Place.HELD,) if grad_in_use else (Place.HELD, Place.GRAD):
            pieces = self.buffer(place).pieces
            if any(not holds(x) for p in pieces for x in p.leases):
                ops += self.drop(place, DropReason.REVOKED, holds)
        revoked = [d for d in self.drops if any(not holds(x) for x in d.leases)]
        self.drops = [d for d in self.drops if d not in revoked]
        self.lost += sum(d.samples for d in revoked)
        return ops

    def lose_all(self, *, grad_in_use: bool) -> list[BufferOp]:
        """This rank was left out and returns as a joiner: it brings nothing (R8)."""
        ops = self.drop(Place.HELD, DropReason.REVOKED, lambda _: False)
        grad_ops = self.drop(Place.GRAD, DropReason.REVOKED, lambda _: False)
        # What the backward pass is still adding to is zeroed when its step is over.
        ops += [] if grad_in_use else grad_ops
        self.void = grad_in_use
        self.lost += sum(d.samples for d in self.drops)
        self.drops = []
        return ops

    # ---- announcing (R11, D4) -------------------------------------------------------------

    def share(
        self,
        member: MemberId,
        *,
        round_: int,
        settings: Settings,
        with_grad: bool,
        fresh: bool,
        holds: Callable[[int], bool],
    ) -> tuple[Share, list[BufferOp]]:
        """What may be named in this round: HELD, and GRAD where nobody is adding to it.

        What is too old is weighed or dropped here, by its owner, and named as such (D4, I7)."""
        ops: list[BufferOp] = []
        places = [Place.HELD, Place.GRAD] if with_grad else [Place.HELD]
        if settings.max_age:
            for place in places:
                ops += self._age(place, round_, settings, holds)
        pieces = [p for place in places for p in self.buffer(place).pieces]
        filled = [b for b in (self.buffer(p) for p in places) if b.pieces]
        units = {b.unit for b in filled}
        kept = sum(b.samples * b.discount for b in filled)
        samples = sum(p.samples for p in pieces)
        return Share(
            member=member,
            upto=self.seq if with_grad else max((p.seq for p in pieces), default=0),
            count=len(pieces),
            oldest=min((p.version for p in pieces), default=round_),
            fresh=fresh,
            samples=samples,
            unit=units.pop() if len(units) == 1 else 1,
            discount=kept / samples if samples else 1.0,
            leases=tuple(x for p in pieces for x in p.leases),
            drops=tuple(self.drops),
            metrics=_sum_metrics(pieces),
        ), ops

    def _age(
        self, place: Place, round_: int, s: Settings, holds: Callable[[int], bool]
    ) -> list[BufferOp]:
        buffer = self.buffer(place)
        if not buffer.pieces:
            return []
        over = round_ - min(p.version for p in buffer.pieces) - s.max_age
        if over <= 0 or s.late is MaxAgePolicy.WAIT:
            return []
        if s.late is MaxAgePolicy.DROP:
            return self.drop(place, DropReason.STALE, holds)
        factor = s.decay_factor**over / buffer.discount
        if factor >= 1.0:
            return []
        buffer.discount *= factor
        return [Scale(place, factor)]

    # ---- a round with this rank in it -----------------------------------------------------

    def contribute(self, upto: int) -> tuple[Place | None, list[BufferOp]]:
        """Where the pieces up to `upto` lie, after both buffers were merged if both are named."""
        if self.grad.pieces and self.grad.pieces[-1].seq <= upto:
            if not self.held.pieces:
                return Place.GRAD, []
            return Place.HELD, self.merge()
        return (Place.HELD if self.held.pieces else None), []

    def merge(self) -> list[BufferOp]:
        """Right after a commit, or when both are named: GRAD's sum goes into HELD (R22)."""
        if not self.grad.pieces:
            return []
        if not self.held.pieces:
            self.held.take_from(self.grad)
            return [Swap()]
        held, grad = self.held, self.grad
        same = held.unit == grad.unit
        op = Merge(1.0, 1.0) if same else Merge(float(held.unit), float(grad.unit))
        total = held.samples * held.discount + grad.samples * grad.discount
        held.discount = total / (held.samples + grad.samples)
        held.unit = held.unit if same else 1
        held.pieces += grad.pieces
        grad.pieces, grad.discount = [], 1.0
        return [op]

    def applied(self, share: Share) -> list[BufferOp]:
        """The round that named `share` is committed: forget what it took."""
        ops: list[BufferOp] = []
        for place in (Place.HELD, Place.GRAD):
            buffer = self.buffer(place)
            if share.count and buffer.pieces and buffer.pieces[-1].seq <= share.upto:
                buffer.pieces, buffer.discount = [], 1.0
                ops.append(Zero(place))
        for drop in share.drops:
            self.drops.remove(drop)
        return ops

    def recount(self, counted: int) -> None:
        """The log of the group says `counted` of this rank's samples: what neither it nor this
        rank has was lost, be it applied in a round that the group abandoned (R8, V17)."""
        pending = sum(p.samples for p in self.pieces) + sum(d.samples for d in self.drops)
        self.lost = self.produced - counted - pending


def _sum_metrics(pieces: list[Piece]) -> tuple[Metric, ...]:
    sums: dict[str, tuple[float, float]] = {}
    for piece in pieces:
        for m in piece.metrics:
            total, weight = sums.get(m.name, (0.0, 0.0))
            sums[m.name] = (total + m.total, weight + m.weight)
    return tuple(Metric(name, *sums[name]) for name in sorted(sums))
