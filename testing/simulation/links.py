"""Messages in flight: delays, order, and the loss of messages by a death or a cut connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline_api.ids import MemberId, pod_of

from testing.simulation.sums import Sum
from testing.simulation.world import MS

if TYPE_CHECKING:
    from testing.simulation.pods import SimPod
    from testing.simulation.simulation import Simulation

GREET_MS = 20
"""Longest time for which an agent waits for its ranks' introductions before it greets."""

Copies = tuple[Any, ...]
"""Copy of a rank's state, which only its receiver looks into."""
Gate = Callable[[tuple[object, ...], Struct, Callable[[], None]], bool]
"""(lane, message, action that delivers it) -> True if the gate takes the message over."""


class Links:
    """All connections of a job.

    Messages between two ends arrive in order, after any delay. A message is lost if an end is gone
    or cut off when it would arrive.
    """

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.last: dict[tuple[object, ...], int] = {}
        self.open: dict[tuple[tuple[int, int], str], int] = {}
        """Connections of pods to coordinators, by a number that separates old from new ones."""
        self.cut: set[tuple[int, int]] = set()
        """Pods that reach no coordinator."""
        self.gate: Gate | None = None
        """Hook by which a test may hold or drop single messages."""

    def _send(
        self,
        lane: tuple[object, ...],
        message: Struct,
        action: Callable[[], None],
        ms: float = 0,
    ) -> None:
        if self.gate is None or not self.gate(lane, message, lambda: self._later(lane, action, ms)):
            self._later(lane, action, ms)

    def _later(self, lane: tuple[object, ...], action: Callable[[], None], ms: float = 0) -> None:
        low, high = self.sim.world.delay_ms
        due = self.sim.now + int((self.sim.rng.uniform(low, high) + ms) * MS)
        due = max(due, self.last.get(lane, 0) + 1)
        self.last[lane] = due
        self.sim.at(due, action)

    # ---- rank and rank --------------------------------------------------------------------

    def to_peer(self, src: MemberId, dst: MemberId, message: m.PeerMessage) -> None:
        """Send a message from one rank to another."""
        self._send((src, dst), message, lambda: self._deliver(src, dst, message))

    def send_part(self, src: MemberId, dst: MemberId, part: m.LogPart, result: Sum | None) -> None:
        """Send a missing part of the log, with the accumulated sum if it is needed."""

        def arrive() -> None:
            self.sim.ranks[dst].part = result
            self._deliver(src, dst, part)

        self._send((src, dst), part, arrive)

    def send_state(
        self, src: MemberId, dst: MemberId, state: m.StateTransfer, copied: Copies
    ) -> None:
        """Send a joiner the state, which takes up to `World.stream_ms` longer than a message."""

        def arrive() -> None:
            self.sim.ranks[dst].staged[state.generation] = copied
            self._deliver(src, dst, state)

        ms = self.sim.rng.uniform(0, self.sim.world.stream_ms)
        self._send((src, dst, "stream"), state, arrive, ms)

    def _deliver(self, src: MemberId, dst: MemberId, message: m.PeerMessage) -> None:
        rank = self.sim.ranks.get(dst)
        if rank is None or not rank.running:
            return
        if not isinstance(message, m.Start | m.Announce):
            self.sim.tell(f"{src} -> {dst}: {type(message).__name__}")
        rank.post(message)

    # ---- pod and coordinator (R43) --------------------------------------------------------

    def connect(self, pod: SimPod, name: str) -> None:
        """Connect the agent of a pod to a coordinator.

        The agent greets when all of its ranks that take part have introduced themselves, and after
        GREET_MS at the latest.

        Args:
            pod: the pod that connects.
            name: the coordinator's name.
        """
        self.sim.count += 1
        number = self.open[pod.key, name] = self.sim.count
        pod.waiting[name] = []
        for member, word in pod.relay(name).connect():
            self._introduce(name, member, word)

        def greet() -> None:
            if self.open.get((pod.key, name)) == number:
                pod.act(lambda: self.greet(pod, name))

        self.sim.after(GREET_MS, greet)
        self._greet_if_all_are_there(pod, name)

    def _greet_if_all_are_there(self, pod: SimPod, name: str) -> None:
        if not pod.relay(name).awaits:
            self.greet(pod, name)

    def greet(self, pod: SimPod, name: str) -> None:
        """Send the agent's hello, then the messages that waited for it."""
        if name not in pod.waiting:
            return  # it has greeted already
        hello, waiting = pod.hello(pod.relay(name).greet()), pod.waiting.pop(name)
        for message in (hello, *pod.kept, *waiting):
            self._way_up(pod, name, message)()
        pod.kept.clear()

    def disconnect(self, pod: SimPod, *, noticed: bool = True) -> None:
        """Close all connections of a pod; with `noticed` the coordinators receive AgentGone."""
        for key, name in [k for k in self.open if k[0] == pod.key]:
            del self.open[key, name]
            pod.waiting.pop(name, None)
            pod.relay(name).disconnect()
            if noticed:
                self.sim.to_coordinators(coord.AgentGone(*pod.key), name)

    def names(self, pod: SimPod) -> list[str]:
        """Return the names of the living coordinators to which a pod is connected."""
        return [name for key, name in self.open if key == pod.key and name in self.sim.coordinators]

    def open_line(self, pod: SimPod, member: MemberId) -> None:
        """Open the line between a rank and its agent, which introduces the rank."""
        for name, relay in pod.relays.items():
            if (word := relay.open(member)) is not None:
                self._introduce(name, member, word)

    def close_line(self, pod: SimPod, member: MemberId) -> None:
        """Close the line of a rank that has ended."""
        for name, relay in pod.relays.items():
            for word in relay.close(member):
                self._way_up(pod, name, word)()

    def _introduce(self, name: str, member: MemberId, word: m.Introduce) -> None:
        self.sim.ranks[member].introduce(name, word)

    def to_coordinators(self, src: MemberId, message: m.RankMessage | m.Heartbeat) -> None:
        """Send a message of a rank to its agent, which passes it on to each coordinator."""
        pod = self.sim.pods[pod_of(src)]
        for name, number in list(self.sim.ranks[src].connections.items()):
            pod.hear(name, src, m.RankEnvelope(number, message))

    def from_rank(self, pod: SimPod, name: str, src: MemberId, envelope: m.RankEnvelope) -> None:
        """Relay a rank's message to a coordinator, as its agent does."""
        if (pod.key, name) not in self.open:
            return
        words = pod.relay(name).hear(src, envelope)
        if name in pod.waiting:
            self._greet_if_all_are_there(pod, name)
        for word in words:
            send = self._way_up(pod, name, word)
            if self.gate is None or not self.gate((src, name), word, send):
                send()

    def from_agent(self, pod: SimPod, message: m.AgentMessage) -> None:
        """Send an agent's evidence; without a connection, keep it for the next one."""
        names = self.names(pod)
        for name in names:
            self._way_up(pod, name, message)()
        if not names:
            pod.kept.append(message)

    def beat(self, pod: SimPod) -> None:
        """Send a pod's heartbeat to each coordinator that it has greeted."""
        for name in self.names(pod):
            if name not in pod.waiting:
                self._way_up(pod, name, pod.relay(name).beat())()

    def _way_up(
        self, pod: SimPod, name: str, message: m.AgentMessage | m.RankMessage
    ) -> Callable[[], None]:
        """Return an action that sends a message over the connection that is open now."""
        if name in pod.waiting:
            return lambda: pod.waiting.get(name, []).append(message)
        number = self.open.get((pod.key, name))

        def arrive() -> None:
            if number is not None and self.open.get((pod.key, name)) == number:
                self.sim.to_coordinators(coord.heard(message), name)

        return lambda: self._later((pod.key, name), arrive)

    def to_ranks(self, name: str, order: coord.ToRanks) -> None:
        """Send a coordinator's message to ranks of a pod by way of their agent."""
        pod, message = self.sim.pods[order.pod], order.message
        members = []
        for member in order.members:
            alone = self._way_down(name, pod, lambda x=member: self._tell(name, pod, (x,), message))  # type: ignore[misc]
            if self.gate is None or not self.gate((name, member), message, alone):
                members.append(member)
        if members:
            self._way_down(name, pod, lambda: self._tell(name, pod, members, message))()

    def _tell(self, name: str, pod: SimPod, members: Iterable[MemberId], message: m.ToRank) -> None:
        for member in pod.relay(name).listeners(members):
            rank = self.sim.ranks[member]
            if rank.running:
                self.sim.tell(f"{name} -> {member}: {_short(message)}")
                rank.post(message)

    def to_agent(self, name: str, key: tuple[int, int], order: m.ToAgent | m.BeatEvery) -> None:
        """Send a coordinator's order to an agent."""
        pod = self.sim.pods[key]
        self._way_down(name, pod, lambda: self.sim.obey(pod, order))()

    def _way_down(self, name: str, pod: SimPod, action: Callable[[], None]) -> Callable[[], None]:
        number = self.open.get((pod.key, name))

        def arrive() -> None:
            lost = number is None or self.open.get((pod.key, name)) != number
            if name not in self.sim.coordinators:  # the last messages of a dead one may be lost
                lost = lost or self.sim.rng.random() < 0.5
            if not lost:
                pod.act(action)

        return lambda: self._later((name, pod.key), arrive)


def _short(message: Struct) -> str:
    match message:
        case m.Prepare(id=id_):
            return f"Prepare {id_}"
        case m.CommitChange(id=id_, base=base):
            return f"Commit {id_} as a change of {base}"
        case m.Commit(gen=gen, joiners=joiners, behind=behind):
            extra = [f" joiners={list(map(str, joiners))}"] if joiners else []
            extra += [f" behind={[str(x) for x, _, _ in behind]}"] if behind else []
            return f"Commit {gen.id}{''.join(extra)}"
    return type(message).__name__
