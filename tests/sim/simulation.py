"""A whole job on a virtual clock: real state machines, simulated threads, links and processes.

One seed gives everything: delays, reordering between channels, deaths, drains, joins, suspicions, hung
main threads, coordinator restarts, a second coordinator. Gradients are decodable: each batch has a label
of its own and a sum tells exactly what is inside, as fractions, so no rounding hides an error. The
driver below does what `paceline.comm.engine` does with tensors; checkers look after every event.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.ids import MemberId
from paceline.core.pending import Merge, Place, Scale, Swap, Zero
from paceline.core.rank import events as ev
from paceline.core.rank.machine import Rank
from paceline.core.rank.state import Main
from paceline.core.records import DataPlan, Metric, Settings
from paceline.core.sampling import samples_of, total_leases

MS = 10**6
Sum = dict[tuple[MemberId, int], Fraction]
"""Gradient sum: how many samples of which batch (member, its own count) are in it."""


def add(into: Sum, other: Sum, factor: Fraction = Fraction(1)) -> None:
    for label, value in other.items():
        into[label] = into.get(label, Fraction(0)) + value * factor


@dataclass
class World:
    """What may go wrong, and how much of it."""

    ranks: int = 3
    settings: Settings = field(default_factory=Settings)
    leases: int = 24
    batch: int = 4
    uneven: bool = False
    """The last lease of an epoch is smaller."""
    epochs: int = 1
    step_ms: tuple[int, int] = (5, 20)
    slow: dict[int, float] = field(default_factory=dict)
    """Factor by slot."""
    nan: float = 0.0
    skip: float = 0.0
    rest: float = 0.0
    delay_ms: tuple[float, float] = (0.05, 3.0)
    freeze_ms: int = 400
    until_ms: int = 60_000


class SimRank:
    """A rank process: the machine, a simulated driver and a simulated user's script."""

    def __init__(self, sim: Simulation, me: MemberId) -> None:
        self.sim, self.me = sim, me
        endpoints = m.Endpoints(f"trigger-{me}", f"data-{me}")
        self.machine = Rank(me, pid=me.slot, host="sim", endpoints=endpoints)
        self.alive = True
        self.hung = False
        self.exit: ev.Exit | None = None
        self.grad: Sum = {}
        self.held: Sum = {}
        self.result: Sum = {}
        self.queue: dict[int, Sum] = {}
        self.weights: Sum = {}
        self.bank: Sum = {}
        self.staged: dict[object, tuple[Sum, Sum, int]] = {}
        self.part_result: Sum | None = None
        self.leases: tuple[int, ...] = ()
        self.pulled: set[int] = set()
        self.labels = 0
        self.waiting: deque[object] = deque()
        """Events that arrive while the communication thread is inside a reduction."""
        self.reducing: ev.Reduce | None = None
        self.wake_ns: int | None = None
        self.chain: dict[int, str] = {}
        self.fresh_results: list[bool] = []
        self.result_of: int | None = None

    @property
    def state(self):  # noqa: ANN201
        return self.machine.state

    # ---- events in, effects out -----------------------------------------------------------

    def post(self, event: object) -> None:
        if not self.alive or self.exit is not None:
            return
        if self.reducing is not None and not isinstance(event, ev.Reduced | ev.ChannelFailed):
            self.waiting.append(event)
            if isinstance(event, m.Prepare | m.Release | m.Dismiss):
                self.abort(aborted=True)
            elif isinstance(event, ev.Connected):  # the link introduces the rank by itself
                self._carry_out(ev.ToCoordinator(self.state.registration()))
            return
        self._handle(event)
        while self.waiting and self.reducing is None and self.alive and self.exit is None:
            self._handle(self.waiting.popleft())

    def _handle(self, event: object) -> None:
        effects = self.machine.handle(self.sim.now, event)  # type: ignore[arg-type]
        follow: deque[object] = deque()
        for effect in effects:
            done = self._carry_out(effect)
            if done is not None:
                follow.append(done)
        self.sim.after_event(self)
        while follow and self.alive:
            self.post(follow.popleft())

    def _carry_out(self, effect: object) -> object | None:  # noqa: C901, PLR0912
        sim = self.sim
        match effect:
            case ev.ToPeer(member=to, message=message):
                sim.send(("rank", self.me), ("rank", to), message)
            case ev.ToCoordinator(message=message):
                for name in sim.coordinators:
                    sim.send(("rank", self.me), ("coord", name), message)
            case ev.Buffers(op=op):
                self._buffers(op)
            case ev.OpenChannel(commit=commit):
                group = (commit.gen.id, commit.gen.members)
                sim.channels.setdefault(commit.gen.id, {})
                self.group = group
                return ev.ChannelOpened()
            case ev.CloseChannel():
                self.reducing = None
                self.group = None
            case ev.Reduce():
                self.reducing = effect
                self._join_reduction(effect)
            case ev.Apply(go=go, weighing=weighing):
                self._apply(go, weighing, self.result)
            case ev.Queue(go=go):
                self.queue[go.round] = dict(self.result)
            case ev.DropQueue():
                self.queue.clear()
                self.staged = {g: s for g, s in self.staged.items() if g == effect.generation}
            case ev.InstallPart(go=go, weighing=weighing):
                assert self.part_result is not None
                self._install_bank(go, weighing, self.part_result)
            case ev.InstallState(queued=queued):
                weights, bank, _ = self.staged.pop(self.state.gen_id)
                self.weights, self.bank = dict(weights), dict(bank)
                for go, weighing in queued:
                    self._apply(go, weighing, self.queue[go.round])
                self.queue.clear()
            case ev.SendPart(to=to, part=part, with_result=with_result):
                payload = dict(self.bank) if with_result else None
                sim.send(("rank", self.me), ("rank", to), part, payload)
            case ev.SendState(to=to, state=state):
                payload = (dict(self.weights), dict(self.bank), state.log.version)
                sim.send(("rank", self.me), ("rank", to), state, payload, extra_ms=sim.rng.uniform(0, 80))
            case ev.Resume():
                self._resume(effect)
            case ev.Held(leases=leases):
                self.leases = leases
            case ev.WakeAt(at_ns=at_ns):
                self.wake_ns = at_ns
                sim.at(at_ns, lambda: self._tick(at_ns))
            case ev.Exit():
                self.exit = effect
                sim.exited(self)
            case _:
                raise AssertionError(effect)
        return None

    def _tick(self, at_ns: int) -> None:
        if self.wake_ns == at_ns:
            self.post(ev.Tick())

    # ---- buffers --------------------------------------------------------------------------

    def _buffers(self, op: object) -> None:
        match op:
            case Swap():
                assert not self.held, (self.me, self.held)
                self.held, self.grad = self.grad, {}
            case Merge(held_factor=hf, grad_factor=gf):
                merged: Sum = {}
                add(merged, self.held, Fraction(hf))
                add(merged, self.grad, Fraction(gf))
                self.held, self.grad = merged, {}
            case Scale(place=place, factor=factor):
                scaled: Sum = {}
                add(scaled, self.grad if place is Place.GRAD else self.held, Fraction(factor))
                if place is Place.GRAD:
                    self.grad = scaled
                else:
                    self.held = scaled
            case Zero(place=place):
                if place is Place.GRAD:
                    self.grad = {}
                else:
                    self.held = {}

    # ---- reductions -----------------------------------------------------------------------

    def _join_reduction(self, effect: ev.Reduce) -> None:
        sim = self.sim
        own: Sum = {}
        if effect.place is not None:
            source = self.grad if effect.place is Place.GRAD else self.held
            add(own, source, Fraction(effect.factor))
        gen_id, members = self.group
        joined = sim.channels[gen_id].setdefault(effect.go.round, {})
        joined[self.me] = own
        if set(joined) == set(members):
            for member in members:
                sim.after(sim.rng.uniform(0.1, 5.0), lambda x=member: sim.complete(gen_id, effect.go.round, x))

    def complete(self, gen_id: object, round_: int) -> None:
        """The reduction is through on this rank, unless it was abandoned."""
        r = self.reducing
        if r is None or r.go.generation != gen_id or r.go.round != round_ or not self.alive:
            return
        dead = [x for x in self.group[1] if not self.sim.is_reachable(x, gen_id)]
        if dead and self.sim.rng.random() < 0.5:
            return  # a peer went away in the middle of it: it may never complete here
        total: Sum = {}
        for own in self.sim.channels[gen_id][round_].values():
            add(total, own)
        self.result = total
        self.reducing = None
        self.post_now(ev.Reduced())

    def post_now(self, event: object) -> None:
        self._handle(event)
        while self.waiting and self.reducing is None and self.alive and self.exit is None:
            self._handle(self.waiting.popleft())

    def abort(self, *, aborted: bool, why: str = "aborted") -> None:
        if self.reducing is not None and self.alive:
            self.reducing = None
            self.post_now(ev.ChannelFailed(why, None, aborted))

    # ---- committed state ------------------------------------------------------------------

    def _apply(self, go: object, weighing: object, result: Sum) -> None:
        if weighing.first:
            self.bank = {}
        else:
            self.bank = dict(self.bank)
        add(self.bank, result, Fraction(weighing.unit))
        self._finish_apply(go, weighing)

    def _install_bank(self, go: object, weighing: object, bank: Sum) -> None:
        self.bank = dict(bank)
        self._finish_apply(go, weighing)

    def _finish_apply(self, go: object, weighing: object) -> None:
        if weighing.step:
            add(self.weights, self.bank)
        self.sim.check_round(self, go, weighing)

    # ---- the user's script ----------------------------------------------------------------

    def start_script(self) -> None:
        plan = self.sim.plan
        self.post(ev.Begin("same", plan, 2))

    def _resume(self, effect: ev.Resume) -> None:
        self.fresh_results.append(effect.fresh)
        if effect.stopped:
            self.sim.after(0.1, lambda: self.post(ev.Finish()))
        else:
            self.sim.after(0.01, self.next_batch)

    def next_batch(self) -> None:
        sim = self.sim
        if not self.alive or self.exit is not None:
            return
        if sim.world.rest and sim.rng.random() < sim.world.rest:
            self.post(ev.Rest())
            sim.after(sim.rng.uniform(5, 40), lambda: self.post(ev.Unrest()))
            return
        free = [x for x in self.leases if x not in self.pulled]
        if not free:
            self.pulled &= set(self.leases)
            self.post(ev.Want())
            return
        lease = free[0]
        self.pulled.add(lease)
        samples = samples_of(sim.plan, lease)
        if sim.world.skip and sim.rng.random() < sim.world.skip:
            self.post(ev.Skip(lease, samples))
            sim.after(0.01, self.next_batch)
            return
        low, high = sim.world.step_ms
        factor = sim.world.slow.get(self.me.slot, 1.0)
        sim.after(sim.rng.uniform(low, high) * factor, lambda: self.finish_batch(lease, samples))

    def finish_batch(self, lease: int, samples: int) -> None:
        if not self.alive or self.exit is not None:
            return
        if self.hung:
            self.sim.after(50, lambda: self.finish_batch(lease, samples))
            return
        self.labels += 1
        unit = self.state.pending.grad.unit if self.state.pending.grad.pieces else samples
        if unit != samples:  # the training layer rescales what lies in GRAD before the backward pass
            scaled: Sum = {}
            add(scaled, self.grad, Fraction(unit, samples))
            self.grad = scaled
        add(self.grad, {(self.me, self.labels): Fraction(1)})
        self.sim.lease_of[(self.me, self.labels)] = lease
        self.sim.samples[(self.me, self.labels)] = samples
        finite = not (self.sim.world.nan and self.sim.rng.random() < self.sim.world.nan)
        self.post(
            ev.Step((lease,), samples, samples, finite, (Metric("loss", 1.0 * samples, samples),))
        )

    def drain(self) -> None:
        self.post(ev.Drain())


