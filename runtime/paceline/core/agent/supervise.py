"""Life cycle of a pod's rank processes: what an agent does when one starts, ends or drains.

A *place* is (slot, local). One process after the other lives in it, and each is a member of its
own. Whatever happens to a place is a cue. The table `NEXT` gives the phase that follows, and the
driver (`agent.supervisor`) carries out the effects. Nothing here waits: the driver calls `handle`
with `Tick` at the time `wake_at_ns`.

A crashed rank is started again after a backoff. A rank is not started again if it finished, was
dismissed or asked to leave, exited with code 0 before the job was over, made a mistake that only
its user can fix, or crashed more often than `backoffLimit`. The last three fail the pod, whose
other ranks drain first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from paceline_api.errors import EXIT_FAILURE
from paceline_api.failures import ruled
from paceline_api.ids import ATTEMPT_STRIDE, GenerationId, MemberId
from paceline_api.settings import FINISH_DEADLINE_S, FailureRuleSettings
from paceline_api.times import NS_PER_S
from paceline_api.types.enums import FailureAction

from paceline.core.agent.exits import (
    CRASHES,
    Death,
    EndKind,
    PlaceEnd,
    RankOutcome,
    failed,
    how_it_ended,
    is_scripts_own,
    last_end,
    why_it_ended,
)
from paceline.core.agent.last_words import crash_in, error_in
from paceline.core.messages import DealtBatch, RankDead, RankStarted, ScriptError

BACKOFF_NS: Final = NS_PER_S
"""Backoff before the first restart; doubles with each further failure."""
BACKOFF_MAX_NS: Final = 60 * NS_PER_S
"""Upper bound on the backoff."""
HEALTHY_NS: Final = 60 * NS_PER_S
"""Lifetime of a process that resets the count of failures, as far as an agent can tell."""
START_NS: Final = 60 * NS_PER_S
"""Time limit from the launch to the first message of the process. Measured over MPI: 0.1 s on an
idle machine."""
DISMISSED_NS: Final = 30 * NS_PER_S
"""Time limit for a dismissed rank to end. It ends itself after 10 s, unless it is stuck."""
SHUTDOWN_NS: Final = 10 * NS_PER_S
"""Time limit for a rank to end by itself when the job is over. It does not apply to a released
rank. A rank that takes no part is killed at once."""
RELEASED: Final = "all ranks are released"
"""Reason to leave after the release."""
FAILURES_KEPT: Final = 4
"""Number of script failures of a place that are kept. The second failure at the same line or batch
ends the job (R55)."""


class PlacePhase(StrEnum):
    """Phase of a place and the process in it."""

    STARTING = "starting"
    """Launched; the process has not reported yet."""
    RUNNING = "running"
    """The user's command runs."""
    DRAINING = "draining"
    """Asked to leave; killed at its deadline."""
    KILLED = "killed"
    """SIGKILL was sent; not reaped yet."""
    WAITING = "waiting"
    """Dead; the next process starts after the backoff."""
    ENDED = "ended"
    """Dead; no process follows."""


class Cue(StrEnum):
    """Something that happens to a place."""

    UP = "up"
    """The process has reported: its pid is known and the user's command runs."""
    DEAD_AGAIN = "dead-again"
    """The process is dead; another one follows."""
    DEAD_LAST = "dead-last"
    """The process is dead; none follows."""
    DRAIN = "drain"
    """The process is asked to leave."""
    KILL = "kill"
    """The process is to be killed."""
    TIME = "time"
    """The deadline or backoff of this phase is over."""


