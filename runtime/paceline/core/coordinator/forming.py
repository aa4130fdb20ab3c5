"""From the reports of a PREPARE to the next generation: a pure function (R5, R6, R16, R26).

The answer is the COMMIT, or what it waits for, or why the job is broken. `may_commit` is asked
twice: before PREPARE is sent, with those who are expected to answer, and after, with those who
did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from msgspec.structs import replace
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Pacing

from paceline.core.coordinator.sizes import Sizes
from paceline.core.messages import Commit, Prepared, Register, pod_of
from paceline.core.protocol.ids import GenerationId, MemberId
from paceline.core.protocol.records import Gen, LeftOut
from paceline.core.protocol.rows import members_of
from paceline.core.protocol.snapshot import Kept


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be committed yet; condition Degraded, reason WaitingForEvidence."""

    why: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The job cannot go on."""

    reason: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The newest checkpoint is the end of the job: there is nothing left to train (C1)."""

    checkpoint: Kept


def may_commit(
    last_active: Iterable[MemberId],
    promised: Iterable[MemberId],
    leaving: Iterable[MemberId],
    unaccounted: str,
) -> str:
    """R6: empty if a generation may be committed, else what it waits for.

    `last_active`: M, active ranks of the winner's last GEN record. `unaccounted`: answer of
    `Roster.unaccounted` for the promised ones. Leaving ranks do not count for a majority (V24)."""
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
    """R26: empty if a first generation may be formed, else what it waits for.

    `possible`: ranks that may exist. More than half of them is enough as long as nobody can have
    trained; after that only the certainty that no rank with weights lives (C1)."""
    if not unaccounted:
        return ""
    if had_state:
        return f"ranks of this job have trained, and {unaccounted}"
    if 2 * here > possible:
        return ""
    return f"{here} of {possible} possible ranks answered, and {unaccounted}"


