"""Rounds: announce, start, join, commit (R11-R13, R20, R21).

All ranks announce to the starter of the round, in a large job by way of the head of their group.
The starter asks the trigger table and sends GO to all members. Each member then joins the
reduction, contributes what GO names of it, and commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace
from paceline_api.ids import MemberId

from paceline.core.messages import (
    Announce,
    AskState,
    Complain,
    Gathered,
    Start,
    Stopped,
    WeightsHash,
)
from paceline.core.protocol.arrivals import Arrivals
from paceline.core.protocol.bits import chosen, pack_bits, rounded
from paceline.core.protocol.composition import call_share, compact, without_gradients
from paceline.core.protocol.log import LogError
from paceline.core.protocol.pending import BufferName
from paceline.core.protocol.records import (
    AnnounceKind,
    Benched,
    Go,
    Operation,
    Request,
    Share,
    Trigger,
)
from paceline.core.protocol.trigger import NEVER, Decision, decide
from paceline.core.rank import streaming
from paceline.core.rank.events import (
    Apply,
    ChannelFailed,
    DropQueue,
    Hashed,
    Queue,
    Reduce,
    Reduced,
    Voided,
    WakeAt,
)
from paceline.core.rank.gather import Collector, hear_all
from paceline.core.rank.state import NOTHING, Main, RankState

HASHES_MAX: Final = 16
"""Number of versions whose hashes are compared at the same time."""


# ---- announcing: while this rank takes part and no GO is under way -------------------------------


def announce(rank: RankState) -> None:
    """Announce to the starter what is new: PENDING or COMING, or what supersedes it (R11)."""
    if rank.announced:
        return
    kind = _kind(rank)
    if kind is None:
        return
    log = rank.log
    if kind is AnnounceKind.COMING:
        rank.stream.announced = True
        _say(rank, kind, streaming.share_of_coming(rank))
        return
    with_grad = kind in (AnnounceKind.ARRIVE, AnnounceKind.IDLE)
    if with_grad and is_for_later(rank):
        with_grad = False
    operation = rank.operation if kind is AnnounceKind.ARRIVE else None
    if operation is not None and operation.is_call:
        share = call_share(log, rank.me, operation, rank.where)
        share = replace(share, drops=tuple(rank.pending.drops))
    else:
        share, ops = rank.pending.share(
            rank.me,
            round_=log.version,
            age=log.age,
            settings=log.settings,
            with_grad=with_grad,
            fresh=kind is AnnounceKind.ARRIVE,
            holds=rank.holds,
        )
        rank.do(ops)
        if operation is not None:
            share = replace(share, operation=operation, where=rank.where)
    rank.share = _with_standing(rank, share, kind)
    if kind is AnnounceKind.PENDING:
        rank.announced_pending = True
    else:
        rank.announced = True
    _say(rank, kind, rank.share)


def is_for_later(rank: RankState) -> bool:
    """Return True if GRAD belongs to a later round, because a gradient is under way (R37)."""
    return rank.under_way == rank.log.version


def _say(rank: RankState, kind: AnnounceKind, share: Share) -> None:
    log = rank.log
    rank.send(rank.head or rank.starter, Announce(log.id, log.version, kind, share))


def _kind(rank: RankState) -> AnnounceKind | None:
    """Return what this rank may announce now; None for nothing."""
    parked = rank.main in (Main.PARKED, Main.WANT)
    if not rank.is_active:
        ended = rank.follows and rank.main is Main.DONE  # on its way to where the others are (S14)
        ready = ((parked or ended) and not rank.draining) or rank.stops
        return AnnounceKind.READY if ready else None
    if rank.under_way == rank.log.version:
        return AnnounceKind.ARRIVE
    if rank.main is Main.PARKED and rank.waits_for >= rank.log.version:
        return AnnounceKind.ARRIVE
    if rank.main in (Main.WANT, Main.DONE) or (rank.draining and parked):
        return AnnounceKind.IDLE
    if rank.main is Main.REST and (rank.draining or not rank.log.settings.is_synchronous):
        return AnnounceKind.IDLE  # in Full, rounds wait for a rank that evaluates (R13)
    late = rank.pending.late.steps or rank.pending.drops
    if late and not rank.announced_pending and not rank.is_behind:
        return AnnounceKind.PENDING
    return AnnounceKind.COMING if streaming.hopes(rank) else None


def _with_standing(rank: RankState, share: Share, kind: AnnounceKind) -> Share:
    """Return the share with the flags of this rank and the leases that it gives back."""
    if kind not in (AnnounceKind.ARRIVE, AnnounceKind.IDLE):
        standing = rank.me in rank.log.resting, rank.me in rank.log.done
        return replace(share, resting=standing[0], done=standing[1], base=rank.main_version)
    resting = rank.is_resting
    # Leases that an earlier announcement of this round gave back stay so, also after Unrest. A
    # gradient of them could not be named in this round, and no other rank would wait for it.
    returned = rank.share.returned if rank.share is not None else ()
    if resting:
        worked = rank.pending.leases()
        returned = tuple(x for x in rank.log.held(rank.me) if x not in worked)
    elif kind is AnnounceKind.ARRIVE and not returned and not rank.stops:
        return share  # as in nearly all rounds
    return replace(
        share,
        idle=kind is AnnounceKind.IDLE,
        resting=resting,
        done=rank.main is Main.DONE,
        stop=rank.stops,
        returned=returned,
    )


# ---- starting: while this rank takes part and no GO is under way ---------------------------------


def on_announce(rank: RankState, message: Announce | Gathered) -> None:
    """Keep an announcement until this rank looks at it as starter or as head.

    A message for the next round may arrive before this rank has committed the present one. One for
    an earlier round is dropped.

    Args:
        rank: State of this rank.
        message: Announcement of a rank, or the announcements of a group.
    """
    if message.round < rank.log.version:
        return
    rank.words.setdefault(message.round, []).append((rank.now_ns, message))


def pass_on(rank: RankState) -> None:
    """Forward the announcements of a group to the starter, or wake up when it is time to (R41).

    Args:
        rank: State of this rank. It forwards only as the head of its group, and if it is not the
            starter.
    """
    log, grid = rank.log, rank.grid
    if grid is None:
        return
    if rank.starter == rank.me or rank.head != rank.me:
        return
    number = grid.number[rank.me]
    if rank.collector is None:
        rank.collector = Collector(log, number, grid.groups[number])
    for at_ns, word in rank.words.pop(log.version, ()):
        if isinstance(word, Announce):
            rank.collector.hear(at_ns, word)
    due_ns = rank.collector.due_ns()
    if due_ns is not None and due_ns <= rank.now_ns:
        rank.send(rank.starter, rank.collector.take(rank.now_ns))
    elif due_ns is not None:
        rank.emit(WakeAt(due_ns))


def consider_start(rank: RankState) -> None:
    """Send GO if the trigger table starts the round; otherwise wake up when it may."""
    log = rank.log
    if rank.arrivals is None and log.version not in rank.words:
        return  # nothing can start the round before the first announcement
    if not log.active or rank.starter != rank.me:
        return
    arrivals = _arrivals(rank)
    if arrivals.differs is not None:
        _fail_for_different_calls(rank, *arrivals.differs)
        return
    if arrivals.done and arrivals.operation is not None and not log.is_synchronous:
        ended = [m for m in arrivals.last if arrivals.has_ended(m)]
        _fail_for_uneven_passes(rank, arrivals.operation, ended)
        return
    go = _next_go(rank, arrivals, streaming.spread_ns(rank))
    if go is None:
        return
    grid, alone = rank.grid, Start(go)
    if grid is None:
        ways: dict[MemberId, tuple[MemberId, ...]] = dict.fromkeys(log.members, ())
        del ways[rank.me]
    else:
        ways = grid.ways(rank.me, log.version)
    for member, onward in ways.items():
        rank.send(member, Start(go, onward) if onward else alone)
    on_go(rank, go)


def _fail_for_different_calls(rank: RankState, one: Share, other: Share) -> None:
    """End the job, because two ranks wait in different operations of their scripts (S3)."""
    if rank.fatal is not None:
        return
    mine, its = one.operation, other.operation
    spots, rule = ("", ""), "make the same calls in the same order"
    if mine is not None and its is not None and str(mine) == str(its) and mine.place != its.place:
        # Without their passes, the two calls would look the same.
        spots = _pass_of(mine), _pass_of(its)
        rule = (
            "go through their data loaders alike. A library that reads on one rank for all of them "
            "(accelerate's dispatch_batches, the default for an IterableDataset) has to read on "
            "each rank"
        )
    rank.fail(
        "CallsDiffer",
        f"{_waits_in(one)}{spots[0]}, and {_waits_in(other)}{spots[1]}: all ranks must {rule}",
    )


def _waits_in(share: Share) -> str:
    if share.operation is None:
        return f"rank {share.member} is in no operation"
    return f"rank {share.member} is in {share.operation} at {share.where}"


def _pass_of(operation: Operation) -> str:
    if operation.place % 2:
        return f" in pass {operation.place // 2 + 1} over its data loader"
    return " in no pass over its data loader"


def _fail_for_uneven_passes(
    rank: RankState, operation: Operation | None, ended: Sequence[MemberId]
) -> None:
    """End the job, because a script makes another step than one that has ended (S17.8)."""
    if rank.fatal is None and operation is not None and not operation.is_call:
        rank.fail(
            "UnevenPasses",
            f"a script waits in {operation}, and that of rank {min(ended)} has ended: in mode "
            f"{rank.log.settings.mode} all ranks must make as many backward passes",
        )


def _next_go(rank: RankState, arrivals: Arrivals, spread_ns: int) -> Go | None:
    """Return the GO of this round; None if it does not start yet."""
    has_request = unwritten(rank) is not None
    decision = decide(arrivals, now_ns=rank.now_ns, has_request=has_request, spread_ns=spread_ns)
    if decision.trigger is None:
        if decision.wake_ns is not None:
            rank.emit(WakeAt(decision.wake_ns))
        return None
    go = _make_go(rank, arrivals, decision)
    if go.streamed and rank.log.stops_with(go):
        # User metrics come with step() only, so those of a streamed last round would be lost.
        return _next_go(rank, arrivals, NEVER)
    return go


def _arrivals(rank: RankState) -> Arrivals:
    """Return all announcements for this round, new ones included."""
    if rank.arrivals is None:
        rank.arrivals = Arrivals(rank.log, rank.opened_ns)
    grid = rank.grid
    for at_ns, word in rank.words.pop(rank.log.version, ()):
        if isinstance(word, Announce):
            rank.arrivals.hear(word.kind, at_ns, word.share)
        elif grid is not None:
            hear_all(rank.arrivals, word, grid.groups[word.group], at_ns)
    return rank.arrivals


def unwritten(rank: RankState) -> Request | None:
    """Return the newest request that no GO has carried yet; None without one (R18)."""
    request = rank.request
    return request if request is not None and request.number > rank.log.request else None


def _make_go(rank: RankState, arrivals: Arrivals, decision: Decision) -> Go:
    """Return the GO for a decision, with all that the log cannot predict."""
    log, named = rank.log, arrivals.named(streamed=decision.streamed)
    first_ns = min((a.at_ns for a in named.values()), default=rank.now_ns)
    benched = []
    for member in decision.benched:
        share = named[member].share if member in named else None
        kept = {*share.leases, *(x for d in share.drops for x in d.leases)} if share else set()
        back = tuple(x for x in log.held(member) if x not in kept)
        benched.append(Benched(member, back))
    listed = []
    operation = arrivals.operation
    # Late gradients go into steps only, and into none of another kind (S17.1, S17.5).
    takes_late = not log.plan.script or (operation is not None and not operation.needs_everybody)
    usual: dict[MemberId, tuple[AnnounceKind, int]] = {}
    for member, (kind, at_ns, share) in named.items():
        offset_us = (at_ns - first_ns) // 1000
        if share is not None and not share.fresh and not takes_late:
            share = without_gradients(log, share)
        if share is None:
            usual[member] = kind, offset_us
        else:
            offset_us = rounded(offset_us)
            listed.append(replace(share, offset_us=offset_us, operation=None, where=""))
    go = Go(
        generation=log.id,
        round=log.version,
        trigger=decision.trigger or Trigger.ALL,
        listed=tuple(listed),
        metrics=arrivals.metrics,
        admitted=tuple(sorted(arrivals.ready)),
        benched=tuple(benched),
        request=unwritten(rank),
        streamed=decision.streamed,
        coming=pack_bits(bytearray(m in arrivals.coming for m in log.active))
        if decision.streamed
        else b"",
        wait_us=(rank.now_ns - first_ns) // 1000,
        round_us=0 if decision.streamed else (rank.now_ns - rank.opened_ns) // 1000,
        before_us=rank.before_ns // 1000 if log.after_streamed else 0,
        operation=arrivals.operation or (arrivals.coming_operation if decision.streamed else None),
    )
    go = compact(log, go, usual)
    every = log.settings.buffers_every
    due = bool(every) and ((log.version + 1) % every == 0 or log.stops_with(go))
    return replace(go, sync=True) if due else go


# ---- joining -------------------------------------------------------------------------------------


def on_start(rank: RankState, start: Start) -> None:
    """Forward GO first, then take it: others wait, and joining the reduction blocks this thread.

    Args:
        rank: State of this rank.
        start: GO, with the members to whom this rank forwards it.
    """
    alone = Start(start.go)
    for member in start.onward:
        rank.send(member, alone)
    on_go(rank, start.go)


def on_go(rank: RankState, go: Go) -> None:
    """Keep a GO until this rank joins its round; GO of a round that is over is dropped."""
    if go.round >= rank.round:
        rank.gos[go.round] = go


def join(rank: RankState) -> None:
    """Join the reduction of this rank's next round if its GO is here."""
    go = rank.gos.get(rank.round)
    if go is None or rank.reducing is not None or not rank.in_rounds or rank.broken:
        return
    share = None if rank.passive else rank.log.read(go).share_of(rank.me)
    if share is not None and share.count and rank.main is Main.DONE and not _has(rank, share):
        # The late gradients here are dropped, because no step was to come (S17.12).
        _fail_for_uneven_passes(rank, go.operation, (rank.me,))
        return
    rank.reducing = go
    reduce = Reduce(go, None, 1.0) if share is None else _part(rank, go, share)
    streaming.began(rank, in_hand=reduce.in_hand)
    if not rank.passive:
        weighing = rank.log.weigh(go)
        alone = go.streamed and weighing.first and weighing.step
        divisor = weighing.divisor if alone else 0.0
        reduce = replace(reduce, divisor=divisor, unit=weighing.residual_unit)
    rank.emit(reduce)


