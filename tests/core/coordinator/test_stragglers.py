"""The coordinator's verdict on slow ranks.

The only response that it carries out itself is RestartInPlace.
"""

from __future__ import annotations

from typing import Any

from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.coordinator.state import CoordinatorPhase
from paceline.core.protocol.rows import rows_of
from paceline_api.ids import NO_GENERATION, MemberId
from paceline_api.settings import StragglerSettings
from paceline_api.status import Status
from paceline_api.types.enums import StragglerResponse as Do

from testing.makers import PLAN, member, pod_beat

S = 10**9
A, B, C = (member(slot) for slot in range(3))
AGAIN = MemberId(2, 0, 1)
"""The process that follows C in its place."""


class Job:
    """Three ranks that train with the step times that the test gives."""

    def __init__(self, *respond: Do) -> None:
        straggler = StragglerSettings(10, 1.5, respond, 20 * S)
        config = coord.Config("job", 3, settle_ns=S, straggler=straggler)
        self.coordinator = coord.Coordinator(config, uid="a", now_ns=0, wall_s=1000.0)
        self.now_ns = self.gens = 0
        self.kills: list[m.KillRank] = []
        pods = m.Inventory(1, ((0, 0), (1, 0), (2, 0)))
        self.post(coord.SetInventory(pods))
        for who in (A, B, C):
            self.post(coord.FromAgent(m.AgentHello(who.slot, 0, "h", "", (who,), ())))
        for who in (A, B, C):
            self.register(who)
        self.change(A, B, C)

    def post(self, event: coord.Event) -> None:
        self.now_ns += S // 1000
        for effect in self.coordinator.handle(self.now_ns, event):
            if isinstance(effect, coord.ToAgent) and isinstance(effect.message, m.KillRank):
                self.kills.append(effect.message)

    def say(self, message: Any) -> None:
        if isinstance(message, m.Heartbeat):
            self.post(coord.FromAgent(pod_beat(message)))
        else:
            self.post(coord.FromRank(message))

    def register(self, who: MemberId) -> None:
        ends = m.Endpoints("t", "d")
        none = NO_GENERATION
        self.say(m.Register(who, 1, "h", ends, none, none, 0, False, ready=True, plan=PLAN))

    def change(self, *who: MemberId) -> None:
        state = self.coordinator.state
        assert state.phase is CoordinatorPhase.PREPARING, state.phase
        gen = state.gen
        for each in who:
            old = gen if gen is not None and each in gen.members else None
            report = m.Prepared(
                id=state.proposal,
                member=each,
                last=old.id if old else NO_GENERATION,
                version=0,
                index=self.gens if old else 0,
                digest="x" if old else "",
                tail=((self.gens, "x"),) if old else ((0, ""),),
                accepted=old.id if old else NO_GENERATION,
                members=rows_of(old.members if old else ()),
                with_state=rows_of(old.members if old else ()),
                active=rows_of(old.members if old else ()),
                benched=(),
                gen_active=rows_of(old.active if old else ()),
                started=0,
                has_state=old is not None,
                ready=True,
                leaving=False,
                stopped=False,
                request=0,
            )
            self.say(report)
        for each in who:
            self.say(m.Started(state.proposal, each, True))
        assert CoordinatorPhase(state.phase) is CoordinatorPhase.RUNNING, state.phase
        self.gens += 1

    def train(self, seconds: int, **steps_s: float) -> Status:
        """Return the status after some seconds of heartbeats with these step times.

        Example: `train(5, a=0.1, c=0.3)`.
        """
        ranks = {"a": A, "b": B, "c": C, "again": AGAIN}
        gen = self.coordinator.state.gen
        assert gen is not None
        for _ in range(seconds):
            self.now_ns += S
            for name, step_s in steps_s.items():
                who = ranks[name]
                self.say(m.RankFigures(who, 1, {"log.round_seconds": 0.1}))
                self.say(m.Heartbeat(who, gen.id, gen.id, 1, active=True, step_s=step_s))
        return self.coordinator.status(self.now_ns)


def test_a_slow_rank_is_reported_with_its_slowdown_and_start_time() -> None:
    job = Job(Do.TOLERATE)
    assert job.train(3, a=0.1, b=0.1, c=0.1).stragglers == ()
    status = job.train(5, a=0.1, b=0.1, c=0.32)
    [slow] = status.stragglers
    assert (slow.member, slow.percent, slow.action) == (C, 320, "Tolerate")
    assert 1003 < slow.since_wall_s < 1006
    [event] = [h for h in status.history if h.reason == "RankSlow"]
    assert "320 % of the median step" in event.message
    assert job.kills == []
    assert job.train(2, a=0.1, b=0.1, c=0.1).stragglers == ()


def test_restart_in_place_happens_once_and_the_next_process_continues_the_ladder() -> None:
    job = Job(Do.RESTART_IN_PLACE, Do.REPLACE)
    job.train(10, a=0.1, b=0.1, c=0.3)
    [kill] = job.kills
    assert kill.member == C
    assert "RestartInPlace" in kill.why
    job.post(coord.FromAgent(m.RankDead(C, -9, "killed by its agent", True)))
    assert job.coordinator.state.failures == 0, "it was asked for"
    job.change(A, B)
    job.post(coord.FromAgent(m.RankStarted(AGAIN, 7)))
    job.train(2, a=0.1, b=0.1)
    job.register(AGAIN)
    job.change(A, B, AGAIN)
    [slow] = job.train(12, a=0.1, b=0.1, again=0.3).stragglers
    assert (slow.member, slow.action) == (AGAIN, "Replace"), "its place went on on the ladder"
    assert len(job.kills) == 1
