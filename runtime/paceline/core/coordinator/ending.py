"""How it ends: released, failed, or with nobody left to hand over to (R17, C8, D7)."""

from __future__ import annotations

from typing import Final

from paceline.core import messages as m
from paceline.core.coordinator import scripts
from paceline.core.coordinator.events import NS_PER_S, JobEnded, ToAgent
from paceline.core.coordinator.roster import KnownPod, KnownRank
from paceline.core.coordinator.state import CoordinatorState, Phase
from paceline.core.coordinator.wording import format_clock, named
from paceline.core.protocol.ids import GenerationId
from paceline.core.protocol.snapshot import Kept
from paceline.core.status import Outcome

OVERTIME_NS: Final = 10 * NS_PER_S
"""A script that runs for longer after the release is named."""
STATE_LOST: Final = "StateLost"


def some_stopped(c: CoordinatorState) -> bool:
    return any(s.stopped is not None for s in c.roster.ranks.values())


def release_when_stopped(c: CoordinatorState) -> None:
    """R17: all members with state have reported the stop round."""
    if c.gen is None or c.phase not in (Phase.STARTING, Phase.RUNNING):
        return
    members = [c.roster.rank(x) for x in c.gen.members]
    from_the_start = set(c.gen.with_state)
    with_state = [s for s in members if s.current or s.member in from_the_start]
    agreed = all(s.stopped == c.gen.id for s in with_state)
    if agreed and any(s.present for s in with_state):  # somebody has to take the final model out
        release(c, c.gen.id, max(s.version for s in with_state))


def prove(c: CoordinatorState, released: tuple[GenerationId, int] | None) -> None:
    """One who was released before is evidence of success: the others are released too (R17)."""
    if released is not None:
        c.proven = True
        release(c, *released)


def release(c: CoordinatorState, generation: GenerationId, version: int) -> None:
    if c.phase in (Phase.RELEASED, Phase.ENDED):
        return
    c.phase = Phase.RELEASED
    c.version = version
    c.released, c.released_ns = (generation, version), c.now_ns
    end = "they end here, as was asked for" if c.stop_asked else "the job is complete"
    c.happened("Released", f"all ranks have version {version}; {end}")
    order = m.Release(generation, version)
    for seen in c.roster.present():
        c.tell(seen.member, order)
    for pod in c.roster.pods.values():
        if pod.connected:
            close(c, pod)


def close(c: CoordinatorState, pod: KnownPod) -> None:
    """Nothing is started after the release."""
    c.effects.append(ToAgent(pod.slot, pod.attempt, m.Closing()))


def answer_late(c: CoordinatorState, register: m.Register) -> None:
    """A rank comes back, or a new one comes, when it is all over."""
    seen = c.roster.rank(register.member)
    seen.register, seen.connected, seen.gone_ns = register, True, None
    if c.released is not None:
        c.tell(seen.member, m.Release(*c.released))
    elif c.outcome is not None:
        c.tell(seen.member, m.Dismiss(c.outcome.reason))


def answer_late_agent(c: CoordinatorState, message: m.AgentMessage) -> None:
    """A pod that was still starting when the job ended has nothing left to do."""
    if isinstance(message, m.AgentHello) and c.outcome is not None:
        for register in message.registers:
            answer_late(c, register)
        c.effects.append(ToAgent(message.slot, message.attempt, m.Shutdown(c.outcome.reason)))


def end_when_all_have_left(c: CoordinatorState) -> None:
    """Complete once every rank that was released has ended; its script may still fail (I14)."""
    if any(_is_awaited(c, seen) for seen in c.roster.ranks.values()):
        return
    if c.proven:
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


def _is_awaited(c: CoordinatorState, seen: KnownRank) -> bool:
    """Whoever may hold the final weights, until one has taken them out; then who can be seen."""
    if seen.register is None or c.roster.is_dead(seen.member):
        return False
    if not c.proven and not seen.dismissed:
        return True
    agent = c.roster.agent_of(seen.member)
    return (seen.connected and not seen.suspect) or (agent is not None and not agent.silent)


def name_running_scripts(c: CoordinatorState) -> None:
    """Say once whose scripts hold up the end of the job. Their agents end them in time."""
    if c.overtime_told or c.now_ns < overtime_due_ns(c):
        return
    if text := running_scripts(c):
        c.overtime_told = True
        c.happened("ScriptStillRuns", text)


def overtime_due_ns(c: CoordinatorState) -> int:
    return c.released_ns + min(OVERTIME_NS, c.config.finish_deadline_ns // 2)


def running_scripts(c: CoordinatorState) -> str:
    """Whose scripts have not returned though all ranks are released; empty if it is too early to
    ask, or if there are none."""
    if c.phase is not Phase.RELEASED or c.now_ns < overtime_due_ns(c):
        return ""
    running = [
        f"rank {member} on {seen.register.host}"
        for member, seen in sorted(c.roster.ranks.items())
        if seen.register is not None and _is_awaited(c, seen)
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
    """The checkpoint says that an earlier run came to the end (C1)."""
    c.version = kept.version
    text = f"the checkpoint of version {kept.version} is the end of the job; nothing is left to do"
    _end(c, Outcome(True, "Complete", text))


def fail_when_everybody_left(c: CoordinatorState) -> None:
    """Nobody is left to hand over to: all ranks drain, or all scripts ended early (D7)."""
    if c.gen is None or c.phase in (Phase.RELEASED, Phase.ENDED):
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
    """A process outside the group that lives, or starts, and can still take over the state."""

    def can(pod: KnownPod) -> bool:
        ranks = [c.roster.rank(x) for x in pod.living]
        return not pod.done and not pod.draining and not any(s.leaving for s in ranks)

    pods = c.roster.listed if c.roster.inventory else frozenset(c.roster.pods)
    return any(key not in c.roster.pods or can(c.roster.pods[key]) for key in pods)


def fail(c: CoordinatorState, reason: str, message: str, hint: str = "") -> None:
    """End the job as failed. Lost weights are a consequence where scripts ended all the ranks that
    had them: then the script is named (R55)."""
    if c.phase is Phase.ENDED:
        return
    if reason == STATE_LOST and (script := scripts.cause_of_loss(c)):
        reason, message, hint = "ScriptFailed", f"{script}; {message}", ""
    _end(c, Outcome(False, reason, message, hint))


def _end(c: CoordinatorState, outcome: Outcome) -> None:
    c.phase = Phase.ENDED
    c.outcome = outcome
    for seen in c.roster.present():
        c.dismiss(seen, outcome.reason)
    for pod in c.roster.pods.values():
        if pod.connected:
            shutdown = m.Shutdown(outcome.reason)
            c.effects.append(ToAgent(pod.slot, pod.attempt, shutdown))
    stopped = outcome.complete and c.stop_asked
    c.happened("Stopped" if stopped else outcome.reason, outcome.message)
    c.effects.append(JobEnded(outcome))
