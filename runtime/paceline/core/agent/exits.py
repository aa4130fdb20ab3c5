"""Meaning of the end of a rank process: why it ended, and whether another process may follow.

The judgment is pure. It uses what the agent knows at that moment: the exit code, the outcome that
the rank reported, and whether it was killed or asked to leave. How often a place may be started
again is counted by `core.agent.supervise`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGSYS, Signals
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, EXIT_FAILURE
from paceline_api.ids import MemberId

from paceline.core.messages import RankDead, ScriptError

ENDED_EARLY: Final = "ScriptEndedEarly"
"""Reason for a script that took part and ended before the job did (D7)."""
LAUNCH_IT: Final = (
    "a script for torchrun needs the command `paceline launch SCRIPT`, or pl.attach() as its first "
    "line (docs/porting.md)"
)
"""What lets a script for torchrun take part in a job (S16)."""
NO_GROUP: Final = "environment variable RANK expected"
"""What torch says in a script that makes a process group and that nobody has launched."""
TOOK_NO_PART: Final = "ScriptTookNoPart"
"""Reason for a script that ended without `pl.init()`, and that `paceline launch` has not run."""
CRASHES: Final = frozenset((SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGSYS))
"""Signals that only a program's own instructions cause."""


EXIT_AGAIN: Final = 75
"""Exit code of a rank that has to run its script from the first line again (EX_TEMPFAIL)."""


class RankOutcome(StrEnum):
    """Outcome that a rank reports to its agent before its process ends."""

    PRESENT = "present"
    """The rank takes part in the job; its end is open."""
    FINISHED = "finished"
    """The rank was released (R17). The script may continue on its own."""
    DISMISSED = "dismissed"
    """The rank was dismissed: the job does not need it."""
    FAILED = "failed"
    """The rank failed; the reason comes with the report."""
    UNSTARTABLE = "unstartable"
    """The command could not be run at all. The shim reports this."""


class EndKind(StrEnum):
    """Kind of end of a place or a pod, as in `AgentDone.outcome`."""

    FINISHED = "finished"
    DRAINED = "drained"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PlaceEnd:
    """The end of a place or a pod."""

    end: EndKind
    message: str
    exit_code: int
    """Exit code of the agent: 0, 1, or 2 for a mistake that only the user can fix."""
    reason: str = "RankFailed"
    """One word for programs, if the end is FAILED."""


@dataclass(frozen=True, slots=True)
class Death:
    """All that an agent knows about the end of one process."""

    member: MemberId
    code: int | None
    """Exit code; negative for a signal. None if the process never reported to the agent."""
    text: str
    """Last lines of stderr, or why it never reported."""
    outcome: RankOutcome | None
    """Outcome that the rank reported; None if it reported none."""
    message: str
    """Message that came with that outcome."""
    kill_why: str
    """Reason why the agent killed it; empty if it did not."""
    leaving: str
    """Reason why it was asked to leave; empty if it was not."""
    over: bool = False
    """True if it was asked to leave because the job was over."""
    again: bool = False
    """True if a failure rule of the job lets another process follow such an end."""
    error: ScriptError | None = None
    """The exception that its script raised last."""


def why_it_ended(death: Death) -> str:
    """Return why a process ended, for people.

    Args:
        death: What is known about the end.

    Returns:
        One or more lines; empty for an orderly end without a message.
    """
    if in_order(death):
        return death.message
    if death.outcome is RankOutcome.FINISHED:
        how = "was cut short" if _cut_short(death) else "ended badly"
        return f"its script {how} after the job was over: {_reason(death)}"
    return _reason(death)


def in_order(death: Death) -> bool:
    """Return True if the process exited with code 0 after it was released or dismissed."""
    return death.code == 0 and death.outcome in (RankOutcome.FINISHED, RankOutcome.DISMISSED)


def is_scripts_own(dead: RankDead) -> bool:
    """Return True if the script ended this process itself (R55).

    It did so by an exception, by an exit code, or by a signal that only its own instructions cause.

    Args:
        dead: The report of the end.

    Returns:
        True if the script caused the end.
    """
    return dead.error is not None or dead.exit_code > 0 or -dead.exit_code in CRASHES