class Candidate(Protocol):
    """A rank that the next generation may continue or begin with: its report, or what it would
    report as far as the coordinator knows."""

    @property
    def member(self) -> MemberId: ...
    @property
    def last(self) -> GenerationId: ...
    @property
    def version(self) -> int: ...
    @property
    def has_state(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def leaving(self) -> bool: ...
    @property
    def checkpoint(self) -> Kept | None: ...


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


def winner(candidates: Iterable[AnyCandidate]) -> AnyCandidate | None:
    """Whose state the living continue: greatest (last GEN record, version) (R5)."""
    full = [x for x in candidates if x.has_state]
    if not full:
        return None
    best = max((x.last, x.version) for x in full)
    holders = [x for x in full if (x.last, x.version) == best]
    return min(holders, key=lambda x: (x.leaving, x.member))


def predecessor(
    candidates: Collection[AnyCandidate],
) -> tuple[AnyCandidate | None, Kept | None]:
    """What the next generation continues: the winner's state; or, without a winner, this
    checkpoint; without either it is the first one (R26).

    A checkpoint goes before a state that is older: that is a rank's which was left out long ago,
    and those who went on without it are all dead."""
    seen = [x.checkpoint for x in candidates if may_begin_with(x) and x.checkpoint is not None]
    kept = max(seen, key=lambda k: (k.generation, k.version), default=None)
    best = winner(candidates)
    if best is None or kept is None:
        return best, kept
    newer = (kept.generation, kept.version) > (best.last, best.version)
    return (None, kept) if newer else (best, None)


def counts_as_state(report: Prepared, best: Prepared, with_state: Collection[MemberId]) -> bool:
    """R5: its log ends in the winner's GEN record, or that record lists it as having state."""
    return report.has_state and (report.last == best.last or report.member in with_state)


def may_join(report: Prepared, best: Prepared) -> bool:
    """A draining rank is never admitted (R16), and nobody once the stop round is committed."""
    return report.ready and not report.leaving and not best.stopped


def may_begin_with(candidate: Candidate) -> bool:
    """Can be a member of a generation that has no predecessor alive."""
    return candidate.ready and not candidate.leaving


def has_all(report: Prepared, best: Prepared) -> bool:
    """Nothing of the log is only with the winner."""
    return report.digest == best.digest


def form(
    proposal: GenerationId,
    reports: Mapping[MemberId, Prepared],
    registers: Mapping[MemberId, Register],
    *,
    dead: Mapping[MemberId, str],
    unaccounted: str,
    possible_ranks: int,
    settings: RoundSettings,
    had_state: bool,
    state_lost: str,
    sizes: Sizes,
    draining: Collection[MemberId],
) -> Commit | Wait | Broken | Finished:
    """The next generation from the answers to PREPARE(`proposal`).

    `dead`: evidence by member, for the record. `possible_ranks`: ranks that may exist (R26).
    `had_state`: ranks of this job have trained. `state_lost`: what to say if that is lost.
    `draining`: not counted in a size, and members until they ask to leave."""
    best, kept = predecessor(reports.values())
    if best is None:
        return _first(
            proposal,
            reports,
            registers,
            kept,
            unaccounted=unaccounted,
            possible=possible_ranks,
            settings=settings,
            had_state=had_state,
            state_lost=state_lost,
            sizes=sizes,
        )
    leaving = {m for m, r in reports.items() if r.leaving}
    waits = may_commit(members_of(best.gen_active), reports, leaving, unaccounted)
    if waits:
        return Wait(waits)
    had_before = set(members_of(best.with_state))
    state = {m for m, r in reports.items() if counts_as_state(r, best, had_before)}
    best = _able_to_repair(best, [reports[m] for m in sorted(state)])
    if (diverging := _diverging(state, reports, best)) is not None:
        return diverging
    able = {m for m, r in reports.items() if m not in state and may_join(r, best)}
    leave, promoted = _who_leaves(state, leaving, reports, best)
    stay = state - leave
    before = members_of(best.members)
    receiving = able.intersection(before).difference(draining)  # members that have no state yet
    inside = (stay - leaving - set(draining)) | receiving
    joiners = receiving | sizes.join(inside, able - receiving - set(draining))
    together = stay | joiners
    members = tuple(sorted(together))
    odd = _fingerprints_differ(members, registers, best.member)
    if odd is not None:
        return odd
    # No round yet: everybody takes part from the first one (R26).
    fresh = best.version == best.started
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
    """Who sends what to whom (R7, R15)."""
    behind = tuple(
        (m, reports[m].index, reports[m].digest)
        for m in sorted(stay)
        if m != best.member and reports[m].digest != best.digest
    )
    behind_members = {m for m, _, _ in behind}
    return _commit(gen, best.member, behind, min(stay - behind_members or stay), joiners, registers)


def _able_to_repair(best: Prepared, state: Collection[Prepared]) -> Prepared:
    """Return the winner, or another rank with its log that can send what the others lack (R7): one
    that has got a state in this generation has none of the records before it."""
    ends = {(r.index, r.digest) for r in state}
    equals = [best, *(r for r in state if r.digest == best.digest and r.version == best.version)]
    return next((r for r in equals if ends.issubset(r.tail)), best)


def _diverging(
    state: set[MemberId], reports: Mapping[MemberId, Prepared], best: Prepared
) -> Broken | None:
    """Members' logs are prefixes of the winner's; anything else is an error, not a repair (R5)."""
    for member in sorted(state):
        report = reports[member]
        if (report.index, report.digest) not in best.tail:
            return Broken(
                "LogsDiverge",
                f"the log of rank {member} ends at record {report.index} ({report.digest}), "
                f"which is no part of the log of rank {best.member} ({best.tail})",
            )
    return None


def _who_leaves(
    state: set[MemberId],
    leaving: set[MemberId],
    reports: Mapping[MemberId, Prepared],
    best: Prepared,
) -> tuple[set[MemberId], set[MemberId]]:
    """(who leaves now, who is made active for it) of the ranks with state."""
    leave = state & leaving
    heirs = state - leave
    if not any(has_all(reports[m], best) for m in heirs):
        return set(), set()  # first somebody who stays gets all that the leaver has (V12)
    if not heirs.intersection(members_of(best.gen_active)):
        return set(), heirs  # first a generation that records them as active (R6)
    return leave, set()


def _awake(stay: set[MemberId], benched: set[MemberId]) -> tuple[MemberId, ...]:
    """A joiner whose state was complete is active at once; a benched rank stays benched (A6)."""
    return tuple(sorted(stay - benched or stay))


def beginners(
    able: Mapping[MemberId, Kept | None], kept: Kept | None, sizes: Sizes
) -> tuple[MemberId, ...]:
    """Who begins of these, each with the checkpoint that it sees; one of them sees `kept`. Empty
    if that makes no allowed size."""
    sees = {pod_of(m) for m, found in able.items() if found == kept}
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
    settings: RoundSettings,
    had_state: bool,
    state_lost: str,
    sizes: Sizes,
) -> Commit | Wait | Broken | Finished:
    """R26: the newest checkpoint is the state, or, if none of the ranks has ever trained, the
    lowest member's initial weights. Everybody is active from the first round."""
    able = sorted(m for m, r in reports.items() if may_begin_with(r))
    if not able:
        return Wait("no rank is ready")
    problem = next((p for m in able if (p := reports[m].checkpoint_problem)), "")
    members = beginners({m: reports[m].checkpoint for m in able}, kept, sizes)
    if not members:
        return Wait("the replicas that see the checkpoint are not of an allowed size")
    trained = had_state or kept is not None or bool(problem)
    waits = may_begin(len(reports), possible, unaccounted, had_state=trained)
    if waits:
        return Wait(waits)
    if problem:
        return Broken("CheckpointUnusable", problem)
    if kept is not None and kept.finished:
        return Finished(kept)
    if kept is not None and kept.generation >= proposal:
        return Wait(f"the checkpoint of version {kept.version} is of a later generation")
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
    with_state = tuple(m for m in members if reports[m].checkpoint == kept) if kept else (lowest,)
    gen = Gen(
        id=proposal,
        members=members,
        with_state=with_state,
        active=members,
        version=kept.version if kept else 0,
        lookahead=tuple((m, registers[m].lookahead) for m in members),
        plan=registers[lowest].plan,
        settings=settings,
    )
    joiners = set(members) - set(with_state)
    commit = _commit(gen, with_state[0], (), with_state[0], joiners, registers)
    return replace(commit, restore=kept)


def _fingerprints_differ(
    members: Iterable[MemberId], registers: Mapping[MemberId, Register], reference: MemberId
) -> Broken | None:
    """A gradient of another shape, or other data, on one rank: found before the first reduction."""
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
