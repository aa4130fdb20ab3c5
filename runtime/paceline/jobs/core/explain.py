"""`paceline explain`: why a job is slow or does not start, and up to three commands to type next.

The verdict follows from the job's state; the most pressing cause comes first. The evidence behind
it is quoted from the operator, the coordinator or the script.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from paceline_api.ids import pod_of
from paceline_api.reasons import Reason
from paceline_api.status import (
    OperationKind,
    RankPhase,
    RankStatus,
    Status,
    StragglerStatus,
    as_number,
    place_of,
)
from paceline_api.types.enums import Mode

from paceline.core.protocol.waits import quorum_of
from paceline.jobs.interface import (
    COMPLETE,
    ENDED,
    FAILED,
    SUSPENDED,
    TRAINING,
    Explanation,
    JobEvent,
    JobStatus,
)

COMMANDS_MAX: Final = 3
"""Upper bound on the suggested commands."""
WORDS_MAX: Final = 5
"""Upper bound on the warnings that are listed, the latest ones; also on the listed script failures.
"""
LINES_MAX: Final = 12
"""Upper bound on the lines of a failed rank's output that are listed."""
_PASSING: Final = (Reason.RANK_SLOW, Reason.RANK_BENCHED, Reason.QUORUM_REDUCED)
"""Reasons of warnings about rounds in progress; they do not matter once no round runs."""
_SETTLED: Final = OperationKind.SETTLED
_UNDER_WAY: Final = {
    "Resizing": "It trains, and workers are being added, replaced or taken away.",
    "Suspending": "It is being suspended: it stops after a checkpoint, then its pods go.",
    "Deleting": "It is being deleted.",
}


def explain(
    status: JobStatus, events: Sequence[JobEvent], *, flags: str, cluster: bool
) -> Explanation:
    """Return why a job is in its current state, and what to type next.

    Args:
        status: Status of the job, with `detail` if it is known.
        events: History of the job, the oldest first.
        flags: Options with which the commands find the job, such as ' -n team'.
        cluster: True for a job in a cluster, where kubectl can say more.

    Returns:
        The explanation.
    """
    job = _Job(status, flags, cluster)
    verdict, because, commands = job.explanation()
    because = [*because, *job.conditions(because), *job.warnings(events)]
    return Explanation(verdict, tuple(because), tuple(dict.fromkeys(commands))[:COMMANDS_MAX])


