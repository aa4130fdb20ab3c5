"""One run of a job on this machine, from the first process to the last.

The runner follows the coordinator's status, lets the injector act on it, and passes it on for
display. The run ends when the coordinator has decided how the job ended, when the run is broken, or
when the user wants. A suspended run has no processes until it is resumed; then all are started
again.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
from paceline_api.settings import ResolvedJob
from paceline_api.status import Outcome, Status, at_rest
from paceline_api.times import NS_PER_S
from paceline_api.types.durations import format_duration
from paceline_api.types.enums import Network

from paceline import scratch
from paceline.clock import now_ns, wall_s
from paceline.core.faults import Fault
from paceline.local import index
from paceline.local.client import Client, CoordinatorAwayError
from paceline.local.cluster import Cluster
from paceline.local.control import Control, View
from paceline.local.faults import Injector
from paceline.local.processes import Child, tail
from paceline.local.rundir import STATUS, Printed, RunDirError, write
from paceline.local.slow import Replacer
from paceline.local.timeline import Timeline
from paceline.private_files import UMASK, private_umask

AWAY_S: Final = 30.0
"""Longest time without an answer of the coordinator, in seconds. Its start takes about a second."""
POLL_S: Final = 1.0
"""Longest time that a request for a new status waits, in seconds."""
RETRY_S: Final = 0.05
"""Pause before a request to the coordinator is retried, in seconds."""
FAILED_S: Final = 15.0
"""How long to wait for agents after a job has failed, in seconds. They give their ranks 10 s to
report why."""
END_S: Final = 5.0
"""Time from SIGTERM to SIGKILL, in seconds, for agents that have not ended by themselves."""
IDLE_S: Final = 20.0
"""How long the run waits for an outcome while no worker lives and none is started, in seconds."""
INTERRUPTED: Final = "Interrupted"
"""Reason of the outcome of a run that the user has ended."""
RELEASED: Final = "Released"
"""Reason of the `HistoryEntry` which reports that all ranks have made the last round."""
SUSPENDING: Final = "Suspending"
"""State of a run that is being suspended."""
SUSPENDED: Final = "Suspended"
"""State of a run without processes, which can be resumed."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of a run, and what was recorded of it."""

    outcome: Outcome
    status: Status | None
    """Last status that the runner has received."""
    timeline: Timeline
    interrupted: bool
    left_over: int
    removed: bool = False
    """True if another terminal has asked to end the run and to remove its folder."""


