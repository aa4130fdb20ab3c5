"""Whether a rank hopes for a streamed round, and for how long (R28, R33, R34).

In a streamed round the reduction begins while backward() still runs. It pays where everybody is
about as fast, and a hope that fails costs a round: so a rank says COMING only with nothing else to
say, the starter streams only where the announcements came close together, a rank that keeps the
others waiting gives the round up, and then all are quiet for a while.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from paceline_api.types.enums import Overlap

from paceline.core.protocol.arrivals import bench_after_ns
from paceline.core.protocol.records import GivenUp, Go, Share
from paceline.core.protocol.trigger import NEVER
from paceline.core.rank.events import Coming, GiveUp, WakeAt

if TYPE_CHECKING:
    from paceline.core.rank.state import RankState

REMEMBERED: Final = 16
"""Rounds."""
LEVEL_MAX: Final = 6
"""After a void round nobody says COMING for 2 ^ level rounds, whoever gave it up: if another rank
is late each time, no single one would ever be quiet for long."""
UNSAID_MAX: Final = 32
"""Rounds of which the user's figures wait for the next ARRIVE."""
PATIENCE_MIN_NS: Final = 20 * 10**6
PATIENCE_SHARE: Final = 1.5
"""Of the usual time of a batch of one's own behind GO, or of a reduction if that is longer."""
PATIENCE_MAX_NS: Final = 10 * 10**9
"""Before anybody takes the others, who wait inside a segment, for stuck (R35)."""


@dataclass(slots=True)
class Streaming:
    """What a rank knows of its hopes."""

    segments: int = 1
    """Of the gradients; a single one leaves nothing to stream."""
    coming: Coming | None = None
    """The batch in hand; its first segment is ready."""
    announced: bool = False
    """COMING is out in this round."""
    due_ns: int | None = None
    """The round under way is given up then, if the batch is not through."""
    level: int = 0
    quiet: int = 0
    """Rounds without COMING that are left."""
    good: int = 0
    """Streamed rounds since the level has changed."""
    given_up: dict[GivenUp, int] = field(default_factory=dict)
    """Rounds that this rank made void."""
    joined_ns: int | None = None
    """When this rank joined a round with the batch that is still in hand."""
    batches_ns: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """From joining to the end of the last such batches, given up or not. The whole round would not
    do: it waits for whoever is late, so one late rank in each round would make all of them patient.
    """
    transfers_ns: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """What their reductions took, without waiting for a batch of this rank's own."""


def hopes(rank: RankState) -> bool:
    """Whether this rank may say COMING now."""
    s, log = rank.stream, rank.log
    return (
        s.coming is not None
        and not s.announced
        and not s.quiet
        and len(log.members) > 1
        and rank.pending.unsaid_rounds < UNSAID_MAX
        and not log.after_void
        and log.settings.overlap is Overlap.AUTO
        and not log.settings.pipeline  # the whole reduction is hidden then
        # The weights have not changed since it began: else its batch is late.
        and rank.main_version == log.version
        # A GO may name it whole, or nothing.
        and rank.pending.empty
        and not rank.pending.void
        and not rank.draining
        and all(rank.may_apply(x) for x in s.coming.leases)
    )


def share_of_coming(rank: RankState) -> Share:
    """Of the batch in hand, as it will be announced when it is through (R28)."""
    coming = rank.stream.coming
    assert coming is not None
    return Share(
        rank.me,
        upto=rank.pending.seq + 1,
        count=1,
        oldest=rank.log.version,
        fresh=True,
        samples=coming.samples,
        unit=coming.unit,
        leases=coming.leases,
    )


def is_in_hand(rank: RankState, share: Share) -> bool:
    """What GO names of this rank is the batch that it is computing."""
    coming = rank.stream.coming
    return (
        coming is not None
        and share.upto == rank.pending.seq + 1
        and (share.count, share.leases, share.samples) == (1, coming.leases, coming.samples)
    )


def spread_ns(rank: RankState) -> int:
    """How far apart announcements may be: a segment's transfer is not hidden anyhow (R34)."""
    s = rank.stream
    if s.segments < 2 or not s.transfers_ns or rank.log.settings.overlap is Overlap.NEVER:
        return NEVER
    return min(s.transfers_ns) * (s.segments - 1) // s.segments


def began(rank: RankState, *, in_hand: bool) -> None:
    """This rank joins a round, with its batch still in hand or without."""
    s = rank.stream
    if not in_hand:
        return
    s.joined_ns = rank.now_ns
    patience_ns = min(PATIENCE_MAX_NS, bench_after_ns(rank.log))
    if rank.log.quorum < len(rank.log.active) and s.batches_ns:
        usual_ns = max(sorted(s.batches_ns)[(len(s.batches_ns) - 1) // 2], *s.transfers_ns, 0)
        patience_ns = min(patience_ns, max(PATIENCE_MIN_NS, int(PATIENCE_SHARE * usual_ns)))
    s.due_ns = rank.now_ns + patience_ns


def through(rank: RankState) -> None:
    """The batch in hand is whole."""
    s = rank.stream
    if s.joined_ns is not None:
        s.batches_ns.append(rank.now_ns - s.joined_ns)
    s.coming = s.due_ns = s.joined_ns = None


def consider_giving_up(rank: RankState) -> None:
    """Its patience with its own batch is over: the others wait for it (R33)."""
    s = rank.stream
    if s.due_ns is None or s.coming is None:
        return
    if rank.now_ns < s.due_ns:
        rank.emit(WakeAt(s.due_ns))
    else:
        give_up(rank, GivenUp.LATE)


def give_up(rank: RankState, why: GivenUp) -> None:
    """What a streamed GO may name of it will not come (R31). Before any GO nothing is to be said:
    `rounds.join` finds out."""
    s = rank.stream
    s.coming = None
    if s.due_ns is not None:
        s.due_ns = None
        rank.emit(GiveUp(why))


def voided(rank: RankState, own: GivenUp | None) -> None:
    """The round came to nothing; `own`: why this rank has given it up, if it has."""
    s = rank.stream
    _over(s)
    if own is not None:
        s.given_up[own] = s.given_up.get(own, 0) + 1
    s.level = min(LEVEL_MAX, s.level + 1)
    s.quiet, s.good = 2**s.level, 0


def ended(rank: RankState, go: Go, *, transfer_ns: int) -> None:
    """The round is reduced."""
    s = rank.stream
    _over(s)
    s.transfers_ns.append(transfer_ns)
    if not go.streamed:
        return
    s.good += 1
    if s.level and s.good >= 2**s.level:
        s.level, s.good = s.level - 1, 0


def _over(s: Streaming) -> None:
    s.due_ns, s.announced = None, False
    s.quiet = max(0, s.quiet - 1)
