"""Changes of the membership on a rank: promise, start, repair, join, leave (R1-R10, R15-R17)."""

from __future__ import annotations

from msgspec.structs import replace
from paceline_api.ids import MemberId

from paceline.core.differences import changed
from paceline.core.messages import (
    Ask,
    AskState,
    Commit,
    CommitChange,
    Complain,
    Dismiss,
    Leaving,
    LogPart,
    Prepare,
    Prepared,
    PromiseRefused,
    Release,
    Start,
    Started,
    StateTransfer,
)
from paceline.core.protocol.log import Log, LogError
from paceline.core.protocol.records import Gen, Go
from paceline.core.protocol.rows import rows_of
from paceline.core.protocol.snapshot import LogSnapshot
from paceline.core.protocol.tree import branches
from paceline.core.rank import saving
from paceline.core.rank.events import (
    CloseChannel,
    DropQueue,
    InstallPart,
    InstallState,
    OpenChannel,
    PassState,
    Restore,
    SendPart,
    SendState,
)
from paceline.core.rank.rounds import after_commit
from paceline.core.rank.state import NOTHING, QUEUE_MAX, Main, RankState

Order = Prepare | Commit | CommitChange | Release | Dismiss | Ask


def on_order(rank: RankState, order: Order) -> None:
    """Handle an order of the coordinator.

    Args:
        rank: State of this rank.
        order: The order. After RELEASE only PREPARE and DISMISS have an effect.
    """
    if rank.released is not None:
        _answer_released(rank, order)
        return
    match order:
        case Prepare(id=proposal):
            if proposal > rank.promise:
                _promise(rank, order)
            elif proposal == rank.promise and rank.frozen:
                rank.tell(_report(rank))  # the coordinator repeats PREPARE over a new connection
            else:
                rank.tell(PromiseRefused(proposal, rank.me, rank.promise))
                if rank.broken and not rank.frozen:
                    # The proposal aborted a reduction before it was read.
                    why = "a reduction was given up for a proposal that came too late"
                    rank.tell(Complain(rank.gen_id, rank.me, rank.round, why))
        case Commit() | CommitChange():
            _hear_commit(rank, order)
        case Release():
            _release(rank, order)
        case Dismiss(why=why):
            _exit(rank, finished=False, why=why)
        case Ask(request=request):
            if rank.request is None or request.number > rank.request.number:
                rank.request = request


def _hear_commit(rank: RankState, order: Commit | CommitChange) -> None:
    new = order.gen.id if isinstance(order, Commit) else order.id
    if new == rank.promise and rank.frozen:
        _accept(rank, order if isinstance(order, Commit) else changed(rank.commit, order))
    elif new < rank.promise:
        rank.tell(PromiseRefused(new, rank.me, rank.promise))


def _answer_released(rank: RankState, order: Order) -> None:
    """Answer an order while only the last checkpoint is missing: evidence of success (R17)."""
    if isinstance(order, Prepare):
        rank.tell(rank.registration())
    elif isinstance(order, Dismiss):
        _exit(rank, finished=True, why=order.why)


# ---- promise and report --------------------------------------------------------------------------


def _promise(rank: RankState, prepare: Prepare) -> None:
    """Promise a newer generation: from here on nothing older is committed or started (R3)."""
    rank.promise = prepare.id
    rank.reducing = rank.arrived_state = None
    rank.started = rank.broken = False
    # A rank that still lacks records reports the state of its own log (R5).
    rank.needs_part = False
    rank.stop_reported = rank.leave_asked = False
    rank.announced = rank.announced_pending = rank.stream.announced = False
    rank.stream.due_ns = None
    rank.share = None
    rank.words.clear()
    rank.arrivals = rank.collector = None
    rank.gos.clear()
    rank.serve.clear()
    rank.hashes.clear()
    rank.early = [m for m in rank.early if m.generation >= prepare.id]
    rank.emit(CloseChannel())
    rank.tell(_report(rank))