def _part(rank: RankState, go: Go, share: Share) -> Reduce:
    """Return the reduction with what this rank contributes; LogError if it lacks what GO names."""
    if not share.count:
        return Reduce(go, None, 1.0)
    factor = rank.log.weigh(go).factor(share)
    is_call = go.operation is not None and go.operation.is_call
    if go.streamed and rank.stream.announced:
        if streaming.is_in_hand(rank, share):
            return Reduce(go, BufferName.GRAD, factor, in_hand=True)
        if not _has(rank, share):
            return Reduce(go, None, 1.0, gives_up=True)
    if not is_call and not _has(rank, share):
        have = tuple(x for p in rank.pending.steps for x in p.leases)
        raise LogError(f"GO {rank.round} names {share} of {rank.me}, which has {have} pending")
    if is_call:
        return Reduce(go, BufferName.GRAD, factor)
    source, ops = rank.pending.contribute(share.upto)
    rank.do(ops)
    return Reduce(go, source, factor)


def _has(rank: RankState, share: Share) -> bool:
    """Return True if exactly the steps that GO names are pending here."""
    mine = [p for p in rank.pending.steps if p.seq <= share.upto]
    return len(mine) == share.count and share.leases == tuple(x for p in mine for x in p.leases)


def on_reduced(rank: RankState, reduced: Reduced) -> None:
    """Commit the round that was reduced here, or queue its sum as a joiner."""
    go = _taken(rank)
    if go is None:
        return
    streaming.ended(rank, go, transfer_ns=reduced.transfer_ns)
    if rank.passive:
        _queue(rank, go)
    else:
        weighing = rank.log.weigh(go)
        after_commit(rank, go)
        rank.emit(Apply(go, weighing, hash=_is_hash_due(rank, go)))


