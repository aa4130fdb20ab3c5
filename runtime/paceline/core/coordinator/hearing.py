"""Messages from ranks, and what the coordinator learns from them (R1, R3, R16-R18)."""

from __future__ import annotations

from dataclasses import replace as changed
from typing import Final

from msgspec.structs import replace
from paceline_api.ids import NO_GENERATION, GenerationId, MemberId
from paceline_api.reasons import Reason
from paceline_api.types.enums import Pacing

from paceline.core import messages as m
from paceline.core.coordinator import changing, ending, silence
from paceline.core.coordinator.events import Retire
from paceline.core.coordinator.roster import KnownRank
from paceline.core.coordinator.state import CoordinatorPhase, CoordinatorState
from paceline.core.coordinator.timeouts import COMPLAINT_MAX_NS, COMPLAINT_NS
from paceline.core.coordinator.wording import GOES_ON
from paceline.core.log_figures import unpack_figures
from paceline.core.protocol.records import Request
from paceline.core.protocol.rows import members_of
from paceline.core.protocol.snapshot import Kept

COMPLAINTS_MAX: Final = 20
"""Number of generations of the same members that may fail without a round. With the waits in
between they take seven minutes; a network that recovers does not need as long."""
CHANNEL_HINT: Final = "check the network between the ranks, or use another collective.backend"
"""Remedy that is shown when the data channel fails again and again."""
REQUIRED_HINT: Final = (
    "make room, and start the job again: it goes on from the checkpoint before; or remove "
    "spec.checkpoint.required, and it trains on without"
)
"""Remedy that is shown when a required checkpoint cannot be written."""
LATE_STARTS_MAX: Final = 3
"""Number of later coordinators that a new one may overtake. After that it retires. It may only do
so before it has formed a generation."""


def from_rank(c: CoordinatorState, message: m.RankMessage) -> bool:
    """Process a message of a rank.

    Args:
        c: The state, updated in place.
        message: The message, as the rank's agent passed it on. Heartbeats come in `beats` instead.

    Returns:
        True if something changed that decisions read.
    """
    unknown = message.member not in c.roster.ranks
    rank = c.roster.rank(message.member)
    if c.is_over and isinstance(message, m.Register):
        rank.heard_ns = c.now_ns
        ending.answer_late(c, message)
        return True
    silence.heard(c, rank, answers=not isinstance(message, m.RankFigures))
    match message:
        case m.RankFigures():
            rank.facts, rank.log = unpack_figures(message.facts)
            rank.figures_version = message.version
            return unknown
        case m.Prepared():
            return _prepared(c, rank, message) or unknown
        case m.Started():
            return _started(c, rank, message) or unknown
        case m.Register():
            _register(c, rank, message)
        case m.PromiseRefused():
            _refused(c, message)
        case m.Stopped():
            rank.stopped, rank.version = message.id, message.version
        case m.Saved():
            _saved(c, message)
        case m.Complain():
            _complain(c, message)
        case m.Leaving():
            rank.leaving, rank.left_early = True, message.early
            _dismiss_outsider(c, rank)
        case m.Fatal() if c.phase is not CoordinatorPhase.RELEASED:
            ending.fail(c, message.reason, f"rank {message.member}: {message.message}")
    return True


def _register(c: CoordinatorState, rank: KnownRank, register: m.Register) -> None:
    if rank.dead:
        # The other ranks rely on the evidence of its death, so it may not come back (R25).
        c.dismiss(rank, f"the job goes on without this rank: {rank.dead}")
        return
    first = rank.register is None
    was_ready = rank.ready
    rank.register = register
    rank.newborn = False
    rank.connected, rank.gone_ns = True, None
    rank.pid, rank.version = register.pid, register.version
    rank.last, rank.gen_active = register.last, members_of(register.gen_active)
    rank.has_state = register.has_state
    rank.leaving = register.leaving
    c.version = max(c.version, register.version)
    c.had_state = c.had_state or register.version > 0
    _learn_request(c, register.request)
    _learn_checkpoint(c, rank, register.checkpoint)
    if register.released is not None:
        ending.prove(c, register.released)
        return
    for known in (register.promise, register.last):
        _learn(c, known)
    if c.request is not None:
        c.tell(register.member, m.Ask(c.request))
    if c.phase is CoordinatorPhase.ENDED:
        return
    if register.ready and not was_ready:
        rank.ready_ns = c.now_ns
        c.happened("RankReady", f"rank {register.member} is ready on {register.host}")
    elif first:
        c.happened("RankStarted", f"rank {register.member} started on {register.host}")
    changing.ask_again(c, register)
    _dismiss_outsider(c, rank)


