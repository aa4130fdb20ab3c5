"""Judgment of script failures: bad luck of one rank, or an error that every rank meets (R55).

A rank whose script failed is started again, and its batch is dealt to another rank. If the error is
in the script or in the data, it ends one rank after the other until no rank has the weights.
Therefore the second failure that cannot be chance ends the job and names the script. That is the
same exception at the same line on another rank, or another process that ended while it had the same
batch.

With `failurePolicy.maxSkippedBatches` a batch with which two processes have failed is given up
instead. The next generation names its lease, and the rank that is dealt the lease drops it (R56).
The leases to give up follow from the known failures and from the log. So nothing is lost with a
coordinator, and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from paceline_api.failures import ruled
from paceline_api.ids import MemberId
from paceline_api.status import ScriptFailure

from paceline.core import messages as m
from paceline.core.agent.exits import EXIT_AGAIN, how_it_ended, is_scripts_own
from paceline.core.coordinator.state import CoordinatorState
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import batches_of, samples_of, total_leases

SAMPLES_MAX: Final = 64
"""Number of sample numbers of one batch that are listed."""
GROUPS_MAX: Final = 4
"""Number of distinct failures that one sentence lists."""


def note(c: CoordinatorState, dead: m.RankDead) -> bool:
    """Remember the end of a process that its script caused.

    Args:
        c: The state, updated in place.
        dead: The report of the process's agent.

    Returns:
        False if the script did not cause the end, or if this end is known already.
    """
    rank = c.roster.rank(dead.member)
    if not is_scripts_own(dead) or rank.kill_asked or rank.dismissed:
        return False
    if any(known.member == dead.member for known in c.script_failures):
        return False
    c.script_failures.append(dead)
    c.scripts_failed += 1
    return True


def repeated(c: CoordinatorState, dead: m.RankDead) -> str:
    """Describe a failure that repeats an earlier one and costs the job more than a batch.

    Args:
        c: The state.
        dead: The failure, noted already.

    Returns:
        One line that names the failures; empty if this failure does not end the job.
    """
    others = [known for known in c.script_failures if known.member != dead.member]
    alike = [known for known in others if _same_line(known, dead) or _same_batch(known, dead)]
    if not alike or all(costs_a_batch(c, known) for known in (*alike, dead)):
        return ""
    return describe_failures(c, [*alike, dead])


def costs_a_batch(c: CoordinatorState, dead: m.RankDead) -> bool:
    """Return True if this failure is charged to its batch instead of the job.

    Such a failure counts towards giving the batch up, and the job continues (R56).

    Args:
        c: The state.
        dead: The failure.

    Returns:
        True if the batch is known and the job may still give up all failing batches.
    """
    most = c.config.max_skipped_batches
    return bool(most) and dead.batch is not None and len(c.skips | failing_leases(c)) <= most


def failing_leases(c: CoordinatorState) -> frozenset[int]:
    """Return the leases with a batch that has ended two processes or more."""
    ended: dict[m.DealtBatch, set[MemberId]] = {}
    for dead in c.script_failures:
        if dead.batch is not None and ruled(c.config.failure_rules, dead.exit_code) is None:
            ended.setdefault(dead.batch, set()).add(dead.member)
    return frozenset(batch.lease for batch, members in ended.items() if len(members) > 1)


def to_skip(c: CoordinatorState, given_up: Collection[int]) -> tuple[int, ...] | None:
    """Return the leases that the next generation gives up (R56).

    Args:
        c: The state.
        given_up: Leases that the log has given up already.

    Returns:
        Further leases, in ascending order. None if that makes more than the job allows.
    """
    if not c.config.max_skipped_batches:
        return ()
    more = failing_leases(c).difference(given_up)
    if len(more) + len(given_up) > c.config.max_skipped_batches:
        return None if more else ()
    return tuple(sorted(more))


def skipped(c: CoordinatorState, lease: int) -> str:
    """Return one line that names the samples given up with a lease, and why."""
    failures = [x for x in c.script_failures if x.batch is not None and x.batch.lease == lease]
    plan = _plan(c)
    samples = "" if plan is None else f"{samples_of(plan, lease)} samples are "
    why = describe_failures(c, failures)
    return (
        f"{samples}dropped, since the script failed twice with their batch: {why} "
        f"({len(c.skips)} of at most {c.config.max_skipped_batches} batches, "
        "spec.failurePolicy.maxSkippedBatches)"
    )


def cause_of_loss(c: CoordinatorState) -> str:
    """Describe the script failures that ended all ranks with the weights.

    Args:
        c: The state.

    Returns:
        One line that names the failures; empty if not all of those ranks were ended by scripts.
    """
    failed = {dead.member for dead in c.script_failures}
    members = set(c.gen.members) if c.gen is not None else failed
    return describe_failures(c, list(c.script_failures)) if failed and members <= failed else ""


def describe_failures(c: CoordinatorState, failures: Sequence[m.RankDead]) -> str:
    """Describe failures in one line: exception or exit code, ranks and sample numbers.

    Args:
        c: The state, which knows the order of the data.
        failures: The failures. Those with the same exception and line are grouped.

    Returns:
        The line. At most `GROUPS_MAX` groups are listed.
    """
    groups: dict[str, list[m.RankDead]] = {}
    for dead in failures:
        at = dead.error
        key = f"{at.type} {at.file} {at.line}" if at is not None else str(dead.exit_code)
        groups.setdefault(key, []).append(dead)
    parts = []
    for alike in list(groups.values())[:GROUPS_MAX]:
        last = alike[-1]
        ranks = list(dict.fromkeys(str(dead.member) for dead in alike))
        samples = list(dict.fromkeys(filter(None, (_samples(c, dead) for dead in alike))))
        what = _what(last) + (" on rank " if len(ranks) == 1 else " on ranks ")
        parts.append(what + _listed(ranks) + (f", {_listed(samples)}" if samples else ""))
    more = len(groups) - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def at_the_end(c: CoordinatorState) -> str:
    """Return the remark on script failures for a completed job; empty if there were none."""
    if not c.scripts_failed:
        return ""
    times = "once" if c.scripts_failed == 1 else f"{c.scripts_failed} times"
    return f"the script failed {times} on the way: {describe_failures(c, list(c.script_failures))}"


def never_replaced(c: CoordinatorState) -> list[m.RankDead]:
    """Return the script failures after which nobody trained to the end in their slot.

    In a job of a script that runs unchanged, each slot writes and evaluates its own part, so the
    job is not complete without it. Failures that a rule of the user allows do not count.

    Args:
        c: The state.

    Returns:
        The failures; none if any rank can do the work of another one.
    """
    if not c.script_failures or not c.runs_script:
        return []
    ended = {
        rank.member[:2]: rank.member
        for _, rank in sorted(c.roster.ranks.items())
        if rank.finished and not rank.beat.outside
    }
    return [
        dead
        for dead in c.script_failures
        if ended.get(dead.member[:2], dead.member) <= dead.member
        and ruled(c.config.failure_rules, dead.exit_code) is None
        and (dead.error is not None or dead.exit_code != EXIT_AGAIN)
    ]


def before_in_slot(c: CoordinatorState, member: MemberId) -> list[m.RankDead]:
    """Return the script failures of a rank's slot before it, which are why the rank was started.

    Args:
        c: The state.
        member: The rank.

    Returns:
        The failures; none if any rank can do the work of another one.
    """
    failures = never_replaced(c)
    return [dead for dead in failures if dead.member[:2] == member[:2] and dead.member < member]


def lost_slots(c: CoordinatorState) -> list[m.RankDead]:
    """Return the script failures whose slot has a rank that can never join the others.

    The script of such a rank has come to its end without having taken part, since it does not know
    where to begin (S10). Another start would end in the same way.

    Args:
        c: The state.

    Returns:
        The failures; none if any rank can do the work of another one.
    """
    if not c.script_failures:
        return []
    outside = {rank.member[:2] for rank in c.roster.present() if rank.beat.outside}
    return [dead for dead in never_replaced(c) if dead.member[:2] in outside]


def status(c: CoordinatorState) -> tuple[ScriptFailure, ...]:
    """Return the known script failures for the status."""
    return tuple(
        ScriptFailure(dead.member, _what(dead), _samples(c, dead)) for dead in c.script_failures
    )


def last_lines(dead: m.RankDead) -> str:
    """Return the last lines of stderr: all lines of the reason after the first."""
    return dead.why.partition("\n")[2]


def _what(dead: m.RankDead) -> str:
    return str(dead.error) if dead.error is not None else how_it_ended(dead.exit_code)


def _same_line(one: m.RankDead, other: m.RankDead) -> bool:
    if one.error is None or other.error is None or one.member[:2] == other.member[:2]:
        return False
    return one.error.is_same(other.error)


def _same_batch(one: m.RankDead, other: m.RankDead) -> bool:
    return one.batch is not None and one.batch == other.batch


def _samples(c: CoordinatorState, dead: m.RankDead) -> str:
    """Return the sample numbers of its batch, as far as the order of the data is known here."""
    plan = _plan(c)
    if dead.batch is None or plan is None or not 0 <= dead.batch.lease < total_leases(plan):
        return ""
    parts = batches_of(plan, dead.batch.lease)
    if not 0 <= dead.batch.part < len(parts):
        return ""
    numbers = parts[dead.batch.part]
    more = f" and {len(numbers) - SAMPLES_MAX} more" if len(numbers) > SAMPLES_MAX else ""
    return f"samples {', '.join(map(str, numbers[:SAMPLES_MAX]))}{more}"


def _plan(c: CoordinatorState) -> DataPlan | None:
    plans = (s.register.plan for s in c.roster.ranks.values() if s.register is not None)
    return next((plan for plan in plans if plan is not None and plan.samples), None)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