def _is_hash_due(rank: RankState, go: Go) -> bool:
    """Return True if this rank reports a hash of its weights with the round just committed.

    A script has the weights of the job only in its steps (S17.11). It changes them in the middle of
    its optimizer's step, may have others while it evaluates, and a rank that leaves, or that has
    not loaded the state of its donor, does not take the averages of further steps.

    Args:
        rank: State of this rank, after the commit.
        go: The round.
    """
    log, every = rank.log, rank.log.settings.hash_every
    if not every:
        return False
    if not log.plan.script:
        return log.version % every == 0
    if go.operation is None or go.operation.is_call or rank.main is not Main.PARKED:
        return False
    waits_in_it = rank.operation is not None and rank.operation.spot == go.operation.spot
    return waits_in_it and log.updates % every == 0


def on_voided(rank: RankState, voided: Voided) -> None:
    """Commit the round as void, as every rank does; a joiner queues the record (R32)."""
    go = _taken(rank)
    if go is None:
        return
    streaming.voided(rank, voided.own)
    if rank.passive:
        rank.queue.append(go.voided())
    else:
        after_commit(rank, go.voided())


def _taken(rank: RankState) -> Go | None:
    """End the round under way and return its GO; None if PREPARE has abandoned the round."""
    go = rank.reducing
    if go is not None:
        rank.reducing = None
        for old in [r for r in rank.gos if r <= go.round]:
            del rank.gos[old]
        rank.round = go.round + 1
    return go


