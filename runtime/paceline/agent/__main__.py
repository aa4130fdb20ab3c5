"""Entry point of an agent: `python -m paceline.agent`. All settings come from the environment.

Exit code: 0 if all ranks finished or left in order, 1 after a failure or a drain that lost work, 2
if the user has to correct something (also an exit code 2 of a rank). After a signal that was
followed in order it is PACELINE_DRAINED_EXIT_CODE, if that is set.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError, printable_lines
from paceline_api.ids import MemberId
from paceline_api.jobfile import JobFile, read_job_file
from paceline_api.times import NS_PER_S

from paceline import scratch
from paceline.agent import targets
from paceline.agent.http import HttpServer
from paceline.agent.launch import LaunchPlan, find_mpiexec, needs_mpi, plan_rank
from paceline.agent.logs import LogOutput
from paceline.agent.network import NetworkWatch, nccl_log
from paceline.agent.rank_lines import RankLines
from paceline.agent.supervisor import Supervisor
from paceline.agent.system import Reaper, become_subreaper
from paceline.clock import wall_s
from paceline.control.tls import pinned
from paceline.control.tokens import Tokens
from paceline.control.voice import Carriers, PodVoice
from paceline.core.agent.exits import EndKind, PlaceEnd
from paceline.core.agent.relay import Relay
from paceline.core.agent.supervise import RankLimits, Report
from paceline.core.anatomy.samples import PodSamples
from paceline.core.demand import agent_files
from paceline.core.messages import AgentDone, AgentHello, Register, Shutdown, ToAgent
from paceline.environment import AgentSettings
from paceline.limits import ensure_files
from paceline.logs import log_to_stderr
from paceline.private_files import UMASK
from paceline.refusals import PROCESS
from paceline.signals import on_request_to_end
from paceline.telemetry.collector import PodRecords
from paceline.telemetry.course import Course

log = logging.getLogger("paceline.agent")

TERMINATION_LOG: Final = Path("/dev/termination-log")
"""File whose content the kubelet puts into the pod's status, where the operator reads how the pod
ended."""
TERMINATION_BYTES_MAX: Final = 4096


class Agent:
    """Connects the parts of one pod's agent. `run` returns how the pod ended."""

    def __init__(self, settings: AgentSettings, spec: JobFile, folders: scratch.Scratch) -> None:
        """Make the parts of an agent. Nothing starts before `run`.

        Args:
            settings: Settings from the environment.
            spec: The job.
            folders: This agent's own folders, in which its ranks have theirs.
        """
        mpiexec = find_mpiexec()
        ensure_files("the agent of a pod", agent_files(settings.procs * spec.model))
        self._settings, self._folders = settings, folders
        self._mpiexec = mpiexec if needs_mpi(spec.backend, mpiexec) else ""
        self._spec = spec
        self._metrics_url = ""
        self._parent = os.getppid()
        self._signalled = False
        loop = asyncio.get_running_loop()
        self._output = LogOutput(loop, sys.stdout.fileno(), settings.run_dir / "logs")
        self._reaper = Reaper()
        self._tokens = Tokens(settings.token, settings.tokens_file)
        self._records = PodRecords(settings.slot, settings.procs)
        self._course = Course()
        self._voice = PodVoice(
            settings.coordinators,
            lambda: self._tokens.own,
            Relay(settings.slot, settings.attempt),
            hello=self._hello,
            carriers=self._carriers,
            obey=self._obey,
            tell=lambda member, data: self._lines.tell(member, data),
            tls=pinned(settings.tls_cert, settings.tls_own),
        )
        self._lines = RankLines(loop, self._voice)
        self._records.connection = lambda: (self._voice.connected, self._voice.connections)
        self._supervisor = Supervisor(
            settings,
            RankLimits(
                spec.backoff_limit,
                int(settings.drain_grace_s * NS_PER_S),
                spec.failure_rules,
                spec.finish_deadline_ns,
            ),
            self._plan,
            model=spec.model,
            records=self._records,
            output=self._output,
            reaper=self._reaper,
            lines=self._lines,
            send=self._send,
        )

        self._network = NetworkWatch(
            self._records, self._supervisor.pids, partial(nccl_log, settings.run_dir)
        )
        self._records.carriers = lambda: self._network.verdicts
        self._records.phases = lambda: (place.phase for place in self._supervisor.places)

    async def run(self) -> PlaceEnd:
        """Start the ranks, serve until all of them have ended, and report it to the coordinator.

        Returns:
            How the pod ended, with the exit code of the agent.
        """
        loop = asyncio.get_running_loop()
        become_subreaper()
        self._reaper.start(loop)
        on_request_to_end(loop, self._asked_to_leave)
        http = HttpServer(
            lambda exemplars: self._records.page(exemplars=exemplars),
            self._health,
            lambda: msgspec.json.encode(self._steps()),
            token=self._settings.token,
            refusals=PROCESS,
        )
        host = "127.0.0.1" if self._settings.local else "0.0.0.0"
        port = await http.start(host, self._settings.metrics_port, search=self._settings.local)
        self._metrics_url = f"http://{self._settings.host}:{port}/metrics"
        target = self._publish(port) if self._settings.local else None
        link = asyncio.create_task(self._voice.run())
        watch = asyncio.create_task(self._network.run())
        course = asyncio.create_task(self._watch_course())
        try:
            ended = await self._supervisor.run()
            await self._reaper.end_the_rest()
            done = AgentDone(
                self._settings.slot,
                self._settings.attempt,
                str(ended.end),
                ended.message,
                ended.reason,
            )
            await self._voice.finish(done)
        finally:
            if target is not None:
                target.unlink(missing_ok=True)
            link.cancel()
            watch.cancel()
            course.cancel()
            await asyncio.wait([link, watch, course])
            self._lines.close()
            await http.stop()
            self._leave_steps()
            self._output.close()
            self._records.close()
        if self._signalled and ended.end is EndKind.DRAINED and ended.exit_code == 0:
            return replace(ended, exit_code=self._settings.drained_exit_code)
        return ended

    def _publish(self, port: int) -> Path | None:
        """Write the target for Prometheus. A failure is only logged, since no run needs it."""
        settings = self._settings
        try:
            targets.leave_token(settings.run_dir, settings.token)
            return targets.publish(
                settings.run_dir,
                job=settings.job,
                slot=settings.slot,
                attempt=settings.attempt,
                address=f"{settings.host}:{port}",
            )
        except OSError as error:
            log.warning("no target for Prometheus in %s: %s", settings.run_dir, error.strerror)
            return None

    def _steps(self) -> PodSamples:
        return PodSamples(
            self._settings.job,
            self._settings.slot,
            self._settings.host,
            self._records.samples(),
            self._course.moments(),
        )

    async def _watch_course(self) -> None:
        """Keep moments of the job until cancelled."""
        while True:
            self._course.add(wall_s(), self._records.values().values())
            await asyncio.sleep(self._course.every_s)

    def _leave_steps(self) -> None:
        """Write the last steps of a local run.

        Failures are logged only: only a report needs them.
        """
        if self._settings.local:
            try:
                targets.leave_steps(self._settings.run_dir, self._steps())
            except OSError as error:
                where = self._settings.run_dir
                log.warning("the last steps are not kept in %s: %s", where, error.strerror)

    def _asked_to_leave(self, number: signal.Signals) -> None:
        if os.getppid() == self._parent:
            self._signalled = True
            self._supervisor.drain(number.name)
        else:
            # `paceline run` was killed, so a drain would help nobody.
            self._supervisor.obey(Shutdown("the run has ended"))

    def _plan(self, member: MemberId, shard: int, socket_name: str, key: str) -> LaunchPlan:
        return plan_rank(
            self._settings,
            self._spec,
            member,
            shard=shard,
            outside=os.environ,
            mpiexec=self._mpiexec,
            socket_name=socket_name,
            key=key,
            agent_pid=os.getpid(),
            sockets=self._folders.sockets,
            temporary=self._folders.temporary,
        )

    def _hello(self, registers: tuple[Register, ...]) -> AgentHello:
        return AgentHello(
            self._settings.slot,
            self._settings.attempt,
            self._settings.host,
            self._metrics_url,
            self._supervisor.living(),
            self._supervisor.dead(),
            self._supervisor.released(),
            registers,
            self._supervisor.failures(),
        )

    def _carriers(self) -> Carriers:
        return tuple((m, network) for m, network in self._network.verdicts.items() if network)

    def _obey(self, message: ToAgent) -> None:
        self._supervisor.obey(message)

    def _send(self, report: Report) -> None:
        self._voice.send(report.message)

    def _health(self) -> dict[str, object]:
        places = {str(place.member): str(place.phase) for place in self._supervisor.places}
        return {"ranks": places, "coordinator": self._voice.connected}


