"""Processes of a local job: one coordinator, and one agent for each replica.

This module does on one machine what the operator does in a cluster. It keeps as many agents alive
as replicas are intended, and restarts a dead agent under its next attempt. It keeps the coordinator
running on the same socket, and sends it the numbered inventory of pods that may live (R25). If
there are too many replicas, the coordinator decides which ones leave; an agent that ends then is
not replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from paceline_api.ids import pod_of
from paceline_api.jobfile import JOB_FILE, JobFile
from paceline_api.names import (
    ENV_ATTEMPT,
    ENV_COORDINATOR,
    ENV_JOB,
    ENV_LOCAL,
    ENV_OPERATOR_TOKEN,
    ENV_RUN_DIR,
    ENV_SLOT,
    ENV_TOKEN,
    is_reserved_env,
)
from paceline_api.settings import ResolvedJob
from paceline_api.status import Outcome, Status
from paceline_api.times import NS_PER_S

from paceline import scratch
from paceline.agent.launch import ENV_COMPILED
from paceline.clock import now_ns
from paceline.core.faults import INSIDE_A_RANK, Fault, format_faults
from paceline.core.messages import Inventory, Targets
from paceline.environment import (
    ENV_DRAIN_GRACE,
    ENV_FAULTS,
    ENV_LINGER,
    ENV_LISTEN_FD,
    ENV_METRICS_PORT,
    ENV_PROCS,
    ENV_SPEC,
    ENV_UMASK,
)
from paceline.limits import LISTEN_BACKLOG
from paceline.local.client import Client, CoordinatorAwayError
from paceline.local.processes import Child, adopt_orphans, children_of, kill_orphans
from paceline.local.rundir import write
from paceline.private_files import UMASK, ForeignFolderError, make_folder

ASK_S: Final = 3.0
"""How long the replacement of an agent waits for a coordinator that does not answer, in seconds."""
RETRY_S: Final = 0.05
"""Pause before a request to the coordinator is retried, in seconds."""
QUICK_NS: Final = 5 * NS_PER_S
"""Upper bound on the lifetime of a process that counts as failed at its start."""
QUICK_DEATHS_MAX: Final = 5
"""Number of failed starts in a row after which the run gives up."""
PAUSE_S: Final = 0.5
"""Pause before a start that follows failed ones, in seconds, times their number."""
TAIL_LINES: Final = 15
"""Number of log lines that an error message shows."""
COORDINATOR_END_S: Final = 3.0
"""Time from SIGTERM to SIGKILL for the coordinator, in seconds."""
LINGER_S: Final = 900.0
"""How long the coordinator stays after the job's end, in seconds; usually the runner ends it
earlier."""


STARTING_MAX: Final = max(4, 2 * (os.cpu_count() or 1))
"""Upper bound on agents that start at the same time. Each start takes a second of a core; dozens at
once would leave no core on which runner and coordinator could answer."""
STARTING_NS: Final = 15 * NS_PER_S
"""Time after which an agent that the coordinator does not know yet no longer delays the start of
others."""


@dataclass(slots=True)
class _Slot:
    attempt: int = -1
    """Highest attempt so far; -1 before the first start."""
    agent: Child | None = None
    started_ns: int = 0
    quick_deaths: int = 0


class Cluster:
    """All processes of a run; an async context manager that starts them and ends every one.

    Use it inside one asyncio event loop.

    Args:
        job: The job.
        run_dir: Folder of the run, with the job file and all logs.
        working_dir: Working directory of the ranks.
        faults: Faults to inject; only those inside a rank are passed on to the agents.
        temporary: TMPDIR of the processes.
        on_line: Receives the name of an agent and a line that its ranks have printed.
        record: True if the ranks keep a journal for `paceline replay`.
        measures: True if the job runs for `paceline plan`.
        after_attempt: Highest attempt of an earlier cluster for the same run folder.
        umask: The user's own umask, which the ranks get.
    """

    def __init__(
        self,
        job: ResolvedJob,
        *,
        run_dir: Path,
        working_dir: Path,
        faults: tuple[Fault, ...],
        temporary: Path,
        on_line: Callable[[str, str], None],
        record: bool = False,
        measures: bool = False,
        after_attempt: int = -1,
        umask: int = UMASK,
    ) -> None:
        self.left_over = 0
        """Number of processes that were still alive after all had been ended."""
        self.broken: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """Future: outcome of a run that must end for a reason unknown to the coordinator."""
        self._token = secrets.token_urlsafe(24)
        self.operator_token = secrets.token_urlsafe(24)
        """Token of this runner at the coordinator; the ranks do not have it."""
        self._job = job
        self._run_dir, self._temporary = run_dir, temporary
        self._faults = format_faults(f for f in faults if f.kind in INSIDE_A_RANK)
        self._on_line = on_line
        self._spec = run_dir / JOB_FILE
        trainer = job.trainer
        frozen = JobFile.of(
            job,
            command=trainer.command,
            env=trainer.env.items(),
            working_dir=str(working_dir),
            record=record,
            measures=measures,
        )
        write(run_dir, JOB_FILE, frozen.to_json())
        self._wanted = job.replicas
        self._informed = ""
        """Uid of the coordinator that has received inventory and targets last."""
        self._stopping = False
        self._stop_to_tell = False
        self._slots: dict[int, _Slot] = {}
        self._after_attempt, self._umask = after_attempt, umask
        self._revision = 0
        self._coordinator: Child | None = None
        self._ending = False
        self._over = False
        """True once the last round is made. A coordinator that was restarted or stopped does not
        know it."""
        self._reported: set[tuple[int, int]] = set()
        """Pods, by slot and attempt, of which the coordinator knows a rank."""
        self._again: asyncio.TimerHandle | None = None
        self._stale = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        # The runner binds the socket and the coordinator inherits it. So no other program can take
        # the port while the coordinator restarts, and a client that connects then waits.
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=LISTEN_BACKLOG)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._client = Client(self.url, self.operator_token)

    async def __aenter__(self) -> Self:
        adopt_orphans(True)
        # Children from before the run do not belong to it.
        self._others = set(children_of(os.getpid()))
        await self._client.__aenter__()
        self._spawn(self._keep_coordinator())
        self._spawn(self._keep_informed())
        self._start_missing()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.end(grace_s=0.0)
        adopt_orphans(False)
        await self._client.__aexit__(kind, error, at)
        self._socket.close()

    # ---- what the user and the faults ask for ---------------------------------------------

    @property
    def wanted(self) -> int:
        """Number of intended replicas."""
        return self._wanted

    @property
    def agents(self) -> list[Child]:
        """Agents that are alive."""
        return [slot.agent for slot in self._slots.values() if slot.agent is not None]

    def agents_but(self, slots: Collection[int]) -> list[Child]:
        """Return the agents that are alive, except those of these slots."""
        return [s.agent for n, s in self._slots.items() if s.agent is not None and n not in slots]

    @property
    def highest_attempt(self) -> int:
        """Highest attempt of any agent so far."""
        return max((slot.attempt for slot in self._slots.values()), default=self._after_attempt)

    def scale(self, replicas: int) -> None:
        """Change the number of intended replicas; the coordinator decides which ones leave."""
        self._wanted = replicas
        self._stale.set()
        self._start_missing()

    def grow(self, replicas: int) -> None:
        """Add this many replicas."""
        self.scale(self._wanted + replicas)

    def terminate(self, slot: int) -> bool:
        """Send SIGTERM to the agent of a slot; return False if it has none now."""
        agent = self._slots[slot].agent if slot in self._slots else None
        if agent is not None:
            agent.signal(signal.SIGTERM)
        return agent is not None

    def stop(self) -> None:
        """Ask for a stop at an agreed round (R17, R18)."""
        self._stopping = self._stop_to_tell = True
        self._stale.set()

    def kill_coordinator(self) -> None:
        """Send SIGKILL to the coordinator, which is then restarted."""
        if self._coordinator is not None:
            self._coordinator.signal(signal.SIGKILL)

    def take_status(self, status: Status) -> None:
        """Take in a new status of the coordinator.

        A coordinator that was restarted has no inventory and no targets, so they are sent again.
        """
        self._over = self._over or status.stopping or status.outcome is not None
        self._reported |= {pod_of(rank.member) for rank in status.ranks}
        if self._again is not None:
            self._start_missing()
        if status.coordinator != self._informed:
            self._informed = status.coordinator
            self._stop_to_tell = self._stopping
            self._stale.set()

    async def end(self, *, grace_s: float) -> None:
        """End all processes; safe to call again.

        Args:
            grace_s: Time in seconds from SIGTERM to SIGKILL for the agents.
        """
        self._ending = True
        if self._again is not None:
            self._again.cancel()
        for task in self._tasks:
            task.cancel()
        # Orphans of agents that ended by themselves: their watchers are canceled by now.
        await kill_orphans(self._pids)
        await asyncio.gather(*(agent.end(grace_s=grace_s) for agent in self.agents))
        if self._coordinator is not None:
            await self._coordinator.end(grace_s=min(grace_s, COORDINATOR_END_S))
        self.left_over += await kill_orphans(lambda: self._others)
        self._sweep()

    # ---- coordinator ----------------------------------------------------------------------

    async def _keep_coordinator(self) -> None:
        quick_deaths = 0
        while not self._ending:
            started_ns = now_ns()
            self._coordinator = self._start_coordinator()
            self._stale.set()
            code = await self._coordinator.ended()
            if self._ending:
                return
            quick_deaths = quick_deaths + 1 if now_ns() - started_ns < QUICK_NS else 0
            if quick_deaths > QUICK_DEATHS_MAX:
                self._break(
                    "CoordinatorFailed", f"the coordinator ends with code {code}", self._coordinator
                )
                return
            if quick_deaths > 1:
                await asyncio.sleep(PAUSE_S * quick_deaths)

    def _start_coordinator(self) -> Child:
        env = self._env() | {
            ENV_LISTEN_FD: str(self._socket.fileno()),
            ENV_OPERATOR_TOKEN: self.operator_token,
            ENV_LINGER: str(LINGER_S),
        }
        return Child.start(
            "coordinator",
            [sys.executable, "-m", "paceline.coordinator"],
            env=env,
            log=self._run_dir / "coordinator.log",
            keep_fds=[self._socket.fileno()],
        )

    async def _keep_informed(self) -> None:
        """Send inventory and targets whenever they have changed or the coordinator is new."""
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                await self._push()
            except CoordinatorAwayError:
                self._stale.set()
                await asyncio.sleep(RETRY_S)

    async def _push(self) -> None:
        # Targets first: the coordinator would dismiss a replica beyond its present target.
        targets = Targets(replicas=self._wanted, stop=self._stop_to_tell)
        await self._client.post("/v1/targets", targets)
        self._stop_to_tell = False
        pods = ((n, slot.attempt) for n, slot in sorted(self._slots.items()) if slot.agent)
        inventory = Inventory(revision=self._revision, pods=tuple(pods))
        await self._client.post("/v1/inventory", inventory)

    # ---- agents ---------------------------------------------------------------------------

    def _start_missing(self) -> None:
        """Start agents in the lowest free slots until the intended number is alive.

        Only a few start at a time. The method is called again when the coordinator knows them.
        """
        if self._again is not None:
            self._again.cancel()
            self._again = None
        while not (self._ending or self._over) and len(self.agents) < self._wanted:
            if len(starting := self._starting()) >= STARTING_MAX:
                self._come_back(min(starting) + STARTING_NS)
                return
            number = next(n for n in range(self._wanted) if not self._is_taken(n))
            slot = self._slots.setdefault(number, _Slot(self._after_attempt))
            slot.attempt += 1
            slot.started_ns = now_ns()
            # The inventory that names the pod must have its number before the pod starts (R25).
            self._revision += 1
            slot.agent = self._start_agent(number, slot.attempt)
            self._stale.set()
            self._spawn(self._watch_agent(number, slot, slot.agent))

    def _starting(self) -> list[int]:
        """Return the start times of agents that the coordinator does not know yet."""
        return [
            slot.started_ns
            for number, slot in self._slots.items()
            if slot.agent is not None
            and (number, slot.attempt) not in self._reported
            and now_ns() - slot.started_ns < STARTING_NS
        ]

    def _come_back(self, at_ns: int) -> None:
        delay_s = max(0, at_ns - now_ns()) / NS_PER_S
        self._again = asyncio.get_running_loop().call_later(delay_s, self._start_missing)

    def _is_taken(self, number: int) -> bool:
        slot = self._slots.get(number)
        return slot is not None and slot.agent is not None

    def _start_agent(self, number: int, attempt: int) -> Child:
        env = self._env() | {
            ENV_SLOT: str(number),
            ENV_ATTEMPT: str(attempt),
            ENV_COORDINATOR: self.url,
            ENV_FAULTS: self._faults,
            ENV_DRAIN_GRACE: str(self._job.elasticity.drain_grace_ns / NS_PER_S),
            ENV_METRICS_PORT: str(self._job.metrics_port),
            ENV_UMASK: f"{self._umask:03o}",
        }
        name = f"agent-{number}-{attempt}"
        return Child.start(
            name,
            [sys.executable, "-m", "paceline.agent"],
            env=env,
            log=self._run_dir / f"{name}.log",
            on_line=partial(self._on_line, name),
        )

    async def _watch_agent(self, number: int, slot: _Slot, agent: Child) -> None:
        code = await agent.ended()
        # A pod leaves the inventory only when all its processes are dead, even stopped ones (R25).
        await kill_orphans(self._pids)
        self._sweep()
        slot.agent = None
        self._revision += 1
        self._stale.set()
        if self._ending or await self._is_over():
            return
        quick = code != 0 and now_ns() - slot.started_ns < QUICK_NS
        slot.quick_deaths = slot.quick_deaths + 1 if quick else 0
        if slot.quick_deaths > QUICK_DEATHS_MAX:
            self._break(
                "AgentFailed", f"the agent of replica {number} ends with code {code}", agent
            )
            return
        if slot.quick_deaths > 1:
            await asyncio.sleep(PAUSE_S * slot.quick_deaths)
        self._start_missing()

    async def _is_over(self) -> bool:
        """Return True if pods end because the job does; retry if the coordinator is away.

        Returns:
            False also if the coordinator does not answer within ASK_S.
        """
        deadline_ns = now_ns() + round(ASK_S * NS_PER_S)
        while not self._over and now_ns() < deadline_ns:
            try:
                self.take_status(await self._client.status())
            except CoordinatorAwayError:
                await asyncio.sleep(RETRY_S)
                continue
            break
        return self._over

    # ---- helpers --------------------------------------------------------------------------

    def _env(self) -> dict[str, str]:
        outer = {name: value for name, value in os.environ.items() if not is_reserved_env(name)}
        # `python` in a job's command is the interpreter that runs Paceline.
        own_bin = str(Path(sys.executable).parent)
        return outer | {
            # With a buffer, each exit would flush what a full disk has refused, and fail.
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self._temporary),
            **_compiled(outer),
            "PATH": os.pathsep.join([own_bin, outer.get("PATH", os.defpath)]),
            ENV_JOB: self._job.name,
            ENV_PROCS: str(self._job.procs_per_replica),
            ENV_TOKEN: self._token,
            ENV_RUN_DIR: str(self._run_dir),
            ENV_SPEC: str(self._spec),
            ENV_LOCAL: "1",
        }

    def _sweep(self) -> None:
        """Remove the temporary files of agents that were killed."""
        scratch.sweep(dict.fromkeys((self._temporary, scratch.SHORT)))

    def _pids(self) -> set[int]:
        own = {agent.pid for agent in self.agents}
        if self._coordinator is not None:
            own.add(self._coordinator.pid)
        return self._others | own

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.broken.done():
            self.broken.set_exception(error)

    def _break(self, reason: str, message: str, child: Child) -> None:
        if self.broken.done():
            return
        output = "\n".join(child.tail(TAIL_LINES))
        self.broken.set_result(
            Outcome(
                complete=False,
                reason=reason,
                message=f"{message}; it said:\n{output}" if output else message,
                hint=f"the whole log is {child.log}",
            )
        )


def _compiled(outer: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that sets the cache of torch.compile, unless the user has set it.

    The cache outlives the run, in the folder that torch itself would use. Everybody knows the name
    of that folder, and what is in it is executed. If another user owns the folder, nothing is set,
    and the cache is in the temporary folder of the run.

    Args:
        outer: Environment of the runner.

    Returns:
        The variable for the ranks, or nothing.
    """
    if ENV_COMPILED in outer:
        return {}
    folder = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    with contextlib.suppress(OSError, ForeignFolderError):
        make_folder(folder, "cache folder")
        return {ENV_COMPILED: str(folder)}
    return {}