def _dismiss_outsider(c: CoordinatorState, rank: KnownRank) -> None:
    """Dismiss a draining rank that is not a member: it is never admitted (R16).

    Before this coordinator has formed a generation, the state of a rank may be needed.
    Such a rank has to wait for the first generation.
    """
    if not rank.leaving or rank.dismissed:
        return
    if c.gen is None:
        outside = not rank.has_state
    else:
        outside = rank.member not in c.index and c.phase is not CoordinatorPhase.PREPARING
    if outside:
        c.dismiss(rank, "drained, and not needed by the group")


def beats(c: CoordinatorState, pod: m.PodBeat) -> bool:
    """Process one beat of a pod: the heartbeats of its ranks (R43).

    Args:
        c: The state, updated in place.
        pod: The beat. It names the ranks that the agent has heard, and lists those with news.

    Returns:
        True if something changed that decisions read.
    """
    changed = {beat.member: beat for beat in pod.changed}
    news = False
    for local, attempt in pod.heard:
        member = MemberId(pod.slot, local, attempt)
        news = news or member not in c.roster.ranks
        rank = c.roster.rank(member)
        silence.heard(c, rank, answers=False)
        before = _read_by_decisions(c, rank)
        beat = changed.get(member)
        if beat is not None:
            before_doing, rank.beat, rank.leaving = rank.beat.doing, beat, beat.leaving
            silence.name_a_stuck_script(c, rank)
            news = silence.works(c, rank, before_doing) or news
        at = beat or pod
        rank.version, rank.promise = at.version, at.promise
        committed(c, at.version)
        _learn(c, at.promise)
        if c.gen is not None and at.last == c.gen.id:
            rank.last, rank.gen_active = c.gen.id, c.gen.active
        if c.phase is not CoordinatorPhase.ENDED:
            _dismiss_outsider(c, rank)
        news = news or _read_by_decisions(c, rank) != before
    return news


def committed(c: CoordinatorState, version: int) -> None:
    """Note a committed version that was reported: rounds were made since the last one."""
    if version > c.version:
        c.version = version
        c.failures = 0  # a committed round resets the count of failures (C8)
    c.had_state = c.had_state or version > 0
    c.history.committed(version, c.now_ns)


def _read_by_decisions(c: CoordinatorState, rank: KnownRank) -> tuple[object, ...]:
    """Return the values that decisions read and that a heartbeat or report may change.

    The winner (R5) is determined only while no generation is in force, so version and last record
    count only then.

    Args:
        c: The state.
        rank: The rank that sent the message.

    Returns:
        Values to compare with those before the message.
    """
    report = (
        (rank.version, rank.last)
        if c.phase in (CoordinatorPhase.RECOVER, CoordinatorPhase.WAITING)
        else ()
    )
    standing = rank.leaving, rank.dismissed, rank.beat.outside
    return c.phase, c.due_ns, c.had_state, *standing, report


def _prepared(c: CoordinatorState, rank: KnownRank, message: m.Prepared) -> bool:
    if message.id != c.proposal or c.phase is not CoordinatorPhase.PREPARING:
        return False
    before = _read_by_decisions(c, rank)
    c.reports[message.member] = message
    rank.last, rank.gen_active = message.last, members_of(message.gen_active)
    rank.version, rank.has_state = message.version, message.has_state
    rank.leaving = message.leaving
    _learn_request(c, message.request)
    _learn_checkpoint(c, rank, message.checkpoint)
    # No decision is possible before the last report has come.
    return len(c.reports) >= len(c.asked) or _read_by_decisions(c, rank) != before


def _started(c: CoordinatorState, rank: KnownRank, message: m.Started) -> bool:
    if c.gen is None or message.id != c.gen.id:
        return False
    rank.started = message.id
    c.channel_why = message.channel_why or c.channel_why  # a single rank chooses no transport
    c.unstarted.discard(message.member)
    if message.has_state:
        rank.current = rank.has_state = True
        rank.last, rank.gen_active = c.gen.id, c.gen.active
    if not c.unstarted or c.phase is not CoordinatorPhase.STARTING:
        return True
    silence.answered(c, rank)
    return False


def _complain(c: CoordinatorState, message: m.Complain) -> None:
    # A complete job stays complete (C1).
    if c.is_over or c.gen is None or message.id != c.gen.id:
        return
    if not c.complained:
        c.complaints = 0 if message.round > c.gen.version else c.complaints + 1
    c.complained.add(message.member)
    lost = f" (rank {message.lost})" if message.lost else ""
    # Back off: a link that fails in every generation must not cause a storm of generations.
    within = min(COMPLAINT_MAX_NS, COMPLAINT_NS << min(c.futile, 10))
    why = f"rank {message.member} lost its data channel{lost}: {message.why}"
    if c.complaints >= COMPLAINTS_MAX:
        text = f"{why}; in {c.complaints} memberships of the same ranks no round was committed"
        ending.fail(c, Reason.DATA_CHANNEL_FAILED, text, hint=CHANNEL_HINT)
        return
    if c.phase is CoordinatorPhase.PREPARING and message.member in c.asked:
        return  # the change in progress repairs it; a new one would cost a report of every rank
    c.complaint = why
    c.want_change(why, within)