class SimCoordinator:
    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim, self.name = sim, name
        config = coord.Config(
            job="sim",
            replicas=sim.world.ranks,
            settings=sim.world.settings,
            settle_ns=300 * MS,
            freeze_timeout_ns=sim.world.freeze_ms * MS,
            backoff_limit=1000,
        )
        self.machine = coord.Coordinator(config, uid=name, now_ns=sim.now)
        self.alive = True
        self.outcome: coord.Outcome | None = None
        self.retired = ""
        self.wake_ns: int | None = None

    def post(self, event: object) -> None:
        if not self.alive:
            return
        sim = self.sim
        for effect in self.machine.handle(sim.now, event):  # type: ignore[arg-type]
            match effect:
                case coord.ToRank(member=member, message=message):
                    sim.send(("coord", self.name), ("rank", member), message)
                case coord.ToAgent(message=m.KillRank(member=member)):
                    sim.after(2, lambda x=member: sim.kill(x))
                case coord.ToAgent(slot=slot, message=m.DrainPod()):
                    sim.after(2, lambda s=slot: sim.drain_slot(s))
                case coord.ToAgent():
                    pass
                case coord.WakeAt(at_ns=at_ns):
                    self.wake_ns = at_ns
                    sim.at(at_ns, lambda t=at_ns: self._tick(t))
                case coord.JobEnded(outcome=outcome):
                    self.outcome = outcome
                case coord.Retire(why=why):
                    self.retired, self.alive = why, False
                    sim.tell(f"coordinator {self.name} retires: {why}")
                    sim.retired(self)
                case coord.Happened(reason=reason, message=message):
                    sim.tell(f"coordinator {self.name}: {reason}: {message} {effect.facts or str()}")

    def _tick(self, at_ns: int) -> None:
        if self.wake_ns == at_ns:
            self.post(coord.Tick())


