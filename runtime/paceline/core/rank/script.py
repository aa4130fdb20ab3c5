"""The user's thread as the protocol sees it: what it announces, and when it may go on.

A fresh gradient waits for its round. A late one waits at most for the reduction in flight. Then the
main thread takes the newest committed weights and goes on from there (a jump), so that a rank that
is always slow delays no other (A1, I9).
"""

from __future__ import annotations

from msgspec.structs import replace

from paceline.core.protocol.pending import BufferName
from paceline.core.protocol.progress import progress_of
from paceline.core.protocol.records import Drop, DropReason, GivenUp, Operation
from paceline.core.protocol.sampling import samples_of
from paceline.core.rank import rounds, streaming
from paceline.core.rank.events import (
    Begin,
    Coming,
    Drain,
    Finish,
    Flush,
    Held,
    Need,
    Rest,
    Resume,
    Skip,
    Step,
    Unrest,
    Want,
)
from paceline.core.rank.state import NOTHING, Main, RankState

ScriptEvent = Begin | Want | Skip | Flush | Need | Rest | Unrest | Finish | Drain


def on_script(rank: RankState, event: ScriptEvent) -> None:
    """Handle a call of the user's script, or an order to drain.

    Args:
        rank: State of this rank.
        event: What the script called. Step and Coming have handlers of their own.
    """
    match event:
        case Begin():
            rank.begun = event
            rank.endpoints = replace(rank.endpoints, data=event.data, shards=event.shards)
            rank.stream.segments = event.segments
            rank.main, rank.waits_for = Main.PARKED, NOTHING
            rank.tell(rank.registration())
        case Want():
            _put_down(rank, Main.WANT)
        case Skip(lease=lease, samples=samples):
            _drop_coming(rank, lease=lease)
            if rank.owns(lease) and lease not in rank.pending.leases():
                rank.pending.drops.append(Drop(DropReason.SKIPPED, samples, (lease,)))
                rank.pending.produced += samples
        case Flush() | Need():
            _put_down(rank, Main.PARKED)
            rank.waits_for, rank.hands_on = NOTHING, False
            rank.needs = isinstance(event, Need)
        case Rest():
            _put_down(rank, Main.REST)
        case Unrest():
            _unrest(rank)
        case Finish(stop=stop, outside=outside):
            rank.outside = outside
            _finish(rank, stop=stop)
            # A script that leaves its loop early drains only its own rank (A4, D7).
            if rank.log.plan.ends and not rank.log.stopped and not stop:
                rank.draining = rank.ended_early = True
        case Drain():
            rank.draining = True


def on_coming(rank: RankState, coming: Coming) -> None:
    """Record that the first segment of the batch in hand is ready, while the script computes."""
    if rank.main is Main.RUN:
        rank.stream.coming = coming
        if coming.operation is not None:
            rank.stream.segments = len(coming.operation.parts)


def _drop_coming(rank: RankState, why: GivenUp = GivenUp.DROPPED, lease: int | None = None) -> None:
    """Record that the batch in hand will never be announced, if it is of this lease.

    A GO that was already sent may name it, so its sequence number is used up (R28).

    Args:
        rank: State of this rank.
        why: Reason if a round is aborted by it.
        lease: Lease of the batch; None for any batch.
    """
    stream = rank.stream
    if stream.coming is None or lease not in (None, *stream.coming.leases):
        return
    if stream.announced:
        rank.pending.seq += 1
    stream.joined_ns = None
    streaming.give_up(rank, why)


def _put_down(rank: RankState, main: Main) -> None:
    """Record that no backward pass runs any more, and drop what waited in GRAD for its end."""
    _drop_coming(rank)
    rank.main = main
    rank.do(rank.pending.drop_revoked(rank.owns, grad_in_use=False))


def _finish(rank: RankState, *, stop: bool) -> None:
    _put_down(rank, Main.DONE)
    rank.stops = stop
    if rank.is_behind:
        rank.fail(
            "UnevenPasses",
            f"the script of rank {rank.me} has ended, and the others have made a backward pass "
            f"without it: in mode {rank.log.settings.mode} all ranks must make as many",
        )
    if stop:
        _say_more(rank)


