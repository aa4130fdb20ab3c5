"""The communication thread: waits for events, asks the state machine, and carries out its effects.

It makes no decisions. The protocol's decisions are made in `core.rank`. Here tensors are added,
links opened, messages sent and the main thread is let go. Every wait ends with a message, a timer
or an abort.
"""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, assert_never

import torch
from paceline_api.errors import PacelineError
from paceline_api.ids import GenerationId, MemberId
from paceline_api.times import NS_PER_MS

from paceline.clock import now_ns
from paceline.core.messages import (
    Announce,
    Away,
    Commit,
    Dismiss,
    Doing,
    Fatal,
    Gathered,
    Heartbeat,
    LogPart,
    Prepare,
    RankFigures,
    RankMessage,
    Register,
    Release,
    Saved,
    Start,
    StateTransfer,
    Stopped,
    ToRank,
)
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.pending import BufferName, BufferOp, Zero
from paceline.core.protocol.records import Go
from paceline.core.rank import events as ev
from paceline.core.rank.machine import Rank
from paceline.errors import StateError, UnsupportedError
from paceline.refusals import RefusalReason
from paceline.transport.base import Abort, Transport
from paceline.worker.data_channel import DataChannel
from paceline.worker.metrics.rounds import RoundMetrics
from paceline.worker.metrics.squares import GradientSquares
from paceline.worker.peer_sockets import PeerSockets, ReceivedMessage
from paceline.worker.recorder import Recorder
from paceline.worker.reduction import Reducer
from paceline.worker.session import MainThread
from paceline.worker.state.codec import read_header
from paceline.worker.state.committed import Bytes, Committed
from paceline.worker.state.gradients import Gradients
from paceline.worker.streamed_rounds import StreamedRounds

if TYPE_CHECKING:  # only a job with checkpoints loads the writer
    from paceline.worker.checkpoint.service import CheckpointService

log = logging.getLogger("paceline.rank")

IDLE_MS: Final = 1_000
"""Upper bound on the wait of an idle thread, after which it checks its timers again."""
SOON_MS: Final = 1
"""Delay of deferred work after a round, in milliseconds. A main thread that computes for longer
than this is not held up by the work."""
ROUND: Final = (Announce, Gathered, Start, ev.Reduced)
"""Messages and events of every round, apart from Step."""
INTERRUPTING: Final = (Prepare, Release, Dismiss)
"""Orders that abort what the communication thread is blocked in."""
WRITER: Final = (ev.Written, ev.Published)
"""Answers of the checkpoint writer."""
PARKED: Final = (ev.Begin, ev.Step, ev.Want, ev.Flush, ev.Need, ev.Unrest)
"""Events after which the main thread is parked until Resume."""
STAGED_MAX: Final = 2
"""Upper bound on the staged states of generations that this rank has not promised. Such a state may
arrive before the order to promise."""
RECENT: Final = 32
"""Number of recent reductions from which the usual duration is taken."""


class Interrupts:
    """Counts the interrupting orders that the communication thread has not handled yet.

    Any thread may call the methods. The abort flag is raised as long as the count is not zero.
    """

    def __init__(self) -> None:
        self.abort = Abort()
        self._lock = threading.Lock()
        self._outstanding = 0

    @staticmethod
    def interrupts(order: object) -> bool:
        """Return True if the order aborts what the communication thread is blocked in."""
        return isinstance(order, INTERRUPTING)

    def arrived(self) -> None:
        """Count an interrupting order and raise the abort flag."""
        with self._lock:
            self._outstanding += 1
            self.abort.raise_()

    def taken(self) -> None:
        """Count an interrupting order as handled, and lower the flag after the last one.

        An order that was never counted by `arrived` changes nothing.
        """
        with self._lock:
            self._outstanding = max(0, self._outstanding - 1)
            if not self._outstanding:
                self.abort.clear()


class Within:
    """Base class of the messages on the lines inside a group (`worker.group`)."""

    __slots__ = ()


class ControlChannel(Protocol):
    """Sends messages to the coordinator: through the agent, or to a state machine in place."""

    def start(self) -> None:
        """Start the channel; called once, by the main thread."""

    def send(self, message: RankMessage) -> None:
        """Send or queue a message without blocking; it is lost if there is no connection."""

    def close(self) -> None:
        """Send what is queued and end the channel, in bounded time."""


