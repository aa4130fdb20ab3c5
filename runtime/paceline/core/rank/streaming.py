"""Speculation on streamed rounds: early announcements, timeouts and backoff (R28, R33, R34).

In a streamed round the reduction begins while backward() still runs. This pays where all ranks are
about as fast, and a failed speculation costs a round. So a rank announces COMING only with nothing
else to announce, and the starter streams only where the announcements came close together. A rank
that keeps the others waiting aborts the round, and then all ranks back off for a while.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from paceline_api.times import NS_PER_S
from paceline_api.types.enums import Overlap

from paceline.core.protocol.arrivals import bench_after_ns
from paceline.core.protocol.records import GivenUp, Go, Share
from paceline.core.protocol.trigger import NEVER
from paceline.core.rank.events import Coming, GiveUp, WakeAt

if TYPE_CHECKING:
    from paceline.core.rank.state import RankState

REMEMBERED: Final = 16
"""Number of recent batches and reductions whose durations are kept."""
LEVEL_MAX: Final = 6
"""Upper bound on the backoff level. After a void round no rank announces COMING for 2 ^ level
rounds, whichever rank aborted it: if another rank is late each time, no single one would ever
back off for long."""
UNSAID_MAX: Final = 32
"""Number of streamed rounds after which this rank must announce with ARRIVE, so that user metrics
are reported."""
PATIENCE_MIN_NS: Final = 20 * 10**6
"""Lower bound on the timeout that follows from the usual time of a batch: 20 ms."""
PATIENCE_SHARE: Final = 1.5
"""Timeout of the own batch after GO, as a multiple of its usual time, or of a reduction's if that
is longer."""
PATIENCE_MAX_NS: Final = 10 * NS_PER_S
"""Upper bound on the timeout: 10 s. It must be below the time after which ranks that wait inside a
segment count as stuck (R35)."""


@dataclass(slots=True)
class Streaming:
    """Speculation of one rank on streamed rounds."""

    segments: int = 1
    """Number of segments of the gradients, in a script those of the last backward pass that said
    COMING. With a single one there is nothing to stream."""
    coming: Coming | None = None
    """Batch in hand, if its first segment is ready."""
    announced: bool = False
    """True if COMING was announced in this round."""
    due_ns: int | None = None
    """Time at which this rank aborts the round under way if its batch is not complete."""
    level: int = 0
    """Backoff level: the next void round raises it, and then COMING is off for 2 ^ level rounds."""
    quiet: int = 0
    """Number of rounds for which this rank still backs off."""
    good: int = 0
    """Number of streamed rounds that succeeded since the level has changed."""
    given_up: dict[GivenUp, int] = field(default_factory=dict)
    """Number of rounds that this rank made void, by reason."""
    joined_ns: int | None = None
    """Time at which this rank joined a round with the batch that is still in hand."""
    batches_ns: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Times from joining a round to the end of the own batch, for the last such batches, aborted or
    not. The duration of the whole round would be wrong: it includes waiting for late ranks, so
    one late rank in each round would make all others patient."""
    transfers_ns: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Durations of the last reductions, without waiting for this rank's own batch."""


def hopes(rank: RankState) -> bool:
    """Return True if this rank may announce COMING now, before backward() has ended (R28)."""
    s, log = rank.stream, rank.log
    return (
        s.coming is not None
        and not s.announced
        and not s.quiet
        and len(log.members) > 1
        and rank.pending.unsaid_rounds < UNSAID_MAX
        and not log.after_void
        and log.settings.overlap is Overlap.AUTO
        and not log.settings.pipeline  # a pipeline hides the whole reduction anyway
        # In partial modes, the steps of a script are not streamed (S17.13).
        and (log.waits_for_everybody or not log.plan.script)
        # If the weights have changed since the batch began, it is late.
        and rank.main_version == log.version
        # GO can name a rank's pending contributions only as a whole.
        and rank.pending.empty
        and not rank.pending.void
        and not rank.draining
        and all(rank.may_apply(x) for x in s.coming.leases)
    )


def share_of_coming(rank: RankState) -> Share:
    """Return the share of the batch in hand, as its ARRIVE will have it (R28)."""
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
        operation=coming.operation,
        where=coming.where,
    )


def is_in_hand(rank: RankState, share: Share) -> bool:
    """Return True if GO names the batch that this rank is computing."""
    coming = rank.stream.coming
    return (
        coming is not None
        and share.upto == rank.pending.seq + 1
        and (share.count, share.leases, share.samples) == (1, coming.leases, coming.samples)
    )


def spread_ns(rank: RankState) -> int:
    """Return how far apart announcements may be in a streamed round; NEVER for no such round."""
    s = rank.stream
    if s.segments < 2 or not s.transfers_ns or rank.log.settings.overlap is Overlap.NEVER:
        return NEVER
    return min(s.transfers_ns) * (s.segments - 1) // s.segments


def began(rank: RankState, *, in_hand: bool) -> None:
    """Start the timeout of the own batch, if this rank joins a round with it (R33).

    Args:
        rank: State of this rank.
        in_hand: True if the batch that GO names is still being computed.
    """
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
    """Record that the batch in hand is complete, and stop its timeout."""
    s = rank.stream
    if s.joined_ns is not None:
        s.batches_ns.append(rank.now_ns - s.joined_ns)
    s.coming = s.due_ns = s.joined_ns = None


def consider_giving_up(rank: RankState) -> None:
    """Abort the round if the own batch is late and the others wait for it (R33)."""
    s = rank.stream
    if s.due_ns is None or s.coming is None:
        return
    if rank.now_ns < s.due_ns:
        rank.emit(WakeAt(s.due_ns))
    else:
        give_up(rank, GivenUp.LATE)


def give_up(rank: RankState, why: GivenUp) -> None:
    """Give up the batch in hand: what a streamed GO may name of it will not come (R31).

    If this rank has not joined a round with the batch, there is nothing to abort. `rounds.join`
    finds out if a GO names it later.

    Args:
        rank: State of this rank.
        why: Why the batch does not come.
    """
    s = rank.stream
    s.coming = None
    if s.due_ns is not None:
        s.due_ns = None
        rank.emit(GiveUp(why))


def voided(rank: RankState, own: GivenUp | None) -> None:
    """Back off after a void round.

    Args:
        rank: State of this rank.
        own: Why this rank aborted the round; None if others did.
    """
    s = rank.stream
    _over(s)
    if own is not None:
        s.given_up[own] = s.given_up.get(own, 0) + 1
    s.level = min(LEVEL_MAX, s.level + 1)
    s.quiet, s.good = 2**s.level, 0


def ended(rank: RankState, go: Go, *, transfer_ns: int) -> None:
    """Record that a round was reduced; enough successes lower the backoff level.

    Args:
        rank: State of this rank.
        go: GO of the round.
        transfer_ns: Duration of the reduction, without waiting for this rank's own batch.
    """
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