def _cut_short(death: Death) -> bool:
    """Return True if a signal killed it, so its exit code tells nothing about the script."""
    return death.code is not None and death.code < 0


def last_end(death: Death) -> PlaceEnd | None:
    """Return how the place ends with this process, or None if another process may follow.

    Args:
        death: What is known about the end.

    Returns:
        The end of the place. None for a failure that a new process may fix; `supervise` counts
        those.
    """
    why = why_it_ended(death)
    if in_order(death):
        end = EndKind.FINISHED if death.outcome is RankOutcome.FINISHED else EndKind.DRAINED
        return PlaceEnd(end, why, 0)
    if death.outcome is RankOutcome.FINISHED and _cut_short(death):
        return PlaceEnd(EndKind.FINISHED, why, 0)  # a complete job stays complete (R17)
    if death.outcome is RankOutcome.FINISHED:
        return failed(death.member, why)
    if death.outcome is RankOutcome.DISMISSED and death.kill_why:
        return PlaceEnd(
            EndKind.DRAINED, why, 0
        )  # its work was done; only its script did not return
    if death.leaving:
        # A rank that takes no part yet, or a job that is over, has no work that could be lost.
        holds_work = death.outcome is not None and not death.over
        lost = EXIT_FAILURE if holds_work else 0
        return PlaceEnd(EndKind.DRAINED, f"rank {death.member}: {death.leaving}; {why}", lost)
    if death.outcome is RankOutcome.UNSTARTABLE:
        return failed(death.member, why, EXIT_BAD_INPUT)
    if death.code == EXIT_BAD_INPUT and not death.again:
        return failed(death.member, why, EXIT_BAD_INPUT, "ScriptFailed")
    if death.code == 0:
        # A new process would end early again.
        early = ENDED_EARLY if death.outcome is not None else TOOK_NO_PART
        return failed(death.member, why, reason=early)
    return None


def failed(
    member: MemberId, why: str, exit_code: int = EXIT_FAILURE, reason: str = "RankFailed"
) -> PlaceEnd:
    """Return the end of a place whose rank failed."""
    return PlaceEnd(EndKind.FAILED, f"rank {member}: {why}", exit_code, reason)


_HINTS: Final = {
    # The kernel's out-of-memory killer sends the same signal as a person with kill -9.
    int(SIGKILL): "; if nobody sent it, the machine ran out of memory",
    # The file system has no space for a page of a mapped file.
    int(SIGBUS): "; a file in memory or on a disk could not grow: most often /dev/shm is too "
    "small or full. `df -h /dev/shm` shows it; enlarge it (docker run --shm-size=8g; in a pod, an "
    "emptyDir with medium Memory mounted at /dev/shm), or set num_workers=0 in the loader, or "
    "collective.backend to gloo",
}
"""Usual cause of a signal, where the signal alone does not tell it."""


def how_it_ended(code: int) -> str:
    """Return an exit code or a signal as text, with its usual cause."""
    if code >= 0:
        return f"exit code {code}"
    name = Signals(-code).name if -code in set(Signals) else "unknown signal"
    return f"signal {-code} ({name}){_HINTS.get(-code, '')}"


def _reason(death: Death) -> str:
    if death.kill_why:
        return f"killed by its agent: {death.kill_why}"
    if death.message:
        return death.message
    if death.code is None:
        return f"it could not be started: {death.text}"
    if death.code == 0 and death.outcome is None:
        return (
            f"{TOOK_NO_PART}: the script ended and never called pl.init(), so each rank did its "
            f"work alone; {LAUNCH_IT}"
        )
    if death.code == 0:
        # Exit code 0 looks like success to the shell, but samples are missing (D7).
        return (
            f"{ENDED_EARLY}: the script ended before the job did; let it run all epochs or steps "
            "(pl.steps), call pl.finish() at its end, or pl.stop() where the job shall end early"
        )
    # A process cannot write anything about SIGKILL, so its last lines are about something else.
    tells = death.text and death.code != -SIGKILL
    what = str(death.error) if death.error is not None else how_it_ended(death.code)
    if NO_GROUP in (death.text or ""):
        what += f"; {LAUNCH_IT}"
    return what + (f"; last lines:\n{death.text}" if tells else "")