async def _run(settings: AgentSettings, spec: JobFile) -> PlaceEnd:
    runner = os.getppid()
    # Remove what an earlier container of the pod, or another agent of the run, has left.
    scratch.sweep(scratch.bases())
    with scratch.Scratch.make(spare=settings.run_dir) as folders:
        ended = await Agent(settings, spec, folders).run()
    if settings.local and os.getppid() != runner:
        # The runner was killed, so the last of its agents removes what it has left.
        scratch.sweep(dict.fromkeys(base for own in scratch.bases() for base in (own, own.parent)))
    return ended


def _leave_word(ended: PlaceEnd) -> None:
    """Write how the pod ended for the operator, which needs it if no coordinator is left (C1)."""
    text = f"{ended.end}: {ended.message}" if ended.message else str(ended.end)
    try:
        TERMINATION_LOG.write_bytes(printable_lines(text).encode()[:TERMINATION_BYTES_MAX])
    except OSError as error:
        log.info("no word is left in %s: %s", TERMINATION_LOG, error.strerror)


def main() -> int:
    """Run the agent of this pod and return its exit code."""
    log_to_stderr("agent: ")
    try:
        settings = AgentSettings.from_environment(os.environ)
        if settings.umask is not None:
            os.umask(UMASK)  # settings.umask is for the scripts
        ended = asyncio.run(_run(settings, read_job_file(settings.spec_path)))
        if TERMINATION_LOG.exists():
            _leave_word(ended)
    except PacelineError as error:
        sys.stderr.write(error.render() + "\n")
        return error.exit_code
    in_order = (0, settings.drained_exit_code)
    if ended.exit_code not in in_order:
        log.error("the pod ended as %s: %s", ended.end, ended.message)
    assert ended.exit_code in (*in_order, 1, EXIT_BAD_INPUT), ended
    return ended.exit_code


if __name__ == "__main__":
    sys.exit(main())