class _Job:
    def __init__(self, status: JobStatus, flags: str, cluster: bool) -> None:
        self._status, self._detail = status, status.detail or Status(status.name, "")
        self._flags, self._cluster = flags, cluster
        self._name = status.name if cluster else status.place

    def explanation(self) -> tuple[str, list[str], list[str]]:
        """Return the verdict, its evidence, and the commands, by the state of the job."""
        status, logs, events = self._status, self._command("logs"), self._command("events")
        match status.state:
            case x if x == COMPLETE:
                verdict = f"It is complete, after {status.round} rounds."
                scripts = self._detail.script_failures[-WORDS_MAX:]
                failed = [f"the script failed on the way: {one}" for one in scripts]
                return verdict, [*failed, *self._gain()], [logs, events, self._command("delete")]
            case x if x == FAILED:
                first, *more = status.message.splitlines() or ["nobody has said why"]
                details = [*more[-LINES_MAX:], *([status.hint] if status.hint else [])]
                return f"It has failed: {first}", details, [f"{logs} --previous", events]
            case x if x == ENDED:
                details = [status.hint] if status.hint else []
                verdict = f"It has ended; {status.message}"
                return verdict, details, [f"{logs} --previous", self._command("delete")]
            case x if x == SUSPENDED:
                verdict = "It is suspended and nothing of it runs; resume starts it again."
                return verdict, [], [self._command("resume"), logs, events]
            case x if x in _UNDER_WAY:
                watch = f"{self._command('status')} --watch"
                return _UNDER_WAY[x], [*self._waiting()], [watch, events, logs]
            case x if x == TRAINING:
                return self._training()
        return self._starting()

    def _starting(self) -> tuple[str, list[str], list[str]]:
        """Explain a job that starts, or that trains with less than was asked for.

        Returns:
            The verdict, its evidence, and the commands.
        """
        status = self._status
        what = f"{status.ready} of {status.replicas} replicas take part"
        message = f": {status.message.splitlines()[0]}" if status.message else "."
        word = "" if status.state == "Starting" else f" ({status.state})"
        waiting = [rank for rank in self._detail.ranks if _waits(rank)]
        commands = [self._command("events"), f"{self._command('status')} --watch"]
        if waiting and self._cluster:
            slot, attempt = pod_of(waiting[0].member)
            pod = f"{status.name}-{slot}-{attempt}"
            commands.insert(0, f"kubectl describe pod {pod}{self._flags}")
        commands.append(self._command("logs"))
        return f"{what}{word}{message}", [*self._waiting()], commands

    def _training(self) -> tuple[str, list[str], list[str]]:
        slow = self._detail.stragglers
        logs, wide = self._command("logs"), f"{self._command('status')} -o wide"
        if not slow:
            speed = self._status.rounds_per_s_now
            pace = f", {speed:.1f} rounds/s now" if speed else ""
            verdict = f"It trains with all {self._status.replicas} replicas{pace}; nothing holds it"
            watch = f"{self._command('status')} --watch"
            return f"{verdict} up.", [*self._gain()], [watch, wide, logs]
        worst = slow[0]
        rank = place_of(worst.member, self._detail.procs)
        takes = f"its step takes {worst.percent} % of the median"
        verdict = f"It trains, and rank {rank} holds it up: {takes}."
        if not self._waits_for_all():
            mode = self._detail.round_settings.mode
            verdict = f"It trains; rank {rank} is slow ({takes}), and in mode {mode} nobody waits."
        return (
            verdict,
            [*map(self._slow, slow), *self._gain()],
            [f"{logs} --rank {rank}", wide, self._command("events")],
        )

    def _waits_for_all(self) -> bool:
        """Return True if a round of the job's mode can wait for its slowest rank."""
        # In an unchanged script every rank goes through every step, so the others wait one later.
        is_script = bool(self._detail.log.operations)
        return is_script or self._detail.round_settings.mode is Mode.DEADLINE or self._is_full

    @property
    def _is_full(self) -> bool:
        """Return True if every round needs all active ranks."""
        settings = self._detail.round_settings
        if settings.is_synchronous:
            return True
        active = sum(not _waits(rank) for rank in self._detail.ranks)
        return settings.mode is Mode.QUORUM and quorum_of(Mode.QUORUM, settings, active) >= active

    def _gain(self) -> Iterator[str]:
        """Yield what the mode saves for an unchanged script, or why it saves nothing (S17)."""
        log, mode = self._detail.log, self._detail.round_settings.mode
        calls, settled = (log.operations.get(k, 0) for k in (OperationKind.CALL, _SETTLED))
        steps = settled + log.operations.get(OperationKind.STEP, 0)
        if not steps or self._is_full:
            return
        nothing = f"mode {mode} gains nothing: each step waits for all ranks, because the script"
        if 2 * settled > steps:
            yield (
                f"{nothing} averages several backward passes for one step of its optimizer, trains "
                "several models in turn, or has a GradScaler that scales; its log names the line"
            )
        elif calls >= steps:
            yield f"{nothing} makes {calls / steps:.1f} collective calls in each step"
        elif not log.samples_late:
            yield f"mode {mode} has gained nothing so far: no rank was late"
        else:
            saved = as_number(log.avoided_s)
            yield (
                f"mode {mode} has saved {saved:.1f} s of waiting, summed over the ranks; "
                f"{log.samples_late:,} of {log.samples_applied:,} samples came one step late"
            )

    def _slow(self, slow: StragglerStatus) -> str:
        rank = place_of(slow.member, self._detail.procs)
        on = next((one.host for one in self._detail.ranks if one.member == slow.member), "")
        where = f" on {on}" if on else ""
        action = f"; in force: {slow.action}" if slow.action else ""
        return f"rank {rank}{where}: {slow.percent} % of the median step{action}"

    def _waiting(self) -> Iterator[str]:
        """Yield one line for each reason why ranks do not take part, with these ranks."""
        reasons: dict[str, list[int]] = {}
        for rank in self._detail.ranks:
            if _waits(rank):
                first = rank.why.partition("\n")[0]
                why = f"{rank.state}{f': {first}' if first else ''}"
                reasons.setdefault(why, []).append(place_of(rank.member, self._detail.procs))
        for why, ranks in reasons.items():
            who = "rank" if len(ranks) == 1 else "ranks"
            yield f"{who} {', '.join(map(str, ranks))}: {why}"

    def conditions(self, shown: Iterable[str]) -> Iterator[str]:
        """Yield the conditions as text, without RingReady and those in `shown`."""
        for condition in self._detail.conditions:
            text = f"{condition.type} ({condition.reason}): {condition.message}"
            if condition.type != "RingReady" and text not in shown:
                yield text

    def warnings(self, events: Sequence[JobEvent]) -> Iterator[str]:
        """Yield the latest warnings; those about stragglers only while rounds run."""
        rests = self._status.ended or self._status.state == SUSPENDED
        warnings = [one for one in events if one.warning and not (rests and one.reason in _PASSING)]
        for event in warnings[-WORDS_MAX:]:
            yield f"{event.reason}: {event.message.partition(chr(10))[0]}"

    def _command(self, verb: str) -> str:
        return f"paceline {verb} {shlex.quote(self._name)}{self._flags}"


def _waits(rank: RankStatus) -> bool:
    return rank.state not in (RankPhase.ACTIVE, RankPhase.FINISHED)