def _report(rank: RankState) -> Prepared:
    log = rank.log
    return Prepared(
        id=rank.promise,
        member=rank.me,
        last=log.id,
        version=log.version,
        index=log.index,
        digest=log.digest,
        tail=tuple(log.tail),
        accepted=rank.gen_id,
        members=rows_of(log.members),
        with_state=rows_of(log.with_state),
        active=rows_of(log.active),
        benched=rows_of(sorted(log.benched)),
        gen_active=rows_of(log.gen.active if log.gen else ()),
        started=log.started,
        has_state=rank.has_state,
        ready=rank.begun is not None,
        leaving=rank.wants_to_leave,
        stopped=rank.has_state and log.stopped,
        request=rank.request_known,
        checkpoint=rank.on_disk.checkpoint,
        checkpoint_problem=rank.on_disk.problem,
        skips=tuple(sorted(log.skips)),
    )


def _started(rank: RankState, *, has_state: bool) -> Started:
    return Started(rank.gen_id, rank.me, has_state, rank.channel_why)


def on_connected(rank: RankState) -> None:
    """Register, and repeat what may have been lost with an older connection."""
    rank.tell(rank.registration())
    if rank.fatal is not None:
        rank.tell(rank.fatal)
    if rank.frozen:
        rank.tell(_report(rank))
    elif rank.started:
        rank.tell(_started(rank, has_state=rank.has_state and not rank.passive))
    if rank.broken and not rank.frozen:
        rank.tell(Complain(rank.gen_id, rank.me, rank.round, "the data channel failed"))
    rank.stop_reported = rank.leave_asked = False


# ---- the new generation --------------------------------------------------------------------------


def _accept(rank: RankState, commit: Commit) -> None:
    """Accept a COMMIT of the promised generation: repair others, then join, restore or start."""
    gen = commit.gen
    rank.commit = commit
    rank.is_member = rank.me in gen.members
    behind = {member: (index, digest) for member, index, digest in commit.behind}
    if rank.me == commit.holder:
        for member, (index, digest) in behind.items():
            records = rank.log.missing_after(index, digest)
            part = LogPart(gen.id, records)
            with_result = any(isinstance(r, Go) and not r.void for r in records)
            rank.emit(SendPart(member, part, with_result))
    if not rank.is_member:
        if rank.draining:
            _exit(rank, finished=False, why="drained")
        return
    if rank.me == commit.donor:
        rank.serve = dict.fromkeys(commit.joiners, gen.version)
    if rank.me in commit.joiners:
        _join_without_state(rank, commit)
    elif commit.restore is not None:
        _bring_nothing(rank)
        rank.emit(Restore(commit.restore))
    elif rank.me in behind:
        rank.needs_part = True
    else:
        _start(rank)
    # Part and State messages that arrived before this COMMIT are handled now (R4).
    rank.inbox.extend(m for m in rank.early if isinstance(m, LogPart | StateTransfer))
    rank.early = [m for m in rank.early if not isinstance(m, LogPart | StateTransfer)]


def _join_without_state(rank: RankState, commit: Commit) -> None:
    """Become a joiner; its old state is kept until the donor's is complete (R8)."""
    _bring_nothing(rank)
    rank.passive, rank.follows = True, False
    rank.round = commit.gen.version
    forget_queue(rank, commit)
    rank.emit(OpenChannel(commit))


def _bring_nothing(rank: RankState) -> None:
    """Give up all gradients of this rank (R8)."""
    rank.under_way = NOTHING
    rank.do(rank.pending.lose_all(grad_in_use=rank.main is Main.RUN))


def on_restored(rank: RankState, log: LogSnapshot) -> None:
    """Start with the checkpoint as this rank's state (R26).

    Args:
        rank: State of this rank.
        log: Log of the checkpoint.

    Raises:
        LogError: If this is not the checkpoint that COMMIT named.
    """
    commit = rank.commit
    if rank.frozen or commit is None or commit.restore is None:
        return  # another proposal came in between
    if (log.digest, log.version) != (commit.restore.digest, commit.gen.version):
        raise LogError(f"checkpoint {log.version} ({log.digest}) is not {commit.restore}")
    take_log(rank, Log.restore(log))
    rank.fatal = None
    _start(rank)