def _say_more(rank: RankState) -> None:
    """Allow another announcement in this round, if the first one names no gradient (R11, V20)."""
    if rank.share is None or not rank.share.count:
        rank.announced = False


def on_step(rank: RankState, step: Step) -> None:
    """Record the gradient of a step, or drop it if the rank may not announce it."""
    stream = rank.stream
    made = Coming(step.leases, step.samples, step.unit, step.operation, step.where)
    if stream.coming not in (None, made):
        _drop_coming(rank, GivenUp.REWRITTEN)
    rank.main = Main.PARKED
    rank.waits_for = rank.main_version + rank.log.settings.pipeline
    rank.hands_on = bool(rank.log.settings.pipeline)
    rank.operation, rank.where = step.operation, step.where
    rank.facts.steps += 1
    pending = rank.pending
    if step.operation is not None and not _begin_operation(rank, step.operation, step.where):
        streaming.through(rank)
        return
    pending.add(
        version=rank.main_version,
        leases=step.leases,
        samples=step.samples,
        unit=step.unit,
        metrics=step.metrics,
    )
    owned = all(rank.may_apply(x) for p in pending.grad.steps for x in p.leases)
    if pending.void or rank.passive or not rank.is_active or not owned:
        # The rank was benched or left out, and the log deals these leases to others (R13, R8). Or
        # the job gave up one of them while it was computed here (R56).
        streaming.give_up(rank, GivenUp.DROPPED)
        rank.do(pending.drop(BufferName.GRAD, DropReason.REVOKED, rank.may_apply))
        rank.waits_for, rank.hands_on = NOTHING, False
    elif step.foreign:
        streaming.give_up(rank, GivenUp.DROPPED)
        rank.do(pending.drop(BufferName.GRAD, DropReason.FOREIGN, rank.holds))
    elif not step.finite:
        streaming.give_up(rank, GivenUp.NONFINITE)
        rank.do(pending.drop(BufferName.GRAD, DropReason.NONFINITE, rank.holds))
    streaming.through(rank)


def _begin_operation(rank: RankState, operation: Operation, where: str) -> bool:
    """Note that the script waits in an operation.

    A call brings no gradient: what is late stays where it is (S17.7).

    Args:
        rank: State of this rank.
        operation: The operation.
        where: File and line of the script.

    Returns:
        True if the operation brings a gradient.
    """
    log = rank.log
    if rank.is_behind and (operation.is_call or operation.spot != log.step_at):
        place, number = log.step_at or (0, 0)
        rank.fail(
            "UnevenPasses",
            f"rank {rank.me} is in {operation} at {where}, and the others have averaged backward "
            f"pass {number} of pass {place // 2} over the loader without it: in mode "
            f"{log.settings.mode} all ranks must make as many backward passes",
        )
    if operation.is_call:
        if rank.passive or not rank.is_active:
            rank.waits_for, rank.hands_on = NOTHING, False
        return False
    is_unlike, rank.kind = rank.kind not in (None, operation.kind), operation.kind
    if is_unlike:
        # No GO can name it: all ranks say that this operation settles.
        rank.do(rank.pending.drop(BufferName.LATE, DropReason.UNLIKE, rank.holds))
    settles = not log.is_synchronous and (operation.settles or is_unlike)
    rank.operation = replace(operation, settles=settles)
    return True


def drop_at_the_end(rank: RankState) -> None:
    """Drop what is late on a rank of a script that makes no step any more (S17.12)."""
    leaves = rank.draining and rank.main is Main.PARKED and rank.waits_for < rank.log.version
    if not rank.log.plan.script or not (leaves or rank.main is Main.DONE):
        return
    if rank.pending.steps and rank.is_active and not rank.passive:
        for which in (BufferName.LATE, BufferName.GRAD):
            rank.do(rank.pending.drop(which, DropReason.ENDED, rank.holds))


def _unrest(rank: RankState) -> None:
    rank.main = Main.PARKED
    rank.waits_for, rank.hands_on = NOTHING, False
    _say_more(rank)


