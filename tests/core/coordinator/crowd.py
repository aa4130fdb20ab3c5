"""A coordinator and the ranks of a job on a virtual clock, which send what real ranks send.

The ranks live in pods of eight. There are no sockets.
"""

from __future__ import annotations

import msgspec
from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.agent.relay import Relay
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.rows import Rows, rows_of
from paceline_api.ids import NO_GENERATION, GenerationId, MemberId, pod_of

S = 10**9
MS = 10**6
PROCS = 8
SPREAD_NS = S
"""Time within which registrations, answers and deaths of all ranks arrive."""
UID = "5b3c1d0a-6f0e-4c39-9a56-0d8f8f6b2f11"
"""Identity of the coordinator, as long as a pod's UID."""


class Crowd:
    """A coordinator and its ranks on a virtual clock."""

    def __init__(self, ranks: int) -> None:
        self.now = S
        self.wake: int | None = None
        self.heard_bytes = 0
        pods = ranks // PROCS
        self.pods = tuple((slot, 0) for slot in range(pods))
        self.members = [MemberId(s, n, 0) for s in range(pods) for n in range(PROCS)]
        config = coord.Config("job", replicas=pods, procs=PROCS, settle_ns=60 * S)
        self.coordinator = coord.Coordinator(config, uid=UID, now_ns=self.now)
        self.orders: list[coord.ToRank] = []
        self.numbers: dict[MemberId, int] = {}
        self.relays = {pod: self._relay(pod) for pod in self.pods}
        self.rows: Rows = ()
        """Members of the generation in force, all of them active and with state."""

    @property
    def gen(self) -> GenerationId:
        """Id of the generation in force."""
        gen = self.coordinator.state.gen
        return gen.id if gen else NO_GENERATION

    def post(self, event: coord.Event) -> None:
        """Pass an event to the coordinator and keep its effects."""
        for effect in self.coordinator.handle(self.now, event):
            if isinstance(effect, coord.WakeAt):
                self.wake = effect.at_ns
            elif isinstance(effect, coord.ToRank):
                self.orders.append(effect)

    def at(self, at_ns: int) -> None:
        """Advance the clock; due timers fire on the way."""
        while self.wake is not None and self.wake <= at_ns:
            self.now, self.wake = max(self.now, self.wake), None
            self.post(coord.Tick())
        self.now = max(self.now, at_ns)

    def all_say(self, events: list[coord.Event]) -> None:
        """Post events, spread evenly over SPREAD_NS."""
        begin = self.now
        for n, event in enumerate(events):
            self.at(begin + n * SPREAD_NS // len(events))
            self.post(event)
        self.at(begin + SPREAD_NS)

    def hear(self, message: m.RankMessage | m.AgentMessage) -> None:
        """Deliver a message to the coordinator and count its bytes."""
        self.heard_bytes += len(msgspec.json.encode(message))
        self.post(coord.heard(message))

    def start(self) -> None:
        """Register all agents and ranks and run until the first generation has started."""
        self.post(coord.SetInventory(m.Inventory(1, self.pods)))
        hello = [
            m.AgentHello(slot, 0, "h", "", tuple(x for x in self.members if x.slot == slot), ())
            for slot, _ in self.pods
        ]
        self.all_say([coord.FromAgent(x) for x in hello])
        self.all_say([coord.FromRank(self._register(x)) for x in self.members])
        self.at(self.now + SPREAD_NS)
        self.answer()

    def lose(self, member: MemberId) -> None:
        """Let one rank die; the others continue without it."""
        self.members.remove(member)
        [gone] = self.relays[pod_of(member)].close(member)
        self.hear(gone)
        self.post(coord.FromAgent(m.RankDead(member, -9, "killed", restarts=False)))
        self.at(self.now + SPREAD_NS)
        self.answer()

    def answer(self) -> None:
        """Answer the coordinator's orders until it sends no more."""
        while self.orders:
            orders, self.orders = self.orders, []
            gen = self.coordinator.state.gen
            self.rows = rows_of(gen.members) if gen else ()
            answers = [self._answer(x.member, x.message) for x in orders]
            self.all_say([coord.FromRank(x) for x in answers if x is not None])

    def beat(self, version: int, pods: tuple[tuple[int, int], ...]) -> None:
        """Deliver the beats of these pods, all of whose ranks have sent one since the last."""
        for pod in pods:
            self.hear(self.said_by(pod, version))

    def said_by(self, pod: tuple[int, int], version: int) -> m.PodBeat:
        """Return the beat that a pod's agent makes of the heartbeats of its ranks."""
        doing = m.Doing(3, version, 12, 1_000_000_000)
        relay = self.relays[pod]
        for member in relay.lines:
            beat = m.Heartbeat(
                member, self.gen, self.gen, version, doing=doing, active=True, step_s=0.012345
            )
            relay.hear(member, m.RankEnvelope(self.numbers[member], beat))
        return relay.beat()

    def _relay(self, pod: tuple[int, int]) -> Relay:
        relay = Relay(*pod)
        for member in (x for x in self.members if pod_of(x) == pod):
            relay.open(member)
        for member, word in relay.connect():
            self.numbers[member] = word.connection
            relay.hear(member, m.RankEnvelope(word.connection, self._register(member)))
        relay.greet()
        return relay

    def _register(self, member: MemberId) -> m.Register:
        where = m.Endpoints(f"tcp://10.0.0.{member.slot}:5000", f"10.0.0.{member.slot}:6000")
        last = NO_GENERATION
        return m.Register(
            member, 1, "host", where, last, last, 0, False, True, plan=DataPlan(steps=10**6)
        )

    def _answer(self, member: MemberId, order: object) -> m.RankMessage | None:
        commit = self.coordinator.state.commit
        gen = commit.gen if commit is not None else None
        match order:
            case m.Prepare(id=id_):
                return m.Prepared(
                    id=id_,
                    member=member,
                    last=self.gen,
                    version=gen.version if gen else 0,
                    index=0,
                    digest="",
                    tail=((0, ""),),
                    accepted=self.gen,
                    members=self.rows,
                    with_state=self.rows,
                    active=self.rows,
                    benched=(),
                    gen_active=self.rows,
                    started=0,
                    has_state=gen is not None,
                    ready=True,
                    leaving=False,
                    stopped=False,
                    request=0,
                )
            case m.Commit() | m.CommitChange():
                return m.Started(self.gen, member, has_state=True)
        return None
