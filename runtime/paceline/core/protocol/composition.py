"""Who has what in a round: a GO as the log reads it (R2).

In a large job nearly all shares of a round can be told from the log: one fresh gradient of the
oldest lease that its rank holds, with the next sequence number. GO names these *ordinary* ranks by
one bit each; likewise the *quiet* ones, who are there and have nothing. Only what differs is
listed. So a GO is read with the log that ends before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from msgspec.structs import replace

from paceline.core.protocol.bits import chosen, pack_bits, pack_offsets, unpack_offsets
from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.records import AnnounceKind, DataPlan, Go, Share
from paceline.core.protocol.sampling import leases_per_epoch


class Before(Protocol):
    """What reading needs of the log that ends before the round (`core.protocol.log.Log`)."""

    version: int
    active: tuple[MemberId, ...]
    plan: DataPlan
    resting: frozenset[MemberId]
    done: frozenset[MemberId]
    upto: dict[MemberId, int]
    usual: dict[MemberId, int]

    @property
    def fresh_from(self) -> int: ...

    def held(self, member: MemberId) -> tuple[int, ...]: ...

    def first_leases(self, members: Sequence[MemberId]) -> list[int]: ...


def ordinary_share(log: Before, member: MemberId) -> Share | None:
    """The share that needs no words; None of a rank that holds no lease."""
    leases = log.held(member)[:1] if log.plan.samples else ()
    if log.plan.samples and not leases:
        return None
    samples = _samples(log.plan, leases)[0] if leases else log.usual.get(member, 1)
    return Share(
        member,
        upto=log.upto.get(member, 0) + 1,
        count=1,
        oldest=log.fresh_from,
        fresh=True,
        samples=samples,
        unit=samples,
        leases=leases,
    )


def quiet_share(log: Before, member: MemberId) -> Share:
    """Of a rank that has nothing, and rests or has ended if it did before."""
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
    """What is announced can be told from the log: ordinary, or quiet."""
    if kind in (AnnounceKind.ARRIVE, AnnounceKind.COMING):
        told = ordinary_share(log, share.member)
        if told is not None and share.metrics:
            told = replace(told, metrics=share.metrics)
        return told == share
    return kind is AnnounceKind.IDLE and quiet_share(log, share.member) == share


def pack_usual(
    everybody: Sequence[MemberId], usual: Mapping[MemberId, tuple[AnnounceKind, int]]
) -> tuple[bytes, bytes, bytes]:
    """(ordinary, quiet, times) of the usual ones among `everybody`; a time in us for each."""
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
    """`go` with the ranks of `usual` in it, each with its kind and the time of its arrival."""
    ordinary, quiet, offsets = pack_usual(log.active, usual)
    return replace(go, ordinary=ordinary, quiet=quiet, offsets=offsets)


def read(log: Before, go: Go) -> Composition:
    """Raises ValueError if it names others than are active."""
    ordinary, quiet = chosen(go.ordinary, log.active), chosen(go.quiet, log.active)
    if len(go.offsets) != 2 * (len(ordinary) + len(quiet)):
        raise ValueError(f"{len(go.offsets) // 2} times for {len(ordinary) + len(quiet)} ranks")
    upto = log.upto
    if log.plan.samples:
        leases = log.first_leases(ordinary)
        samples = _samples(log.plan, leases)
    else:
        leases, usual = [], log.usual
        samples = [usual.get(m, 1) for m in ordinary]
    return Composition(
        go=go,
        oldest=log.fresh_from,
        ordinary=ordinary,
        leases=leases,
        samples=samples,
        upto=[upto.get(m, 0) + 1 for m in ordinary],
        quiet=tuple(quiet_share(log, m) for m in quiet),
    )


def _samples(plan: DataPlan, leases: Sequence[int]) -> list[int]:
    """Of each of these leases; only the last one of an epoch can be a smaller one."""
    size, per_epoch = plan.batch * plan.accumulate, leases_per_epoch(plan)
    last = plan.samples - (per_epoch - 1) * size
    if last >= size:
        return [size] * len(leases)
    return [last if x % per_epoch == per_epoch - 1 else size for x in leases]


@dataclass(frozen=True, slots=True)
class Weighing:
    """How the contributions of one round become an update; equal on all ranks (D3)."""

    contributors: tuple[MemberId, ...]
    unit: int
    """Common unit of the contributed buffers, or 1 where each is multiplied by its own (D3)."""
    equal: bool
    """Buffers are summed as they are: mean of means, the bits of the plain reference."""
    samples: int
    first: bool
    """The accumulated sum starts anew with this round."""
    step: bool
    """The optimizer steps."""
    divisor: float
    """Of the accumulated sum, in units of `unit`."""
    scheduler_steps: int
    progress: Fraction
    """That the round adds to the log's."""

    @property
    def residual_unit(self) -> int:
        """In what rounding takes away is counted in this round (D18); 0: it takes nothing along,
        since its sum is not applied."""
        return self.unit if self.samples else 0

    def factor(self, share: Share) -> float:
        """What the contributor of `share` multiplies its buffer with before the reduction."""
        return 1.0 if self.equal else float(share.unit)


