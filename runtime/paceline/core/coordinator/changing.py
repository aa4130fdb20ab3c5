"""Change of the membership: its reasons, its PREPARE and its COMMIT (R3, R6, R7, A9).

A change has three steps: PREPARE (the asked ranks promise and report), COMMIT (the result of
`forming.form`) and STARTED (all members have the log and their links). Any disturbance leads to the
next proposal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace
from paceline_api.ids import NO_GENERATION, GenerationId, MemberId

from paceline.core import messages as m
from paceline.core.coordinator import ending, forming, joining, scripts
from paceline.core.coordinator.roster import KnownRank
from paceline.core.coordinator.state import CoordinatorPhase, CoordinatorState
from paceline.core.differences import difference
from paceline.core.protocol.records import Gen
from paceline.core.protocol.rows import members_of
from paceline.core.protocol.snapshot import Kept

DEAD_KEPT: Final = 64
"""Number of dead ranks that the status remembers."""


# ---- reasons -------------------------------------------------------------------------------------


def find_reason(c: CoordinatorState) -> None:
    """Request a change if one is needed: a death, a leaver, a joiner, a new coordinator (A9)."""
    c.joins_ns = None
    if c.gen is None or _nobody_left(c):
        _find_first_reason(c)
        return
    for member in c.gen.members:
        rank = c.roster.rank(member)
        if c.roster.is_dead(member) or rank.suspect:
            c.want_change(f"rank {member}: {rank.dead or rank.suspect or 'its pod is gone'}", 0)
    if c.unstarted:
        return  # a joiner must not interrupt the start of a generation
    leavers = [x for x in c.gen.members if c.roster.rank(x).leaving]
    if leavers and _has_successor(c):
        for member in leavers:
            c.want_change(f"rank {member} leaves", 0)
    joiners = joining.admitted(c)
    if joiners and not ending.some_stopped(c):
        at_ns = joining.due_ns(c, joiners)
        if at_ns > c.now_ns:
            c.joins_ns = at_ns  # the group is whole, so no change is needed yet
        else:
            c.want_change(_who_join(joiners), 0)


def _who_join(members: Iterable[MemberId]) -> str:
    named = [str(member) for member in sorted(members)]
    return f"rank {named[0]} joins" if len(named) == 1 else f"ranks {', '.join(named)} join"


def _nobody_left(c: CoordinatorState) -> bool:
    """Return True if all ranks that trained are dead: a checkpoint is needed to continue (R26)."""
    assert c.gen is not None
    return all(c.roster.is_dead(x) for x in c.gen.members) and not any(
        s.has_state for s in c.roster.present()
    )


def _has_successor(c: CoordinatorState) -> bool:
    """Return True if a member stays that has the state.

    Without one, a leaving member cannot be dismissed (R6, R16).

    Args:
        c: The state, with a generation in force.

    Returns:
        True if there is such a member.
    """
    assert c.gen is not None
    members = (c.roster.rank(x) for x in c.gen.members)
    return any(s.current and s.present and not s.leaving for s in members)


def _find_first_reason(c: CoordinatorState) -> None:
    """Request a generation that continues none that this coordinator has formed.

    A new coordinator waits for the ranks of the winner's last record; a start of the job waits for
    all wanted ranks.
    """
    ready = [s for s in c.roster.present() if s.ready]
    if not ready:
        return
    since_ns = min(s.ready_ns for s in ready)
    best = forming.winner(ready)
    if best is not None and best.register is not None:
        missing = [x for x in members_of(best.register.members) if not _is_settled(c, x)]
        why, within = "the coordinator is new", c.freeze_ns if missing else 0
    else:
        why = "the job starts" if c.gen is None else "all ranks that trained are dead"
        within = c.config.settle_ns
        if len(ready) >= c.wanted_ranks and (
            not c.had_state or not c.roster.unaccounted({s.member for s in ready})
        ):
            within = 0
    if c.proposal == NO_GENERATION or c.gen is not None:
        c.due_ns = None  # a rank with state may have registered: the old due time is void
    c.want_change(why, within - (c.now_ns - since_ns))


def _is_settled(c: CoordinatorState, member: MemberId) -> bool:
    rank = c.roster.ranks.get(member)
    return rank is not None and (rank.present or c.roster.is_dead(member))


# ---- asking --------------------------------------------------------------------------------------


def change_when_due(c: CoordinatorState) -> None:
    """Send PREPARE if a requested change is due and its COMMIT would be possible (R6).

    Else the coordinator waits for evidence (phase WAITING).
    """
    if c.due_ns is None or c.now_ns < c.due_ns:
        return
    present = c.roster.present()
    expected = [s for s in present if s.ready]
    waits = would_wait(c, expected)
    if waits:
        # Ranks that are not ready can promise, too. Without a majority of the active ranks, a
        # COMMIT needs the promise of every process that may live (R6).
        expected = present
        waits = would_wait(c, expected)
    if waits:
        if c.phase is not CoordinatorPhase.WAITING:
            c.happened("WaitingForEvidence", f"{c.why}: {waits}")
        c.phase, c.waits = CoordinatorPhase.WAITING, waits
        return
    _prepare(c, {s.member for s in expected})


def would_wait(c: CoordinatorState, expected: list[KnownRank]) -> str:
    """Return what a COMMIT would wait for if exactly these ranks answered as they are known.

    Args:
        c: The state.
        expected: Ranks that would be asked.

    Returns:
        One sentence for people; empty if the COMMIT would be possible.
    """
    if not expected:
        return "no rank is there"
    unaccounted = c.roster.unaccounted({s.member for s in expected})
    best, kept = forming.predecessor(expected)
    if best is None:
        able = {s.member: s.checkpoint for s in expected if forming.may_begin_with(s)}
        if len(forming.beginners(able, kept, c.sizes)) < c.fewest_ranks:
            why = "minReplicas, allowedSizes" if c.sizes.allowed else "minReplicas"
            return f"{len(able)} of the {c.fewest_ranks} ranks that it needs are ready ({why})"
        return forming.may_begin(
            len(expected), c.possible_ranks, unaccounted, had_state=c.had_state
        )
    leaving = {s.member for s in expected if s.leaving}
    return forming.may_commit(best.gen_active, [s.member for s in expected], leaving, unaccounted)


def _prepare(c: CoordinatorState, asked: set[MemberId]) -> None:
    c.counter += 1
    c.proposal = GenerationId(max(1, c.incarnation), c.uid, c.counter)
    c.incarnation = c.proposal.incarnation
    c.phase = CoordinatorPhase.PREPARING
    c.asked, c.asked_ns = asked, c.now_ns
    c.reports = {}
    c.due_ns = None
    c.history.prepared(c.now_ns)
    prepare = m.Prepare(c.proposal)
    for member in sorted(asked):
        c.tell(member, prepare)


def ask_again(c: CoordinatorState, register: m.Register) -> None:
    """Repeat the PREPARE or COMMIT that an older connection of this rank may have lost.

    Both messages are idempotent.
    """
    member = register.member
    if c.phase is CoordinatorPhase.PREPARING:
        if member in c.asked and register.promise < c.proposal:
            c.tell(member, m.Prepare(c.proposal))
        return
    commit = c.commit if c.commit is not None and c.commit.gen.id == c.proposal else None
    waits = register.promise == c.proposal != register.last
    if commit is not None and waits and member in c.reports:
        c.tell(member, _as_told_to(c, member, commit))


# ---- answering -----------------------------------------------------------------------------------


def evaluate(c: CoordinatorState) -> None:
    """Evaluate the answers to PREPARE once all have arrived; ask again if one cannot arrive."""
    lost = sorted(x for x in c.asked if not c.roster.rank(x).present)
    if lost or c.due_ns is not None:
        c.want_change(c.why or f"rank {lost[0]} was lost during the change", 0)
        c.phase = CoordinatorPhase.WAITING
        change_when_due(c)
        return
    if c.reports.keys() != c.asked:
        return
    registers = {x: r for x in c.asked if (r := c.roster.rank(x).register) is not None}
    answer = forming.form(
        c.proposal,
        c.reports,
        registers,
        dead={x: "dead" for x in c.roster.ranks if c.roster.is_dead(x)},
        unaccounted=c.roster.unaccounted(set(c.reports)),
        possible_ranks=c.possible_ranks,
        wanted_ranks=c.wanted_ranks,
        settings=c.settings,
        had_state=c.had_state,
        state_lost=_state_lost(c),
        sizes=c.sizes,
        draining=joining.draining(c),
    )
    match answer:
        case forming.EvidenceWait(why=why):
            c.phase, c.waits = CoordinatorPhase.WAITING, why
            c.happened("WaitingForEvidence", f"{c.why}: {why}")
            c.want_change(c.why, 0)
        case forming.Finished(checkpoint=kept):
            ending.was_finished(c, kept)
        case forming.Broken():
            ending.fail(c, answer.reason, answer.message, answer.hint)
        case m.Commit():
            _commit_without_failing(c, answer)


def _commit_without_failing(c: CoordinatorState, commit: m.Commit) -> None:
    """Commit, and give up the batches with which scripts keep failing (R56).

    The job ends instead if those are more than `maxSkippedBatches`.
    """
    best, _ = forming.predecessor(c.reports.values())
    given_up = frozenset(best.skips if best is not None else ())
    skips = scripts.to_skip(c, given_up)
    if skips is None:
        ending.fail(c, "ScriptFailed", scripts.describe_failures(c, list(c.script_failures)))
        return
    c.skips = given_up.union(skips)
    _commit(c, replace(commit, gen=replace(commit.gen, skips=skips)) if skips else commit)
    for lease in skips:
        c.happened("BatchSkipped", scripts.skipped(c, lease), {"lease": str(lease)})


def _state_lost(c: CoordinatorState) -> str:
    if not c.had_state:
        return ""
    lost = f"all ranks that had the weights of version {c.version} are lost"
    return f"{lost}, and no rank that is left sees a checkpoint"


def _commit(c: CoordinatorState, commit: m.Commit) -> None:
    gen = commit.gen
    if commit.restore is not None:
        _resumed(c, commit.restore)
    elif gen.plan is not None and c.commit is not None:
        # Never start from zero without an Event (R26): rounds since the last heartbeat may be lost.
        c.happened("BeganAnew", "no rank has weights and no committed round was ever reported")
    came = set(gen.members) - set(c.commit.gen.members) if c.commit is not None else set()
    same_version = c.commit is not None and c.commit.gen.version == gen.version
    c.futile = c.futile + 1 if same_version else 0
    if not same_version or c.commit is None or c.commit.gen.members != gen.members:
        c.complaints = 0
    c.change = difference(c.commit, commit) if c.commit is not None else None
    c.commit = commit
    c.index = {member: n for n, member in enumerate(gen.members)}
    c.settings = gen.settings or c.settings
    c.phase = CoordinatorPhase.STARTING
    c.version = max(c.version, gen.version)
    c.unstarted, c.complained = set(gen.members), set()
    for member in sorted(c.reports):
        rank = c.roster.rank(member)
        rank.current = False
        rank.dismissed = c.reports[member].leaving and member not in c.index
        c.tell(member, _as_told_to(c, member, commit))
    c.tell_pace()
    _who_starts_over(c, commit)
    _who_draws_alike(c, commit)
    why = _with_all_who_came(_true_cause(c, gen, c.history.cause_why), came)
    c.history.committed_generation(gen, why, c.now_ns, c.wall_s)
    c.happened(
        "GenerationFormed",
        f"generation {gen.id}: {len(gen.members)} ranks, {len(gen.active)} active",
        {
            "why": _with_all_who_came(_true_cause(c, gen, c.why), came),
            "version": str(gen.version),
        },
    )
    c.why = c.waits = c.complaint = ""
    c.roster.forget_dead(set(gen.members), DEAD_KEPT)


def _true_cause(c: CoordinatorState, gen: Gen, why: str) -> str:
    """Return the deaths behind a complaint about a data channel, else the given reason.

    A rank that lost its data channel complains before the agent of the dead rank reports the death,
    and the complaint names the rank that complains.

    Args:
        c: The state.
        gen: The generation that is being formed.
        why: The reason known so far.

    Returns:
        The evidence of the deaths; `why` if it is not a complaint, or if no member died.
    """
    if not why or why != c.complaint:
        return why
    dead = ((left.member, c.roster.rank(left.member).dead) for left in gen.left_out)
    return "; ".join(f"rank {member}: {evidence}" for member, evidence in dead if evidence) or why


def _with_all_who_came(why: str, came: Iterable[MemberId]) -> str:
    """Add to the reason each joiner that it does not name.

    A change for another reason also admits all ranks that are ready.

    Args:
        why: The reason for the change.
        came: Ranks that were admitted with it.

    Returns:
        The complete reason.
    """
    named = set(why.replace(",", " ").split())
    unnamed = [member for member in came if str(member) not in named]
    return f"{why}; {_who_join(unnamed)}" if unnamed else why


def _as_told_to(
    c: CoordinatorState, member: MemberId, commit: m.Commit
) -> m.Commit | m.CommitChange:
    """Return the COMMIT for one rank: as a difference if it has the COMMIT before (R44)."""
    change = c.change
    if change is not None and c.reports[member].accepted == change.base:
        return change
    return commit


def _who_starts_over(c: CoordinatorState, commit: m.Commit) -> None:
    """Report the ranks that join a self-fed script without `pl.steps()`.

    Such a script has no known number of steps. On a rank that joins late its loop starts at step 0,
    while the other ranks are in the middle of theirs.
    """
    gen = commit.gen
    new = [x for x in gen.members if not c.reports[x].has_state]
    if not new or not gen.version or any(_plan_ends(c, x) or _runs_script(c, x) for x in new):
        return
    names = ", ".join(map(str, new))
    c.starts_over = (
        f"the script feeds itself and says no number of steps: it began at its first step on "
        f"{names}, with the weights of version {gen.version}; say `for step in pl.steps(N)` and "
        "the job counts, or use pl.DataLoader"
    )
    c.happened("ScriptStartsOver", c.starts_over)


def _who_draws_alike(c: CoordinatorState, commit: m.Commit) -> None:
    """Report ranks that feed themselves from equal seeds: they would draw the same batches."""
    if commit.gen.plan is None:
        return
    by_seed: dict[int, list[MemberId]] = {}
    for member in commit.gen.members:
        register = c.roster.rank(member).register
        if register is not None and register.seed is not None:
            by_seed.setdefault(register.seed, []).append(member)
    for seed, members in by_seed.items():
        if len(members) > 1:
            text = (
                f"torch's seed is {seed} on {', '.join(map(str, members))}, and the script feeds "
                "itself: do they draw the same batches? Say torch.manual_seed(seed + pl.rank()) "
                "after pl.init(); a script that is not launched has no RANK in its environment"
            )
            c.happened("SeedsEqual", text)


def _plan_ends(c: CoordinatorState, member: MemberId) -> bool:
    """Return True if the member's data plan has an end, or if no plan of it is known."""
    register = c.roster.rank(member).register
    return register is None or register.plan is None or register.plan.ends


def _runs_script(c: CoordinatorState, member: MemberId) -> bool:
    """Return True if the member's script steps its own optimizers, and finds its place itself."""
    register = c.roster.rank(member).register
    return register is not None and register.plan is not None and register.plan.script > 0


def _resumed(c: CoordinatorState, kept: Kept) -> None:
    """Note that the log continues from a checkpoint; the rounds after it are repeated."""
    redone = max(0, c.version - kept.version)
    text = f"the job goes on from the checkpoint of version {kept.version}"
    facts = {"version": str(kept.version), "redone": str(redone)}
    c.happened(
        "ResumedFromCheckpoint", f"{text}; {redone} rounds are lost" if redone else text, facts
    )
    c.version = kept.version
    c.history.began_at(kept.version)


def all_started(c: CoordinatorState) -> None:
    """Enter phase RUNNING: all members have reported STARTED."""
    c.phase = CoordinatorPhase.RUNNING
    c.history.all_started(c.now_ns)