class Simulation:
    """One history."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.seed = world, seed
        self.rng = random.Random(seed)
        self.now = 0
        self.heap: list[tuple[int, int, Callable[[], None]]] = []
        self.count = 0
        per_epoch = world.leases
        samples = per_epoch * world.batch - (world.batch // 2 if world.uneven else 0)
        self.plan = DataPlan(samples=samples, batch=world.batch, epochs=world.epochs, seed=1)
        self.ranks: dict[MemberId, SimRank] = {}
        self.coordinators: dict[str, SimCoordinator] = {}
        self.channels: dict[object, dict[int, dict[MemberId, Sum]]] = {}
        self.order: dict[tuple[object, object], int] = {}
        self.cut: set[MemberId] = set()
        self.inventory = m.Inventory(0, ())
        self.lease_of: dict[tuple[MemberId, int], int] = {}
        self.samples: dict[tuple[MemberId, int], int] = {}
        self.weights_at: dict[str, Sum] = {}
        self.lines: deque[str] = deque(maxlen=400)
        self.gos: list[object] = []
        self.faults: list[tuple[int, Callable[[], None]]] = []
        self.violation: str | None = None

    # ---- time -----------------------------------------------------------------------------

    def at(self, at_ns: int, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (max(at_ns, self.now), self.count, action))

    def after(self, ms: float, action: Callable[[], None]) -> None:
        self.at(self.now + int(ms * MS), action)

    def tell(self, line: str) -> None:
        self.lines.append(f"{self.now / MS:9.2f} ms  {line}")

    def story(self) -> str:
        return f"seed {self.seed}\n" + "\n".join(self.lines)

    # ---- links ----------------------------------------------------------------------------

    def send(
        self, src: tuple[str, object], dst: tuple[str, object], message: object,
        payload: object = None, extra_ms: float = 0.0,
    ) -> None:
        """In order per pair, with any delay; lost if an end is dead or cut off by then."""
        key = (src, dst)
        low, high = self.world.delay_ms
        due = self.now + int((self.rng.uniform(low, high) + extra_ms) * MS)
        lane = (*key, isinstance(message, m.State))
        due = max(due, self.order.get(lane, 0) + 1)
        self.order[lane] = due
        self.at(due, lambda: self._deliver(src, dst, message, payload))

    def _deliver(self, src, dst, message, payload) -> None:  # noqa: ANN001
        control = "coord" in (src[0], dst[0])
        ends = {x for kind, x in (src, dst) if kind == "rank"}
        if control and ends & self.cut:
            return
        if src[0] == "coord" and src[1] not in self.coordinators:
            return
        if dst[0] == "coord":
            c = self.coordinators.get(dst[1])
            if c is not None:
                c.post(coord.FromRank(message))
            return
        rank = self.ranks.get(dst[1])
        if rank is None or not rank.alive:
            return
        if not isinstance(message, m.Start | m.Announce):
            self.tell(f"{src[1]} -> {dst[1]}: {type(message).__name__}")
        if isinstance(message, m.Part):
            rank.part_result = payload
        if isinstance(message, m.State):
            rank.staged[message.generation] = payload
        rank.post(message)

    def is_reachable(self, member: MemberId, gen_id: object) -> bool:
        rank = self.ranks[member]
        return rank.alive and rank.state.promise <= gen_id

    def complete(self, gen_id: object, round_: int, member: MemberId) -> None:
        self.ranks[member].complete(gen_id, round_)

    # ---- processes ------------------------------------------------------------------------

    def start(self) -> None:
        self.start_coordinator("a")
        for slot in range(self.world.ranks):
            self.start_rank(slot)

    def start_coordinator(self, name: str) -> None:
        self.coordinators[name] = SimCoordinator(self, name)
        self.tell(f"coordinator {name} starts")
        self.after(0.5, lambda: self._to_coordinators(coord.SetInventory(self.inventory), name))
        for rank in self.ranks.values():
            if rank.alive and rank.exit is None:
                self.after(self.rng.uniform(1, 60), lambda r=rank: self._connect(r, name))
            elif not rank.alive:
                self._evidence(rank, name)

    def kill_coordinator(self, name: str) -> None:
        if name in self.coordinators:
            self.tell(f"coordinator {name} dies")
            self.coordinators.pop(name).alive = False

    def retired(self, coordinator: SimCoordinator) -> None:
        """Whoever started it starts another one, unless one acts."""
        self.coordinators.pop(coordinator.name, None)
        if not self.coordinators:
            self.after(20, lambda: self.coordinators or self.start_coordinator(f"r{self.count}"))

    def _connect(self, rank: SimRank, name: str) -> None:
        c = self.coordinators.get(name)
        if c is None or not rank.alive or rank.me in self.cut or rank.exit is not None:
            return
        pod = m.pod_of(rank.me)
        c.post(coord.FromAgent(m.AgentHello(*pod, "sim", "", (rank.me,), ())))
        rank.post(ev.Connected())

    def start_rank(self, slot: int, attempt: int = 0, restarts: int = 0) -> SimRank:
        me = MemberId(slot, 0, attempt * m.ATTEMPT_STRIDE + restarts)
        rank = self.ranks[me] = SimRank(self, me)
        self.tell(f"rank {me} starts")
        if m.pod_of(me) not in self.inventory.pods:
            self._set_inventory((*self.inventory.pods, m.pod_of(me)))
        self.after(self.rng.uniform(0, 20), lambda: [self._connect(rank, c) for c in list(self.coordinators)])
        self.after(self.rng.uniform(21, 60), rank.start_script)
        self.after(100, lambda: self._beat(rank))
        return rank

    def _set_inventory(self, pods: tuple[tuple[int, int], ...]) -> None:
        self.inventory = m.Inventory(self.inventory.revision + 1, tuple(sorted(pods)))
        inventory = self.inventory
        self.after(1, lambda: self._to_coordinators(coord.SetInventory(inventory)))

    def _to_coordinators(self, event: object, name: str | None = None) -> None:
        for key, c in list(self.coordinators.items()):
            if name in (None, key):
                c.post(event)

    def _beat(self, rank: SimRank) -> None:
        if not rank.alive or rank.exit is not None:
            return
        s = rank.state
        beat = m.Heartbeat(rank.me, s.promise, s.log.id, s.log.version, s.wants_to_leave, s.log.stopped, {})
        for name in self.coordinators:
            self.send(("rank", rank.me), ("coord", name), beat)
        self.after(100, lambda: self._beat(rank))

    def kill(self, member: MemberId, *, with_agent: bool = False) -> None:
        rank = self.ranks[member]
        if not rank.alive or rank.exit is not None:
            return
        self.tell(f"rank {member} dies")
        rank.alive = False
        if with_agent:
            gone = m.pod_of(member)
            self.after(
                self.rng.uniform(5, 300),
                lambda: self._set_inventory(tuple(p for p in self.inventory.pods if p != gone)),
            )
            for name in list(self.coordinators):
                self._to_coordinators(coord.RankGone(member), name)
                self._to_coordinators(coord.AgentGone(*m.pod_of(member)), name)
        else:
            for name in list(self.coordinators):
                self._evidence(rank, name)
        for other in self.ranks.values():
            if other.reducing is not None and member in other.group[1] and self.rng.random() < 0.5:
                self.after(self.rng.uniform(0.1, 30), lambda o=other: o.abort(aborted=False, why="peer lost"))

    def _evidence(self, rank: SimRank, name: str) -> None:
        finished = rank.exit is not None and rank.exit.finished
        dead = m.RankDead(rank.me, 0 if finished else -9, "ended", False, rank.state.released)
        self.after(self.rng.uniform(0.5, 20), lambda: self._to_coordinators(coord.FromAgent(dead), name))

    def drain_slot(self, slot: int) -> None:
        for rank in list(self.ranks.values()):
            if rank.me.slot == slot and rank.alive and rank.exit is None:
                self.tell(f"rank {rank.me} drains")
                rank.drain()

    def exited(self, rank: SimRank) -> None:
        self.tell(f"rank {rank.me} exits: finished={rank.exit.finished} {rank.exit.why}")
        rank_dead = m.RankDead(rank.me, 0, "exit 0", False, rank.state.released)
        self.after(5, lambda: self._to_coordinators(coord.FromAgent(rank_dead)))

        def gone() -> None:
            rank.alive = False

        self.after(4, gone)

    def cut_off(self, member: MemberId, ms: float) -> None:
        """The control channel of one rank and its agent is cut: a false suspicion."""
        self.tell(f"rank {member} is cut off for {ms:.0f} ms")
        self.cut.add(member)
        self._to_coordinators(coord.RankGone(member))
        self._to_coordinators(coord.AgentGone(*m.pod_of(member)))

        def heal() -> None:
            self.cut.discard(member)
            self.tell(f"rank {member} is connected again")
            for name in list(self.coordinators):
                self._connect(self.ranks[member], name)

        self.after(ms, heal)

    def hang(self, member: MemberId, ms: float) -> None:
        rank = self.ranks[member]
        rank.hung = True
        self.tell(f"main thread of {member} hangs for {ms:.0f} ms")
        self.after(ms, lambda: setattr(rank, "hung", False))

    # ---- running --------------------------------------------------------------------------

    def run(self) -> None:
        """Until every living rank has exited; raises if a promise breaks or nothing ends."""
        while self.heap:
            at, _, action = heapq.heappop(self.heap)
            self.now = at
            if at > self.world.until_ms * MS:
                raise AssertionError(f"I8: not over after {self.world.until_ms} ms\n{self.describe()}\n{self.story()}")
            try:
                action()
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.describe()}\n{self.story()}") from error
            if self.over():
                return
        raise AssertionError(f"I8: nothing left to happen\n{self.describe()}\n{self.story()}")

    def over(self) -> bool:
        started = [r for r in self.ranks.values()]
        return bool(started) and all(not r.alive or r.exit is not None for r in started)

    def describe(self) -> str:
        out = []
        for r in self.ranks.values():
            s = r.state
            out.append(
                f"{r.me} alive={r.alive} exit={r.exit} v={s.log.version} main={s.main} waits={s.waits_for} "
                f"gen={s.gen_id} frozen={s.frozen} passive={s.passive} started={s.started} "
                f"broken={s.broken} reducing={r.reducing is not None} active={s.log.active} "
                f"held={s.log.held(s.me)} pend={[p.seq for p in s.pending.pieces]} ann={s.announced},"
                f"{s.announced_pending} drain={s.draining} needs={s.needs_part} stopped={s.log.stopped}"
            )
        for n, c in self.coordinators.items():
            x = c.machine.state
            out.append(f"coord {n} {x.phase} gen={x.gen.id if x.gen else None} prop={x.proposal} asked={x.asked} "
                       f"reports={set(x.reports)} unstarted={x.unstarted} due={x.due_ns} why={x.why} waits={x.waits}")
        return "\n".join(out)

    # ---- promises -------------------------------------------------------------------------

    def after_event(self, rank: SimRank) -> None:
        log = rank.state.log
        for index, digest in log.tail:
            rank.chain[index] = digest
        if rank.state.has_state and not rank.state.passive and log.gen is not None:
            seen = self.weights_at.setdefault(log.digest, dict(rank.weights))
            assert seen == rank.weights, f"I5: {rank.me} has other weights at {log.digest}"
            self.check_conservation(rank)

    def check_conservation(self, rank: SimRank) -> None:
        """I1: produced = applied + pending + dropped + lost, in samples."""
        p = rank.state.pending
        totals = rank.state.log.ledger.by_member.get(rank.me, m.Totals())
        pending = sum(x.samples for x in p.pieces) + sum(d.samples for d in p.drops)
        total = totals.applied + totals.dropped + pending + p.lost
        assert p.produced == total, (
            f"I1: {rank.me} produced {p.produced}, applied {totals.applied} dropped {totals.dropped} "
            f"pending {pending} lost {p.lost}"
        )

    def check_round(self, rank: SimRank, go, weighing) -> None:  # noqa: ANN001
        """I2, I4, I6, I12: what was summed is what GO names, each sample once, rightly weighed."""
        for share in go.shares:
            assert not share.fresh or share.oldest <= go.round
        if not weighing.step:
            return
        for label, value in rank.weights.items():
            limit = self.samples[label]
            assert value <= limit, f"I2: batch {label} applied {value} of {limit} samples"
            if self.world.settings.late != "Decay":
                assert value == limit, f"I12: batch {label} applied with weight {value} of {limit}"

    def check_end(self) -> None:
        """After a complete run: every lease applied once or counted as dropped."""
        finished = [r for r in self.ranks.values() if r.exit is not None and r.exit.finished]
        assert finished, f"nobody finished\n{self.describe()}\n{self.story()}"
        first = finished[0]
        for other in finished[1:]:
            assert other.state.log.digest == first.state.log.digest, self.story()
            assert other.weights == first.weights, self.story()
        leases = [self.lease_of[label] for label in first.weights]
        assert len(leases) == len(set(leases)), f"I2: a lease was applied twice\n{self.story()}"
        ledger = first.state.log.ledger
        total = ledger.total()
        wanted = sum(samples_of(self.plan, x) for x in range(total_leases(self.plan)))
        assert total.applied + total.dropped == wanted, (total, wanted, self.story())