def after_commit(rank: RankState, go: Go) -> None:
    """Append GO to the log, and forget what the round applied of this rank.

    Args:
        rank: State of this rank.
        go: GO of the round, or the void record in its place.
    """
    was_coming = rank.me in chosen(go.coming, rank.log.active)
    rank.log.append(go)
    if go.void:
        _lift(rank)
    else:
        share = rank.log.read(go).share_of(rank.me)
        if share is not None:
            rank.do(rank.pending.applied(share, was_coming=was_coming))
    rank.do(rank.pending.drop_revoked(rank.owns, grad_in_use=rank.main is Main.RUN))
    if rank.main is Main.RUN and any(b.member == rank.me for b in go.benched):
        rank.pending.void = True  # the batch in hand is dropped when it ends (R13)
    if go.admitted and rank.log.plan.script:
        _serve_admitted(rank, go)
    rank.round = rank.log.version
    rank.before_ns, rank.opened_ns = rank.now_ns - rank.opened_ns, rank.now_ns
    rank.announced = rank.announced_pending = False
    rank.share = None
    rank.arrivals = rank.collector = None
    for old in [r for r in rank.words if r < rank.log.version]:
        del rank.words[old]


def _serve_admitted(rank: RankState, go: Go) -> None:
    """Let one rank with the script's state send it to those that GO has made active (S3)."""
    log, has_state = rank.log, set(rank.log.with_state)
    # A script that has ended before the others has an older state than theirs.
    donors = sorted((m in log.done, m) for m in log.active if m in has_state)
    if donors and donors[0][1] == rank.me:
        rank.serve.update(dict.fromkeys(go.admitted, rank.log.version))


