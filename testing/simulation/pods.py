"""A simulated pod: an agent with the real relay between its ranks and the coordinators."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.core import messages as m
from paceline.core.agent.relay import Relay
from paceline_api.ids import GenerationId, MemberId

if TYPE_CHECKING:
    from testing.simulation.simulation import Simulation

BEAT_MS = 100
SMALL_GROUPS_BEAT_MS = 200
LONG_MS = 150
"""`long_ms` of `Relay`. It is short, since histories are short and nothing here waits for news."""


class SimPod:
    """An agent with its ranks; the agent may be frozen."""

    def __init__(self, sim: Simulation, slot: int, attempt: int) -> None:
        self.sim = sim
        self.key = (slot, attempt)
        self.alive = True
        self.frozen = False
        """True while the agent is stopped (SIGSTOP); its ranks go on."""
        self.draining = False
        self.closing = False
        self.living: list[MemberId] = []
        self.dead: list[MemberId] = []
        self.failures: list[m.RankDead] = []
        self.released: tuple[GenerationId, int] | None = None
        self.restarts: dict[int, int] = {}
        self.beat_ms = BEAT_MS
        self.waiting: dict[str, list[m.AgentMessage | m.RankMessage]] = {}
        """Coordinator -> messages that wait until the agent has greeted it."""
        self.kept: list[m.AgentMessage] = []
        """Messages that wait for a connection."""
        self.relays: dict[str, Relay] = {}
        self._backlog: deque[Callable[[], None]] = deque()

    def relay(self, name: str) -> Relay:
        """Return the relay for a coordinator; a real agent has one, here several may act."""
        if name not in self.relays:
            relay = self.relays[name] = Relay(*self.key, long_ms=LONG_MS)
            for member in self.living:
                if self.sim.ranks[member].initialised:
                    relay.open(member)
        return self.relays[name]

    def act(self, action: Callable[[], None]) -> None:
        """Run an action of the agent now, or when it continues if it is frozen."""
        if self.frozen:
            self._backlog.append(action)
        elif self.alive:
            action()

    def thaw(self) -> None:
        """Continue after SIGSTOP: run the actions that were held back."""
        self.frozen = False
        while self._backlog and not self.frozen:
            self.act(self._backlog.popleft())

    def hear(self, name: str, src: MemberId, envelope: m.RankEnvelope) -> None:
        """Receive a message from one of the ranks for a coordinator."""
        self.act(lambda: self.sim.links.from_rank(self, name, src, envelope))

    def told_to_beat_every(self, ms: int) -> None:
        """Set the heartbeat interval; small groups use BEAT_MS, since runs are short (R42)."""
        self.beat_ms = ms if ms > SMALL_GROUPS_BEAT_MS else BEAT_MS

    def hello(self, registers: tuple[m.Register, ...]) -> m.AgentHello:
        """Return the hello with which the agent greets a coordinator."""
        return m.AgentHello(
            *self.key,
            "sim",
            "",
            tuple(self.living),
            tuple(self.dead),
            self.released,
            registers,
            tuple(self.failures),
        )
