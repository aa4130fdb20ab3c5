"""A rank process: the real machine, a simulated communication thread and a simulated script.

`SimRank` does with fractions what `paceline.worker` does with tensors.
"""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from typing import TYPE_CHECKING

from paceline.core import messages as m
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.pending import BufferName, BufferOp, Merge, Scale, Swap, Zero
from paceline.core.protocol.rank_leases import RankLeases
from paceline.core.protocol.records import Go, LoggedMetric
from paceline.core.protocol.sampling import samples_of
from paceline.core.rank import events as ev
from paceline.core.rank.machine import Rank
from paceline.core.rank.state import RankState
from sim.sums import Label, Sum, add, scaled
from sim.world import MS

BEAT_MS = 100
SMALL_GROUPS_BEAT_MS = 200

if TYPE_CHECKING:
    from sim.simulation import Simulation

WANTS_MAX = 20


class SimRank:
    def __init__(self, sim: Simulation, me: MemberId) -> None:
        self.sim, self.me = sim, me
        endpoints = m.Endpoints(f"trigger-{me}", f"data-{me}")
        every = sim.world.save_every
        self.machine = Rank(me, pid=me.slot, host="sim", endpoints=endpoints, save_every=every)
        self.machine.state.tree_above = sim.world.tree_above
        self.alive = True
        self.exit: ev.Exit | None = None
        # What is wrong with it.
        self.hung = False
        """Its main thread."""
        self.stopped = False
        """The whole process (SIGSTOP)."""
        self.stuck = False
        """Its communication thread; heartbeats go on."""
        self.work_since = 0
        """Of its communication thread."""
        self.beat_ms = BEAT_MS
        # Memory.
        self.grad: Sum = {}
        self.late: Sum = {}
        self.result: Sum = {}
        self.queue: dict[int, Sum] = {}
        self.weights: Sum = {}
        self.accumulated: Sum = {}
        self.staged: dict[object, tuple[Sum, Sum]] = {}
        self.part_result: Sum | None = None
        # The communication thread.
        self.group: m.Commit | None = None
        self.reducing: ev.Reduce | None = None
        self.waiting: deque[ev.Event] = deque()
        """Events that arrive while it is inside a reduction."""
        self.backlog: deque[ev.Event] = deque()
        """Events that arrive while it is stopped or stuck."""
        self.wake_ns: int | None = None
        # The script.
        self.rank_leases = RankLeases()
        self.wants = 0
        """In a row; a lease may be dealt to others just before it is pulled."""
        self.labels = 0
        self.steps = 0
        self.ending = False
        """Its script ends the job when it comes back from `step()`."""
        self.resumed: list[ev.Resume] = []

    @property
    def state(self) -> RankState:
        return self.machine.state

    @property
    def running(self) -> bool:
        return self.alive and self.exit is None

    def doing(self) -> m.Doing:
        busy = self.stuck or self.reducing is not None
        go = self.reducing.go if self.reducing is not None else None
        for_ms = (self.sim.now - self.work_since) // MS if busy else 0
        return m.Doing(for_ms, go.round if go is not None else -1)

    @property
    def released(self) -> bool:
        """Its script still works, on its own account."""
        return self.alive and self.exit is not None and self.exit.finished

    # ---- events in, effects out -----------------------------------------------------------

    def told_to_beat_every(self, ms: int) -> None:
        """R42. Small groups beat twice as often here as they are told: histories are short."""
        self.beat_ms = ms if ms > SMALL_GROUPS_BEAT_MS else BEAT_MS

    def post(self, event: ev.Event) -> None:
        if not self.running:
            return
        if self.stopped or self.stuck:
            self.backlog.append(event)
            if isinstance(event, ev.Connected) and not self.stopped:
                self._carry_out(ev.ToCoordinator(self.state.registration()))
        elif self.reducing is not None and not isinstance(event, ev.Reduced | ev.ChannelFailed):
            self.waiting.append(event)
            if isinstance(event, m.Prepare | m.Release | m.Dismiss):
                self.abort("an order came", aborted=True)
            elif isinstance(event, ev.Connected):  # the link introduces the rank by itself
                self._carry_out(ev.ToCoordinator(self.state.registration()))
        else:
            self._handle(event)
            self._work_off()

    def _work_off(self) -> None:
        while self.waiting and self.reducing is None and self.running:
            self._handle(self.waiting.popleft())

    def thaw(self) -> None:
        self.stopped = self.stuck = False
        while self.backlog and not (self.stopped or self.stuck):
            self.post(self.backlog.popleft())

    def _handle(self, event: ev.Event) -> None:
        looks = self.sim.world.save_every and (self.state.passive or not self.state.has_state)
        if isinstance(event, m.Prepare) and looks:
            self._handle(self.sim.disk.look())
        before = self.sim.checkers.before_event(self, event)
        follow: list[ev.Event] = []
        for effect in self.machine.handle(self.sim.now, event):
            done = self._carry_out(effect)
            if done is not None:
                follow.append(done)
        self.sim.checkers.after_event(self, before)
        for done in follow:
            if self.running:
                self._handle(done)

    def _carry_out(self, effect: ev.Effect) -> ev.Event | None:
        sim = self.sim
        match effect:
            case ev.ToPeer(member=to, message=message):
                sim.links.to_peer(self.me, to, message)
            case ev.ToCoordinator(message=message):
                sim.links.to_coordinators(self.me, message)
            case ev.ChangeBuffers(op=op):
                self._buffers(op)
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
                self.reducing = self.group = None
            case ev.Reduce():
                self.reducing, self.work_since = effect, sim.now
                self._join_reduction(effect)
            case ev.WakeAt(at_ns=at_ns):
                self.wake_ns = at_ns
                sim.at(at_ns, lambda: self._tick(at_ns))
            case ev.Resume():
                self._resume(effect)
            case ev.Held(leases=leases):
                self.rank_leases.hold(leases)
            case ev.Exit():
                self.exit = effect
                sim.exited(self)
            case _:
                self._change_state(effect)
        return None

    def _tick(self, at_ns: int) -> None:
        if self.wake_ns == at_ns:
            self.post(ev.Tick())

    # ---- memory ---------------------------------------------------------------------------

    def _buffers(self, op: BufferOp) -> None:
        match op:
            case Swap():
                assert not self.late, f"R22: LATE of {self.me} is swapped but not empty"
                self.late, self.grad = self.grad, {}
            case Merge(late_factor=late, grad_factor=grad):
                merged = scaled(self.late, Fraction(late))
                add(merged, self.grad, Fraction(grad))
                self.late, self.grad = merged, {}
            case Scale(which=BufferName.GRAD, factor=factor):
                self.grad = scaled(self.grad, Fraction(factor))
            case Scale(factor=factor):
                self.late = scaled(self.late, Fraction(factor))
            case Zero(which=BufferName.GRAD):
                self.grad = {}
            case Zero():
                self.late = {}

    def _change_state(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Apply(go=go, weighing=weighing):
                self._apply(go, weighing, self.result)
            case ev.Queue(go=go):
                self.queue[go.round] = self.result
            case ev.DropQueue(generation=generation):
                self.queue.clear()
                self.staged = {g: s for g, s in self.staged.items() if g == generation}
            case ev.InstallPart(go=go, weighing=weighing):
                assert self.part_result is not None
                self.accumulated = dict(self.part_result)
                self._step_optimizer(go, weighing)
            case ev.InstallState(queued=queued):
                weights, accumulated = self.staged.pop(self.state.gen_id)
                self.weights, self.accumulated = dict(weights), dict(accumulated)
                for go, weighing in queued:
                    self._apply(go, weighing, self.queue[go.round])
                self.queue.clear()
            case ev.SendPart(to=to, part=part, with_result=with_result):
                result = dict(self.accumulated) if with_result else None
                self.sim.links.send_part(self.me, to, part, result)
            case ev.SendState(to=to, state=state):
                copied = dict(self.weights), dict(self.accumulated)
                self.sim.links.send_state(self.me, to, state, copied)
            case ev.PassState(to=to, state=state):
                self.sim.links.send_state(self.me, to, state, self.staged[state.generation])
            case _:
                raise AssertionError(effect)

    def _apply(self, go: Go, weighing: Weighing, result: Sum) -> None:
        self.accumulated = {} if weighing.first else dict(self.accumulated)
        add(self.accumulated, result, Fraction(weighing.unit))
        self._step_optimizer(go, weighing)

    def _step_optimizer(self, go: Go, weighing: Weighing) -> None:
        if weighing.step:
            self.weights = dict(self.weights)
            add(self.weights, self.accumulated)
        self.sim.checkers.committed(self, go, weighing)

    # ---- reductions -----------------------------------------------------------------------

    def _join_reduction(self, effect: ev.Reduce) -> None:
        assert self.group is not None
        own: Sum = {}
        if effect.source is not None:
            source = self.grad if effect.source is BufferName.GRAD else self.late
            own = scaled(source, Fraction(effect.factor))
        self.sim.checkers.joined(self, effect, own)
        self.sim.reductions.join(self, self.group.gen, effect.go.round, own)

    def complete(self, generation: object, round_: int, total: Sum) -> None:
        """The reduction is through on this rank, unless it was abandoned."""
        reduce = self.reducing
        if reduce is None or (reduce.go.generation, reduce.go.round) != (generation, round_):
            return
        if not self.running:
            return
        if self.stopped or self.stuck:
            self.sim.after(20, lambda: self.complete(generation, round_, total))
            return
        self.result = total
        self.reducing = None
        self._handle(ev.Reduced())
        self._work_off()

    def abort(self, why: str, *, aborted: bool) -> None:
        if self.reducing is not None and self.running:
            self.reducing = None
            self._handle(ev.ChannelFailed(why, None, aborted))
            self._work_off()

    # ---- the user's script ----------------------------------------------------------------

    def start_script(self) -> None:
        world = self.sim.world
        if world.save_every:
            self.post(self.sim.disk.look())
        self.post(ev.Begin("same", world.plan, world.lookahead))

    def _resume(self, effect: ev.Resume) -> None:
        self.resumed.append(effect)
        world = self.sim.world
        done = effect.stopped or (not world.plan.ends and self.steps >= world.steps)
        if done:
            self.sim.after(0.1, lambda: self.post(ev.Finish()))
        elif self.ending or (world.stop and self.sim.rng.random() < world.stop):
            self.sim.after(0.01, lambda: self.post(ev.Finish(stop=True)))
        else:
            self.sim.after(0.01, self.next_batch)

    def ends_the_job(self) -> None:
        self.ending = True

    def next_batch(self) -> None:
        sim, world = self.sim, self.sim.world
        if not self.running:
            return
        if self.stopped or self.hung:
            sim.after(20, self.next_batch)
            return
        if world.rest and sim.rng.random() < world.rest:
            self.post(ev.Rest())
            ends = world.stop and sim.rng.random() < world.stop  # as an evaluation may decide
            after: ev.Event = ev.Finish(stop=True) if ends else ev.Unrest()
            sim.after(sim.rng.uniform(5, 40), lambda: self.post(after))
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
        sim.after(pause, lambda: self.finish_batch(lease, samples))

    def finish_batch(self, lease: int, samples: int) -> None:
        if not self.running:
            return
        if self.hung or self.stopped:
            self.sim.after(20, lambda: self.finish_batch(lease, samples))
            return
        self.labels += 1
        self.steps += 1
        label = Label(self.me, self.labels)
        unit = self.state.pending.grad.unit if self.grad else samples
        if unit != samples:  # the training layer rescales what lies in GRAD before the backward
            self.grad = scaled(self.grad, Fraction(unit, samples))
        self.grad = {**self.grad, label: Fraction(1)}
        finite = not (self.sim.world.nan and self.sim.rng.random() < self.sim.world.nan)
        self.sim.checkers.produced(label, lease, samples, finite=finite)
        leases = (lease,) if lease >= 0 else ()
        metrics = (LoggedMetric("loss", 1.0 * samples, samples),)
        self.post(ev.Step(leases, samples, samples, finite, metrics))