@dataclass(slots=True)
class Tensors:
    """The tensors and services that the script brings with `begin()`."""

    gradients: Gradients
    committed: Committed
    reducer: Reducer
    checkpoints: CheckpointService | None
    """The service that writes checkpoints; None if the job has none."""


class _CannotJoinError(Exception):
    """The job's state does not fit this rank's script: the rank ends alone, and the job goes on."""


class CommThread:
    """Runs the state machine, and carries out its effects on sockets, tensors and transport.

    The thread owns the machine and the peers' sockets. Tensors and transport are also used by the
    memory thread and the data thread (`worker.reduction`).
    """

    def __init__(
        self,
        machine: Rank,
        peers: PeerSockets,
        transport: Transport,
        main: MainThread,
        interrupts: Interrupts,
        metrics: RoundMetrics,
        shard: int = 0,
        token: str = "",
    ) -> None:
        self.machine, self._shard = machine, shard
        self.tensors: Tensors | None = None
        self.link: ControlChannel | None = None
        self.recorder: Recorder | None = None
        self.away: Callable[[], Away | None] = lambda: None
        """Returns since when the script has not come back, for the heartbeat."""
        self.squares: GradientSquares | None = None
        """Squared norms of gradients; None unless `paceline plan` measures the run."""
        self._peers = peers
        self._channel = DataChannel(transport, interrupts.abort, metrics, shard, token)
        self._main, self._interrupts, self._metrics = main, interrupts, metrics
        self._posted: deque[ev.Event | Within] = deque()
        self._wake_ns: int | None = None
        self._queue: dict[int, list[torch.Tensor]] = {}
        self._staged: dict[GenerationId, tuple[Bytes, ...]] = {}
        self._part: tuple[Bytes, ...] = ()
        self._shared: tuple[tuple[GenerationId, int], list[Bytes]] | None = None
        """A copy of the state of one version, for all ranks that join at this version."""
        self._synced: torch.Tensor | None = None
        """Averaged float buffers that are loaded when the main thread is parked (D10)."""
        self._own_buffers: torch.Tensor | None = None
        """The model's float buffers when the main thread was last parked, with a pipeline. The main
        thread changes those of the model while they are reduced."""
        self._later: deque[Callable[[], None]] = deque()
        """Metrics of the last round that are still to be counted, in order. They can wait, and the
        main thread, which was just let go, needs the interpreter lock."""
        self._streamed: ev.Reduce | None = None
        """The streamed round in flight, or the last one."""
        self._work_since_ns = now_ns()
        self._reductions_ms: deque[int] = deque(maxlen=RECENT)
        self._usual_ms = 0
        self._closing = False
        self._state_lock = threading.Lock()
        """Guards the machine's state. The communication thread holds it while an event changes the
        state, which takes microseconds; the link thread holds it while it reads."""
        self._thread = threading.Thread(target=self._run, name="paceline-comm", daemon=True)

    # ---- any thread -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def take(
        self, gradients: Gradients, committed: Committed, checkpoints: CheckpointService | None
    ) -> None:
        """Take over the tensors of a script that begins. Main thread, before it posts an event.

        Args:
            gradients: Gradient buffers.
            committed: Weights and optimizer state.
            checkpoints: Writes and loads checkpoints; None if the job has none.
        """
        self._metrics.ring.divide([x.nbytes for x in gradients.result])
        reducer = Reducer(
            self._channel,
            gradients,
            committed,
            self._float_buffers,
            self._hear,
            self._metrics.ring,
        )
        self.tensors = Tensors(gradients, committed, reducer, checkpoints)

    def _hear(self, event: ev.Coming | None) -> None:
        """Post an event of the reducer, or only wake the thread (None). Memory or data thread."""
        if event is None:
            self._peers.wake()
        else:
            self.post(event)

    @property
    def _streams(self) -> StreamedRounds[Any, Any] | None:
        """What sums streamed rounds; None before there are tensors."""
        return self.tensors.reducer if self.tensors is not None else None

    @property
    def alive(self) -> bool:
        """Return True if the thread is running."""
        return self._thread.is_alive()

    def post(self, event: ev.Event | Within) -> None:
        """Queue an event for the communication thread. Any thread."""
        self._posted.append(event)
        self._peers.wake()

    def order(self, order: ToRank) -> None:
        """Queue an order of the coordinator or the agent. Any thread.

        An order that interrupts aborts what the communication thread is blocked in. Once such an
        order is counted it is always queued too, since handling it takes the count back. Otherwise
        every later reduction would be aborted.
        """
        try:
            if Interrupts.interrupts(order):
                self._interrupt()
        finally:
            self.post(order)

    def _interrupt(self) -> None:
        self._interrupts.arrived()

    def registration(self) -> Register:
        """Return this rank's registration, consistent between two events. Link thread."""
        with self._state_lock:
            return self.machine.state.registration()

    def heartbeat(self) -> Heartbeat:
        """Return the next heartbeat, consistent between two events. Link thread."""
        doing = self.doing()
        with self._state_lock:
            return self._metrics.facts.heartbeat(self.machine.state, doing, self.away())

    def figures(self) -> RankFigures:
        """Return the figures that were computed last. Link thread."""
        with self._state_lock:
            return self._metrics.facts.figures(self.machine.state)

    def doing(self) -> Doing:
        """Return what the rank is busy with and for how long. Link thread.

        The communication thread cannot report itself that it is stuck (R35).

        Returns:
            The work of the thread that has been busy for longer, of the communication and the data
            thread.
        """
        with self._state_lock:
            go, tensors, streams = self.machine.state.reducing, self.tensors, self._streams
        # Report the thread that has been busy for longer.
        since_ns = (self._work_since_ns, streams.busy_since_ns if streams else 0)
        return Doing(
            for_ms=(now_ns() - min(x for x in since_ns if x)) // NS_PER_MS,
            round=go.round if go is not None else -1,
            usual_ms=self._usual_ms,
            payload_bytes=sum(x.nbytes for x in tensors.gradients.result) if tensors else 0,
        )

    def close(self, timeout_s: float) -> None:
        """Abort what the thread is blocked in, and wait at most `timeout_s` for its end."""
        self._closing = True
        self._interrupts.arrived()
        self._peers.wake()
        self._thread.join(timeout_s)

    # ---- the communication thread ---------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._catch_up()
        except _CannotJoinError as error:
            why = f"rank {self.machine.state.me} cannot take the state of the job: {error}"
            log.error("%s", why)
            self._main.exited(ev.Exit(finished=False, why=why))
        except UnsupportedError as error:  # of an object of the script, whose state is asked for
            why = f"{error.message}; hint: {error.hint}"
            log.error("%s", why)
            self._say(Fatal(self.machine.state.me, "ScriptFailed", why))
            self._main.broken(error)
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            log.error("the communication thread failed:\n%s", text)
            self._say(Fatal(self.machine.state.me, "RuntimeBroken", f"{error!r}"))
            self._main.broken(error)
        finally:
            if self._streams is not None:
                self._streams.shutdown()
            self._channel.shutdown()
            self._peers.close()
            if self.recorder is not None:
                self.recorder.close()
            if self.tensors is not None and self.tensors.checkpoints is not None:
                self.tensors.checkpoints.close()

    def _turn(self) -> None:
        self._work_since_ns = now_ns()
        self._take_outcome()
        while self._posted and not self._closing:
            self._take(self._posted.popleft())
            self._take_outcome()
        while not self._posted and (mail := self._peers.read()) is not None:
            self._receive(mail)
        if self._posted:
            return
        if self._wake_ns is not None and now_ns() >= self._wake_ns:
            self._wake_ns = None
            self._take(ev.Tick())
            return
        self._metrics.refresh(self.machine.state, now_ns())
        timeout_ms = self._timeout_ms()
        if not self._peers.wait(min(SOON_MS, timeout_ms) if self._later else timeout_ms):
            self._catch_up()

    def _catch_up(self) -> None:
        """Do the deferred work: while the next Step is being announced, or when the thread is idle.

        Must run before the log goes on, since the metrics of a round are read from the log.
        """
        while self._later:
            self._later.popleft()()

    def _timeout_ms(self) -> int:
        if self._posted or self._closing:
            return 0
        if self._wake_ns is None:
            return IDLE_MS
        left_ns = self._wake_ns - now_ns()
        return max(0, min(IDLE_MS, -(-left_ns // NS_PER_MS)))

    def _receive(self, mail: ReceivedMessage) -> None:
        self._stage(mail)
        self._take(mail.message)
        self._unstage(mail.message)

    def _stage(self, mail: ReceivedMessage) -> None:
        if isinstance(mail.message, LogPart):
            self._part = mail.payload
        elif isinstance(mail.message, StateTransfer):
            self._staged[mail.message.generation] = mail.payload
            rank = self.machine.state
            strange = [g for g in self._staged if g not in (rank.gen_id, rank.promise)]
            for generation in sorted(strange)[:-STAGED_MAX]:
                del self._staged[generation]

    def _unstage(self, message: ev.Event) -> None:
        if isinstance(message, StateTransfer) and self.machine.state.has_state_of(message):
            self._staged.pop(message.generation, None)

    def _take(self, event: ev.Event | Within) -> None:
        """Handle an event, its effects, and the events that result from the effects."""
        assert not isinstance(event, Within), "no group"
        if isinstance(event, Prepare) and self._has_nothing_newer():
            self._take(self._checkpoints.look())  # the report names the newest one (R26)
        if self._interrupts.interrupts(event):
            if self._streams is not None:
                self._streams.stop()
                self._take_outcome()  # what was reduced before the order counts
            self._interrupts.taken()
        if isinstance(event, ev.Step) and self.tensors is not None:
            event = self._reducer.finish(event)
            if self.squares is not None:
                self.squares.own(event, self._gradients)
        elif not isinstance(event, ROUND):
            self._catch_up()
        self._handle(event, now_ns())

    def _handle(self, event: ev.Event, now: int) -> None:
        self._work_since_ns = now_ns()
        if self.tensors is not None and isinstance(event, PARKED):
            self._committed.take_back()
        if isinstance(event, ev.ChannelFailed):
            self._synced = None  # summed here, but perhaps not on all ranks of the group
        with self._state_lock:
            effects = self.machine.handle(now, event)
        self._metrics.handled(self.machine.state, event, now)  # before the main thread goes on
        if isinstance(event, WRITER):
            self._checkpoints.count(self.machine.state.saving)
        if self.recorder is not None:
            self.recorder.handled(event, self.machine.state.log)
        blocking: list[ev.Blocking] = []
        follow: deque[ev.Event] = deque()
        for effect in effects:
            if isinstance(effect, ev.Blocking):
                blocking.append(effect)  # after the other effects of this event
                if isinstance(effect, ev.OpenChannel):
                    self._meet(effect.commit)
            elif (event_after := self._do(effect)) is not None:
                follow.append(event_after)
        if isinstance(event, ev.Step) and self._streams is not None:
            self._streams.complete()
            self._catch_up()
        if self.tensors is not None:
            self._reducer.joined()
        for effect in blocking:
            if (event_after := self._block(effect)) is not None:
                follow.append(event_after)
        for event_after in self._agreed(follow):
            self._take(event_after)

    def _agreed(self, outcomes: Sequence[ev.Event]) -> Sequence[ev.Event]:
        """Return the outcomes of effects as events of the member; a group agrees on them (R51)."""
        return outcomes

    def _block(self, effect: ev.Blocking) -> ev.Event | None:
        match effect:
            case ev.Reduce():
                return self._reduce(effect)
            case ev.OpenChannel(commit=commit):
                return self._open(commit)
            case ev.Restore():
                return self._restore(effect)

    def _do(self, effect: ev.Prompt) -> ev.Event | None:
        match effect:
            # The most frequent effects are tested first.
            case ev.ToPeer(member=member, message=message):
                self._peers.send(member, message)
            case ev.ChangeBuffers(op=op):
                self._buffers(op)
            case ev.Apply(go=go, weighing=weighing, hash=due):
                return self._apply(go, weighing, hash_due=due)
            case ev.Resume():
                self._resume(effect)
            case ev.Held(leases=leases):
                self._main.held(leases)
            case ev.WakeAt(at_ns=at_ns):
                self._wake_ns = at_ns
            case ev.ToCoordinator(message=message):
                self._say(message)
            case ev.CloseChannel():
                self._channel.close()
            case ev.GiveUp(why=why):
                assert self._streams is not None
                self._streams.give_up(why)
            case ev.Queue(go=go):
                with self._gradients.streams.own():
                    self._queue[go.round] = [x.clone() for x in self._gradients.result]
            case ev.DropQueue(generation=generation):
                self._queue.clear()
                self._staged = {g: s for g, s in self._staged.items() if g == generation}
            case ev.InstallPart(go=go, weighing=weighing):
                self._install_part(go, weighing)
            case ev.InstallState(queued=queued):
                self._install(queued)
            case ev.SendPart(to=to, part=part, with_result=with_result):
                result = self._committed.last_result() if with_result else []
                self._peers.send_bulk(to, part, result)
            case ev.SendState(to=to, state=state):
                self._peers.send_bulk(to, state, self._state_for_joiners(to, state))
            case ev.PassState(to=to, state=state):
                self._peers.send_bulk(to, state, self._staged[state.generation])
            case ev.RefusePeer():
                self._peers.refuse(RefusalReason.UNKNOWN_PEER)
            case ev.Save() | ev.Publish() | ev.Unsave():
                self._checkpoints.obey(effect)
            case ev.Exit():
                if self.recorder is not None and effect.finished:
                    self.recorder.ended(self.machine.state.log, self._committed.strong_hash())
                if self.tensors is not None:
                    with self._gradients.streams.own():
                        self._gradients.streams.mark_commit()
                self._main.exited(effect)
            case _:
                assert_never(effect)
        return None

    # ---- data channel ---------------------------------------------------------------------

    def _meet(self, commit: Commit) -> None:
        for member, where in commit.endpoints:
            self._peers.know(member, where.of(self._shard).trigger)
        self._peers.keep_only((*commit.gen.members, commit.holder))

    def _open(self, commit: Commit) -> ev.Event:
        return self._channel.open(commit, self.machine.state.me)

    def _reduce(self, effect: ev.Reduce) -> ev.Event | None:
        self._catch_up()  # for the round before, if no Step has done it
        self._metrics.reducing(effect.go, self.machine.state, now_ns())
        if effect.go.streamed:
            self._streamed = effect
        else:
            self._record(effect)
        outcome = self._reducer.reduce(effect)
        if isinstance(outcome, ev.Reduced):
            self._reduced(outcome)
        return outcome

    def _take_outcome(self) -> None:
        """Handle the end of a streamed round, if it has come."""
        streams = self._streams
        outcome = streams.outcome() if streams is not None else None
        if streams is None or outcome is None:
            return
        if isinstance(outcome, ev.Reduced):
            self._summed(outcome)
            self._metrics.streamed(streams.hidden_ns)
        elif isinstance(outcome, ev.Voided):
            self._metrics.voided(outcome.own)
        self._take(outcome)

    def _summed(self, outcome: ev.Reduced) -> None:
        """Take the sums of a streamed round, which is complete on this rank."""
        assert self._streamed is not None
        self._record(self._streamed)  # the batch is announced by now
        self._reduced(outcome)

    def _reduced(self, outcome: ev.Reduced) -> None:
        self._later.append(partial(self._metrics.reduced, now_ns()))
        self._reductions_ms.append(outcome.transfer_ns // NS_PER_MS)
        self._usual_ms = max(self._reductions_ms)
        self._synced = self._reducer.synced

    def _record(self, effect: ev.Reduce) -> None:
        if self.recorder is not None and effect.source is not None:
            methods = self._channel.methods(self._gradients.result)
            self.recorder.gives(effect, methods, self._channel.machines())

    def _float_buffers(self, contributing: bool) -> torch.Tensor:
        if self._own_buffers is None:
            flat = self._committed.float_buffers_flat()
        else:
            flat = self._own_buffers.clone()
        return flat if contributing else flat.zero_()

    # ---- committed state ------------------------------------------------------------------

    def _apply(self, go: Go, weighing: Weighing, *, hash_due: bool) -> ev.Event | None:
        begun_ns = now_ns()
        self._metrics.ring.sum_is_taken()
        with self._gradients.streams.own():
            self._committed.accumulate(self._gradients.result, first=weighing.first)
            self._gradients.keep_residuals(weighing.residual_unit)
            self._update(weighing)
        now, rank = now_ns(), self.machine.state
        self._later.append(partial(self._metrics.applied, go, rank, now, now - begun_ns))
        if hash_due:
            committed = self._committed
            version = self.machine.state.log.version
            return ev.Hashed(version, committed.hash(), committed.hashes_of_copies())
        return None

    def _state_for_joiners(self, to: MemberId, state: StateTransfer) -> list[Bytes]:  # noqa: ARG002
        """Return a copy of the committed state, which all joiners of this version share.

        The copy (D15) is dropped with the next version; its memory is freed when the last joiner
        has it.

        Args:
            to: Receiver of the state.
            state: The message that the copy goes with, and to whom `to` forwards it.

        Returns:
            The header and the buffers, which must not change until they are sent.
        """
        version = state.generation, state.log.version
        if self._shared is None or self._shared[0] != version:
            header, buffers = self._committed.snapshot()
            self._shared = version, [json.dumps(header).encode(), *buffers]
        return self._shared[1]

    def _update(self, weighing: Weighing) -> None:
        self._shared = None
        self._committed.apply(
            weighing.divisor,
            step=weighing.step,
            scheduler_steps=weighing.scheduler_steps,
            look=self.squares.look(weighing) if self.squares is not None else None,
        )
        if self.squares is not None:
            self._metrics.facts.squares = self.squares.facts()

    def _install_part(self, go: Go, weighing: Weighing) -> None:
        begun_ns = now_ns()
        with self._gradients.streams.own():
            self._committed.install_result(self._part)
            # The others could complete the round, so they got this rank's part, and it was rounded.
            self._gradients.keep_residuals(weighing.residual_unit)
            self._update(weighing)
        self._metrics.applied(go, self.machine.state, now_ns(), now_ns() - begun_ns)

    def _install(self, queued: tuple[tuple[Go, Weighing], ...]) -> None:
        header, *buffers = self._staged.pop(self.machine.state.gen_id)
        self._staged.clear()
        with self._gradients.streams.own():
            try:
                self._committed.load(read_header(bytes(header)), buffers)
            except StateError as error:
                hint = f"; hint: {error.hint}" if error.hint else ""
                raise _CannotJoinError(f"{error.message}{hint}") from error
            for go, weighing in queued:
                self._committed.accumulate(self._queue[go.round], first=weighing.first)
                self._update(weighing)
            self._gradients.forget_residuals()
        self._queue.clear()

    # ---- checkpoints ----------------------------------------------------------------------

    def _has_nothing_newer(self) -> bool:
        """Return True if this rank may have to go on from a checkpoint."""
        rank = self.machine.state
        has = self.tensors is not None and self.tensors.checkpoints is not None
        return has and (rank.passive or not rank.has_state)

    def _restore(self, effect: ev.Restore) -> ev.Event:
        try:
            with self._gradients.streams.own():
                self._gradients.forget_residuals()
                return self._checkpoints.restore(effect)
        except PacelineError as error:
            return ev.NotRestored(str(error))

    @property
    def _checkpoints(self) -> CheckpointService:
        assert self.tensors is not None
        assert self.tensors.checkpoints is not None
        return self.tensors.checkpoints

    # ---- gradients and the main thread ----------------------------------------------------

    def _buffers(self, op: BufferOp) -> None:
        if self.recorder is not None:
            self.recorder.did(op)
        if op == Zero(BufferName.GRAD):  # the optimizer, which comes next, does not read it
            self._reducer.beside(partial(self._gradients.carry_out, op))
            return
        self._reducer.joined()
        with self._gradients.streams.own():
            self._gradients.carry_out(op)

    def _resume(self, effect: ev.Resume) -> None:
        with self._gradients.streams.own():
            begun_ns = now_ns()
            rounds = self.machine.state.log
            self._committed.copy_to_model(lend=rounds.waits_for_everybody)
            if self._synced is not None:
                self._committed.load_float_buffers(self._synced)
                self._synced = None
            settings = rounds.settings
            if settings.pipeline and settings.buffers_every:
                self._own_buffers = self._committed.float_buffers_flat()
            self._gradients.streams.mark_commit()
            self._metrics.copied(begun_ns, now_ns())
        if self.recorder is not None:
            if self.recorder.wants_hash:
                self.recorder.hashed(effect.version, self._committed.hash())
            self.recorder.let(effect.version)
        self._reducer.joined()
        self._main.resumed(effect)

    @property
    def _gradients(self) -> Gradients:
        assert self.tensors is not None, "before begin()"
        return self.tensors.gradients

    @property
    def _reducer(self) -> Reducer:
        assert self.tensors is not None, "before begin()"
        return self.tensors.reducer

    @property
    def _committed(self) -> Committed:
        assert self.tensors is not None, "before begin()"
        return self.tensors.committed

    def _say(self, message: RankMessage) -> None:
        if self.link is None:
            return
        if isinstance(message, Stopped | Saved):  # the last figures go with it
            self._catch_up()
            self.link.send(self._metrics.last_figures(self.machine.state))
        self.link.send(message)