def wake(rank: RankState, *, between_rounds: bool) -> None:
    """Let the main thread go on if nothing prevents it.

    Args:
        rank: State of this rank.
        between_rounds: True if this rank takes part in rounds and no GO is under way.
    """
    drop_given_up(rank)
    show_leases(rank)
    if between_rounds:
        drop_at_the_end(rank)
    if rank.main not in (Main.PARKED, Main.WANT) or rank.passive:
        return
    if rank.follows and not rank.needs:
        _resume(rank, fresh=False)  # it has begun, and what the others have done can be repeated
    if not rank.has_state:
        return
    if rank.log.stopped and not rank.needs_part:
        _resume(rank, fresh=_was_fresh(rank))
    elif between_rounds and rank.is_active and not rank.draining:
        _wake_active(rank)


def _wake_active(rank: RankState) -> None:
    if rank.main is Main.WANT:
        if rank.usable():
            _resume(rank, fresh=False)
        return
    if waits_for_the_one_before(rank) or _is_named_as_idle(rank):
        return
    pending = rank.pending
    if rank.waits_for >= rank.log.version:  # fresh
        if rank.hands_on and is_free(rank) and not rank.announced:
            _hand_on(rank)
        else:  # its round is not committed yet
            rank.waits_for, rank.hands_on = rank.log.version, False
        return
    fresh = _was_fresh(rank)
    late = rank.log.plan.script > 0 and bool(pending.grad.steps)
    if pending.grad.steps and is_free(rank):
        rank.do(pending.merge())
    rank.facts.jumps += rank.waits_for != NOTHING and not fresh
    _resume(rank, fresh=fresh, late=late)


def waits_for_the_one_before(rank: RankState) -> bool:
    """Return True if a gradient is announced for this round, which is not over (R37)."""
    return rank.under_way == rank.log.version


def _is_named_as_idle(rank: RankState) -> bool:
    """Return True if the last announcement named a gradient while the rank was idle.

    The rank is back from evaluating. Its gradient is where the next batch would be added, and stays
    what it was announced as: of its age, and never fresh.

    Returns:
        True if the main thread has to wait for the round.
    """
    share = rank.share
    return rank.announced and share is not None and share.idle and share.count > 0


def is_free(rank: RankState) -> bool:
    """Return True if LATE can take what is in GRAD: it is empty, or not named in this round."""
    return not (rank.pending.late.steps and rank.announced_pending)


def _hand_on(rank: RankState) -> None:
    """Move the gradient to LATE, announce it, and let the main thread go on (R36).

    The main thread computes the next gradient into the other buffer, on the newest weights. Its
    next step waits for this round.
    """
    log = rank.log
    rank.do(rank.pending.age_late(log.age, log.settings, rank.holds))
    rank.do(rank.pending.merge())
    rank.under_way = log.version
    rounds.announce(rank)
    _resume(rank, fresh=True)


def _was_fresh(rank: RankState) -> bool:
    """Return True if the gradient of the waiting main thread was applied in its own round.

    In a script something else may be late while it waits in a call.
    """
    pending = rank.pending
    applied = not pending.grad.steps if rank.log.plan.script else pending.empty
    return applied and rank.waits_for == rank.log.version - 1


def _resume(rank: RankState, *, fresh: bool, late: bool = False) -> None:
    rank.main = Main.RUN
    rank.main_version = rank.log.version
    rank.waits_for, rank.operation, rank.needs = NOTHING, None, False
    under_way = waits_for_the_one_before(rank)
    progress = progress_of(rank.log)
    rank.emit(Resume(rank.log.version, fresh, rank.log.stopped, progress, under_way, late))


def drop_given_up(rank: RankState) -> None:
    """Drop each lease of this rank that the job has given up, before it is worked on (R56)."""
    if not rank.log.skips:
        return
    for lease in rank.usable():
        if lease in rank.log.skips:
            _drop_coming(rank, lease=lease)
            samples = samples_of(rank.log.plan, lease)
            rank.pending.drops.append(Drop(DropReason.FAILED, samples, (lease,)))
            rank.pending.produced += samples


def show_leases(rank: RankState) -> None:
    """Tell the loader which leases it may work on, if that has changed."""
    leases = rank.usable()
    if leases != rank.shown_leases:
        rank.shown_leases = leases
        rank.emit(Held(leases))
