"""The rank's engine: the `Session` that the training API uses, with the threads behind it.

    main thread            the user's loop; blocks in a Session call while it is parked
    paceline-comm          `comm_thread`: rounds, committed state, data channel
    paceline-link          `coordinator_line`: control channel, by way of the agent
    paceline-agent         reads the agent's pipe: drain, and the end of the agent (D6)
    paceline-watch         `script_watch`: limits how long the script may stay away
    paceline-memory        `reduction`: prepares the segments of a streamed round
    paceline-data          `reduction`: sums the segments of a streamed round
    paceline-checkpoint    `checkpoint.writer`: writes checkpoints
    paceline-shard-<j>     `group`, on the lead: reads the line to the rank of shard j
    paceline-lead          `group`, on every other rank of a group: reads the line to the lead

The first two always exist; the others are started only where they are needed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from paceline_api.ids import MemberId
from paceline_api.jobfile import JobFile, read_job_file
from paceline_api.status import place_of
from paceline_api.types.enums import Pacing, Wire
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from paceline.clock import now_ns
from paceline.core.anatomy.samples import StepPhase
from paceline.core.messages import DealtBatch, Dismiss, Endpoints, ScriptError
from paceline.core.protocol.progress import Progress, progress_of
from paceline.core.protocol.rank_leases import RankLeases
from paceline.core.protocol.records import DataPlan, LoggedMetric
from paceline.core.rank import events as ev
from paceline.core.rank.machine import Rank
from paceline.core.rank.within import Welcome
from paceline.environment import RankSettings
from paceline.errors import (
    DismissedError,
    PacelineError,
    RuntimeBrokenError,
    UnsupportedError,
    UsageError,
)
from paceline.telemetry.records import RankRecord, RecordError
from paceline.transport.base import Transport, TransportError
from paceline.transport.device_queues import until
from paceline.transport.factory import make_transport
from paceline.transport.solo import NoTransport
from paceline.transport.variables import restore_variables
from paceline.worker import short_sockets
from paceline.worker.agent_pipe import AgentPipe
from paceline.worker.comm_thread import CommThread, Interrupts
from paceline.worker.coordinator_line import CoordinatorLine
from paceline.worker.gpus import take_own_gpu
from paceline.worker.group import FollowerThread, GroupRendezvous, LeadThread
from paceline.worker.metrics.board import Board
from paceline.worker.metrics.loop import LoopMetrics
from paceline.worker.metrics.rounds import RoundMetrics
from paceline.worker.metrics.squares import GradientSquares
from paceline.worker.peer_sockets import PeerSockets
from paceline.worker.recorder import Recorder
from paceline.worker.script_watch import ScriptWatch
from paceline.worker.session import Session, StepResult
from paceline.worker.standalone import StandaloneCoordinator
from paceline.worker.state.committed import Committed, GroupSum
from paceline.worker.state.gradients import Gradients
from paceline.worker.state.shards import is_shard

if TYPE_CHECKING:  # only a job with checkpoints loads the writer
    from paceline.worker.checkpoint.service import CheckpointService

log = logging.getLogger("paceline.rank")

SWITCH_INTERVAL_S: Final = 1e-4
"""Switch interval of the interpreter lock, in seconds. With Python's default of 5 ms a busy main
thread delays GO by 5 ms (docs/design/data-channel.md)."""
WATCH_S: Final = 1.0
"""Interval at which a parked main thread checks that the communication thread is alive."""
DISMISSED_GRACE_S: Final = 10.0
"""Time, in seconds, after which the process of a dismissed rank is ended by force (D7)."""
CLOSE_S: Final = 5.0
"""Upper bound on how long the end of the communication thread is waited for, in seconds."""
FIRST: Final = MemberId(0, 0, 0)
"""The rank that publishes before it is known who trains. A rank that is started again in its place
does not: the others may have gone on, and one of them publishes."""


def connect(settings: RankSettings | None) -> Session:
    """Take part in the job that the environment names, or run alone as rank 0 of 1.

    Args:
        settings: What the agent has set in the environment; None without a job.

    Returns:
        The session of this process; it is closed at exit.
    """
    engine = Engine(settings)
    atexit.register(engine.close)
    return engine


def _open_record(settings: RankSettings | None) -> RankRecord:
    if settings is None:
        return RankRecord.create()
    try:
        return RankRecord.open(settings.record_fd)
    except RecordError as error:
        raise RuntimeBrokenError(
            f"the memory for this rank's metrics does not fit: {error}",
            hint="install the same version of Paceline for the agent and for the script",
        ) from error


def _as_user_error(error: TransportError) -> PacelineError:
    """Return the transport's error as an error for the user, with its hint split off."""
    message, _, hint = str(error).partition("; hint: ")
    return PacelineError(message, hint=hint)