def take_log(rank: RankState, log: Log) -> None:
    """Replace the log, because the committed state was replaced by another one."""
    rank.log = log
    # Samples that this rank applied in rounds which the others abandoned are lost (R8, V17).
    rank.pending.recount(log.ledger.counted(rank.me))
    rank.waits_for = NOTHING
    saving.replaced(rank)


def forget_queue(rank: RankState, commit: Commit) -> None:
    """Discard queued sums: their rounds may have been abandoned by the new generation (R15)."""
    rank.queue.clear()
    rank.queue_max = QUEUE_MAX
    rank.emit(DropQueue(commit.gen.id))


def _start(rank: RankState) -> None:
    """Append GEN to the complete log of this rank, and open the data channel (R7, R8)."""
    assert rank.commit is not None
    rank.needs_part = False
    rank.passive = False
    rank.has_state = True
    rank.queue.clear()
    rank.log.append(rank.commit.gen)
    rank.round = rank.log.version
    rank.do(rank.pending.drop_revoked(rank.owns, grad_in_use=rank.main is Main.RUN))
    if rank.log.stopped:
        on_channel(rank, "")
    else:
        rank.emit(OpenChannel(rank.commit))


def on_channel(rank: RankState, why: str) -> None:
    """Start the generation once its data channel is open; messages that came early count now (R4).

    Args:
        rank: State of this rank.
        why: Why the transport moves buffers as it does, for people.
    """
    if rank.frozen or rank.commit is None:
        return
    rank.started, rank.channel_why = True, why
    rank.opened_ns = rank.now_ns
    rank.tell(_started(rank, has_state=rank.has_state and not rank.passive))
    early, rank.early = rank.early, []
    rank.inbox.extend(early)


# ---- repair --------------------------------------------------------------------------------------


def on_part(rank: RankState, part: LogPart) -> None:
    """Append the records that this rank lacks, apply the last result, and start (R7).

    Args:
        rank: State of this rank.
        part: Message of the holder.

    Raises:
        LogError: If the records hold more than one round.
    """
    if not rank.needs_part or part.generation != rank.promise:
        return
    rounds = [r for r in part.records if isinstance(r, Go)]
    if len(rounds) > 1:
        raise LogError(f"members were {len(rounds)} rounds apart: {part.records}")
    for record in part.records:
        if isinstance(record, Gen):
            rank.log.append(record)
        elif record.void:
            after_commit(rank, record)
        else:
            weighing = rank.log.weigh(record)
            after_commit(rank, record)
            rank.emit(InstallPart(record, weighing))
    _start(rank)


def names_strangers(rank: RankState, message: AskState | StateTransfer | Start) -> bool:
    """Return True if a peer asks to send something to ranks outside of the group."""
    receivers = (message.member,) if isinstance(message, AskState) else message.onward
    return bool(receivers) and not rank.group.issuperset(receivers)


def on_ask_state(rank: RankState, ask: AskState) -> None:
    """Record that a joiner waits for a state of at least the version that it names."""
    rank.serve[ask.member] = ask.at_least


def serve(rank: RankState) -> None:
    """Send the donor's state to the joiners for whom its version is new enough (R15)."""
    if not rank.serve or rank.frozen or rank.needs_part or rank.passive or not rank.started:
        return
    if rank.log.plan.script and not _is_whole(rank):
        return
    due = sorted(m for m, at_least in rank.serve.items() if rank.log.version >= at_least)
    if not due:
        return
    snapshot = rank.log.snapshot()
    for member in due:
        del rank.serve[member]
    for member, onward in branches(due):
        rank.emit(SendState(member, StateTransfer(rank.gen_id, snapshot, onward)))


def _is_whole(rank: RankState) -> bool:
    """Return True if the script's state is whole, and another script can begin with it (S9).

    It is while the script waits in the operation that is next. A script that has ended serves as
    well: its rank stays until the job is over (S14).
    """
    operation = rank.operation
    opens = operation is not None and operation.opens and rank.waits_for == rank.log.version
    return opens or rank.main is Main.DONE


def pass_on(rank: RankState, state: StateTransfer) -> None:
    """Forward a received state to the ranks that it names, even if it is of no use here (R45)."""
    for member, onward in branches(state.onward):
        rank.emit(PassState(member, replace(state, onward=onward)))