NEXT: Final[dict[tuple[PlacePhase, Cue], PlacePhase]] = {
    (PlacePhase.STARTING, Cue.UP): PlacePhase.RUNNING,
    (PlacePhase.STARTING, Cue.DEAD_AGAIN): PlacePhase.WAITING,
    (PlacePhase.STARTING, Cue.DEAD_LAST): PlacePhase.ENDED,
    (PlacePhase.STARTING, Cue.DRAIN): PlacePhase.KILLED,  # it holds no work yet
    (PlacePhase.STARTING, Cue.KILL): PlacePhase.KILLED,
    (PlacePhase.STARTING, Cue.TIME): PlacePhase.KILLED,
    (PlacePhase.RUNNING, Cue.DEAD_AGAIN): PlacePhase.WAITING,
    (PlacePhase.RUNNING, Cue.DEAD_LAST): PlacePhase.ENDED,
    (PlacePhase.RUNNING, Cue.DRAIN): PlacePhase.DRAINING,
    (PlacePhase.RUNNING, Cue.KILL): PlacePhase.KILLED,
    (
        PlacePhase.RUNNING,
        Cue.TIME,
    ): PlacePhase.KILLED,  # the script did not return after the end of its work
    (PlacePhase.DRAINING, Cue.DEAD_LAST): PlacePhase.ENDED,
    (
        PlacePhase.DRAINING,
        Cue.DRAIN,
    ): PlacePhase.DRAINING,  # a second SIGTERM must not cut the drain short
    (PlacePhase.DRAINING, Cue.KILL): PlacePhase.KILLED,
    (PlacePhase.DRAINING, Cue.TIME): PlacePhase.KILLED,
    (PlacePhase.KILLED, Cue.DEAD_AGAIN): PlacePhase.WAITING,
    (PlacePhase.KILLED, Cue.DEAD_LAST): PlacePhase.ENDED,
    (PlacePhase.KILLED, Cue.DRAIN): PlacePhase.KILLED,
    (PlacePhase.KILLED, Cue.KILL): PlacePhase.KILLED,
    (PlacePhase.WAITING, Cue.DRAIN): PlacePhase.ENDED,
    (PlacePhase.WAITING, Cue.KILL): PlacePhase.WAITING,  # the evidence is already there
    (PlacePhase.WAITING, Cue.TIME): PlacePhase.STARTING,
    (PlacePhase.ENDED, Cue.DRAIN): PlacePhase.ENDED,
    (PlacePhase.ENDED, Cue.KILL): PlacePhase.ENDED,
}
"""Next phase for each possible pair. Every other pair is impossible: a process reports once and
dies once, and only armed timers fire."""


# ---- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Up:
    """The process has reported its pid; the user's command runs."""

    pid: int


@dataclass(frozen=True, slots=True)
class ReportedOutcome:
    """The rank has reported its outcome: that it takes part, or how its work ends."""

    outcome: RankOutcome | None
    message: str
    released: tuple[GenerationId, int] | None = None
    """Generation and version with which it was released, if FINISHED (R17)."""
    error: ScriptError | None = None
    """The exception that ends the script, if FAILED."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The process, and all of its group, has been reaped."""

    code: int
    """Exit code; negative for a signal."""
    last_lines: str
    """Last lines that it wrote to stderr."""
    batch: DealtBatch | None = None
    """The batch that it was loading or computing, from its record in shared memory."""
    version: int = 0
    """Version of the weights with which its last step() returned, from the same record."""


@dataclass(frozen=True, slots=True)
class NeverStarted:
    """The launcher ended before the process reported."""

    why: str


@dataclass(frozen=True, slots=True)
class ProcessDrain:
    """The process is to leave in order; its work is handed over first."""

    why: str


@dataclass(frozen=True, slots=True)
class Kill:
    """The process is to be killed at once."""

    why: str


@dataclass(frozen=True, slots=True)
class JobClosing:
    """All ranks of the job are released: from now on no process is started (R17)."""


@dataclass(frozen=True, slots=True)
class JobShutdown:
    """The job is over; the process is to end."""

    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The time `wake_at_ns` has come."""


Event = (
    Up
    | ReportedOutcome
    | Exited
    | NeverStarted
    | ProcessDrain
    | Kill
    | JobClosing
    | JobShutdown
    | Tick
)

# ---- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a process as this member."""

    member: MemberId