class Engine:
    """Implements `Session`, and `MainThread` for the communication thread.

    The main thread makes it and calls the methods of `Session`. `resumed`, `held`, `exited` and
    `broken` are called by other threads.
    """

    is_replay = False

    def __init__(self, settings: RankSettings | None) -> None:
        self._settings = settings
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if settings is not None:
            short_sockets.use_folder(str(settings.scratch))
        self._lock = threading.Condition()
        self._reply: ev.Resume | None = None
        self._end: ev.Exit | None = None
        self._error: BaseException | None = None
        self._leases = RankLeases()
        self._held: tuple[int, ...] = ()
        self._version = 0
        self._progress = Progress()
        self._stopped = self._under_way = self._failed = False
        self._gradients: Gradients | None = None
        self._committed: Committed | None = None
        self._interrupts = Interrupts()
        self._agent: AgentPipe | None = None
        self._spec = read_job_file(settings.spec_path) if settings else None
        member = settings.member if settings else MemberId(0, 0, 0)
        record = _open_record(settings)
        self._record = record
        self._metrics, self._loop = RoundMetrics(record, member), LoopMetrics(record)
        if self._spec is not None and self._spec.tensor_board and not self.shard:
            self._metrics.board = Board(Path(self._spec.tensor_board), member)
        peers = self._make_peer_sockets(settings, member)
        self._take_gpu(settings)
        self._transport = transport = self._make_transport(settings)
        host = settings.host if settings else "localhost"
        saves = self._spec.checkpoint if self._spec else None
        every = saves.every_rounds if saves else 0
        self._rendezvous = rendezvous = GroupRendezvous(
            self.shard, settings.group_fds if settings else ()
        )
        self._script = None if self._spec is None else self._watch_script(self._spec)
        self._welcome = known = self._meet(host, peers.address, transport.address)
        machine = Rank(
            member,
            pid=known.pid,
            host=known.host,
            endpoints=Endpoints(known.address, known.data),
            save_every=every,
        )
        self._state = machine.state
        kind = self._thread_class()
        if rendezvous.lines:
            kind = FollowerThread if self.shard else LeadThread
        self._comm = kind(
            machine,
            peers,
            transport,
            self,
            self._interrupts,
            self._metrics,
            self.shard,
            settings.token if settings else "",
        )
        if isinstance(self._comm, LeadThread | FollowerThread):
            self._comm.join_group(rendezvous)
        if (script := self._script) is not None:
            self._comm.away = lambda: script.away
        if self.shard:
            self._follow_agent()
            self._comm.start()
            return
        if settings is None:
            self._comm.link = StandaloneCoordinator(self._comm.order)
        else:
            self._comm.link = CoordinatorLine(
                settings.line_fd,
                register=self._comm.registration,
                heartbeat=self._comm.heartbeat,
                figures=self._comm.figures,
                obey=self._comm.order,
                connected=lambda: self._comm.post(ev.Connected()),
                failed=self.broken,
            )
            if self._spec is not None and self._spec.record:
                self._comm.recorder = Recorder(settings.run_dir, member)
            if self._spec is not None and self._spec.measures and self.shards == 1:
                self._comm.squares = GradientSquares()
            self._follow_agent()
        self._comm.start()
        self._comm.link.start()

    def _thread_class(self) -> type[CommThread]:
        """Return the class of the communication thread of a rank that is no part of a group."""
        return CommThread

    def _follow_agent(self) -> None:
        """Report this rank to the agent, and start the thread that reads the agent's orders."""
        assert self._settings is not None
        self._agent = AgentPipe(self._settings.agent_fd)
        self._agent.tell("present")
        threading.Thread(target=self._listen, name="paceline-agent", daemon=True).start()

    def _meet(self, host: str, address: str, data: str) -> Welcome:
        """Meet the other ranks of the group, if any, and return the identity of the member."""
        if self.shard:
            return self._rendezvous.follow(address)
        return self._rendezvous.lead(pid=os.getpid(), host=host, address=address, data=data)

    def _make_peer_sockets(self, settings: RankSettings | None, member: MemberId) -> PeerSockets:
        if settings is None:
            return PeerSockets(directory=None, name=str(member), host="", token="", alone=True)
        # The folder is this rank's own, so a short name will do; socket paths must be short.
        directory, name = (settings.scratch, "r") if settings.local else (None, str(member))
        return PeerSockets(directory=directory, name=name, host=settings.host, token=settings.token)

    def _take_gpu(self, settings: RankSettings | None) -> None:
        """Choose this rank's GPU before the script can.

        All ranks of `paceline run` are on one machine, and the ranks of a pod see the pod's
        devices.
        """
        if settings is not None and self._spec is not None:
            member = settings.member
            place = place_of(member, self._spec.procs) if settings.local else member.local
            take_own_gpu(place * self.shards + self.shard)

    def _make_transport(self, settings: RankSettings | None) -> Transport:
        if settings is None or self._spec is None:
            return NoTransport()
        try:
            ranks = self._spec.replicas * self._spec.procs
            return make_transport(
                self._spec.backend,
                local=settings.local,
                ranks=ranks,
                wire=self._spec.wire,
                scratch=settings.scratch,
                reproducible=self._spec.reproducible,
            )
        except TransportError as error:
            raise _as_user_error(error) from error

    def _watch_script(self, spec: JobFile) -> ScriptWatch:
        def overdue(why: str, error: ScriptError) -> None:
            if not self._failed:  # else the script has already reported why it ends
                self.failed(why, error)

        return ScriptWatch(spec.step_deadline_ns, overdue)

    # ---- Session --------------------------------------------------------------------------

    def begin(
        self, gradients: Gradients, committed: Committed, plan: DataPlan, lookahead: int
    ) -> None:
        """Hand the tensors to the communication thread and block until this rank may train."""
        linear, why = committed.linear()
        pacing = Pacing.ROUND if linear else Pacing.SAMPLES
        log.info("optimizer: %s; pacing, where the job leaves it open: %s", why, pacing)
        log.info("%s", committed.memory_report())
        try:
            # The communication thread opens no channel before this rank is ready.
            self._transport.begin(gradients.devices, gradients.layout.largest_bytes)
        except TransportError as error:
            raise _as_user_error(error) from error
        self._gradients, self._committed = gradients, committed
        if isinstance(self._comm, LeadThread | FollowerThread):
            committed.group = GroupSum(self.shard, self._comm.sum)
        checkpoints = self._checkpoints(gradients, committed, plan)
        self._comm.take(gradients, committed, checkpoints)
        if checkpoints is not None and not self.shard:
            self._comm.post(checkpoints.look())
        self._await_kernels()
        self._call(
            ev.Begin(
                gradients.fingerprint(),
                plan,
                lookahead,
                pacing,
                data=self._transport.address,
                segments=len(gradients.layout.segments),
                seed=None if plan.samples else torch.initial_seed(),
                copies=committed.hashes_of_copies(),
                whole=self._whole(gradients, committed),
            )
        )
        self._loop.began(now_ns())
        if self._script is not None:
            self._script.start()

    def _whole(self, gradients: Gradients, committed: Committed) -> str:
        """Return `Begin.whole`: the identity of a group's model that has no shard, else ""."""
        if self.shards == 1 or any(is_shard(parameter) for parameter in gradients.parameters):
            return ""
        return f"{gradients.fingerprint()}:{committed.hash()}"

    def _checkpoints(
        self, gradients: Gradients, committed: Committed, plan: DataPlan
    ) -> CheckpointService | None:
        spec = self._spec.checkpoint if self._spec else None
        if spec is None or self._settings is None:
            return None
        from paceline.worker.checkpoint.format import Identity
        from paceline.worker.checkpoint.service import CheckpointService

        layout = gradients.layout.model_fingerprint()
        identity = Identity(self._settings.job, layout, plan, self.shard, self.shards)
        return CheckpointService(
            spec, identity, committed, self._comm.post, self._record, self._welcome.pid
        )

    def step(
        self,
        *,
        leases: tuple[int, ...],
        samples: int,
        unit: int,
        metrics: tuple[LoggedMetric, ...],
        usable: bool = True,
        foreign: bool = False,
    ) -> StepResult:
        """Announce the gradient in GRAD, and block until the next batch may start."""
        assert self._gradients is not None
        self._close_batch()
        judged = self._comm.tensors.reducer.judge() if self._comm.tensors is not None else ()
        until(judged, self._watch_kernels)
        begun_ns = now_ns()
        resume = self._call(ev.Step(leases, samples, unit, usable, metrics, foreign))
        self._loop.stepped(
            *(begun_ns, now_ns()), fresh=resume.fresh, version=resume.version, samples=samples
        )
        return StepResult(resume.version, resume.fresh, resume.stopped)

    def enters(self, phase: StepPhase) -> None:
        """Note which part of a step the loop begins now."""
        self._loop.entered(phase, now_ns())

    def works_on(self, batch: DealtBatch | None) -> None:
        """Note the batch in hand in this rank's record, which its agent reads (R55)."""
        self._record.works_on(batch)

    def computing(self, leases: tuple[int, ...], samples: int, unit: int) -> None:
        """Allow streaming of the next batch, where the job streams rounds at all (R28)."""
        if self._comm.tensors is not None and not self._pipelined and self.shards == 1:
            self._comm.tensors.reducer.begin(ev.Coming(leases, samples, unit))

    def _close_batch(self, *, dropped: bool = False) -> None:
        if self._comm.tensors is not None:
            self._comm.tensors.reducer.close(dropped=dropped)

    def pull(self) -> int | None:
        """Return the next lease that the loader has not drawn, or None."""
        with self._lock:
            return self._leases.draw()

    def wait_lease(self) -> bool:
        """Block until there is a lease (True) or the job is over (False)."""
        with self._lock:
            if not self._leases.wait() and not self._stopped:
                return True
        self._await_kernels()
        begun_ns = now_ns()
        stopped = self._call(ev.Want()).stopped
        self._loop.waited(begun_ns, now_ns())
        return not stopped

    def holds(self, lease: int) -> bool:
        """Return True if this rank still holds the lease, according to the log."""
        with self._lock:
            return lease in self._leases.held

    def skip(self, lease: int, samples: int) -> None:
        """Drop and count a batch of which the loop made no step."""
        with self._lock:
            self._leases.skip(lease)
        self._close_batch(dropped=True)
        self._comm.post(ev.Skip(lease, samples))

    @property
    def _pipelined(self) -> bool:
        return self._state.log.settings.pipeline > 0

    @property
    def under_way(self) -> bool:
        """True if a gradient of this rank was in flight at the last refresh of the weights."""
        return self._under_way

    def flush(self) -> None:
        """Block until no gradient of this rank is in flight; does nothing without a pipeline."""
        if self._pipelined and not self._stopped:
            self._await_kernels()
            begun_ns = now_ns()
            self._call(ev.Flush())
            self._loop.flushed(begun_ns, now_ns())

    def rest(self) -> None:
        """Give back the leases and count as IDLE; the model gets memory of its own."""
        assert self._committed is not None
        self._committed.part_from_model()  # rounds go on meanwhile
        self._script_came()
        self._comm.post(ev.Rest())

    def resume(self) -> None:
        """End `rest` and block until the model has the newest weights."""
        self._await_kernels()
        self._call(ev.Unrest())
        self._loop.began(now_ns())

    def finish(self, *, stop: bool = False) -> None:
        """Block until the job is released, then give the model the final weights.

        Restores what the engine has changed in the process: hooks on the parameters, the
        interpreter's switch interval and environment variables.

        Args:
            stop: True to end the job on all ranks.

        Raises:
            UsageError: A script without a job has samples left, which no other rank can take.
            DismissedError: The job goes on without this rank.
        """
        if self._script is not None:
            self._script.close()
        self._comm.post(ev.Finish(stop))
        with self._lock:
            while self._end is None:
                self._watch()
                self._lock.wait(WATCH_S)
        if not self._end.finished:
            if self._settings is None:
                raise UsageError(
                    "pl.finish() while samples of the job are left, and there is no other rank to "
                    "take them",
                    hint="let the loop run to its end, or call pl.stop() to end the job here",
                )
            raise DismissedError(0)
        assert self._committed is not None
        assert self._gradients is not None
        self._gradients.streams.adopt_commit()
        self._committed.copy_to_model()
        self._progress = progress_of(self._state.log)
        self._gradients.release()
        sys.setswitchinterval(self._switch_interval_s)
        restore_variables()
        if self._settings is not None:
            short_sockets.restore(str(self._settings.scratch))

    def failed(self, why: str, error: ScriptError | None) -> None:
        """Report to the agent that the script ends because of a mistake.

        Does nothing once the rank's part in the job is over.

        Called by the main thread, and by the script watch at its deadline.
        """
        self._failed = True
        if self._agent is not None and self._end is None:
            self._agent.tell("failed", why, error=error)

    @property
    def rank(self) -> int:
        """Index of this rank in the current generation; `place` before the first one."""
        members, me = self._state.log.members, self._state.me
        return members.index(me) if me in members else self.place

    @property
    def size(self) -> int:
        """Number of members in the current generation; before the first, the number requested."""
        wanted = self._spec.replicas * self._spec.procs if self._spec else 1
        return len(self._state.log.members) or wanted

    @property
    def place(self) -> int:
        """Number of this rank that never changes."""
        return place_of(self._state.me, self._spec.procs if self._spec else 1)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new flat tensor of zeros for sums, in the memory that the transport prefers."""
        try:
            return self._transport.zeros(numel, dtype, device)
        except TransportError as error:
            raise _as_user_error(error) from error

    @property
    def segment_bytes(self) -> int | None:
        """Upper bound on a segment's size that the job sets, in bytes; None for the default."""
        return self._spec.segment_bytes if self._spec else None

    @property
    def wire(self) -> Wire:
        """Data type in which float32 sums travel."""
        return self._spec.wire if self._spec else Wire.FLOAT32

    @property
    def version(self) -> int:
        """Version of the weights in the model."""
        return self._version

    @property
    def progress(self) -> Progress:
        """Progress of the job at the version of the weights in the model."""
        return self._progress

    @property
    def stopped(self) -> bool:
        """True once the stop round is committed or the rank's part in the job is over."""
        return self._stopped

    @property
    def stopped_by_another(self) -> bool:
        """Return True if another rank's script has ended the job, and that rank publishes."""
        return self._state.log.stopped_by is not None and not self.is_publisher

    @property
    def is_publisher(self) -> bool:
        """True on the one rank that publishes the results."""
        log, me = self._state.log, self._state.me
        return (log.publisher if log.members else FIRST) == me and self.shard == 0

    @property
    def shard(self) -> int:
        """Index of this rank among the ranks that share a copy of the model."""
        return self._settings.shard if self._settings else 0

    @property
    def shards(self) -> int:
        """Number of ranks that share a copy of the model."""
        return self._spec.model if self._spec else 1

    def store(self) -> Store:
        """Return the store in which the ranks of this group meet. Call once.

        Returns:
            A store in memory for a rank alone. In a group a TCP store on the loopback, which the
            lead serves on the socket that it has listened on since the group met.
        """
        if self.shards == 1:
            return HashStore()
        known, listener = self._welcome, self._rendezvous.listener
        lead = listener is not None
        return TCPStore(
            "127.0.0.1",
            known.port,
            world_size=None,
            is_master=lead,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )

    # ---- waits of the main thread ---------------------------------------------------------

    def _await_kernels(self) -> None:
        """Wait for the main thread's kernels; the weights that they read change afterwards."""
        assert self._gradients is not None
        until(self._gradients.streams.mark_gradients(), self._watch_kernels)

    def _watch_kernels(self) -> None:
        """Raise if this rank is to end, so that a device that hangs does not hold it up."""
        self._watch()
        if self._end is not None and not self._end.finished:
            raise DismissedError(0)

    def _call(self, event: ev.Event) -> ev.Resume:
        """Park the main thread until the communication thread lets it go on.

        Args:
            event: The request, which the state machine answers with Resume.

        Returns:
            The answer; a made-up one with `stopped` if the job was released meanwhile.

        Raises:
            DismissedError: The job goes on without this rank.
        """
        self._script_came()
        with self._lock:
            self._reply = None
            if self._end is None:
                self._comm.post(event)
            while self._reply is None:
                self._watch()
                if self._end is not None:
                    if not self._end.finished:
                        raise DismissedError(0)
                    self._reply = ev.Resume(self._version, False, True, self._progress)
                    break
                self._lock.wait(WATCH_S)
            reply = self._reply
        self._version, self._progress = reply.version, reply.progress
        self._under_way = reply.under_way
        self._stopped = self._stopped or reply.stopped
        self._adopt()
        if self._script is not None:
            self._script.left()
        return reply

    def _adopt(self) -> None:
        """Let the main thread's device streams wait for what the communication thread queued."""
        assert self._gradients is not None
        self._gradients.streams.adopt_commit()

    def _script_came(self) -> None:
        if self._script is not None:
            self._script.came()

    def _watch(self) -> None:
        """Check that a wait can still end.

        UnsupportedError is raised if the script cannot give a state that a rank needs.

        Raises:
            RuntimeBrokenError: The thread that would end the wait has failed or ended.
        """
        if isinstance(self._error, UnsupportedError):
            raise self._error
        if self._error is not None or (not self._comm.alive and self._end is None):
            raise RuntimeBrokenError(
                f"the communication thread of rank {self._state.me} has ended: {self._error!r}",
                hint="please report this with the log of the rank",
            ) from self._error

    # ---- MainThread: called by other threads ----------------------------------------------

    def resumed(self, resume: ev.Resume) -> None:
        """Let the main thread go on. Communication thread."""
        self._metrics.facts.resumed(now_ns())
        with self._lock:
            if self.shards > 1:
                # All scripts of a group see the same leases between the same two calls (R51).
                self._leases.hold(self._held)
            self._reply = resume
            self._lock.notify_all()

    def held(self, leases: tuple[int, ...]) -> None:
        """Replace the leases that the loader may draw. Communication thread.

        The scripts of a group see the change only when their next call returns (R51).
        """
        with self._lock:
            self._held = leases
            if self.shards == 1:
                self._leases.hold(leases)

    def exited(self, end: ev.Exit) -> None:
        """End the rank's part in the job: report to the agent, and wake the main thread.

        Called by the communication thread. A dismissed rank is ended by force after
        DISMISSED_GRACE_S.
        """
        if self._agent is not None:
            if end.finished:
                # The agent keeps this as evidence: a coordinator that was restarted after RELEASE
                # must not take the end of this rank for a failure (R17).
                self._agent.tell("finished", released=self._state.released)
            else:
                self._agent.tell("dismissed", end.why)
        if self._script is not None:
            self._script.close()  # from here on the agent limits its time
        with self._lock:
            self._end = end
            self._stopped = True
            self._lock.notify_all()
        if not end.finished and self._settings is not None:
            timer = threading.Timer(DISMISSED_GRACE_S, os._exit, (0,))
            timer.daemon = True
            timer.start()

    def broken(self, error: BaseException) -> None:
        """Report the failure of a thread to the agent and wake the main thread, which raises.

        Called by the communication thread or the link thread.
        """
        if self._agent is not None:
            why = error.message if isinstance(error, UnsupportedError) else f"{error!r}"
            self._agent.tell("failed", why)
        with self._lock:
            self._error = error
            self._lock.notify_all()

    # ---- other threads --------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._agent is not None
        while (order := self._agent.read()) is not None:
            if order.kind == "drain":
                self._comm.post(ev.Drain())
            elif order.kind == "shutdown":
                self._comm.order(Dismiss(order.why))
        if self._end is None or not self._end.finished:
            os._exit(1)  # the agent is gone: nobody would report this rank's death (D6)

    def close(self) -> None:
        """Close the threads and sockets at the end of the process, without waiting for other ranks.

        A thread that does not end is left behind after CLOSE_S.
        """
        self._comm.close(CLOSE_S)
        if self._metrics.board is not None:
            self._metrics.board.close()
        if self._comm.link is not None:
            self._comm.link.close()
