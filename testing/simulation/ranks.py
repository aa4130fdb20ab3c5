"""A simulated rank process: the real state machine, a simulated communication thread and script.

`SimRank` does with fractions what `paceline.worker` does with tensors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, assert_never

from paceline.core import messages as m
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.rank_leases import RankLeases
from paceline.core.protocol.records import GivenUp, Go, LoggedMetric
from paceline.core.protocol.sampling import samples_of
from paceline.core.rank import events as ev
from paceline.core.rank.machine import Rank
from paceline.core.rank.state import RankState
from paceline_api.ids import MemberId

from testing.rank_memory import MemoryEffect, RankMemory
from testing.simulation.links import Copies
from testing.simulation.sums import FLAG, Label, Sum, add, exact
from testing.simulation.world import MS

if TYPE_CHECKING:
    from testing.simulation.simulation import Simulation

WANTS_MAX = 20
TRANSFER_NS = 8 * MS


@dataclass
class Batch:
    """The batch that the script is computing."""

    label: Label
    lease: int
    samples: int
    poisoned: int
    """First segment with a NaN, or the number of segments if there is none."""
    handed: int = 0
    """Number of segments that are ready."""
    rewritten: bool = False
    """True if a segment that was handed over was written again."""
    late: bool = False
    """True once the script has paused in the middle of this batch."""
    stepped: bool = False
    dropped: bool = False
    worth: int = 1
    """What the gradient buffer will hold of it."""


@dataclass
class Stream:
    """The data thread of a streamed round, which reduces one segment after the other."""

    reduce: ev.Reduce
    batch: Batch | None
    """The batch whose segments it waits for; None if no batch is in hand."""
    given_up: GivenUp | None
    segment: int = 0
    joined: bool = False
    """True while the current segment is being reduced."""


class SimRank(RankMemory[Sum, Copies]):
    """One rank process."""

    def __init__(self, sim: Simulation, me: MemberId) -> None:
        self.sim, self.me = sim, me
        endpoints = m.Endpoints(f"trigger-{me}", f"data-{me}")
        every = sim.world.save_every
        machine = Rank(me, pid=me.slot, host="sim", endpoints=endpoints, save_every=every)
        super().__init__(machine, {})
        self.machine.state.tree_above = sim.world.tree_above
        self.alive = True
        self.exit: ev.Exit | None = None
        # Injected faults.
        self.hung = False
        """True while the main thread hangs."""
        self.stopped = False
        """True while the whole process is stopped (SIGSTOP)."""
        self.stuck = False
        """True while the communication thread is blocked; heartbeats go on."""
        self.work_since = 0
        """Time at which the communication thread began its present work."""
        # Its connection to the agent.
        self.initialised = False
        """True once the script has called `pl.init()`, so the line is read."""
        self.connections: dict[str, int] = {}
        """Coordinator -> number of the connection that the agent introduced last."""
        # The communication thread.
        self.group: m.Commit | None = None
        self.reducing: ev.Reduce | None = None
        self.stream: Stream | None = None
        self.outcome: ev.Reduced | ev.Voided | None = None
        """Result of the stream that came while the communication thread was stuck."""
        self.waiting: deque[ev.Event] = deque()
        """Events that arrive while the rank is inside a reduction."""
        self.backlog: deque[ev.Event] = deque()
        """Events that arrive while the rank is stopped or stuck."""
        self.introductions: deque[tuple[str, m.Introduce]] = deque()
        """Introductions by the agent that arrive while the rank is stopped."""
        self.wake_ns: int | None = None
        # The script.
        self.rank_leases = RankLeases()
        self.wants = 0
        """Wants in a row; a lease may be dealt to another rank just before it is pulled."""
        self.labels = 0
        self.batch: Batch | None = None
        self.computes = False
        """True between two calls of the script: its weights and gradient are in use."""
        self.flushes = False
        """True if the script will rest as soon as none of its work is in flight."""
        self.steps = 0
        self.ending = False
        """True if the script ends the job when `step()` returns."""
        self.resumed: list[ev.Resume] = []

    @property
    def state(self) -> RankState:
        """State of the rank's machine."""
        return self.machine.state

    @property
    def running(self) -> bool:
        """True while the process lives and its machine has not exited."""
        return self.alive and self.exit is None

    def doing(self) -> m.Doing:
        """Return what the communication thread does, as a heartbeat reports it."""
        busy = self.stuck or self.reducing is not None
        go = self.reducing.go if self.reducing is not None else None
        for_ms = (self.sim.now - self.work_since) // MS if busy else 0
        return m.Doing(for_ms, go.round if go is not None else -1)

    @property
    def released(self) -> bool:
        """Return True if the rank was released and its script still works on its own account."""
        return self.alive and self.exit is not None and self.exit.finished

    # ---- events in, effects out -----------------------------------------------------------

    def introduce(self, name: str, word: m.Introduce) -> None:
        """Take a new connection of the agent to a coordinator, and register there."""
        if self.stopped:
            self.introductions.append((name, word))
            return
        self.connections[name] = word.connection
        if self.running:
            self.post(ev.Connected())
        elif self.released:
            self._carry_out(ev.ToCoordinator(self.state.registration()))

    def post(self, event: ev.Event) -> None:
        """Handle an event, or queue it while the rank is stopped, stuck or inside a reduction."""
        if not self.running:
            return
        if self.stopped or self.stuck:
            self.backlog.append(event)
            if isinstance(event, ev.Connected) and not self.stopped:
                self._carry_out(ev.ToCoordinator(self.state.registration()))
        elif self.stream is not None:
            if isinstance(event, m.Prepare | m.Release | m.Dismiss):
                self.abort("an order came", aborted=True)
            self._handle(event)
        elif self.reducing is not None and not isinstance(event, ev.Reduced | ev.ChannelFailed):
            self.waiting.append(event)
            if isinstance(event, m.Prepare | m.Release | m.Dismiss):
                self.abort("an order came", aborted=True)
            elif isinstance(event, ev.Connected):  # the link registers the rank by itself
                self._carry_out(ev.ToCoordinator(self.state.registration()))
        else:
            self._handle(event)
            self._work_off()

    def _work_off(self) -> None:
        while self.waiting and self.reducing is None and self.running:
            self._handle(self.waiting.popleft())

    def thaw(self) -> None:
        """Continue after SIGSTOP or a blocked thread: handle everything that was queued."""
        self.stopped = self.stuck = False
        while self.introductions and not self.stopped:
            self.introduce(*self.introductions.popleft())
        if self.outcome is not None and self.running:
            self._take_outcome(self.outcome)
        while self.backlog and not (self.stopped or self.stuck):
            self.post(self.backlog.popleft())

    def _handle(self, event: ev.Event) -> None:
        looks = self.sim.world.save_every and (self.state.passive or not self.state.has_state)
        if isinstance(event, m.Prepare) and looks:
            self._handle(self.sim.disk.look())
        before = self.sim.checkers.before_event(self, event)
        follow: list[ev.Event] = []
        effects = self.machine.handle(self.sim.now, event)
        for effect in sorted(effects, key=lambda x: isinstance(x, ev.Blocking)):
            done = self._carry_out(effect)
            if done is not None:
                follow.append(done)
        if isinstance(event, ev.Step) and self.batch is not None:
            self.batch.stepped = True
            self._go_on()
        self.sim.checkers.after_event(self, before)
        for done in follow:
            if self.running:
                self._handle(done)

    def _carry_out(self, effect: ev.Effect) -> ev.Event | None:
        sim = self.sim
        if isinstance(effect, MemoryEffect):
            self.change_memory(effect)
            return None
        match effect:
            case ev.ToPeer(member=to, message=message):
                sim.links.to_peer(self.me, to, message)
            case ev.ToCoordinator(message=message):
                sim.links.to_coordinators(self.me, message)
            case ev.OpenChannel(commit=commit):
                self.group = commit
                if sim.breaks_channel():
                    return ev.ChannelFailed("no link", None, False)
                return ev.ChannelOpened()
            case ev.Restore(checkpoint=kept):
                return sim.disk.load(self, kept)
            case ev.Save():
                sim.disk.save(self, effect)
            case ev.Publish():
                sim.disk.publish(self, effect)
            case ev.Unsave():
                sim.disk.drop(self)
            case ev.CloseChannel():
                self.reducing = self.group = self.stream = None
            case ev.Reduce():
                self.reducing, self.work_since = effect, sim.now
                self._join_reduction(effect)
            case ev.GiveUp(why=why):
                assert self.stream is not None
                self.stream.given_up = why
                self._go_on()
            case ev.WakeAt(at_ns=at_ns):
                self.wake_ns = at_ns
                sim.at(at_ns, lambda: self._tick(at_ns))
            case ev.Resume():
                self._resume(effect)
            case ev.RefusePeer():
                raise AssertionError("ranks of a simulation name no strangers")
            case ev.Held(leases=leases):
                self.rank_leases.hold(leases)
            case ev.Exit():
                self.exit = effect
                sim.exited(self)
            case _:
                assert_never(effect)
        return None

    def _tick(self, at_ns: int) -> None:
        if self.wake_ns == at_ns:
            self.post(ev.Tick())

    # ---- memory ---------------------------------------------------------------------------

    def plus(self, one: Sum, other: Sum, factor: float | Fraction) -> Sum:
        """Return `one + factor * other`."""
        total = dict(one)
        add(total, other, exact(factor))
        return total

    def send_part(self, to: MemberId, part: m.LogPart, result: Sum | None) -> None:
        """Send records that a rank lacks, with the last sum if it needs it."""
        self.sim.links.send_part(self.me, to, part, result)

    def send_state(self, to: MemberId, state: m.StateTransfer, copied: Copies) -> None:
        """Send a state to a rank."""
        self.sim.links.send_state(self.me, to, state, copied)

    def copy(self) -> Copies:
        """Return the committed state as it is sent."""
        return self.weights, self.accumulated

    def load(self, copied: Copies) -> None:
        """Replace the committed state by one that a donor sent."""
        assert self.reducing is None, "R15: the scratch of a reduction is in use"
        self.weights, self.accumulated = copied

    def step_optimizer(self, go: Go, weighing: Weighing) -> None:
        """Step the optimizer, or copy what another rank with the same log has."""
        taken = self.sim.checkers.taken(self) if weighing.step else None
        if taken is None:
            super().step_optimizer(go, weighing)
        else:
            self.weights = taken
        self.sim.checkers.committed(self, go, weighing)

    # ---- reductions -----------------------------------------------------------------------

    def _join_reduction(self, effect: ev.Reduce) -> None:
        assert self.group is not None
        if effect.go.streamed:
            batch = self.batch if effect.in_hand else None
            self.stream = Stream(effect, batch, GivenUp.DROPPED if effect.gives_up else None)
            self._go_on()
            return
        own = self.contribution(effect)
        self.sim.checkers.joined(self, effect, own)
        self.sim.reductions.join(self, self.group.gen, effect.go.round, 0, own)

    def _go_on(self) -> None:
        """Run the data thread if it waits and the segment it waits for is ready (R30)."""
        stream = self.stream
        if stream is None or stream.joined or self.group is None:
            return
        reduce, batch, segment = stream.reduce, stream.batch, stream.segment
        last = segment == self.sim.world.segments - 1
        if batch is not None and stream.given_up is None:
            if batch.dropped:
                stream.given_up = GivenUp.DROPPED
            elif batch.poisoned <= segment < batch.handed:
                stream.given_up = GivenUp.NONFINITE
            elif not batch.stepped and (last or segment >= batch.handed):
                return
        if self._flags(stream):
            own: Sum = {FLAG: 1}
        elif batch is None:
            own = self.contribution(reduce)
        else:
            own = {batch.label: exact(reduce.factor) * batch.worth}
        if last and stream.given_up is None:
            self.sim.checkers.joined(self, reduce, own)
        stream.joined = True
        self.sim.reductions.join(self, self.group.gen, reduce.go.round, segment, own)

    def _flags(self, stream: Stream) -> bool:
        """Return True if the rank flags the segment instead of contributing (R31)."""
        return stream.given_up is not None

    def complete(self, generation: object, round_: int, segment: int, total: Sum) -> None:
        """Take the result of a segment's reduction, unless the reduction was abandoned."""
        reduce = self.reducing
        if reduce is None or (reduce.go.generation, reduce.go.round) != (generation, round_):
            return
        if not self.running:
            return
        if self.stopped or (self.stuck and self.stream is None):
            self.sim.after(20, lambda: self.complete(generation, round_, segment, total))
            return
        if self.stream is None:
            self.result = total
            self.reducing = None
            self.sim.checkers.ended(reduce.go, void=False)
            self._handle(ev.Reduced(TRANSFER_NS))
            self._work_off()
        elif FLAG in total:
            self._end_stream(ev.Voided(self.stream.given_up))
        elif segment == self.sim.world.segments - 1:
            self.result = total
            self._end_stream(ev.Reduced(TRANSFER_NS))
        else:
            self.stream.segment, self.stream.joined = segment + 1, False
            self._go_on()

    def _end_stream(self, event: ev.Reduced | ev.Voided) -> None:
        assert self.reducing is not None
        self.sim.checkers.ended(self.reducing.go, void=isinstance(event, ev.Voided))
        if self.stuck:
            self.outcome = event
        else:
            self._take_outcome(event)

    def _take_outcome(self, event: ev.Reduced | ev.Voided) -> None:
        self.reducing = self.stream = self.outcome = None
        self._handle(event)

    def abort(self, why: str, *, aborted: bool) -> None:
        """Abort the reduction, if one is in progress, as if the data channel had failed."""
        if self.reducing is not None and self.running:
            self.reducing = self.stream = None
            self._handle(ev.ChannelFailed(why, None, aborted))
            self._work_off()

    # ---- the user's script ----------------------------------------------------------------

    def start_script(self) -> None:
        """Begin training, after a look for a checkpoint if the job has them."""
        world = self.sim.world
        if world.save_every:
            self.post(self.sim.disk.look())
        self.post(ev.Begin("same", world.plan, world.lookahead, segments=world.segments))

    def _resume(self, effect: ev.Resume) -> None:
        assert not self.computes, f"R36: the model of {self.me} changes under a batch"
        self.resumed.append(effect)
        world = self.sim.world
        flushed, self.flushes = self.flushes, False
        done = effect.stopped or (not world.plan.ends and self.steps >= world.steps)
        if done:
            self.sim.after(0.1, lambda: self.post(ev.Finish()))
        elif self.ending or (world.stop and self.sim.rng.random() < world.stop):
            self.sim.after(0.01, lambda: self.post(ev.Finish(stop=True)))
        elif flushed:
            self.sim.after(0.01, self.rest)
        else:
            self.sim.after(0.01, self.next_batch)

    def ends_the_job(self) -> None:
        """Make the script end the job when `step()` next returns."""
        self.ending = True

    def next_batch(self) -> None:
        """Draw the next lease and begin its batch; the script may also rest or skip it."""
        sim, world = self.sim, self.sim.world
        if not self.running:
            return
        if self.stopped or self.hung:
            sim.after(20, self.next_batch)
            return
        if world.rest and sim.rng.random() < world.rest:
            if world.settings.pipeline:
                self.flushes = True
                self.post(ev.Flush())
            else:
                self.rest()
            return
        lease, samples = -1, world.batch
        if world.leases:
            if self.rank_leases.wait():
                self.wants += 1
                assert self.wants <= WANTS_MAX, f"{self.me} is woken again and again for no lease"
                self.post(ev.Want())
                return
            drawn = self.rank_leases.draw()
            assert drawn is not None
            lease, self.wants = drawn, 0
            samples = samples_of(world.plan, lease)
            if world.skip and sim.rng.random() < world.skip:
                self.post(ev.Skip(lease, samples))
                sim.after(0.01, self.next_batch)
                return
        factor = world.slow.get(self.me.slot, 1.0)
        pause = sim.rng.uniform(*world.step_ms) * factor
        self.labels += 1
        poisoned = world.segments
        if world.nan and sim.rng.random() < world.nan:
            poisoned = sim.rng.randrange(world.segments)
        self.computes = True
        self.batch = batch = Batch(Label(self.me, self.labels), lease, samples, poisoned)
        if world.segments > 1:
            gap = pause * 2 / 3 / world.segments  # backward takes two thirds
            sim.after(pause / 3 + gap, lambda: self.hand_over(batch, gap))
        else:
            sim.after(pause, lambda: self.finish_batch(batch))

    def rest(self) -> None:
        """Evaluate for a while, as `pl.evaluating()` does."""
        sim, world = self.sim, self.sim.world
        if not self.running:
            return
        state = self.state
        assert state.under_way != state.log.version, "R36: it rests with a gradient under way"
        self.post(ev.Rest())
        ends = world.stop and sim.rng.random() < world.stop  # an evaluation may decide to stop
        after: ev.Event = ev.Finish(stop=True) if ends else ev.Unrest()
        sim.after(sim.rng.uniform(5, 40), lambda: self.post(after))

    def hand_over(self, batch: Batch, gap: float) -> None:
        """Hand over the next segment; the script may drop or rewrite the batch, or pause."""
        sim, world = self.sim, self.sim.world
        if not self.running:
            return
        if self.hung or self.stopped:
            sim.after(20, lambda: self.hand_over(batch, gap))
            return
        if world.leases and world.discard and sim.rng.random() < world.discard / world.segments:
            batch.dropped = True
            self.computes = False
            self.post(ev.Skip(batch.lease, batch.samples))
            self._go_on()
            sim.after(0.01, self.next_batch)
            return
        late = world.late and world.late / (world.segments - 1)
        if batch.handed and not batch.late and late and sim.rng.random() < late:
            batch.late = True
            sim.after(world.late_ms, lambda: self.hand_over(batch, gap))
            return
        batch.handed += 1
        if batch.handed == 1 and batch.poisoned:
            leases = (batch.lease,) if batch.lease >= 0 else ()
            self.post(ev.Coming(leases, batch.samples, batch.samples))
            if not world.leases and world.misjudge and sim.rng.random() < world.misjudge:
                batch.samples += 1
                batch.rewritten = True
        elif world.rewrite and sim.rng.random() < world.rewrite / world.segments:
            batch.rewritten = True
        self._go_on()
        if batch.handed < world.segments - 1:
            sim.after(gap, lambda: self.hand_over(batch, gap))
        else:
            sim.after(gap, lambda: self.finish_batch(batch))

    def finish_batch(self, batch: Batch) -> None:
        """Finish the batch: add its gradient and call `step()`."""
        if not self.running:
            return
        if self.hung or self.stopped:
            self.sim.after(20, lambda: self.finish_batch(batch))
            return
        if batch.lease in self.sim.bad:
            self.sim.script_raises(self.me, m.DealtBatch(batch.lease, 0))
            return
        self.steps += 1
        self.computes = False
        label, lease, samples = batch.label, batch.lease, batch.samples
        unit = self.state.pending.grad.unit if self.grad else samples
        if unit != samples:  # the training layer rescales what lies in GRAD before the backward
            self.grad = self.plus({}, self.grad, Fraction(unit, samples))
        self.grad = {**self.grad, label: 1}
        finite = batch.poisoned == self.sim.world.segments
        stream = self.stream
        if stream is not None and stream.batch is batch and (batch.rewritten or not finite):
            # The communication thread notices this before it hands over the remaining segments.
            stream.given_up = GivenUp.REWRITTEN
        self.sim.checkers.produced(label, lease, samples, finite=finite)
        leases = (lease,) if lease >= 0 else ()
        metrics = (LoggedMetric("loss", 1.0 * samples, samples),)
        self.post(ev.Step(leases, samples, samples, finite, metrics))