@dataclass(frozen=True, slots=True)
class Heard:
    """Who was there when a round began, ordinary and quiet ones first, and when each came."""

    fresh: list[MemberId]
    fresh_us: list[int]
    idle: list[MemberId]
    idle_us: list[int]


@dataclass(slots=True)
class Composition:
    """All shares of a round. It stays true when the log has gone on."""

    go: Go
    oldest: int
    """Version that the gradients of the ordinary ranks were computed on."""
    ordinary: tuple[MemberId, ...]
    leases: list[int]
    """One of each of them; empty where nothing is dealt."""
    samples: list[int]
    """Likewise; the unit of their buffers is the same number."""
    upto: list[int]
    quiet: tuple[Share, ...]
    """Without the time of their arrival."""
    weighing: Weighing | None = field(default=None, init=False)
    """What the log has made of it."""
    _offsets_us: list[int] | None = field(default=None, init=False)
    _shares: tuple[Share, ...] | None = field(default=None, init=False)
    _heard: Heard | None = field(default=None, init=False)
    _asked: tuple[MemberId, Share | None] | None = field(default=None, init=False)
    """The last answer of `share_of`: a rank asks for its own several times."""

    @property
    def listed(self) -> tuple[Share, ...]:
        return self.go.listed

    @property
    def offsets_us(self) -> list[int]:
        """When the ordinary and then the quiet ones came."""
        if self._offsets_us is None:
            self._offsets_us = unpack_offsets(self.go.offsets)
        return self._offsets_us

    @property
    def gradients(self) -> int:
        """Steps of single ranks in the sum."""
        return len(self.ordinary) + sum(s.count for s in self.listed)

    @property
    def contributors(self) -> tuple[MemberId, ...]:
        more = [s.member for s in self.listed if s.count]
        return tuple(sorted([*self.ordinary, *more])) if more else self.ordinary

    @property
    def heard(self) -> Heard:
        """Without those in the middle of a batch."""
        if self._heard is None:
            first, came_us = len(self.ordinary), self.offsets_us
            heard = Heard(
                list(self.ordinary),
                came_us[:first],
                [s.member for s in self.quiet],
                came_us[first:],
            )
            for share in self.go.listed:
                if share.fresh:
                    heard.fresh.append(share.member)
                    heard.fresh_us.append(share.offset_us)
                if share.idle:
                    heard.idle.append(share.member)
                    heard.idle_us.append(share.offset_us)
            self._heard = heard
        return self._heard

    def fresh_at(self, us: int) -> MemberId:
        """Who of the fresh ones came then."""
        for share in self.listed:
            if share.offset_us == us and share.fresh:
                return share.member
        return self.ordinary[self.offsets_us.index(us)]

    def share_of(self, member: MemberId) -> Share | None:
        """What this rank has in the round; None if it is not named."""
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
            unit=samples,
            leases=(self.leases[at],) if self.leases else (),
            offset_us=self.offsets_us[at],
        )

    @property
    def shares(self) -> tuple[Share, ...]:
        """All of them, in rank order, for who has the time to look at each."""
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
