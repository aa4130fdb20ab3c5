"""Composition of a round: which rank contributes what, as read from GO and the log (R2).

In a large job the log predicts nearly all shares of a round: one fresh gradient of the oldest lease
that the rank holds, with the next sequence number. GO names these *ordinary* ranks by one bit each.
It also names the *quiet* ranks by one bit each: they are idle and have nothing to contribute. Only
shares that differ from this are listed. GO must therefore be read with the log that ends before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from msgspec.structs import replace
from paceline_api.ids import MemberId

from paceline.core.protocol.bits import chosen, pack_bits, pack_offsets, unpack_offsets
from paceline.core.protocol.records import (
    AnnounceKind,
    DataPlan,
    Go,
    Operation,
    Share,
)
from paceline.core.protocol.sampling import leases_per_epoch


class Before(Protocol):
    """The part of the log (`core.protocol.log.Log`) that is needed to read the next GO."""

    version: int
    active: tuple[MemberId, ...]
    plan: DataPlan
    resting: frozenset[MemberId]
    done: frozenset[MemberId]
    upto: dict[MemberId, int]
    usual: dict[MemberId, int]

    @property
    def fresh_from(self) -> int:
        """Oldest version on which a gradient of this round may have been computed to be fresh."""

    def held(self, member: MemberId) -> tuple[int, ...]:
        """Return the leases that `member` holds, in the order in which they were dealt."""

    def first_leases(self, members: Sequence[MemberId]) -> list[int]:
        """Return the oldest lease of each of `members`, in their order; each must hold one."""


def ordinary_share(
    log: Before, member: MemberId, operation: Operation | None = None
) -> Share | None:
    """Return the share that the log predicts for an active rank, or None if it holds no lease.

    Args:
        log: Log that ends before the round.
        member: The rank.
        operation: Operation that it waits in, in the job of a script.
    """
    leases = log.held(member)[:1] if log.plan.samples else ()
    if log.plan.samples and not leases:
        return None
    samples = _samples(log.plan, leases)[0] if leases else _usual(log, member, operation)
    is_call = operation is not None and operation.is_call
    return Share(
        member,
        upto=log.upto.get(member, 0) + (not is_call),
        count=1,
        oldest=log.fresh_from,
        fresh=True,
        samples=samples,
        unit=1 if log.plan.script else samples,
        leases=leases,
    )


def call_share(log: Before, member: MemberId, operation: Operation, where: str) -> Share:
    """Return the share of a rank that waits in a call of its script.

    A call is no gradient: it has no sequence number, and what the rank has pending stays (S17.7).

    Args:
        log: Log that ends before the round.
        member: The rank.
        operation: The call.
        where: File and line of the script.
    """
    share = ordinary_share(log, member, operation)
    assert share is not None
    return replace(share, operation=operation, where=where)


def without_gradients(log: Before, share: Share) -> Share:
    """Return a share that is not fresh, for a round that takes no late gradients.

    Args:
        log: Log that ends before the round.
        share: The share as the rank has announced it.
    """
    upto = log.upto.get(share.member, 0)
    return replace(share, upto=upto, count=0, samples=0, oldest=log.version, unit=1, metrics=())


def quiet_share(log: Before, member: MemberId) -> Share:
    """Return the share of an idle rank that has nothing to contribute and keeps its flags."""
    return Share(
        member,
        upto=log.upto.get(member, 0),
        oldest=log.version,
        idle=True,
        unit=1,
        resting=member in log.resting,
        done=member in log.done,
    )


def is_usual(log: Before, kind: AnnounceKind, share: Share) -> bool:
    """Return True if the log predicts an announcement, so that GO needs one bit for it.

    Args:
        log: Log that ends before the round.
        kind: Kind of the announcement.
        share: What the rank announced. Its metrics may be any, because GO sums them apart, and so
            may its operation, because GO names the one that all ranks wait in.

    Returns:
        True for ARRIVE or COMING with the ordinary share, and for IDLE with the quiet one.
    """
    if kind in (AnnounceKind.ARRIVE, AnnounceKind.COMING):
        expected = ordinary_share(log, share.member, share.operation)
        if expected is not None and (share.metrics or share.operation is not None):
            expected = replace(
                expected, metrics=share.metrics, operation=share.operation, where=share.where
            )
        return expected == share
    return kind is AnnounceKind.IDLE and quiet_share(log, share.member) == share


def pack_usual(
    everybody: Sequence[MemberId], usual: Mapping[MemberId, tuple[AnnounceKind, int]]
) -> tuple[bytes, bytes, bytes]:
    """Encode which of `everybody` are ordinary or quiet, and a time for each of them.

    Args:
        everybody: Ranks for which the bits stand.
        usual: For each ordinary rank (ARRIVE) and each quiet one (IDLE): the kind of its
            announcement, and a time in microseconds.

    Returns:
        Bit set of the ordinary ranks, bit set of the quiet ones, and the encoded times: first those
        of the ordinary ranks, then those of the quiet ones.
    """
    ordinary, quiet = bytearray(len(everybody)), bytearray(len(everybody))
    ordinary_us: list[int] = []
    quiet_us: list[int] = []
    for place, member in enumerate(everybody):
        if member in usual:
            kind, us = usual[member]
            if kind is AnnounceKind.ARRIVE:
                ordinary[place] = 1
                ordinary_us.append(us)
            else:
                quiet[place] = 1
                quiet_us.append(us)
    return pack_bits(ordinary), pack_bits(quiet), pack_offsets(ordinary_us + quiet_us)


def compact(log: Before, go: Go, usual: Mapping[MemberId, tuple[AnnounceKind, int]]) -> Go:
    """Encode the ordinary and quiet ranks into `go`.

    Args:
        log: Log that ends before the round.
        go: GO without these ranks.
        usual: Kind of the announcement of each of these ranks, and its arrival offset in
            microseconds.

    Returns:
        The complete GO.
    """
    ordinary, quiet, offsets = pack_usual(log.active, usual)
    return replace(go, ordinary=ordinary, quiet=quiet, offsets=offsets)


def read(log: Before, go: Go) -> Composition:
    """Decode which rank contributes what in `go`.

    Args:
        log: Log that ends before the round.
        go: GO of the next round.

    Returns:
        The composition of the round.

    Raises:
        ValueError: If the bit sets or times of `go` do not fit the active ranks.
    """
    ordinary, quiet = chosen(go.ordinary, log.active), chosen(go.quiet, log.active)
    if len(go.offsets) != 2 * (len(ordinary) + len(quiet)):
        raise ValueError(f"{len(go.offsets) // 2} times for {len(ordinary) + len(quiet)} ranks")
    upto, is_call = log.upto, go.operation is not None and go.operation.is_call
    if log.plan.samples:
        leases = log.first_leases(ordinary)
        samples = _samples(log.plan, leases)
    else:
        leases = []
        samples = [_usual(log, m, go.operation) for m in ordinary]
    return Composition(
        go=go,
        oldest=log.fresh_from,
        ordinary=ordinary,
        leases=leases,
        samples=samples,
        units=[1] * len(samples) if log.plan.script else samples,
        upto=[upto.get(m, 0) + (not is_call) for m in ordinary],
        quiet=tuple(quiet_share(log, m) for m in quiet),
    )


def _usual(log: Before, member: MemberId, operation: Operation | None) -> int:
    """Return the predicted samples of a step of a script that feeds itself; a call has none."""
    return 0 if operation is not None and operation.is_call else log.usual.get(member, 1)


def _samples(plan: DataPlan, leases: Sequence[int]) -> list[int]:
    """Return the samples of each lease; only the last lease of an epoch can have fewer."""
    size, per_epoch = plan.batch * plan.accumulate, leases_per_epoch(plan)
    last = plan.samples - (per_epoch - 1) * size
    if last >= size:
        return [size] * len(leases)
    return [last if x % per_epoch == per_epoch - 1 else size for x in leases]


@dataclass(frozen=True, slots=True)
class Weighing:
    """How the contributions of one round become an update; equal on all ranks (D3)."""

    contributors: tuple[MemberId, ...]
    """Ranks with something in the sum, in rank order."""
    unit: int
    """Common unit of the contributed buffers. It is 1 if each rank multiplies its buffer by its own
    unit (D3)."""
    equal: bool
    """True if buffers are summed as they are: the mean of means, which has the bits of plain
    training."""
    samples: int
    """Samples in the sum of this round."""
    first: bool
    """True if the accumulated sum starts anew with this round."""
    step: bool
    """True if the optimizer steps in this round."""
    divisor: float
    """Divisor of the accumulated sum, in units of `unit`."""
    scheduler_steps: int
    """Number of times that the scheduler is stepped in this round."""
    progress: Fraction
    """Applied over nominal samples of this round, which is added to `Log.progress`."""

    @property
    def residual_unit(self) -> int:
        """Unit of the rounding residuals of this round (D18).

        It is 0 for a round without samples: its sum is not applied, so residuals are not added to
        it.
        """
        return self.unit if self.samples else 0

    def factor(self, share: Share) -> float:
        """Return the factor that the contributor of `share` multiplies its buffer by."""
        return 1.0 if self.equal else float(share.unit)


@dataclass(frozen=True, slots=True)
class ArrivalTimes:
    """Fresh and idle ranks of a round and their arrival offsets; those named by a bit are first."""

    fresh: list[MemberId]
    fresh_us: list[int]
    idle: list[MemberId]
    idle_us: list[int]


@dataclass(slots=True)
class Composition:
    """All shares of one round. It stays valid when more records are appended to the log."""

    go: Go
    oldest: int
    """Version on which the gradients of the ordinary ranks were computed."""
    ordinary: tuple[MemberId, ...]
    """Ranks with the share that the log predicts, in rank order."""
    leases: list[int]
    """Lease of each ordinary rank; empty if the script feeds itself."""
    samples: list[int]
    """Samples of each ordinary rank."""
    units: list[int]
    """Unit of the buffer of each ordinary rank: its samples, or 1 for an operation of a script."""
    upto: list[int]
    """Sequence number of the contribution of each ordinary rank."""
    quiet: tuple[Share, ...]
    """Shares of the idle ranks with nothing to contribute, without their arrival offsets."""
    weighing: Weighing | None = field(default=None, init=False)
    """The log's weighing of the round; None until `Log.weigh` is called."""
    _offsets_us: list[int] | None = field(default=None, init=False)
    _shares: tuple[Share, ...] | None = field(default=None, init=False)
    _arrivals: ArrivalTimes | None = field(default=None, init=False)
    _asked: tuple[MemberId, Share | None] | None = field(default=None, init=False)
    """Last answer of `share_of`, kept because a rank asks for its own share several times."""

    @property
    def listed(self) -> tuple[Share, ...]:
        """Shares that GO lists because the log does not predict them."""
        return self.go.listed

    @property
    def offsets_us(self) -> list[int]:
        """Arrival offsets of the ordinary ranks, then of the quiet ones, in microseconds."""
        if self._offsets_us is None:
            self._offsets_us = unpack_offsets(self.go.offsets)
        return self._offsets_us

    @property
    def gradients(self) -> int:
        """Number of optimizer steps of single ranks in the sum."""
        return len(self.ordinary) + sum(s.count for s in self.listed)

    @property
    def contributors(self) -> tuple[MemberId, ...]:
        """Ranks with something in the sum, in rank order."""
        more = [s.member for s in self.listed if s.count]
        return tuple(sorted([*self.ordinary, *more])) if more else self.ordinary

    @property
    def arrivals(self) -> ArrivalTimes:
        """Fresh and idle ranks and their arrival offsets; ranks inside a batch are left out."""
        if self._arrivals is None:
            first, came_us = len(self.ordinary), self.offsets_us
            arrivals = ArrivalTimes(
                list(self.ordinary),
                came_us[:first],
                [s.member for s in self.quiet],
                came_us[first:],
            )
            for share in self.go.listed:
                if share.fresh:
                    arrivals.fresh.append(share.member)
                    arrivals.fresh_us.append(share.offset_us)
                if share.idle:
                    arrivals.idle.append(share.member)
                    arrivals.idle_us.append(share.offset_us)
            self._arrivals = arrivals
        return self._arrivals

    def fresh_at(self, us: int) -> MemberId:
        """Return a fresh rank whose arrival offset is `us`, in microseconds."""
        arrivals = self.arrivals
        return arrivals.fresh[arrivals.fresh_us.index(us)]

    def share_of(self, member: MemberId) -> Share | None:
        """Return the share of `member` in the round; None if GO does not name it."""
        if self._asked is None or self._asked[0] != member:
            self._asked = member, self._share_of(member)
        return self._asked[1]

    def _share_of(self, member: MemberId) -> Share | None:
        for share in self.listed:
            if share.member == member:
                return share
        at = bisect_left(self.ordinary, member)
        if self.ordinary[at : at + 1] == (member,):
            return self._ordinary_share(at)
        for at, share in enumerate(self.quiet):
            if share.member == member:
                return replace(share, offset_us=self.offsets_us[len(self.ordinary) + at])
        return None

    def _ordinary_share(self, at: int) -> Share:
        samples = self.samples[at]
        return Share(
            self.ordinary[at],
            upto=self.upto[at],
            count=1,
            oldest=self.oldest,
            fresh=True,
            samples=samples,
            unit=self.units[at],
            leases=(self.leases[at],) if self.leases else (),
            offset_us=self.offsets_us[at],
        )

    @property
    def shares(self) -> tuple[Share, ...]:
        """All shares in rank order. It costs O(P): use `share_of` or `ordinary` in every round."""
        if self._shares is None:
            first = len(self.ordinary)
            usual = [self._ordinary_share(at) for at in range(first)]
            usual += [
                replace(share, offset_us=us)
                for share, us in zip(self.quiet, self.offsets_us[first:], strict=True)
            ]
            by_rank = sorted([*usual, *self.listed], key=lambda share: share.member)
            self._shares = tuple(by_rank) if usual else self.listed
        return self._shares