@dataclass(frozen=True, slots=True)
class Command:
    """Send `drain` or `shutdown` to the rank."""

    member: MemberId
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class SendKill:
    """Send SIGKILL to the process and to its launcher."""

    member: MemberId
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """Send a message to the coordinator."""

    message: RankStarted | RankDead


Effect = Launch | Command | SendKill | Report


@dataclass(frozen=True, slots=True)
class RankLimits:
    """Limits of a job on its rank processes."""

    restarts_max: int
    """`backoffLimit`: failures in a row above which the place is given up."""
    drain_ns: int
    """Time limit for a drain."""
    rules: tuple[FailureRuleSettings, ...] = ()
    """Rules of `failurePolicy`: which failures do not count."""
    finish_ns: int = FINISH_DEADLINE_S * NS_PER_S
    """How long a script may run after its rank was released."""


def backoff_ns(failures: int) -> int:
    """Return the backoff after the n-th failure in a row, in nanoseconds; n >= 1."""
    assert failures >= 1, failures
    return min(BACKOFF_NS << min(failures - 1, 32), BACKOFF_MAX_NS)


class Place:
    """One place of the pod and the process in it, as a pure state machine."""

    def __init__(self, slot: int, local: int, pod_attempt: int, limits: RankLimits) -> None:
        """Start in phase WAITING with a Tick due at once, which launches the first process.

        Args:
            slot: Slot of the pod.
            local: Index of the place within the pod.
            pod_attempt: Attempt of the pod in that slot.
            limits: Limits of the job.
        """
        self.member = MemberId(slot, local, pod_attempt * ATTEMPT_STRIDE)
        self.phase = PlacePhase.WAITING
        self.ended: PlaceEnd | None = None
        self.dead: list[MemberId] = []
        """All processes of this place that were reaped, for `AgentHello` (R6, R25)."""
        self.failures: deque[RankDead] = deque(maxlen=FAILURES_KEPT)
        """The last ends that its scripts caused, for `AgentHello` (R55)."""
        self.released: tuple[GenerationId, int] | None = None
        """Generation and version with which one of its processes was released (R17)."""
        self.wake_at_ns: int | None = 0
        """Time at which a Tick is due; None if none is."""
        self._limits = limits
        self._started = False
        self._failures = 0
        """Failures in a row; the backoff depends on them."""
        self._counted = 0
        """Failures in a row that count against `backoffLimit`."""
        self._up_ns: int | None = None
        self._report: ReportedOutcome | None = None
        self._kill_why = ""
        self._leaving = ""
        """Reason why no process will follow this one; empty if one may."""
        self._overtime = ""
        """Reason for the kill at `wake_at_ns`: the work is done, and the script still runs."""
        self._over = False
        """True if the process has to leave because the job is over."""

    @property
    def restarts(self) -> int:
        """Number of restarts before the present process, within this pod."""
        return self.member.attempt % ATTEMPT_STRIDE

    @property
    def alive(self) -> bool:
        """Return True if the user's command may be running."""
        return self.phase in (PlacePhase.RUNNING, PlacePhase.DRAINING) or (
            self.phase is PlacePhase.KILLED and self._up_ns is not None
        )

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """Process one event and return the effects that follow from it.

        The caller makes all calls from one thread. It delivers a `Tick` at `wake_at_ns`; an early
        or stale one is ignored.

        Args:
            now_ns: Monotonic time in nanoseconds.
            event: A report of the process, its end, an order of the coordinator or the pod, or a
                `Tick`.

        Returns:
            The effects, to be carried out in this order.
        """
        match event:
            case Up():
                return self._up(now_ns, event.pid)
            case ReportedOutcome():
                return self._reported(now_ns, event)
            case Exited():
                return self._dead(now_ns, event)
            case NeverStarted():
                return self._dead(now_ns, event)
            case ProcessDrain():
                return self._leave(now_ns + self._limits.drain_ns, "drain", event.why)
            case JobClosing():
                return self._close(now_ns)
            case JobShutdown():
                return self._leave(now_ns + SHUTDOWN_NS, "shutdown", event.why)
            case Kill():
                return self._kill(event.why)
            case Tick():
                return self._tick(now_ns)

    def _go(self, cue: Cue) -> None:
        assert (self.phase, cue) in NEXT, (str(self.member), self.phase, cue)
        self.phase = NEXT[self.phase, cue]

    def _launch(self, now_ns: int) -> list[Effect]:
        if self._started:
            slot, local, attempt = self.member
            self.member = MemberId(slot, local, attempt + 1)
        self._started = True
        self._up_ns, self._report, self._kill_why, self._overtime = None, None, "", ""
        self.wake_at_ns = now_ns + START_NS
        return [Launch(self.member)]

    def _up(self, now_ns: int, pid: int) -> list[Effect]:
        self._go(Cue.UP)
        self._up_ns, self.wake_at_ns = now_ns, None
        return [Report(RankStarted(self.member, pid))]

    def _reported(self, now_ns: int, event: ReportedOutcome) -> list[Effect]:
        """Note the outcome; bound the time of the script after the end of its rank's work."""
        self._report = event
        if self.phase not in (PlacePhase.RUNNING, PlacePhase.DRAINING):
            return []
        if event.outcome is RankOutcome.FINISHED:
            self._overtime = _overtime("the job was complete", self._limits.finish_ns)
            self.wake_at_ns = now_ns + self._limits.finish_ns
        elif event.outcome is RankOutcome.DISMISSED and self.phase is PlacePhase.RUNNING:
            self._overtime = _overtime("it was dismissed", DISMISSED_NS)
            self.wake_at_ns = now_ns + DISMISSED_NS
        return []

    def _leave(self, deadline_ns: int, kind: str, why: str) -> list[Effect]:
        before = self.phase
        self._leaving = self._leaving or why
        self._over = self._over or kind == "shutdown"
        self._go(Cue.DRAIN)
        if self.phase is PlacePhase.ENDED and before is PlacePhase.WAITING:
            self.wake_at_ns = None
            self.ended = PlaceEnd(EndKind.DRAINED, why, 0)
        if self.phase is PlacePhase.KILLED:
            return [] if before is PlacePhase.KILLED else self._send_kill(why)
        if self.phase is not PlacePhase.DRAINING:
            return []
        if self._over and self._report is None:
            # It takes no part, so it has nothing to save. It may be importing for minutes yet.
            return self._kill(why)
        released = self._report is not None and self._report.outcome is RankOutcome.FINISHED
        # A second request shortens the deadline only if the job is over.
        if not released and (before is PlacePhase.RUNNING or kind == "shutdown"):
            self.wake_at_ns = min(deadline_ns, self.wake_at_ns or deadline_ns)
        repeated = before is PlacePhase.DRAINING and kind == "drain"
        return [] if repeated else [Command(self.member, kind, why)]

    def _close(self, now_ns: int) -> list[Effect]:
        """Start no further process; give ranks with the final weights time for RELEASE (R17)."""
        if self._report is None:
            return self._leave(now_ns, "shutdown", RELEASED)
        self._leaving, self._over = self._leaving or RELEASED, True
        if self.phase is PlacePhase.RUNNING and self.wake_at_ns is None:
            # It may never read its RELEASE, because all of its threads may be stuck.
            self._overtime = _overtime(RELEASED, self._limits.finish_ns)
            self.wake_at_ns = now_ns + self._limits.finish_ns
        return []

    def _kill(self, why: str) -> list[Effect]:
        before = self.phase
        self._go(Cue.KILL)
        return self._send_kill(why) if self.phase is PlacePhase.KILLED is not before else []

    def _send_kill(self, why: str) -> list[Effect]:
        self.wake_at_ns, self._kill_why = None, why
        return [SendKill(self.member, why)]

    def _tick(self, now_ns: int) -> list[Effect]:
        if self.wake_at_ns is None or now_ns < self.wake_at_ns:
            return []  # a stale timer
        before = self.phase
        self._go(Cue.TIME)
        if before is PlacePhase.WAITING:
            return self._launch(now_ns)
        if before is PlacePhase.STARTING:
            return self._send_kill(f"it did not start within {START_NS // NS_PER_S} s")
        return self._send_kill(self._overtime or f"it did not leave in time ({self._leaving})")

    def _dead(self, now_ns: int, end: Exited | NeverStarted) -> list[Effect]:
        code: int | None = None
        batch: DealtBatch | None = None
        version = 0
        if isinstance(end, Exited):
            code, text, batch, version = end.code, end.last_lines, end.batch, end.version
        else:
            text = end.why
        if self._up_ns is not None and now_ns - self._up_ns >= HEALTHY_NS:
            self._failures = self._counted = 0
        action = ruled(self._limits.rules, code or 0)
        report = self._report or ReportedOutcome(None, "")
        # A process that ended by itself just before the kill has its own reason.
        kill_why = self._kill_why if code is None or code < 0 else ""
        # A script that has not called init() cannot report its exception: read its traceback.
        error = report.error
        if error is None and code is not None and code > 0:
            error = error_in(text)
        elif error is None and code is not None and -code in CRASHES:
            error = crash_in(text, how_it_ended(code))
        error = None if kill_why else error
        death = Death(
            self.member,
            code,
            text,
            report.outcome,
            report.message,
            kill_why,
            self._leaving,
            self._over,
            again=action in (FailureAction.COUNT, FailureAction.IGNORE),
            error=error,
        )
        why = why_it_ended(death)
        ended = last_end(death) or self._failure(why, counts=action is not FailureAction.IGNORE)
        self.wake_at_ns = None
        if ended is None:
            self.wake_at_ns = now_ns + backoff_ns(self._failures)
        self._go(Cue.DEAD_AGAIN if ended is None else Cue.DEAD_LAST)
        self.ended = ended
        self.dead.append(self.member)
        self.released = self.released or report.released
        exit_code = EXIT_FAILURE if code is None else code
        dead = RankDead(
            self.member,
            exit_code,
            why,
            ended is None,
            report.released,
            error=error,
            batch=batch,
            version=version,
        )
        if is_scripts_own(dead) and self._up_ns is not None and not kill_why:
            self.failures.append(dead)
        return [Report(dead)]

    def _failure(self, why: str, *, counts: bool) -> PlaceEnd | None:
        """Count a failure that another process may fix.

        Args:
            why: Why the process ended.
            counts: True if it counts against `backoffLimit`.

        Returns:
            The end of the place if this was the last allowed failure, else None.
        """
        self._failures += 1
        self._counted += counts
        most = self._limits.restarts_max
        if self._counted > most:
            return failed(self.member, f"{why} (failure {self._counted}, backoffLimit {most})")
        if self.restarts == ATTEMPT_STRIDE - 1:
            return failed(self.member, f"{why} (start {ATTEMPT_STRIDE} was the last one)")
        return None


def _overtime(since: str, bound_ns: int) -> str:
    return f"its script was still running {bound_ns / NS_PER_S:g} s after {since}"


def pod_end(places: list[Place]) -> PlaceEnd | None:
    """Return how the pod ended; None while a place is still in use.

    Args:
        places: All places of the pod.

    Returns:
        The end of the first place that failed; else of one that finished; else of one that drained.
        Its exit code is the highest of all places.
    """
    ends = [place.ended for place in places if place.ended is not None]
    if len(ends) < len(places):
        return None
    order = (EndKind.FAILED, EndKind.FINISHED, EndKind.DRAINED)
    worst = min(ends, key=lambda ended: order.index(ended.end))
    return replace(worst, exit_code=max(ended.exit_code for ended in ends))


def reason_to_leave(places: list[Place]) -> str:
    """Return why the rest of the pod must drain: a place that was given up.

    Args:
        places: All places of the pod.

    Returns:
        The message of the first failure; empty if the pod may stay.
    """
    failed = (place.ended for place in places if place.ended and place.ended.end is EndKind.FAILED)
    return next((ended.message for ended in failed), "")