class Runner:
    """Runner of one job on this machine; use it inside one asyncio event loop.

    Args:
        job: The job.
        run_dir: Folder of the run.
        working_dir: Working directory of the ranks.
        faults: Faults to inject.
        show: Called with each new status.
        say: Called with each event, as one line of text.
        on_line: Called with each line that a rank prints.
        record: True if the ranks keep a journal for `paceline replay`.
        measures: True if the job runs for `paceline plan`.
        on_listen: Called when other terminals can reach the job.
    """

    def __init__(
        self,
        job: ResolvedJob,
        *,
        run_dir: Path,
        working_dir: Path,
        faults: tuple[Fault, ...],
        show: Callable[[Status, Timeline], None],
        say: Callable[[str], None],
        on_line: Callable[[str], None],
        record: bool = False,
        measures: bool = False,
        on_listen: Callable[[index.RunEntry], None] = lambda _: None,
    ) -> None:
        self._job = job
        self._run_dir = run_dir
        self._working_dir = working_dir
        self._record, self._measures = record, measures
        self._faults = faults
        self._show = show
        self._say = say
        self._timeline = Timeline()
        self._replacer = Replacer(job.straggler)
        self._status: Status | None = None
        self._released = False
        """True once a coordinator has reported the release; a later one may not know it."""
        self._interrupts = self._late_interrupts = 0
        self._complete_first = False
        """True if the ranks were released with the whole job done before anybody ended the run."""
        self._removed = False
        self._at_once = asyncio.Event()
        """Set to end the present processes without delay."""
        self._resumed = asyncio.Event()
        self._suspended = ""
        """Suspending, Suspended or empty."""
        self._revision = 0
        self._started_wall_s = wall_s()
        self._on_listen = on_listen
        self._on_line, self._printed = on_line, Printed(run_dir, self._ring)
        self._cluster: Cluster | None = None
        self._umask = UMASK
        """The user's own umask, for the scripts; this process and its agents make private files."""
        scratch.sweep(scratch.bases())
        self._scratch = scratch.Scratch.make()
        self._control = Control(job, run_dir, self, sockets=self._scratch.sockets, warn=say)

    def signalled(self, number: signal.Signals) -> None:
        """Handle a signal that asks the run to end.

        A terminal that closes often sends SIGHUP twice, so SIGHUP never ends the run at once.
        """
        if number is not signal.SIGHUP or not self._interrupts:
            self.interrupt()

    def interrupt(self) -> None:
        """Handle Ctrl-C: first stop at an agreed round, the second time end at once.

        If the job is complete, only the scripts still run. Ctrl-C then does not change how the job
        ended.
        """
        if self._complete_first:
            self._late_interrupts += 1
            if self._late_interrupts > 1:
                self._at_once.set()
            else:
                self._say("the job is complete; its scripts end, Ctrl-C again ends them at once")
            return
        self._interrupts += 1
        if self._interrupts == 1 and self._suspended != SUSPENDED:
            self._stop("; Ctrl-C again ends at once")
        else:
            self.end_at_once()

    def end_at_once(self) -> None:
        """End the run without waiting for an agreed round."""
        self._interrupts += not self._complete_first
        self._at_once.set()
        self._resumed.set()

    def _stop(self, more: str) -> None:
        """Stop at an agreed round, or at once if training has not started."""
        if self._cluster is None or not self._trains():
            self._at_once.set()
            return
        grace_ns = self._job.elasticity.drain_grace_ns
        self._say(f"stopping after the next round, within {format_duration(grace_ns)}{more}")
        self._cluster.stop()
        asyncio.get_running_loop().call_later(grace_ns / NS_PER_S, self._at_once.set)

    def _trains(self) -> bool:
        return self._timeline.started_ns is not None

    # ---- what other terminals ask for (control.Controlled) ----------------------------------

    def view(self) -> View:
        """Return what the runner's own table shows, for other terminals."""
        timeline = self._timeline
        return View(
            self._job.name,
            str(self._run_dir),
            self._status,
            self._wanted(),
            timeline.rounds_per_s_now,
            timeline.left_s,
            revision=self._revision,
            suspended=self._suspended,
            started_wall_s=self._started_wall_s,
        )

    def printed_bytes(self) -> int:
        """Return the size of the file with the lines that the ranks have printed, in bytes."""
        return self._printed.size

    def _wanted(self) -> int:
        return self._job.replicas if self._cluster is None else self._cluster.wanted

    def scale(self, replicas: int) -> int:
        """Change the number of intended replicas; return the one before."""
        before = self._wanted()
        if self._cluster is not None:
            self._cluster.scale(replicas)
        self._job = replace(self._job, replicas=replicas)
        self._tell()
        return before

    def suspend(self, suspend: bool) -> None:
        """Suspend the job after a stop at an agreed round, or resume it."""
        if suspend and not self._suspended:
            self._suspended = SUSPENDING
            self._resumed.clear()
            if self._job.checkpoint is None:
                self._say("the job has no spec.checkpoint: when it is resumed it begins anew")
            self._stop("")
        elif not suspend and self._suspended:
            self._resumed.set()
        self._tell()

    def remove(self) -> None:
        """End the run as Ctrl-C does, and mark its folder for removal."""
        self._removed = True
        self.interrupt()

    def _tell(self) -> None:
        self._revision += 1
        self._ring()

    def _ring(self) -> None:
        self._control.pulse.ring()

    # ---- from beginning to end -----------------------------------------------------------------

    async def run(self) -> RunResult:
        """Run the job until it ends; called once.

        Returns:
            How the run ended.
        """
        with self._scratch, private_umask() as self._umask:
            outcome, left_over = await self._run()
        self._printed.close()
        return RunResult(
            outcome=outcome,
            status=self._status,
            timeline=self._timeline,
            interrupted=self._interrupts > 0 and not self._is_whole(outcome),
            left_over=left_over,
            removed=self._removed,
        )

    async def _run(self) -> tuple[Outcome, int]:
        """Run the job, with all its suspensions.

        Returns:
            How it ended, and the number of processes that were left over.
        """
        faults, attempt = self._faults, -1
        async with self._control:
            self._on_listen(self._control.entry)
            while True:
                cluster = self._new_cluster(faults, attempt)
                outcome = await self._live(cluster)
                if not self._is_suspended(outcome):
                    break
                await self._until_resumed()
                if self._interrupts:
                    break
                # Faults refer to rounds of the first cluster, so they are not repeated.
                faults, attempt = (), cluster.highest_attempt
            self._keep(outcome)
        return outcome, cluster.left_over

    def _new_cluster(self, faults: tuple[Fault, ...], after_attempt: int) -> Cluster:
        return Cluster(
            self._job,
            run_dir=self._run_dir,
            working_dir=self._working_dir,
            faults=faults,
            temporary=self._scratch.temporary,
            on_line=self._line,
            record=self._record,
            measures=self._measures,
            after_attempt=after_attempt,
            umask=self._umask,
        )

    def _line(self, agent: str, text: str) -> None:
        self._printed.add(agent, text)
        self._on_line(text)

    async def _live(self, cluster: Cluster) -> Outcome:
        """Run the processes of a cluster from the first to the last, or to a suspension.

        Returns:
            How the job ended.
        """
        self._cluster = cluster
        try:
            async with cluster, Client(cluster.url, cluster.operator_token) as client:
                outcome = await self._outcome(cluster, client)
                if outcome.complete or (self._status and outcome is self._status.outcome):
                    outcome = await self._finish(cluster, client, outcome)
                await cluster.end(grace_s=0.0 if self._at_once.is_set() else END_S)
        finally:
            self._cluster = None
        return outcome

    def _is_suspended(self, outcome: Outcome) -> bool:
        """Return True if the processes ended in order to be resumed later.

        Returns:
            False if the job was complete just then, has failed, or was ended by the user.
        """
        if not self._suspended or self._interrupts:
            return False
        rests = outcome.complete or outcome.reason == INTERRUPTED
        return rests and not self._is_whole(outcome)

    def _is_whole(self, outcome: Outcome) -> bool:
        """Return True if the job was complete when somebody wanted to end it."""
        progress = self._status.log.progress if self._status is not None else None
        return outcome.complete and (
            self._complete_first or (progress is not None and progress >= 1.0)
        )

    async def _until_resumed(self) -> None:
        self._suspended = SUSPENDED
        self._tell()
        self._say(
            "suspended: `paceline resume` goes on, from the newest checkpoint if there is one"
        )
        await self._resumed.wait()
        self._resumed.clear()
        self._at_once = asyncio.Event()
        self._suspended, self._status, self._released = "", None, False
        self._timeline = Timeline()
        if not self._interrupts:
            self._say("resumed")
        self._tell()

    def _keep(self, outcome: Outcome) -> None:
        """Write the status that `paceline status` shows from now on."""
        status = self._status or Status(
            self._job.name, "", replicas=self._job.replicas, carrier=Network.UNKNOWN
        )
        if self._interrupts and not self._is_whole(outcome):
            outcome = Outcome(complete=False, reason=INTERRUPTED, message="ended by the user")
        status = at_rest(status, outcome)
        text = msgspec.json.format(msgspec.json.encode(status)).decode()
        try:
            write(self._run_dir, STATUS, text)
        except RunDirError as error:  # the outcome does not depend on this file
            self._say(f"warning: {STATUS} is not kept: {error.message}")

    async def _outcome(self, cluster: Cluster, client: Client) -> Outcome:
        """Return how the job ended, by whichever comes first.

        The candidates are the coordinator's outcome, a broken run, the user, and the job's
        deadline.

        Returns:
            The outcome.
        """
        watch = asyncio.create_task(self._watch(cluster, client))
        at_once = asyncio.create_task(self._at_once.wait())
        limit_ns = self._job.active_deadline_ns
        any_of: set[asyncio.Future[Any]] = {watch, at_once, cluster.broken}
        done, _ = await asyncio.wait(
            any_of,
            timeout=None if limit_ns is None else limit_ns / NS_PER_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        at_once.cancel()
        if watch in done:
            return watch.result()
        watch.cancel()
        if cluster.broken in done:
            return cluster.broken.result()
        if at_once in done and self._complete_first:
            return self._complete()
        if at_once in done:
            return Outcome(complete=False, reason=INTERRUPTED, message="ended by the user")
        assert limit_ns is not None
        return Outcome(
            complete=False,
            reason="DeadlineExceeded",
            message=f"the job ran for {format_duration(limit_ns)}",
            hint="give it more time with spec.activeDeadlineSeconds",
        )

    async def _watch(self, cluster: Cluster, client: Client) -> Outcome:
        """Follow the status until it holds an outcome.

        Returns:
            The outcome.
        """
        injector = Injector(self._faults, cluster, self._say)
        heard_ns = alive_ns = now_ns()
        while True:
            try:
                status = await client.status(
                    after=self._status.seq if self._status else None,
                    wait_s=self._wait_s(injector),
                )
            except CoordinatorAwayError:
                if now_ns() - heard_ns > AWAY_S * NS_PER_S:
                    return self._silent()
                await asyncio.sleep(RETRY_S)
                continue
            heard_ns = now_ns()
            self._take(status, cluster)
            if status.outcome is not None:
                return status.outcome
            injector.look(status, self._timeline.elapsed_ns(heard_ns))
            self._replace_slow(status, cluster, heard_ns)
            alive_ns = heard_ns if cluster.agents else alive_ns
            if heard_ns - alive_ns > IDLE_S * NS_PER_S:
                return self._nobody()

    def _take(self, status: Status, cluster: Cluster) -> None:
        self._status = status
        self._released = self._released or status.released
        for happening in self._timeline.add(status, now_ns()):
            first, _, more = happening.message.partition("\n")
            self._say(f"{happening.reason}: {first}{' ...' if more else ''}")
            if happening.reason == RELEASED and not self._interrupts and not self._suspended:
                self._complete_first = True
        cluster.take_status(status)
        self._show(status, self._timeline)
        self._tell()

    def _replace_slow(self, status: Status, cluster: Cluster, at_ns: int) -> None:
        slow = self._replacer.choose(status, at_ns)
        if slow is not None and cluster.terminate(slow.member.slot):
            self._say(
                f"replica {slow.member.slot} is replaced: rank {slow.member} takes "
                f"{slow.percent} % of the median step"
            )

    def _wait_s(self, injector: Injector) -> float:
        next_ns = injector.next_ns()
        if next_ns is None or not self._trains():
            return POLL_S
        left_ns = next_ns - self._timeline.elapsed_ns(now_ns())
        return min(POLL_S, max(0.0, left_ns / NS_PER_S))

    async def _finish(self, cluster: Cluster, client: Client, outcome: Outcome) -> Outcome:
        """Let the workers end by themselves, then end the coordinator.

        Returns:
            The outcome, unchanged.
        """
        agents = cluster.agents
        limit_s = self._job.finish_deadline_ns / NS_PER_S if outcome.complete else FAILED_S
        if not outcome.complete:
            # The coordinator has informed connected ranks, but another one may be starting.
            for agent in agents:
                agent.signal(signal.SIGTERM)
        silent = self._status.silent if self._status else ()
        ends = asyncio.create_task(_all_ended(cluster.agents_but(silent)))
        at_once = asyncio.create_task(self._at_once.wait())
        await asyncio.wait([ends, at_once], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        ends.cancel()
        at_once.cancel()
        await self._last_look(cluster, client)
        await cluster.end(grace_s=0.0 if self._at_once.is_set() else END_S)
        for agent in agents:
            if outcome.complete and agent.exit_code != 0:
                # A script failed after its release, and the coordinator knows it.
                self._say(f"{agent.name} ended with code {agent.exit_code} after the job's end")
        return outcome

    async def _last_look(self, cluster: Cluster, client: Client) -> None:
        """Fetch the final metrics, sent with the last heartbeats; then let the coordinator end.

        If scripts are ended at once, a coordinator that still waits for them has no outcome to
        acknowledge. It ends with the cluster.
        """
        try:
            status = await client.status()
            self._take(status, cluster)
            if status.outcome is not None:
                await client.post("/v1/acknowledge")
        except CoordinatorAwayError as error:
            self._say(f"the coordinator did not answer at the end: {error}")

    def _silent(self) -> Outcome:
        if self._released:
            return self._complete()
        log = self._run_dir / "coordinator.log"
        output = "\n".join(tail(log, 15))
        return Outcome(
            complete=False,
            reason="CoordinatorSilent",
            message=f"the coordinator did not answer for {AWAY_S:g} s; it said:\n{output}",
            hint=f"the whole log is {log}",
        )

    def _nobody(self) -> Outcome:
        if self._released:
            return self._complete()
        return Outcome(
            complete=False,
            reason="NoWorkers",
            message=f"all workers have ended, and the job has no outcome after {IDLE_S:g} s",
            hint=f"the logs are in {self._run_dir}",
        )

    def _complete(self) -> Outcome:
        """Return the outcome of a complete job, even if the coordinator that knew it is gone (C1).

        Returns:
            An outcome with the number of rounds.
        """
        version = self._status.version if self._status else 0
        return Outcome(complete=True, reason="Complete", message=f"{version} rounds, released")


async def _all_ended(agents: list[Child]) -> None:
    for agent in agents:
        await agent.ended()
