"""Pure function from the answers to a PREPARE to the next generation (R5, R6, R16, R26).

The result is the COMMIT, the evidence that is missing, or the reason why the job cannot continue.
The rule `may_commit` is applied twice: before PREPARE is sent, to the ranks that are expected to
answer, and afterwards, to those that did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from paceline_api.ids import GenerationId, MemberId, pod_of
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Pacing

from paceline.core.coordinator.sizes import Sizes
from paceline.core.messages import Commit, Prepared, Register
from paceline.core.protocol.records import Gen, LeftOut
from paceline.core.protocol.rows import members_of
from paceline.core.protocol.snapshot import Kept


@dataclass(frozen=True, slots=True)
class EvidenceWait:
    """Nothing can be committed yet; shown as condition Degraded, reason WaitingForEvidence."""

    why: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The job cannot continue; it fails with this reason."""

    reason: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The newest checkpoint is the end of the job: nothing is left to train (C1)."""

    checkpoint: Kept


def may_commit(
    last_active: Iterable[MemberId],
    promised: Iterable[MemberId],
    leaving: Iterable[MemberId],
    unaccounted: str,
) -> str:
    """Return what a COMMIT still waits for, or an empty string if it may be sent (R6).

    It needs promises of more than half of the active ranks of the winner's last GEN record, or of
    half of them with the lowest one. Without such a majority, all processes that may live must have
    promised.

    Args:
        last_active: Active ranks of the winner's last GEN record.
        promised: Ranks that have promised, or are expected to.
        leaving: Ranks that drain. They do not count for the majority (V24).
        unaccounted: Answer of `Roster.unaccounted` for the promised ranks.

    Returns:
        One sentence for people; empty if the generation may be committed.
    """
    needed = set(last_active)
    counted = (set(promised) - set(leaving)) & needed
    if 2 * len(counted) > len(needed):
        return ""
    if needed and 2 * len(counted) == len(needed) and min(needed) in counted:
        return ""
    if not unaccounted:
        return ""
    return f"{len(counted)} of {len(needed)} active ranks answered, and {unaccounted}"


def may_begin(here: int, possible: int, unaccounted: str, *, had_state: bool) -> str:
    """Return what a first generation still waits for, or an empty string if it may be formed (R26).

    While no rank can have trained, more than half of the ranks that may exist are enough.
    Afterwards only the certainty counts that no rank with weights lives (C1).

    Args:
        here: Number of ranks that have answered, or are expected to.
        possible: Number of ranks that may exist.
        unaccounted: Answer of `Roster.unaccounted` for these ranks.
        had_state: True if ranks of this job have trained.

    Returns:
        One sentence for people; empty if the generation may be formed.
    """
    if not unaccounted:
        return ""
    if had_state:
        return f"ranks of this job have trained, and {unaccounted}"
    if 2 * here > possible:
        return ""
    return f"{here} of {possible} possible ranks answered, and {unaccounted}"


class Candidate(Protocol):
    """A rank that the next generation may continue or begin with.

    Both a rank's report (`Prepared`) and the coordinator's record of it (`KnownRank`) have this
    shape. The record is what the rank would report, as far as the coordinator knows.
    """

    @property
    def member(self) -> MemberId:
        """Member id of the rank."""

    @property
    def last(self) -> GenerationId:
        """Generation of its last GEN record; `NO_GENERATION` if it has none."""

    @property
    def version(self) -> int:
        """Version of its committed state."""

    @property
    def has_state(self) -> bool:
        """Return True if it has weights."""

    @property
    def ready(self) -> bool:
        """Return True if its model and data are known."""

    @property
    def leaving(self) -> bool:
        """Return True if it drains."""

    @property
    def checkpoint(self) -> Kept | None:
        """The newest checkpoint that it sees; None if it sees none."""


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


def winner(candidates: Iterable[AnyCandidate]) -> AnyCandidate | None:
    """Return the rank whose state the others continue: the greatest (last GEN, version) (R5).

    Args:
        candidates: Reports, or what the ranks would report.

    Returns:
        A rank with that state, if possible one that does not leave, then the lowest. None if no
        rank has state.
    """
    full = [x for x in candidates if x.has_state]
    if not full:
        return None
    best = max((x.last, x.version) for x in full)
    holders = [x for x in full if (x.last, x.version) == best]
    return min(holders, key=lambda x: (x.leaving, x.member))


def predecessor(
    candidates: Collection[AnyCandidate],
) -> tuple[AnyCandidate | None, Kept | None]:
    """Return what the next generation continues: a rank's state, or a checkpoint (R26).

    A checkpoint is preferred to an older state. Such a state belongs to a rank that was left out
    long ago; the ranks that continued without it are all dead.

    Args:
        candidates: Reports, or what the ranks would report.

    Returns:
        (winner, None) to continue the winner's state; (None, checkpoint) to continue the
        checkpoint; (None, None) if this is the first generation.
    """
    checkpoints = [
        x.checkpoint for x in candidates if may_begin_with(x) and x.checkpoint is not None
    ]
    kept = max(checkpoints, key=lambda k: (k.generation, k.version), default=None)
    best = winner(candidates)
    if best is None or kept is None:
        return best, kept
    newer = (kept.generation, kept.version) > (best.last, best.version)
    return (None, kept) if newer else (best, None)


def counts_as_state(report: Prepared, best: Prepared, with_state: Collection[MemberId]) -> bool:
    """Return True if the report's state belongs to the winner's log (R5).

    That is so if its log ends in the winner's GEN record, or if that record lists it as having
    state.

    Args:
        report: The report to judge.
        best: The winner's report.
        with_state: Members with state by the winner's GEN record.

    Returns:
        True if the rank keeps its state; else it joins without one.
    """
    return report.has_state and (report.last == best.last or report.member in with_state)


def may_join(report: Prepared, best: Prepared) -> bool:
    """Return True if the rank may be admitted: it does not drain, no stop round was made (R16)."""
    return report.ready and not report.leaving and not best.stopped


def may_begin_with(candidate: Candidate) -> bool:
    """Return True if the rank may be a member of a generation that continues no living rank."""
    return candidate.ready and not candidate.leaving


def has_all(report: Prepared, best: Prepared) -> bool:
    """Return True if the rank's log equals the winner's, so that the winner may leave."""
    return report.digest == best.digest


def form(
    proposal: GenerationId,
    reports: Mapping[MemberId, Prepared],
    registers: Mapping[MemberId, Register],
    *,
    dead: Mapping[MemberId, str],
    unaccounted: str,
    possible_ranks: int,
    wanted_ranks: int,
    settings: RoundSettings,
    had_state: bool,
    state_lost: str,
    sizes: Sizes,
    draining: Collection[MemberId],
) -> Commit | EvidenceWait | Broken | Finished:
    """Return the next generation, from the answers to one PREPARE.

    Args:
        proposal: Id of the PREPARE; it becomes the id of the generation.
        reports: The answers, by member.
        registers: The last registration of each of these ranks.
        dead: Evidence of death by member, for the record of who was left out.
        unaccounted: Answer of `Roster.unaccounted` for these ranks.
        possible_ranks: Upper bound on the ranks that may exist (R26).
        wanted_ranks: Number of ranks that the owner of the job wants.
        settings: Settings of the rounds for a first generation.
        had_state: True if ranks of this job have trained.
        state_lost: Message for the case that the weights are lost.
        sizes: The allowed sizes (C9).
        draining: Ranks of draining replicas. They are not counted in a size, and stay members until
            they ask to leave.

    Returns:
        The COMMIT; or what it waits for; or why the job cannot continue; or the checkpoint that
        ends it.
    """
    best, kept = predecessor(reports.values())
    if best is None:
        return _first(
            proposal,
            reports,
            registers,
            kept,
            unaccounted=unaccounted,
            possible=possible_ranks,
            wanted=wanted_ranks,
            settings=settings,
            had_state=had_state,
            state_lost=state_lost,
            sizes=sizes,
        )
    leaving = {m for m, r in reports.items() if r.leaving}
    waits = may_commit(members_of(best.gen_active), reports, leaving, unaccounted)
    if waits:
        return EvidenceWait(waits)
    had_before = set(members_of(best.with_state))
    state = {m for m, r in reports.items() if counts_as_state(r, best, had_before)}
    best = _able_to_repair(best, [reports[m] for m in sorted(state)])
    if (diverging := _diverging(state, reports, best)) is not None:
        return diverging
    able = {m for m, r in reports.items() if m not in state and may_join(r, best)}
    leave, promoted = _who_leaves(state, leaving, reports, best)
    stay = state - leave
    before = members_of(best.members)
    receiving = able.intersection(before).difference(draining)  # members without state so far
    inside = (stay - leaving - set(draining)) | receiving
    joiners = receiving | sizes.join(inside, able - receiving - set(draining))
    together = stay | joiners
    members = tuple(sorted(together))
    odd = _fingerprints_differ(members, registers, best.member)
    if odd is not None:
        return odd
    # No round was committed yet: all members take part from the first one (R26). A script that
    # joins has to catch up first (S3).
    fresh = best.version == best.started and not _script_ranks(registers[best.member])
    active = members if fresh else _awake(stay, set(members_of(best.benched)) - promoted)
    left_out = tuple(
        LeftOut(m, "leave" if m in leave else dead.get(m) or "silent")
        for m in sorted(set(before).difference(together))
    )
    gen = Gen(
        id=proposal,
        members=members,
        with_state=tuple(sorted(stay)),
        active=active,
        version=best.version,
        left_out=left_out,
        lookahead=tuple((m, registers[m].lookahead) for m in members),
        unwanted=_unwanted(registers[best.member], wanted_ranks),
    )
    return _repaired(gen, stay, joiners, reports, registers, best)


def _repaired(
    gen: Gen,
    stay: set[MemberId],
    joiners: set[MemberId],
    reports: Mapping[MemberId, Prepared],
    registers: Mapping[MemberId, Register],
    best: Prepared,
) -> Commit:
    """Return the COMMIT with the repairs: which rank sends what to which others (R7, R15)."""
    behind = tuple(
        (m, reports[m].index, reports[m].digest)
        for m in sorted(stay)
        if m != best.member and reports[m].digest != best.digest
    )
    behind_members = {m for m, _, _ in behind}
    return _commit(gen, best.member, behind, min(stay - behind_members or stay), joiners, registers)


def _able_to_repair(best: Prepared, state: Collection[Prepared]) -> Prepared:
    """Return the winner, or a rank with an equal log that can send what the others lack (R7).

    A rank that received its state in this generation has no records from before it, so it may lack
    the records that others need.

    Args:
        best: The winner's report.
        state: Reports of all ranks with state.

    Returns:
        A report whose tail covers the ends of all logs; the winner's if there is none.
    """
    ends = {(r.index, r.digest) for r in state}
    equals = [best, *(r for r in state if r.digest == best.digest and r.version == best.version)]
    return next((r for r in equals if ends.issubset(r.tail)), best)


def _diverging(
    state: set[MemberId], reports: Mapping[MemberId, Prepared], best: Prepared
) -> Broken | None:
    """Return the error if a member's log is not a prefix of the winner's, else None (R5).

    Such a difference is never repaired: the job ends with the evidence.

    Args:
        state: Ranks with state.
        reports: The answers, by member.
        best: The winner's report.

    Returns:
        The error, with both logs' ends; None if all logs are prefixes.
    """
    for member in sorted(state):
        report = reports[member]
        if (report.index, report.digest) not in best.tail:
            return Broken(
                "LogsDiverge",
                f"the log of rank {member} ends at record {report.index} ({report.digest}), "
                f"which is not part of the log of rank {best.member} ({best.tail})",
            )
    return None


def _who_leaves(
    state: set[MemberId],
    leaving: set[MemberId],
    reports: Mapping[MemberId, Prepared],
    best: Prepared,
) -> tuple[set[MemberId], set[MemberId]]:
    """Return which ranks with state leave now, and which are made active for that.

    Args:
        state: Ranks with state.
        leaving: Ranks that drain.
        reports: The answers, by member.
        best: The winner's report.

    Returns:
        (ranks that leave with this generation, ranks to promote from the bench). Both are empty
        while no rank that stays has the whole log.
    """
    leave = state & leaving
    heirs = state - leave
    if not any(has_all(reports[m], best) for m in heirs):
        return set(), set()  # first, a rank that stays must get the leaver's whole log (V12)
    if not heirs.intersection(members_of(best.gen_active)):
        return set(), heirs  # first, a generation must record them as active (R6)
    return leave, set()


def _awake(stay: set[MemberId], benched: set[MemberId]) -> tuple[MemberId, ...]:
    """Return the ranks with state that are active in the next generation.

    A joiner whose state became complete is active at once; a benched rank stays benched (A6).

    Args:
        stay: Ranks with state that stay.
        benched: Ranks that are benched and not promoted.

    Returns:
        The active ranks, in rank order. All ranks of `stay` if every one of them is benched.
    """
    return tuple(sorted(stay - benched or stay))


def beginners(
    able: Mapping[MemberId, Kept | None], kept: Kept | None, sizes: Sizes
) -> tuple[MemberId, ...]:
    """Return the ranks that begin a generation without a living predecessor.

    Args:
        able: The ready ranks, each with the checkpoint that it sees.
        kept: The checkpoint to continue; None if there is none.
        sizes: The allowed sizes (C9).

    Returns:
        The members in rank order, at least one of which sees `kept`. Empty if they make no allowed
        size.
    """
    sees = {pod_of(m) for m, checkpoint in able.items() if checkpoint == kept}
    members = tuple(sorted(sizes.begin(able, first=sees)))
    return members if any(able[m] == kept for m in members) else ()


def _first(
    proposal: GenerationId,
    reports: Mapping[MemberId, Prepared],
    registers: Mapping[MemberId, Register],
    kept: Kept | None,
    *,
    unaccounted: str,
    possible: int,
    wanted: int,
    settings: RoundSettings,
    had_state: bool,
    state_lost: str,
    sizes: Sizes,
) -> Commit | EvidenceWait | Broken | Finished:
    """Return a generation that continues no living rank (R26).

    Its state is the newest checkpoint. If no rank has ever trained, it is the initial weights of
    the lowest member. All members are active from the first round.

    Args:
        proposal: Id of the PREPARE.
        reports: The answers, by member.
        registers: The last registration of each of these ranks.
        kept: The checkpoint to continue; None if there is none.
        unaccounted: Answer of `Roster.unaccounted` for these ranks.
        possible: Upper bound on the ranks that may exist.
        wanted: Number of ranks that the owner of the job wants.
        settings: Settings of the rounds.
        had_state: True if ranks of this job have trained.
        state_lost: Message for the case that the weights are lost.
        sizes: The allowed sizes (C9).

    Returns:
        The COMMIT; or what it waits for; or why the job cannot continue; or the checkpoint that
        ends it.
    """
    able = sorted(m for m, r in reports.items() if may_begin_with(r))
    if not able:
        return EvidenceWait("no rank is ready")
    problem = next((p for m in able if (p := reports[m].checkpoint_problem)), "")
    members = beginners({m: reports[m].checkpoint for m in able}, kept, sizes)
    if not members:
        return EvidenceWait("the replicas that see the checkpoint are not of an allowed size")
    trained = had_state or kept is not None or bool(problem)
    waits = may_begin(len(reports), possible, unaccounted, had_state=trained)
    if waits:
        return EvidenceWait(waits)
    if problem:
        return Broken("CheckpointUnusable", problem)
    if kept is not None and kept.finished:
        return Finished(kept)
    if kept is not None and kept.generation >= proposal:
        return EvidenceWait(f"the checkpoint of version {kept.version} is of a later generation")
    if state_lost and kept is None:
        return Broken(
            "StateLost",
            state_lost,
            hint="set spec.checkpoint and its everyRounds, or ask for more replicas than can fail "
            "at once",
        )
    odd = _fingerprints_differ(members, registers, members[0])
    if odd is not None:
        return odd
    lowest = members[0]
    if settings.pacing is Pacing.AUTO:
        settings = replace(settings, pacing=registers[lowest].pacing)
    if script_ranks := _script_ranks(registers[lowest]):
        if len(members) < (needed := min(script_ranks, wanted)):
            return EvidenceWait(f"{len(members)} of {needed} ranks of the script have begun")
        with_state = members
    elif kept:
        with_state = tuple(m for m in members if reports[m].checkpoint == kept)
    else:
        with_state = (lowest,)
    gen = Gen(
        id=proposal,
        members=members,
        with_state=with_state,
        active=members,
        version=kept.version if kept else 0,
        lookahead=tuple((m, registers[m].lookahead) for m in members),
        plan=registers[lowest].plan,
        settings=settings,
        unwanted=_unwanted(registers[lowest], wanted),
    )
    joiners = set(members) - set(with_state)
    commit = _commit(gen, with_state[0], (), with_state[0], joiners, registers)
    return replace(commit, restore=kept)


def _script_ranks(register: Register) -> int:
    """Return with how many ranks a script begins that steps its own optimizers, else 0 (S1)."""
    return register.plan.script if register.plan is not None else 0


def _unwanted(register: Register, wanted: int) -> int | UnsetType:
    """Return how many slots of a script no rank is wanted in, as the record of the log has it."""
    return max(0, _script_ranks(register) - wanted) or UNSET


def _fingerprints_differ(
    members: Iterable[MemberId], registers: Mapping[MemberId, Register], reference: MemberId
) -> Broken | None:
    """Return the error if a member has other parameters or other data, else None.

    This finds a gradient of another shape, or another data set, before the first reduction.

    Args:
        members: Members of the next generation.
        registers: The last registration of each of them.
        reference: The member with which the others are compared.

    Returns:
        The error, which names both ranks and the difference; None if all are equal.
    """
    base = registers[reference]
    for member in members:
        mine = registers[member]
        if mine.fingerprint != base.fingerprint:
            return Broken(
                "ParametersDiffer",
                f"rank {member} has other parameters than rank {reference}: "
                f"{mine.fingerprint} instead of {base.fingerprint}",
                hint="build the same model on every rank: same names, shapes and dtypes",
            )
        if mine.plan != base.plan:
            return Broken(
                "DataDiffers",
                f"rank {member} has another data plan than rank {reference}: "
                f"{_differs(base, mine)}",
                hint="give every rank the same data set, batch size, seed and number of epochs",
            )
    return None


def _differs(base: Register, mine: Register) -> str:
    if base.plan is None or mine.plan is None:
        return "one of them has none"
    return base.plan.differences(mine.plan)


def _commit(
    gen: Gen,
    holder: MemberId,
    behind: tuple[tuple[MemberId, int, str], ...],
    donor: MemberId,
    joiners: set[MemberId],
    registers: Mapping[MemberId, Register],
) -> Commit:
    named = sorted({*gen.members, holder})
    return Commit(
        gen=gen,
        holder=holder,
        behind=behind,
        donor=donor,
        joiners=tuple(sorted(joiners)),
        endpoints=tuple((m, registers[m].endpoints) for m in named),
    )