def on_state(rank: RankState, state: StateTransfer) -> None:
    """Take the donor's state, which is complete here; only now the old one is discarded (R8)."""
    if rank.frozen or state.generation != rank.gen_id:
        return
    pass_on(rank, state)
    if rank.passive or rank.follows:
        rank.arrived_state = state
        install(rank)


def install(rank: RankState) -> None:
    """Install the donor's state between two reductions, and apply the queued sums to it (R15).

    Queued sums are applied in the scratch from which a running reduction contributes, so a
    reduction must end first. If the state is older than the queue, this rank asks for a newer one.

    Args:
        rank: State of this rank.

    Raises:
        LogError: If state and queue do not reach the round of this rank.
    """
    state = rank.arrived_state
    if state is None or rank.reducing is not None:
        return
    rank.arrived_state = None
    if rank.follows:
        _install_last(rank, state)
        return
    base = state.log.version
    if base > rank.round and rank.broken:
        return  # the reduction failed here but not at the donor: a change follows
    first = rank.queue[0].round if rank.queue else rank.round
    if base < first:
        rank.send(_donor(rank), AskState(rank.gen_id, rank.me, at_least=first))
        return
    begun = rank.begun
    if begun is not None and begun.plan != state.log.plan:
        text = f"its data plan is not the job's: {state.log.plan.differences(begun.plan)}"
        rank.fail("PlanDiffers", text)
        return
    take_log(rank, Log.restore(state.log))
    queued = []
    for go in rank.queue:
        if go.round >= base:
            if not go.void:
                queued.append((go, rank.log.weigh(go)))
            rank.log.append(go)
    if rank.log.version != rank.round:
        raise LogError(f"state of version {base} does not reach round {rank.round}")
    rank.queue.clear()
    rank.passive = False
    # The state of a script is a first copy, from which nothing is trained (S3).
    rank.follows = rank.log.plan.script > 0
    rank.has_state = not rank.follows
    rank.opened_ns = rank.now_ns
    rank.emit(InstallState(tuple(queued)))
    if rank.started and rank.has_state:
        rank.tell(_started(rank, has_state=True))


def _install_last(rank: RankState, state: StateTransfer) -> None:
    """Install the state of a script on a rank that GO has made active (S3).

    The donor waits in the operation that comes next, and so will the script of this rank. Any other
    state is a first copy that came twice.
    """
    if _is_present(rank, state):
        rank.follows, rank.has_state = False, True
        rank.emit(InstallState(()))
        rank.tell(_started(rank, has_state=True))


def expects(rank: RankState, state: StateTransfer) -> bool:
    """Return True if an arriving state is installed once it is here, unless a change follows (S3).

    Args:
        rank: State of this rank, whose script follows.
        state: The state, which is still arriving.
    """
    if not rank.follows or rank.frozen or state.generation != rank.gen_id:
        return False
    return _is_present(rank, state)


def _is_present(rank: RankState, state: StateTransfer) -> bool:
    return rank.is_active and state.log.digest == rank.log.digest


def _donor(rank: RankState) -> MemberId:
    assert rank.commit is not None
    return rank.commit.donor


# ---- the end -------------------------------------------------------------------------------------


def leave(rank: RankState) -> None:
    """Ask to be dismissed if this rank drains and has nothing left to apply (R16)."""
    if rank.wants_to_leave and not rank.leave_asked and not rank.frozen and not rank.log.stopped:
        rank.leave_asked = True
        rank.tell(Leaving(rank.gen_id, rank.me, rank.ended_early))


def _release(rank: RankState, release: Release) -> None:
    mine = (
        rank.has_state
        and not rank.passive
        and rank.log.stopped
        and rank.log.id == release.generation
        and rank.log.version == release.version
    )
    if mine:
        rank.released = (release.generation, release.version)
        saving.released(rank)
    else:
        _exit(rank, finished=False, why="the job ended without this rank")


def _exit(rank: RankState, *, finished: bool, why: str) -> None:
    if not rank.ended:
        rank.end(finished=finished, why=why)