def _refused(c: CoordinatorState, message: m.PromiseRefused) -> None:
    _learn(c, message.promise)
    if message.id == c.proposal < message.promise and c.phase is not CoordinatorPhase.ENDED:
        c.want_change(f"rank {message.member} had promised {message.promise}", 0)


def _learn(c: CoordinatorState, known: GenerationId) -> None:
    """Raise the incarnation above a reported one, or retire for a later coordinator (R1, R3)."""
    if c.phase is CoordinatorPhase.ENDED:
        return
    if c.proposal == NO_GENERATION:
        c.incarnation = max(c.incarnation, known.incarnation + 1)
    elif (known.incarnation, known.coordinator) > (c.incarnation, c.uid):
        if c.gen is None and c.late_starts < LATE_STARTS_MAX:
            # This coordinator asked before all ranks had registered. It has formed nothing yet, so
            # it may still overtake the other one.
            c.late_starts += 1
            c.incarnation = known.incarnation + 1
            c.want_change("a rank knows a later coordinator", 0)
            return
        c.phase = CoordinatorPhase.ENDED
        c.effects.append(Retire(f"coordinator of generation {known} is later"))
    elif known.coordinator == c.uid:
        c.counter = max(c.counter, known.counter)


# ---- checkpoints (R19, R26) ----------------------------------------------------------------------


def _learn_checkpoint(c: CoordinatorState, rank: KnownRank, kept: Kept | None) -> None:
    """Note the checkpoint that a rank sees, and raise the incarnation above that of its generation.

    A checkpoint proves that ranks of this job have trained, if only in an earlier run.
    """
    rank.checkpoint = kept
    if kept is not None:
        c.had_state = True
        if kept.generation.coordinator != c.uid:
            c.incarnation = max(c.incarnation, kept.generation.incarnation + 1)


def _saved(c: CoordinatorState, message: m.Saved) -> None:
    before, c.unsaved = c.unsaved, ""
    if message.problem and c.config.checkpoint_required:
        text = (
            f"rank {message.member} could not write the checkpoint of version {message.version}: "
            f"{message.problem}"
        )
        ending.fail(c, "CheckpointFailed", text, hint=REQUIRED_HINT)
    elif message.problem:
        c.unsaved = (
            f"rank {message.member} could not write the checkpoint of version "
            f"{message.version}: {message.problem}"
        )
        if not before:
            c.happened("CheckpointFailed", f"{c.unsaved}; {GOES_ON}")
    elif before:
        c.happened("CheckpointWritten", f"checkpoints are written again, version {message.version}")


# ---- requests (R18) ------------------------------------------------------------------------------


def set_targets(c: CoordinatorState, targets: m.Targets) -> None:
    """Take over the targets of the owner of the job; pass round settings and stop to the ranks."""
    c.has_targets = c.has_targets or targets.replicas is not None
    if targets.replicas is not None and targets.replicas != c.replicas:
        c.happened("Scaled", f"replicas {c.replicas} -> {targets.replicas}")
        c.replicas = targets.replicas
        c.tell_pace()
    if targets.membership is not None:
        before, after = c.config.membership_settings, targets.membership_id
        c.config = changed(c.config, membership_settings=after, **targets.membership.fields())
        c.happened("SettingsChanged", f"settings of the membership {before} -> {after}")
    settings = targets.settings
    if settings is not None and settings.pacing is Pacing.AUTO:
        # A change of the mode keeps the pacing that the first generation chose.
        settings = replace(settings, pacing=c.settings.pacing)
    if settings is not None or targets.stop:
        c.settings = settings or c.settings
        _ask(c, Request(c.request_number + 1, settings, targets.stop))


def _ask(c: CoordinatorState, request: Request) -> None:
    c.request, c.request_number = request, request.number
    ask = m.Ask(request)
    for rank in c.roster.present():
        c.tell(rank.member, ask)


def _learn_request(c: CoordinatorState, number: int) -> None:
    """Note the request number of a rank's log; renumber an earlier request above it (R18)."""
    if c.gen is None and c.request is not None and number >= c.request.number:
        _ask(c, replace(c.request, number=number + 1))
    c.request_number = max(c.request_number, number)
