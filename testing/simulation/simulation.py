"""A whole job on a virtual clock: real state machines, simulated threads, links and processes.

One seed determines everything: delays, reordering between channels, the victims of faults. The
checkers run after every event. `Simulation.run` returns when every process has ended, or raises
`BrokenPromiseError` with the story of the run.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable

from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.rank import events as ev
from paceline_api.ids import ATTEMPT_STRIDE, MemberId, pod_of

from testing.simulation.checkers import Checkers
from testing.simulation.coordinators import SimCoordinator
from testing.simulation.disk import Disk
from testing.simulation.links import Links
from testing.simulation.pods import SimPod
from testing.simulation.ranks import SimRank
from testing.simulation.reductions import Reductions
from testing.simulation.world import MS, World

OUTCOME_MS = 1000
"""Time that a coordinator has to report the outcome of a job with no living process."""
_DRAIN = ev.Drain()
MISTAKE = m.ScriptError("KeyError", "'label'", "train.py", 7)
"""The error that scripts raise."""


class BrokenPromiseError(AssertionError):
    """Raised when a promise is broken; the message is the story of the run."""


class Simulation:
    """One history."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.seed = world, seed
        self.rng = random.Random(seed)
        self.now = 0
        self.count = 0
        self.heap: list[tuple[int, int, Callable[[], object]]] = []
        self.links = Links(self)
        self.reductions = Reductions(self)
        self.checkers = Checkers(self)
        self.disk = Disk(self)
        self.ranks: dict[MemberId, SimRank] = {}
        self.pods: dict[tuple[int, int], SimPod] = {}
        self.coordinators: dict[str, SimCoordinator] = {}
        self.all_coordinators: list[SimCoordinator] = []
        self.inventory = m.Inventory(0, ())
        self.targets: m.Targets | None = None
        self.broken_until = 0
        self.bad: set[int] = set()
        """Leases with which the script raises."""
        self.at_the_end: list[Callable[[], object]] = []
        """Actions to run when the first rank has made the last round."""
        self.all_dead_ns: int | None = None
        self.lines: deque[str] = deque(maxlen=300)

    # ---- time -----------------------------------------------------------------------------

    def at(self, at_ns: int, action: Callable[[], object]) -> None:
        """Schedule an action at a time in nanoseconds, or now if that has passed."""
        self.count += 1
        heapq.heappush(self.heap, (max(at_ns, self.now), self.count, action))

    def after(self, ms: float, action: Callable[[], object]) -> None:
        """Schedule an action in `ms` milliseconds."""
        self.at(self.now + int(ms * MS), action)

    def tell(self, line: str) -> None:
        """Add a line to the story; the last 300 lines are kept."""
        self.lines.append(f"{self.now / MS:9.2f} ms  {line}")

    # ---- coordinators ---------------------------------------------------------------------

    def start(self) -> None:
        """Start a coordinator and all pods."""
        self.start_coordinator("a")
        self.after(20, self.note_trained)
        for slot in range(self.world.replicas):
            self.start_pod(slot)

    def start_coordinator(self, name: str) -> None:
        """Start a coordinator; the pods connect to it within 60 ms."""
        coordinator = self.coordinators[name] = SimCoordinator(self, name)
        self.all_coordinators.append(coordinator)
        self.tell(f"coordinator {name} starts")
        self.after(0.5, lambda: self._inform(name))
        for pod in list(self.pods.values()):
            self.after(self.rng.uniform(1, 60), lambda p=pod: self.connect(p, name))  # type: ignore[misc]

    def _inform(self, name: str) -> None:
        self.to_coordinators(coord.SetInventory(self.inventory), name)
        if self.targets is not None:
            self.to_coordinators(coord.SetTargets(self.targets), name)

    def kill_coordinator(self, name: str) -> None:
        """Kill a coordinator if it lives."""
        if name in self.coordinators:
            self.tell(f"coordinator {name} dies")
            self.coordinators.pop(name).alive = False

    def retired(self, coordinator: SimCoordinator) -> None:
        """Remove a coordinator that retired; start another one unless one is active."""
        self.coordinators.pop(coordinator.name, None)
        if not self.coordinators:
            name = f"r{len(self.all_coordinators)}"
            self.after(20, lambda: None if self.coordinators else self.start_coordinator(name))

    def to_coordinators(self, event: coord.Event, name: str | None = None) -> None:
        """Post an event to one coordinator, or to all of them."""
        for key, coordinator in list(self.coordinators.items()):
            if name in (None, key):
                coordinator.post(event)

    def set_targets(self, targets: m.Targets) -> None:
        """Send new targets to all coordinators; later ones receive the replicas only."""
        self.tell(f"targets: {targets}")
        self.checkers.settings_changed |= targets.settings is not None
        if targets.replicas is not None:
            self.targets = m.Targets(replicas=targets.replicas)
        self.to_coordinators(coord.SetTargets(targets))

    def note_trained(self) -> None:
        """Poll the status as the runner does: once rounds are committed, no fresh start (R26)."""
        if any(c.state.version for c in self.coordinators.values()):
            self.set_inventory(self.inventory.pods, trained=True)
        else:
            self.after(20, self.note_trained)

    def set_inventory(self, pods: tuple[tuple[int, int], ...], *, trained: bool = False) -> None:
        """Set the list of pods and send it to the coordinators with a new revision."""
        inventory = m.Inventory(
            self.inventory.revision + 1, tuple(sorted(pods)), trained or self.inventory.trained
        )
        self.inventory = inventory
        self.after(1, lambda: self.to_coordinators(coord.SetInventory(inventory)))

    # ---- pods -----------------------------------------------------------------------------

    def start_pod(self, slot: int) -> SimPod:
        """Start a pod in a slot; the inventory lists it before it has a process (R25)."""
        attempt = 1 + max((p.key[1] for p in self.pods.values() if p.key[0] == slot), default=-1)
        pod = self.pods[slot, attempt] = SimPod(self, slot, attempt)
        self.set_inventory((*self.inventory.pods, pod.key))
        self.tell(f"pod {slot}#{attempt} starts")
        self.after(self.rng.uniform(2, 8), lambda: self._pod_up(pod))
        return pod

    def _pod_up(self, pod: SimPod) -> None:
        if not pod.alive:
            return
        for local in range(self.world.procs):
            self.start_rank(pod, local)
        for name in list(self.coordinators):
            self.connect(pod, name)
        self._pod_beats(pod)

    def _pod_beats(self, pod: SimPod) -> None:
        if pod.alive:
            if not pod.frozen:
                self.links.beat(pod)
            self.after(pod.beat_ms, lambda: self._pod_beats(pod))

    def replace_pod(self, slot: int) -> None:
        """Start a pod like the runner, unless any coordinator reported the last round (R17)."""
        if not any(c.state.released or c.outcome for c in self.all_coordinators):
            self.start_pod(slot)

    def start_rank(self, pod: SimPod, local: int) -> None:
        """Make the agent of a pod start a rank."""
        pod.act(lambda: self._start_rank(pod, local))

    def _start_rank(self, pod: SimPod, local: int) -> None:
        if pod.closing:
            self._pod_done(pod)
            return
        slot, attempt = pod.key
        restarts = pod.restarts.get(local, -1) + 1
        pod.restarts[local] = restarts
        me = MemberId(slot, local, attempt * ATTEMPT_STRIDE + restarts)
        rank = self.ranks[me] = self.make_rank(me)
        pod.living.append(me)
        self.links.from_agent(pod, m.RankStarted(me, slot))

        def initialise() -> None:
            if rank.running:
                rank.initialised = True
                self.links.open_line(pod, me)

        self.after(self.rng.uniform(0, 20), lambda: pod.act(initialise))
        self.after(self.rng.uniform(21, 60), rank.start_script)
        self.after(pod.beat_ms, lambda: self._beat(pod, rank))

    def make_rank(self, me: MemberId) -> SimRank:
        """Return a new rank process."""
        return SimRank(self, me)

    def connect(self, pod: SimPod, name: str) -> None:
        """Connect a pod's agent to a coordinator, unless it is not up yet or cut off."""
        if pod.living or pod.dead:  # else it is not up yet
            pod.act(lambda: self._connect(pod, name))

    def _connect(self, pod: SimPod, name: str) -> None:
        reaches = name in self.coordinators and pod.key not in self.links.cut
        if reaches and (pod.key, name) not in self.links.open:
            self.links.connect(pod, name)

    def obey(self, pod: SimPod, order: m.ToAgent | m.BeatEvery) -> None:
        """Carry out an order of a coordinator to an agent."""
        match order:
            case m.BeatEvery(ms=ms):
                pod.told_to_beat_every(ms)
            case m.KillRank(member=member):
                self.kill(member, why="killed by its agent", restart=not pod.draining)
            case m.DrainPod():
                self.drain(pod.key)
            case m.Closing():
                pod.closing = True
                for each in list(pod.living):
                    if self.ranks[each].state.begun is None:
                        self.kill(each, why="it took no part")
            case m.Shutdown():
                self.after(50, lambda: self._shut(pod))

    def _shut(self, pod: SimPod) -> None:
        for member in list(pod.living):
            self.kill(member, why="shut down")

    def _beat(self, pod: SimPod, rank: SimRank) -> None:
        if not (rank.running or (rank.alive and self.world.after_ms)):
            return
        s = rank.state
        if not rank.stopped:
            self.links.to_coordinators(
                rank.me,
                m.Heartbeat(
                    rank.me,
                    s.promise,
                    s.log.id,
                    s.log.version,
                    s.wants_to_leave,
                    s.log.stopped,
                    rank.doing(),
                ),
            )
        self.after(pod.beat_ms, lambda: self._beat(pod, rank))

    # ---- deaths ---------------------------------------------------------------------------

    def kill(
        self,
        member: MemberId,
        *,
        why: str = "killed",
        restart: bool = False,
        code: int = -9,
        error: m.ScriptError | None = None,
        batch: m.DealtBatch | None = None,
    ) -> None:
        """End one rank; its agent reaps it and reports the death.

        Args:
            member: the rank; one that is dead already is ignored.
            why: reason, for the story and for the report.
            restart: the agent starts the rank again, unless the pod drains or closes or the rank
                has exited.
            code: exit code that the agent reports; -9 is SIGKILL.
            error: the error that its script raised, if any.
            batch: the batch with which the script raised.
        """
        rank = self.ranks[member]
        if not rank.alive:
            return
        self.tell(f"rank {member} dies: {why}")
        pod = self.pods[pod_of(member)]
        self._dead(rank)
        pod.act(lambda: self.links.close_line(pod, member))
        restart = restart and rank.exit is None and not (pod.draining or pod.closing)
        released = rank.state.released if rank.exit is not None else None
        dead = m.RankDead(member, code, why, restart, released, error, batch)
        late = self.rng.uniform(0.5, 20)
        self.after(late, lambda: pod.act(lambda: self._reaped(pod, rank, dead)))

    def script_raises(self, member: MemberId, batch: m.DealtBatch | None) -> None:
        """End a rank by an error of its script, always at the same line."""
        why = str(MISTAKE)
        self.kill(member, why=why, restart=True, code=1, error=MISTAKE, batch=batch)

    def _dead(self, rank: SimRank) -> None:
        rank.alive = False
        self.reductions.fail(rank.me)

    def _reaped(self, pod: SimPod, rank: SimRank, dead: m.RankDead) -> None:
        self.links.from_agent(pod, dead)
        pod.living.remove(rank.me)
        pod.dead.append(rank.me)
        if dead.error is not None:
            pod.failures.append(dead)
        pod.released = pod.released or dead.released
        if dead.restarts:
            self.after(20, lambda: self.start_rank(pod, rank.me.local))
        else:
            self._pod_done(pod)

    def _pod_done(self, pod: SimPod) -> None:
        if pod.living:
            return
        self.links.from_agent(pod, m.AgentDone(*pod.key, "finished" if pod.released else "drained"))
        self.after(30, lambda: self.remove_pod(pod))

    def remove_pod(self, pod: SimPod) -> None:
        """Remove a whole pod: its agent reports nothing, only the inventory changes."""
        if not pod.alive:
            return
        pod.alive = False
        for member in pod.living:
            self._dies_with_its_pod(self.ranks[member])
        self._pod_gone(pod)

    def _dies_with_its_pod(self, rank: SimRank) -> None:
        if rank.alive:
            self.tell(f"rank {rank.me} dies with its pod")
            self._dead(rank)

    def kill_agent(self, pod: SimPod) -> None:
        """Kill an agent; its ranks notice the end of their lines and exit."""
        self.tell(f"the agent of pod {pod.key} dies")
        pod.alive = False
        for member in pod.living:
            rank = self.ranks[member]
            self.after(self.rng.uniform(0, 5), lambda r=rank: self._dies_with_its_pod(r))  # type: ignore[misc]
        self._pod_gone(pod)

    def _pod_gone(self, pod: SimPod) -> None:
        self.links.disconnect(pod)
        late = self.rng.uniform(5, 300)
        self.after(
            late, lambda: self.set_inventory(tuple(k for k in self.inventory.pods if k != pod.key))
        )

    def drain(self, key: tuple[int, int]) -> None:
        """Make an agent drain its pod."""
        self.pods[key].act(lambda: self._drain(key))

    def _drain(self, key: tuple[int, int]) -> None:
        self.pods[key].draining = True
        for member in self.pods[key].living:
            if self.ranks[member].running:
                self.tell(f"rank {member} drains")
                self.ranks[member].post(_DRAIN)

    def exited(self, rank: SimRank) -> None:
        """End the process of a rank whose machine has exited, after its script's own work."""
        assert rank.exit is not None
        self.tell(f"rank {rank.me} exits: finished={rank.exit.finished} {rank.exit.why}")
        own_ms = self.rng.uniform(0, self.world.after_ms) if self.world.after_ms else 0.0

        def end() -> None:
            if rank.stopped:
                self.after(20, end)
            else:
                self.kill(rank.me, why="exit 0", code=0)

        self.after(4 + own_ms, end)

    def breaks_channel(self) -> bool:
        """Return True if opening a data channel fails now."""
        return self.now < self.broken_until and self.rng.random() < 0.5

    # ---- running --------------------------------------------------------------------------

    def run_until(self, ns: int) -> None:
        """Run all events before this time, in nanoseconds."""
        while self.heap and self.heap[0][0] < ns:
            self.now, _, action = heapq.heappop(self.heap)
            action()

    def run(self) -> None:
        """Run until all ranks have exited; raises BrokenPromiseError if a promise breaks."""
        while self.heap:
            at, _, action = heapq.heappop(self.heap)
            self.now = at
            if at > self.world.until_ms * MS:
                raise self._broken(f"I8: not over after {self.world.until_ms} ms")
            try:
                action()
            except AssertionError as error:
                raise self._broken(f"{type(error).__name__}: {error}") from error
            if self.over():
                return
        raise self._broken("I8: nothing left to happen")

    def _broken(self, what: str) -> BrokenPromiseError:
        return BrokenPromiseError(f"{what}\n{self.story()}")

    def over(self) -> bool:
        """Return True if the history has ended."""
        if any(r.running for r in self.ranks.values()) or not (self.outcomes or self.finished):
            return False
        if not self.world.after_ms:
            return True
        if any(r.alive for r in self.ranks.values()):
            self.all_dead_ns = None
            return False
        if self.all_dead_ns is None:
            self.all_dead_ns = self.now
            self.after(OUTCOME_MS, lambda: None)
        decided = all(c.outcome is not None for c in self.coordinators.values())
        return decided or self.now >= self.all_dead_ns + OUTCOME_MS * MS

    @property
    def finished(self) -> list[SimRank]:
        """Ranks that exited after the job was complete."""
        return [r for r in self.ranks.values() if r.exit is not None and r.exit.finished]

    @property
    def outcomes(self) -> set[str]:
        """Reasons of all outcomes that coordinators reported."""
        return {c.outcome.reason for c in self.all_coordinators if c.outcome is not None}

    def story(self) -> str:
        """Return the seed, the world, the state of each process and the last lines of the log."""
        out = [f"seed {self.seed}  {self.world}"]
        out += [_describe(r) for r in self.ranks.values() if r.alive]
        for name, coordinator in self.coordinators.items():
            x = coordinator.state
            out.append(
                f"coordinator {name} {x.phase} gen={x.gen.id if x.gen else None} "
                f"proposal={x.proposal} asked={sorted(x.asked)} reports={sorted(x.reports)} "
                f"unstarted={sorted(x.unstarted)} due={x.due_ns} why={x.why} waits={x.waits}"
            )
        return "\n".join([*out, *self.lines])


def _describe(r: SimRank) -> str:
    s = r.state
    return (
        f"{r.me} exit={r.exit} v={s.log.version} main={s.main} waits={s.waits_for} gen={s.gen_id} "
        f"frozen={s.frozen} passive={s.passive} started={s.started} broken={s.broken} "
        f"reducing={r.reducing is not None} active={list(map(str, s.log.active))} "
        f"held={s.log.held(s.me)} pending={[p.seq for p in s.pending.steps]} "
        f"announced={s.announced},{s.announced_pending} draining={s.draining} "
        f"needs_part={s.needs_part} stopped={s.log.stopped}"
    )