def _lift(rank: RankState) -> None:
    """Raise the versions of this rank by one, because a void round changed no weights (R32)."""
    rank.main_version += 1
    if rank.waits_for != NOTHING:
        rank.waits_for += 1
    rank.pending.lift()


def _queue(rank: RankState, go: Go) -> None:
    """Keep the sum until the donor's state is here, at most `queue_max` of them (R15)."""
    rank.queue.append(go)
    rank.emit(Queue(go))
    if len(rank.queue) > rank.queue_max:
        rank.queue.clear()
        rank.queue_max *= 2
        commit = rank.commit
        assert commit is not None
        rank.emit(DropQueue(commit.gen.id))
        rank.send(commit.donor, AskState(commit.gen.id, rank.me, at_least=rank.round))


def on_failed(rank: RankState, event: ChannelFailed) -> None:
    """Mark the data channel as broken, and ask for a new generation if it was not aborted."""
    rank.reducing = rank.stream.due_ns = None
    rank.broken = True
    if not event.aborted and not rank.frozen and rank.commit is not None:
        rank.tell(Complain(rank.gen_id, rank.me, rank.round, event.why, event.lost))


# ---- the same weights everywhere -----------------------------------------------------------------


def on_hashed(rank: RankState, event: Hashed) -> None:
    """Send the hash of the weights to the rank that compares hashes."""
    if rank.talks and rank.is_active:
        note = WeightsHash(rank.gen_id, rank.me, event.version, event.value)
        first = rank.grid.first_active(rank.me) if rank.grid is not None else None
        rank.send(rank.log.active[0] if first in (None, rank.me) else first, note)


def on_weights_hash(rank: RankState, note: WeightsHash) -> None:
    """Compare the hashes of one version; a difference ends the job with both (I5, R23)."""
    hashes = rank.hashes.setdefault(note.version, {})
    for member, value in hashes.items():
        if value != note.value:
            text = (
                f"weights of version {note.version} differ: rank {member} has {value:#010x}, "
                f"rank {note.member} has {note.value:#010x}"
            )
            rank.fail("WeightsDiffer", text)
    hashes[note.member] = note.value
    for old in sorted(rank.hashes)[:-HASHES_MAX]:
        del rank.hashes[old]


def report_stop(rank: RankState) -> None:
    """Report once that the stop round is committed; the rank still serves others (R17)."""
    if (
        rank.log.stopped
        and rank.has_state
        and not rank.passive
        and not rank.stop_reported
        and not rank.frozen
        and not rank.needs_part
        and rank.commit is not None
    ):
        rank.stop_reported = True
        rank.tell(Stopped(rank.gen_id, rank.me, rank.log.version))
