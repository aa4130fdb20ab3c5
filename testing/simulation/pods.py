"""A pod: the real relay between its ranks and the coordinators, in an agent that may be frozen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.core import messages as m
from paceline.core.agent.relay import Relay
from paceline.core.protocol.ids import GenerationId, MemberId

if TYPE_CHECKING:
    from testing.simulation.simulation import Simulation

BEAT_MS = 100
SMALL_GROUPS_BEAT_MS = 200
LONG_MS = 150
"""Of `Relay`; histories are short, and nobody waits for news here."""


class SimPod:
    """An agent with its ranks."""

    def __init__(self, sim: Simulation, slot: int, attempt: int) -> None:
        self.sim = sim
        self.key = (slot, attempt)
        self.alive = True
        self.frozen = False
        """Its agent (SIGSTOP); the ranks go on."""
        self.draining = False
        self.closing = False
        self.living: list[MemberId] = []
        self.dead: list[MemberId] = []
        self.failures: list[m.RankDead] = []
        self.released: tuple[GenerationId, int] | None = None
        self.restarts: dict[int, int] = {}
        self.beat_ms = BEAT_MS
        self.waiting: dict[str, list[m.AgentMessage | m.RankMessage]] = {}
        """What waits for the greeting, by coordinator."""
        self.kept: list[m.AgentMessage] = []
        """What waits for a connection."""
        self.relays: dict[str, Relay] = {}
        self._backlog: deque[Callable[[], None]] = deque()

    def relay(self, name: str) -> Relay:
        """An agent has one; here there may be several coordinators at the same time."""
        if name not in self.relays:
            relay = self.relays[name] = Relay(*self.key, long_ms=LONG_MS)
            for member in self.living:
                if self.sim.ranks[member].initialised:
                    relay.open(member)
        return self.relays[name]

    def act(self, action: Callable[[], None]) -> None:
        """The agent does something, now or when it goes on."""
        if self.frozen:
            self._backlog.append(action)
        elif self.alive:
            action()

    def thaw(self) -> None:
        self.frozen = False
        while self._backlog and not self.frozen:
            self.act(self._backlog.popleft())

    def hear(self, name: str, src: MemberId, said: m.Said) -> None:
        self.act(lambda: self.sim.links.heard(self, name, src, said))

    def told_to_beat_every(self, ms: int) -> None:
        """R42. Small groups beat twice as often here as they are told: histories are short."""
        self.beat_ms = ms if ms > SMALL_GROUPS_BEAT_MS else BEAT_MS

    def hello(self, registers: tuple[m.Register, ...]) -> m.AgentHello:
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
