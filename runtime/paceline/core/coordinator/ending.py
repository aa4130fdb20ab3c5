"""End of a job: released, failed, or left by all ranks without a successor (R17, C8, D7)."""

from __future__ import annotations

from typing import Final

from paceline_api.ids import GenerationId
from paceline_api.status import Outcome
from paceline_api.times import NS_PER_S

from paceline.core import messages as m
from paceline.core.coordinator import scripts
from paceline.core.coordinator.events import JobEnded, ToAgent
from paceline.core.coordinator.roster import KnownPod, KnownRank
from paceline.core.coordinator.state import CoordinatorPhase, CoordinatorState
from paceline.core.coordinator.timeouts import OVERTIME_NS
from paceline.core.coordinator.wording import format_clock, named
from paceline.core.protocol.snapshot import Kept

STATE_LOST: Final = "StateLost"
"""Reason of the outcome if no living rank has the weights."""


def some_stopped(c: CoordinatorState) -> bool:
    """Return True if a rank has reported the stop round (R17)."""
    return any(s.stopped is not None for s in c.roster.ranks.values())


def release_when_stopped(c: CoordinatorState) -> None:
    """Release the job once all members with state have reported the stop round (R17)."""
    if c.gen is None or c.phase not in (CoordinatorPhase.STARTING, CoordinatorPhase.RUNNING):
        return
    members = [c.roster.rank(x) for x in c.gen.members]
    from_the_start = set(c.gen.with_state)
    with_state = [s for s in members if s.current or s.member in from_the_start]
    agreed = all(s.stopped == c.gen.id for s in with_state)
    if agreed and any(s.present for s in with_state):  # one rank must publish the final model
        release(c, c.gen.id, max(s.version for s in with_state))


def prove(c: CoordinatorState, released: tuple[GenerationId, int] | None) -> None:
    """Note evidence of success: a rank was released before. All others are released too (R17)."""
    if released is not None:
        c.proven = True
        release(c, *released)


def release(c: CoordinatorState, generation: GenerationId, version: int) -> None:
    """Release all ranks with these final weights, unless the job is over already (R17).

    Args:
        c: The state, updated in place.
        generation: Generation of the last GEN record.
        version: Version of the final weights.
    """
    if c.is_over:
        return
    c.phase = CoordinatorPhase.RELEASED
    c.version = version
    c.released, c.released_ns = (generation, version), c.now_ns
    end = "they end here, as was asked for" if c.stop_asked else "the job is complete"
    c.happened("Released", f"all ranks have version {version}; {end}")
    order = m.Release(generation, version)
    for rank in c.roster.present():
        c.tell(rank.member, order)
    for pod in c.roster.pods.values():
        if pod.connected:
            close(c, pod)


def close(c: CoordinatorState, pod: KnownPod) -> None:
    """Notify an agent of the release: from now on it starts no process (R17)."""
    c.effects.append(ToAgent(pod.slot, pod.attempt, m.Closing()))


def answer_late(c: CoordinatorState, register: m.Register) -> None:
    """Answer a rank that registers after the release or the end of the job."""
    rank = c.roster.rank(register.member)
    rank.register, rank.connected, rank.gone_ns = register, True, None
    if c.released is not None:
        c.tell(rank.member, m.Release(*c.released))
    elif c.outcome is not None:
        c.tell(rank.member, m.Dismiss(c.outcome.reason))


def answer_late_agent(c: CoordinatorState, message: m.AgentMessage) -> None:
    """Tell a pod that was still starting when the job ended to shut down."""
    if isinstance(message, m.AgentHello) and c.outcome is not None:
        for register in message.registers:
            answer_late(c, register)
        c.effects.append(ToAgent(message.slot, message.attempt, m.Shutdown(c.outcome.reason)))


def end_when_all_have_left(c: CoordinatorState) -> None:
    """End the job once every released rank has ended.

    Before that, a script may still fail (I14). The job is complete if a rank was released with its
    final weights; otherwise those weights are lost. A script that runs unchanged must also have
    ended on each slot on which it failed.
    """
    if any(_is_awaited(c, rank) for rank in c.roster.ranks.values()):
        return
    if c.proven and (failures := scripts.never_replaced(c)):
        fail(
            c,
            "ScriptFailed",
            f"{scripts.describe_failures(c, failures)}; the other ranks went on to the end, and no "
            "rank came in its place in time",
            hint="mend the script; what this rank would have written or evaluated is missing",
        )
    elif c.proven:
        text = f"{c.version} rounds, released on all ranks"
        failed = scripts.at_the_end(c)
        _end(c, Outcome(True, "Complete", f"{text}; {failed}" if failed else text))
    else:
        fail(
            c,
            STATE_LOST,
            f"all ranks were lost with the final weights of version {c.version}",
            hint="if the job has checkpoints, start it again: it goes on from the last one",
        )


def fail_without_a_slot(c: CoordinatorState) -> None:
    """Fail the job if a script failed on a slot that nobody can take any more.

    The job could not be complete without it, so the others do not train to their end.
    """
    if c.phase is not CoordinatorPhase.RELEASED and (failures := scripts.lost_slots(c)):
        fail(
            c,
            "ScriptFailed",
            f"{scripts.describe_failures(c, failures)}; a rank that was started in its place "
            "cannot join",
            hint="mend the script; with `step = pl.step()` at the top of a loop without a "
            "DataLoader, a rank that joins knows where to begin",
        )


