"""Decisions made only after changes equal those made after every event.

The oracle is a coordinator that scans all ranks at every event. Both receive the same random story:
ranks that register, send heartbeats, promise, start, complain, leave and die, agents, inventories,
targets, and time that passes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.protocol.rows import rows_of
from paceline_api.ids import NO_GENERATION, GenerationId, MemberId
from paceline_api.settings import StragglerSettings
from paceline_api.types.enums import Network, StragglerResponse

from testing.examples import examples
from testing.makers import member, pod_beat
from tests.core.coordinator.test_coordinator import prepared, register

MS = 10**6
RANKS = 4
CONFIG = coord.Config(
    "job",
    replicas=3,
    min_replicas=2,
    settle_ns=300 * MS,
    stabilization_ns=50 * MS,
    freeze_timeout_ns=400 * MS,
    connect_timeout_ns=300 * MS,
    straggler=StragglerSettings(
        window_rounds=1,
        slowdown_factor=2.0,
        respond=(StragglerResponse.TOLERATE, StragglerResponse.RESTART_IN_PLACE),
        cooldown_ns=10**9,
    ),
)


class Thorough(coord.Coordinator):
    """A coordinator that scans all ranks after each event."""

    def _is_due(self) -> bool:
        return True


@dataclass
class Played:
    """The state of a rank, as far as its answers show it."""

    me: MemberId
    promise: GenerationId = NO_GENERATION
    last: GenerationId = NO_GENERATION
    active: tuple[MemberId, ...] = ()
    version: int = 0
    orders: deque[m.ToRank] = field(default_factory=deque)

    @property
    def report(self) -> dict[str, object]:
        state = self.last != NO_GENERATION
        return {"has_state": state, "version": self.version}

    def obey(self) -> m.RankMessage | None:
        match self.orders.popleft() if self.orders else None:
            case m.Prepare(id=id_) if id_ > self.promise:
                self.promise = id_
                sets = ("members", "with_state", "active", "gen_active")
                log = dict.fromkeys(sets, self.active)
                tail = tuple((v, str(v)) for v in range(self.version + 1))
                at = {"index": self.version, "digest": str(self.version), "tail": tail}
                return prepared(self.me, id_, last=self.last, **log, **at, **self.report)
            case m.Commit(gen=gen) if gen.id == self.promise and self.me in gen.members:
                self.last, self.active, self.version = gen.id, gen.active, gen.version
                return m.Started(gen.id, self.me, self.me in gen.with_state)
        return None


class Stage:
    """Two coordinators that receive the same events."""

    def __init__(self) -> None:
        self.now = 0
        self.quick = coord.Coordinator(CONFIG, uid="a", now_ns=0)
        self.thorough = Thorough(CONFIG, uid="a", now_ns=0)
        self.ranks = {member(n): Played(member(n)) for n in range(RANKS)}
        self.wake: dict[coord.Coordinator, int | None] = {self.quick: None, self.thorough: None}
        self.revision = 0

    def pass_time(self, ms: int) -> None:
        end = self.now + ms * MS
        while (due := min((t for t in self.wake.values() if t is not None), default=end)) < end:
            self.now = max(due, self.now)
            self.wake = {x: t if t is None or t > self.now else None for x, t in self.wake.items()}
            self.post(coord.Tick())
        self.now = end

    def post(self, event: coord.Event) -> None:
        effects = {x: self._effects(x, event) for x in (self.quick, self.thorough)}
        assert effects[self.quick] == effects[self.thorough], event
        for effect in effects[self.quick]:
            if isinstance(effect, coord.ToRank):
                self.ranks[effect.member].orders.append(effect.message)

    def _effects(self, machine: coord.Coordinator, event: coord.Event) -> list[coord.Effect]:
        effects = machine.handle(self.now, event)
        for each in effects:
            if isinstance(each, coord.WakeAt):
                self.wake[machine] = each.at_ns
        return [x for x in effects if not isinstance(x, coord.WakeAt)]

    def say(self, message: m.RankMessage | None) -> None:
        if message is not None:
            self.post(coord.FromRank(message))

    def agent_says(self, message: m.AgentMessage) -> None:
        self.post(coord.FromAgent(message))


def happen(stage: Stage, what: str, who: int, n: int) -> None:
    rank = stage.ranks[member(who)]
    me = rank.me
    match what:
        case "register":
            registration = register(me, rank.last, **{**rank.report, "promise": rank.promise})
            rows = rows_of(rank.active)
            stage.say(
                replace(registration, ready=n != 0, members=rows, gen_active=rows, leaving=n == 1)
            )
        case "beat":
            rank.version += n % 2 if rank.last != NO_GENERATION else 0
            doing = m.Doing(100 * n, rank.version, usual_ms=10 * (n % 5))
            stage.agent_says(pod_beat(beat(rank, doing=doing, step=0.01 * (1 + n))))
        case "obey":
            stage.say(rank.obey())
        case "all obey":
            for each in stage.ranks.values():
                stage.say(each.obey())
        case "leave":
            stage.say(m.Leaving(rank.last, me, n == 0))
        case "complain":
            stage.say(m.Complain(rank.last, me, rank.version, "no link"))
        case "stop":
            stage.say(m.Stopped(rank.last, me, rank.version))
        case "gone":
            stage.post(coord.FromAgent(m.RankGone(me)))
        case "hello":
            registration = register(me, rank.last, **{**rank.report, "promise": rank.promise})
            here = (registration,) if n % 2 else ()
            stage.agent_says(m.AgentHello(who, 0, "h", "", (me,), (), registers=here))
        case "agent beats":
            stage.agent_says(m.PodBeat(who, 0, carriers=((me, Network.TCP),) if n else ()))
        case "all still":
            version = rank.version
            at: dict[str, Any] = {"promise": rank.promise, "last": rank.last, "version": version}
            stage.agent_says(m.PodBeat(who, 0, ((me.local, me.attempt),), **at))
        case "agent gone":
            stage.post(coord.AgentGone(who, 0))
        case "dies":
            stage.agent_says(m.RankDead(me, 1 if n == 8 else -9, "", restarts=False))
        case "inventory":
            stage.revision += 1
            pods = tuple((x, 0) for x in range(RANKS) if x != who or n)
            stage.post(coord.SetInventory(m.Inventory(stage.revision, pods)))
        case "targets":
            stage.post(coord.SetTargets(m.Targets(replicas=1 + n % RANKS)))
        case "time":
            stage.pass_time((1, 20, 100, 350, 410)[n % 5])


def beat(rank: Played, *, doing: m.Doing, step: float) -> m.Heartbeat:
    at = rank.promise, rank.last, rank.version
    return m.Heartbeat(rank.me, *at, doing=doing, active=True, step_s=step)


EVENTS = (
    *("beat", "beat", "beat", "all still"),
    *("obey", "all obey", "time") * 2,
    *("register", "leave", "complain", "stop", "gone", "hello", "agent beats"),
    *("agent gone", "dies", "inventory", "targets"),
)
STEP = st.tuples(st.sampled_from(EVENTS), st.integers(0, RANKS - 1), st.integers(0, 8))


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from((0, 2, 3, 3, 4)), st.lists(STEP, min_size=20, max_size=60))
def test_decisions_equal_those_of_a_coordinator_that_scans_at_each_event(
    first: int, story: list[tuple[str, int, int]]
) -> None:
    stage = Stage()
    happen(stage, "inventory", 0, 1)
    for who in range(first):
        happen(stage, "hello", who, 0)
        happen(stage, "register", who, 2)
    happen(stage, "all obey", 0, 0)
    happen(stage, "all obey", 0, 0)
    for what, who, n in story:
        stage.pass_time(1)
        happen(stage, what, who, n)
