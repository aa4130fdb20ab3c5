"""Wait at the end of a job of a script for slot 0, which writes what the job leaves behind (S14).

The log keeps a job from its end until a script of slot 0 has ended. If the other scripts have ended
and slot 0 has no process, only the owner of the job can bring one. That is said at once, and the
wait has a bound.
"""

from __future__ import annotations

from paceline_api.reasons import Reason
from paceline_api.times import NS_PER_S

from paceline.core.coordinator import ending
from paceline.core.coordinator.state import CoordinatorState
from paceline.core.protocol.log import is_slot_0


def watch(c: CoordinatorState) -> None:
    """Report that the job waits for slot 0; fail the job if slot 0 stays away for too long."""
    if not _is_missing(c):
        c.without_slot_0_ns = None
    elif c.without_slot_0_ns is None:
        c.without_slot_0_ns = c.now_ns
        c.happened(Reason.WAITING_FOR_RANK_0, waits(c))
    elif c.now_ns >= due_ns(c):
        ending.fail(
            c,
            Reason.RANK_0_LOST,
            f"rank 0, which writes what the script saves, was lost, and had no process for "
            f"{_bound_s(c)} s after the scripts of all other ranks had ended "
            "(spec.stepDeadlineSeconds)",
            hint="see why the replica was not replaced, then start the job again: the script goes "
            "on from what it has saved",
        )


def due_ns(c: CoordinatorState) -> int:
    """Return the time at which the job fails; call it only while slot 0 is missing."""
    assert c.without_slot_0_ns is not None
    return c.without_slot_0_ns + c.config.step_deadline_ns


def waits(c: CoordinatorState) -> str:
    """Describe the wait for people; empty if there is none."""
    if c.without_slot_0_ns is None:
        return ""
    return (
        "the scripts of all ranks have ended but that of rank 0, which was lost before it had "
        f"saved; its replacement has {_bound_s(c)} s to start (spec.stepDeadlineSeconds)"
    )


def _bound_s(c: CoordinatorState) -> int:
    return c.config.step_deadline_ns // NS_PER_S


def _is_missing(c: CoordinatorState) -> bool:
    """Return True if only slot 0 keeps the job from its end, and has no process."""
    if c.gen is None or c.is_over:
        return False
    # The cheapest question first: this is asked with every event.
    members = (c.roster.rank(x) for x in c.gen.members if not c.roster.is_dead(x))
    if not all(rank.beat.done for rank in members) or not c.runs_script:
        return False
    lives = any(is_slot_0(member) for pod in c.roster.pods.values() for member in pod.living)
    return not lives and not all(c.roster.is_dead(x) for x in c.gen.members)