def _is_awaited(c: CoordinatorState, rank: KnownRank) -> bool:
    """Return True if the end of the job waits for this rank.

    Until the final weights are proven safe, it waits for each rank that may hold them; afterwards
    only for ranks that are heard, or whose agent is.

    Args:
        c: The state.
        rank: The rank.

    Returns:
        True if the rank may still have to end.
    """
    if rank.register is None or c.roster.is_dead(rank.member):
        return False
    if not c.proven and not rank.dismissed:
        return True
    agent = c.roster.agent_of(rank.member)
    return (rank.connected and not rank.suspect) or (agent is not None and not agent.silent)


def name_running_scripts(c: CoordinatorState) -> None:
    """Report once which scripts delay the end of the job. Their agents end them at the deadline."""
    if c.overtime_reported or c.now_ns < overtime_due_ns(c):
        return
    if text := running_scripts(c):
        c.overtime_reported = True
        c.happened("ScriptStillRuns", text)


def overtime_due_ns(c: CoordinatorState) -> int:
    """Return the time at which scripts that still run are reported."""
    return c.released_ns + min(OVERTIME_NS, c.config.finish_deadline_ns // 2)


def running_scripts(c: CoordinatorState) -> str:
    """Describe the scripts that have not returned though all ranks are released.

    Args:
        c: The state.

    Returns:
        One sentence for people; empty if there are none, or if the release is too recent.
    """
    if c.phase is not CoordinatorPhase.RELEASED or c.now_ns < overtime_due_ns(c):
        return ""
    running = [
        f"rank {member} on {rank.register.host}"
        for member, rank in sorted(c.roster.ranks.items())
        if rank.register is not None and _is_awaited(c, rank)
    ]
    if not running:
        return ""
    since = format_clock(c.wall_offset_s + c.released_ns / NS_PER_S)
    bound = c.config.finish_deadline_ns // NS_PER_S
    return (
        f"all ranks were released at {since}, and the script of {named(running)} has not returned; "
        f"it is killed {bound} s after the release (spec.finishDeadlineSeconds)"
    )


def was_finished(c: CoordinatorState, kept: Kept) -> None:
    """End the job as complete: its checkpoint shows that an earlier run reached the end (C1)."""
    c.version = kept.version
    text = f"the checkpoint of version {kept.version} is the end of the job; nothing is left to do"
    _end(c, Outcome(True, "Complete", text))


def fail_when_everybody_left(c: CoordinatorState) -> None:
    """Fail the job if all members drain or left their loops early, without a successor (D7)."""
    if c.gen is None or c.is_over:
        return
    members = [c.roster.rank(x) for x in c.gen.members]
    leaving = [s for s in members if s.leaving and not c.roster.is_dead(s.member)]
    if not leaving or not all(s.leaving or c.roster.is_dead(s.member) for s in members):
        return
    if any(s.left_early for s in members):
        fail(
            c,
            "ScriptEndedEarly",
            "the scripts of all ranks left their training loop before its end",
            hint="run all epochs or steps; pl.stop() ends the job where the script means to",
        )
    elif not _somebody_can_come(c):
        fail(c, "Interrupted", f"all ranks were drained at version {c.version}")


def _somebody_can_come(c: CoordinatorState) -> bool:
    """Return True if a process outside the group may still take the state over.

    That is a process which lives or starts and does not drain.

    Args:
        c: The state.

    Returns:
        True if there may be such a process.
    """

    def can(pod: KnownPod) -> bool:
        ranks = [c.roster.rank(x) for x in pod.living]
        return not pod.done and not pod.draining and not any(s.leaving for s in ranks)

    pods = c.roster.listed if c.roster.inventory else frozenset(c.roster.pods)
    return any(key not in c.roster.pods or can(c.roster.pods[key]) for key in pods)


def fail(c: CoordinatorState, reason: str, message: str, hint: str = "") -> None:
    """End the job as failed.

    If scripts ended all ranks that had the weights, the loss of the weights is only a consequence.
    Then the reason is ScriptFailed, and the message names the scripts (R55).

    Args:
        c: The state, updated in place. Nothing happens if the job has ended.
        reason: One word for programs.
        message: What failed, for people.
        hint: Remedy; empty if there is none.
    """
    if c.phase is CoordinatorPhase.ENDED:
        return
    if reason == STATE_LOST and (script := scripts.cause_of_loss(c)):
        reason, message, hint = "ScriptFailed", f"{script}; {message}", ""
    _end(c, Outcome(False, reason, message, hint))


def _end(c: CoordinatorState, outcome: Outcome) -> None:
    c.phase = CoordinatorPhase.ENDED
    c.outcome = outcome
    for rank in c.roster.present():
        c.dismiss(rank, outcome.reason)
    for pod in c.roster.pods.values():
        if pod.connected:
            shutdown = m.Shutdown(outcome.reason)
            c.effects.append(ToAgent(pod.slot, pod.attempt, shutdown))
    stopped = outcome.complete and c.stop_asked
    c.happened("Stopped" if stopped else outcome.reason, outcome.message)
    c.effects.append(JobEnded(outcome))
