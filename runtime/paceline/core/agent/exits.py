"""What the end of a rank process means: why it ended, and whether another one may follow it.

A pure judgement of what the agent knows at that moment: the exit code, what the rank said about its
end, whether it was killed or asked to leave. How often a place may start again is counted by
`core.agent.supervise`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGSYS, Signals
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, EXIT_FAILURE

from paceline.core.messages import RankDead, ScriptError
from paceline.core.protocol.ids import MemberId

ENDED_EARLY: Final = "ScriptEndedEarly"
TOOK_NO_PART: Final = "ScriptTookNoPart"
CRASHES: Final = frozenset((SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGSYS))


class RankOutcome(StrEnum):
    """What a rank says about its own end, before it ends."""

    PRESENT = "present"
    """It takes part in the job; nothing about its end yet."""
    FINISHED = "finished"
    """Released (R17): whatever the script still does is its own."""
    DISMISSED = "dismissed"
    FAILED = "failed"
    """With the reason in the user's words."""
    UNSTARTABLE = "unstartable"
    """The command could not be run at all; said by the shim."""


class End(StrEnum):
    """How a place, and a pod, ended; `AgentDone.outcome`."""

    FINISHED = "finished"
    DRAINED = "drained"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ended:
    end: End
    message: str
    exit_code: int
    """Of the agent: 0, 1, or 2 for a mistake that only the user can mend."""
    reason: str = "RankFailed"
    """FAILED: one word for programs."""


@dataclass(frozen=True, slots=True)
class Death:
    """All that is known about one end."""

    member: MemberId
    code: int | None
    """Negative for a signal; None = the process never spoke."""
    text: str
    """Last lines of stderr, or why it never spoke."""
    outcome: RankOutcome | None
    said: str
    kill_why: str
    """Why the agent killed it; empty if it did not."""
    leaving: str
    """Why it was asked to leave; empty if it was not."""
    over: bool = False
    """It was asked to because the job was over."""
    again: bool = False
    """A rule of the job says that another process follows such an end."""
    error: ScriptError | None = None
    """What its script raised last."""


def why_it_ended(death: Death) -> str:
    """For people; empty for an end in order without a word."""
    if in_order(death):
        return death.said
    if death.outcome is RankOutcome.FINISHED:
        how = "was cut short" if _cut_short(death) else "ended badly"
        return f"its script {how} after the job was over: {_reason(death)}"
    return _reason(death)


def in_order(death: Death) -> bool:
    return death.code == 0 and death.outcome in (RankOutcome.FINISHED, RankOutcome.DISMISSED)


def is_scripts_own(dead: RankDead) -> bool:
    """Return True if the script ended this process itself: by an exception, by an exit code, or by
    a signal that only its own instructions cause (R55)."""
    return dead.error is not None or dead.exit_code > 0 or -dead.exit_code in CRASHES


def _cut_short(death: Death) -> bool:
    """By a signal, which tells nothing about the script."""
    return death.code is not None and death.code < 0


def last_end(death: Death) -> Ended | None:
    """How the place ends with this process; None if another one may follow."""
    why = why_it_ended(death)
    if in_order(death):
        end = End.FINISHED if death.outcome is RankOutcome.FINISHED else End.DRAINED
        return Ended(end, why, 0)
    if death.outcome is RankOutcome.FINISHED and _cut_short(death):
        return Ended(End.FINISHED, why, 0)  # R17: what is complete stays complete
    if death.outcome is RankOutcome.FINISHED:
        return failed(death.member, why)
    if death.outcome is RankOutcome.DISMISSED and death.kill_why:
        return Ended(End.DRAINED, why, 0)  # only its script was left, and did not return
    if death.leaving:
        # Before it takes part, and after the job is over, it holds no work that could be lost.
        holds_work = death.outcome is not None and not death.over
        lost = EXIT_FAILURE if holds_work else 0
        return Ended(End.DRAINED, f"rank {death.member}: {death.leaving}; {why}", lost)
    mistake = death.code == EXIT_BAD_INPUT and not death.again
    if mistake or death.outcome is RankOutcome.UNSTARTABLE:
        return failed(death.member, why, EXIT_BAD_INPUT)
    if death.code == 0:
        # It would end early again.
        early = ENDED_EARLY if death.outcome is not None else TOOK_NO_PART
        return failed(death.member, why, reason=early)
    return None


def failed(
    member: MemberId, why: str, exit_code: int = EXIT_FAILURE, reason: str = "RankFailed"
) -> Ended:
    return Ended(End.FAILED, f"rank {member}: {why}", exit_code, reason)


_HINTS: Final = {
    # The kernel's memory killer sends the same signal as a person with kill -9.
    int(SIGKILL): "; if nobody sent it, the machine ran out of memory",
    # A page of a mapped file that the file system has no room for.
    int(SIGBUS): "; a file in memory or on a disk could not grow: most often /dev/shm is too "
    "small or full. `df -h /dev/shm` shows it; enlarge it (docker run --shm-size=8g; in a pod, an "
    "emptyDir with medium Memory mounted at /dev/shm), or set num_workers=0 in the loader, or "
    "collective.backend to gloo",
}
"""What a signal usually means, where that is not plain."""


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = Signals(-code).name if -code in set(Signals) else "unknown signal"
    return f"signal {-code} ({name}){_HINTS.get(-code, '')}"


def _reason(death: Death) -> str:
    if death.kill_why:
        return f"killed by its agent: {death.kill_why}"
    if death.said:
        return death.said
    if death.code is None:
        return f"it could not be started: {death.text}"
    if death.code == 0 and death.outcome is None:
        return (
            f"{TOOK_NO_PART}: the script ended and never called pl.init() or pl.ddp(), so each "
            "rank did its work alone; docs/porting.md shows the lines to add"
        )
    if death.code == 0:
        # D7: leaving early looks like success to the shell, but its samples are missing.
        return (
            f"{ENDED_EARLY}: the script ended before the job did; let it run all epochs or steps "
            "(pl.steps), call pl.finish() at its end, or pl.stop() where the job shall end early"
        )
    # SIGKILL leaves no time for a word: what was written before is about something else.
    tells = death.text and death.code != -SIGKILL
    what = str(death.error) if death.error is not None else how_it_ended(death.code)
    return what + (f"; last lines:\n{death.text}" if tells else "")
