"""A change of the membership: when it begins, who is asked, what comes of it (R3, R6, R7, A9).

One change runs through PREPARE (asked ranks promise and report), COMMIT (the answer of
`forming.form`) and STARTED (all members have the log and their links). Whatever disturbs it makes
the next proposal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from paceline.core import messages as m
from paceline.core.coordinator import ending, forming, joining, scripts
from paceline.core.coordinator.roster import KnownRank
from paceline.core.coordinator.state import CoordinatorState, Phase
from paceline.core.differences import difference
from paceline.core.protocol.ids import NO_GENERATION, GenerationId, MemberId
from paceline.core.protocol.records import Gen
from paceline.core.protocol.rows import members_of
from paceline.core.protocol.snapshot import Kept

DEAD_KEPT: Final = 64
"""Dead ranks that status remembers."""


# ---- reasons -------------------------------------------------------------------------------------


def find_reason(c: CoordinatorState) -> None:
    """A member died or leaves, somebody can join, or this coordinator is new (A9)."""
    c.joins_ns = None
    if c.gen is None or _nobody_left(c):
        _find_first_reason(c)
        return
    for member in c.gen.members:
        seen = c.roster.rank(member)
        if c.roster.is_dead(member) or seen.suspect:
            c.want_change(f"rank {member}: {seen.dead or seen.suspect or 'its pod is gone'}", 0)
    if c.unstarted:
        return  # a new member interrupts nobody's start
    leavers = [x for x in c.gen.members if c.roster.rank(x).leaving]
    if leavers and _has_successor(c):
        for member in leavers:
            c.want_change(f"rank {member} leaves", 0)
    joiners = joining.admitted(c)
    if joiners and not ending.some_stopped(c):
        at_ns = joining.due_ns(c, joiners)
        if at_ns > c.now_ns:
            c.joins_ns = at_ns  # no change is wanted yet: the group is whole
        else:
            c.want_change(_who_join(joiners), 0)


def _who_join(members: Iterable[MemberId]) -> str:
    named = [str(member) for member in sorted(members)]
    return f"rank {named[0]} joins" if len(named) == 1 else f"ranks {', '.join(named)} join"


def _nobody_left(c: CoordinatorState) -> bool:
    """All who trained are dead: the group begins once more, from a checkpoint (R26)."""
    assert c.gen is not None
    return all(c.roster.is_dead(x) for x in c.gen.members) and not any(
        s.has_state for s in c.roster.present()
    )


def _has_successor(c: CoordinatorState) -> bool:
    """Somebody stays who has the state; without one a leaver could not be dismissed (R6, R16)."""
    assert c.gen is not None
    members = (c.roster.rank(x) for x in c.gen.members)
    return any(s.current and s.present and not s.leaving for s in members)


def _find_first_reason(c: CoordinatorState) -> None:
    """A new coordinator waits for the ranks of the last record, a beginning for all ranks."""
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
        c.due_ns = None  # what was due before somebody with state was heard counts no more
    c.want_change(why, within - (c.now_ns - since_ns))


def _is_settled(c: CoordinatorState, member: MemberId) -> bool:
    seen = c.roster.ranks.get(member)
    return seen is not None and (seen.present or c.roster.is_dead(member))


# ---- asking --------------------------------------------------------------------------------------


def change_when_due(c: CoordinatorState) -> None:
    """PREPARE is only sent when its COMMIT could be (R6)."""
    if c.due_ns is None or c.now_ns < c.due_ns:
        return
    present = c.roster.present()
    expected = [s for s in present if s.ready]
    waits = would_wait(c, expected)
    if waits:
        expected = present  # the unready can promise too, which is what R6 (b) may need
        waits = would_wait(c, expected)
    if waits:
        if c.phase is not Phase.WAITING:
            c.happened("WaitingForEvidence", f"{c.why}: {waits}")
        c.phase, c.waits = Phase.WAITING, waits
        return
    _prepare(c, {s.member for s in expected})


def would_wait(c: CoordinatorState, expected: list[KnownRank]) -> str:
    """Why a COMMIT could not follow if exactly these answer as they are known; else empty."""
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
    c.phase = Phase.PREPARING
    c.asked, c.asked_ns = asked, c.now_ns
    c.reports = {}
    c.due_ns = None
    c.history.prepared(c.now_ns)
    prepare = m.Prepare(c.proposal)
    for member in sorted(asked):
        c.tell(member, prepare)


def ask_again(c: CoordinatorState, register: m.Register) -> None:
    """What an older connection of this rank may have lost; both are idempotent."""
    member = register.member
    if c.phase is Phase.PREPARING:
        if member in c.asked and register.promise < c.proposal:
            c.tell(member, m.Prepare(c.proposal))
        return
    commit = c.commit if c.commit is not None and c.commit.gen.id == c.proposal else None
    waits = register.promise == c.proposal != register.last
    if commit is not None and waits and member in c.reports:
        c.tell(member, _as_told_to(c, member, commit))


# ---- answering -----------------------------------------------------------------------------------


def evaluate(c: CoordinatorState) -> None:
    """All who were asked have answered, or cannot: commit, or ask again."""
    lost = sorted(x for x in c.asked if not c.roster.rank(x).present)
    if lost or c.due_ns is not None:
        c.want_change(c.why or f"rank {lost[0]} was lost during the change", 0)
        c.phase = Phase.WAITING
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
        settings=c.settings,
        had_state=c.had_state,
        state_lost=_state_lost(c),
        sizes=c.sizes,
        draining=joining.draining(c),
    )
    match answer:
        case forming.Wait(why=why):
            c.phase, c.waits = Phase.WAITING, why
            c.happened("WaitingForEvidence", f"{c.why}: {why}")
            c.want_change(c.why, 0)
        case forming.Finished(checkpoint=kept):
            ending.was_finished(c, kept)
        case forming.Broken():
            ending.fail(c, answer.reason, answer.message, answer.hint)
        case m.Commit():
            _commit_without_failing(c, answer)


def _commit_without_failing(c: CoordinatorState, commit: m.Commit) -> None:
    """Commit, with the batches that the job gives up from here on (R56)."""
    best, _ = forming.predecessor(c.reports.values())
    given_up = frozenset(best.skips if best is not None else ())
    skips = scripts.to_skip(c, given_up)
    if skips is None:
        ending.fail(c, "ScriptFailed", scripts.told(c, list(c.script_failures)))
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
        # Never silently from zero (R26): rounds of less than a heartbeat may be gone.
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
    c.phase = Phase.STARTING
    c.version = max(c.version, gen.version)
    c.unstarted, c.complained = set(gen.members), set()
    for member in sorted(c.reports):
        seen = c.roster.rank(member)
        seen.current = False
        seen.dismissed = c.reports[member].leaving and member not in c.index
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
    """Return the deaths behind a complaint: whoever lost its data channel says so sooner than the
    agent of the rank that died, and names itself first."""
    if not why or why != c.complaint:
        return why
    dead = ((left.member, c.roster.rank(left.member).dead) for left in gen.left_out)
    return "; ".join(f"rank {member}: {evidence}" for member, evidence in dead if evidence) or why


def _with_all_who_came(why: str, came: Iterable[MemberId]) -> str:
    """A change for another reason also admits whoever is ready: each joiner is named."""
    told = set(why.replace(",", " ").split())
    unnamed = [member for member in came if str(member) not in told]
    return f"{why}; {_who_join(unnamed)}" if unnamed else why


def _as_told_to(
    c: CoordinatorState, member: MemberId, commit: m.Commit
) -> m.Commit | m.CommitChange:
    """Who has the COMMIT before is told what changes (R44)."""
    change = c.change
    if change is not None and c.reports[member].accepted == change.base:
        return change
    return commit


def _who_starts_over(c: CoordinatorState, commit: m.Commit) -> None:
    """Whoever joins a script that feeds itself, and says no number of steps, begins its loop at the
    first step while the others are in the middle of theirs."""
    gen = commit.gen
    new = [x for x in gen.members if not c.reports[x].has_state]
    if not new or not gen.version or any(_plan_ends(c, x) for x in new):
        return
    names = ", ".join(map(str, new))
    c.starts_over = (
        f"the script feeds itself and says no number of steps: it began at its first step on "
        f"{names}, with the weights of version {gen.version}; say `for step in pl.steps(N)` (with "
        "DDP: pl.ddp(..., steps=N)) and the job counts, or hand the loader over"
    )
    c.happened("ScriptStartsOver", c.starts_over)


def _who_draws_alike(c: CoordinatorState, commit: m.Commit) -> None:
    """Ranks that feed themselves from equal seeds: each gradient would be there several times."""
    if commit.gen.plan is None:
        return
    found: dict[int, list[MemberId]] = {}
    for member in commit.gen.members:
        register = c.roster.rank(member).register
        if register is not None and register.seed is not None:
            found.setdefault(register.seed, []).append(member)
    for seed, members in found.items():
        if len(members) > 1:
            text = (
                f"torch's seed is {seed} on {', '.join(map(str, members))}, and the script feeds "
                "itself: do they draw the same batches? Say torch.manual_seed(seed + pl.rank()) "
                "after pl.init(); RANK in the environment is 0 on each rank"
            )
            c.happened("SeedsEqual", text)


def _plan_ends(c: CoordinatorState, member: MemberId) -> bool:
    register = c.roster.rank(member).register
    return register is None or register.plan is None or register.plan.ends


def _resumed(c: CoordinatorState, kept: Kept) -> None:
    """The released log goes on from the checkpoint; what came after it is made once more."""
    redone = max(0, c.version - kept.version)
    text = f"the job goes on from the checkpoint of version {kept.version}"
    facts = {"version": str(kept.version), "redone": str(redone)}
    c.happened(
        "ResumedFromCheckpoint", f"{text}; {redone} rounds are lost" if redone else text, facts
    )
    c.version = kept.version
    c.history.began_at(kept.version)


def all_started(c: CoordinatorState) -> None:
    c.phase = Phase.RUNNING
    c.history.all_started(c.now_ns)
