"""A simulated coordinator process: the real state machine, simulated connections and a timer."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.coordinator.pace import LoadBounds
from paceline.core.coordinator.state import CoordinatorState

from testing.simulation.world import MS

if TYPE_CHECKING:
    from testing.simulation.simulation import Simulation


class SimCoordinator:
    """One coordinator; it may be stopped (SIGSTOP), killed, or retire by itself."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self.sim, self.name = sim, name
        world = sim.world
        pause_ns = int(world.pause_ms * MS) // (world.replicas * world.procs)
        config = coord.Config(
            job="sim",
            replicas=world.replicas,
            procs=world.procs,
            settings=world.settings,
            settle_ns=world.settle_ms * MS,
            stabilization_ns=world.stabilization_ms * MS,
            allowed_sizes=world.allowed,
            freeze_timeout_ns=world.freeze_ms * MS,
            connect_timeout_ns=world.freeze_ms * MS // 4,
            backoff_limit=1000,
            max_skipped_batches=world.max_skipped,
            pace=LoadBounds(small=0, pause_per_rank_ns=pause_ns) if pause_ns else LoadBounds(),
        )
        self.machine = coord.Coordinator(config, uid=name, now_ns=sim.now)
        self.alive = True
        self.stopped = False
        self.backlog: deque[coord.Event] = deque()
        self.outcome: coord.Outcome | None = None
        self.retired = ""
        self.wake_ns: int | None = None
        self.reasons: list[str] = []

    @property
    def state(self) -> CoordinatorState:
        """State of the coordinator's machine."""
        return self.machine.state

    def thaw(self) -> None:
        """Continue after SIGSTOP: handle the events that arrived meanwhile."""
        self.stopped = False
        while self.backlog:
            self.post(self.backlog.popleft())

    def post(self, event: coord.Event) -> None:
        """Handle an event and carry out its effects; queue it while stopped."""
        if not self.alive:
            return
        if self.stopped:
            self.backlog.append(event)
            return
        for effect in coord.by_pod(self.machine.handle(self.sim.now, event)):
            self._carry_out(effect)

    def _carry_out(self, effect: coord.Effect | coord.ToRanks) -> None:
        sim = self.sim
        match effect:
            case coord.ToRanks(message=message):
                if isinstance(message, m.Commit | m.CommitChange):
                    assert self.state.commit is not None
                    sim.checkers.formed(self.state, self.state.commit.gen)
                sim.links.to_ranks(self.name, effect)
            case coord.ToAgent(slot=slot, attempt=attempt, message=order):
                sim.links.to_agent(self.name, (slot, attempt), order)
            case coord.WakeAt(at_ns=at_ns):
                self.wake_ns = at_ns
                sim.at(at_ns, lambda: self._tick(at_ns))
            case coord.JobEnded(outcome=outcome):
                self.outcome = outcome
                sim.checkers.job_ended(self.state, outcome.reason)
            case coord.Retire(why=why):
                self.retired, self.alive = why, False
                sim.tell(f"coordinator {self.name} retires: {why}")
                sim.retired(self)
            case coord.Happened(reason=reason, message=message, facts=facts):
                self.reasons.append(reason)
                why = f" ({facts['why']})" if "why" in facts else ""
                sim.tell(f"coordinator {self.name}: {reason}: {message}{why}")

    def _tick(self, at_ns: int) -> None:
        if self.wake_ns == at_ns:
            self.post(coord.Tick())
