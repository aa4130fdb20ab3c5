"""Judgment of ranks that are slow for long, and the response that the coordinator carries out.

`paceline_api.slow` judges from the step times in heartbeats. The verdict is in the status, for
people, the runner and the operator. RestartInPlace is carried out here, by the rank's agent, once
for each time it is a step of the ladder. Replace is carried out by the owner of the pods.
"""

from __future__ import annotations

from paceline_api import slow
from paceline_api.ids import MemberId, pod_of
from paceline_api.status import StragglerStatus
from paceline_api.types.enums import StragglerResponse

from paceline.core import messages as m
from paceline.core.coordinator.events import ToAgent
from paceline.core.coordinator.roster import KnownRank
from paceline.core.coordinator.state import CoordinatorPhase, CoordinatorState
from paceline.core.coordinator.timeouts import JUDGE_NS


def is_due(c: CoordinatorState) -> bool:
    """Return True if ranks are judged in this phase and the next judgment is due."""
    judges = c.config.straggler is not None and c.phase is CoordinatorPhase.RUNNING
    return judges and c.now_ns >= c.judge_ns


def judge_now_and_then(c: CoordinatorState) -> None:
    """Compare the step times of all members if it is due; act on the slow ones."""
    settings = c.config.straggler
    if settings is None or not is_due(c):
        return
    c.judge_ns = c.now_ns + JUDGE_NS
    if any(s.stopped for s in c.roster.ranks.values()):
        return
    steps = {
        _key(pod.slot, local, pod.attempt): 0.0
        for pod in c.roster.running_pods()
        for local in range(c.config.procs)
    }
    ranks = {}
    for rank in c.roster.ranks.values():
        if not rank.dead and rank.member in c.index:
            key = _key(rank.member.slot, rank.member.local, pod_of(rank.member)[1])
            ranks[key] = rank
            steps[key] = rank.beat.step_s if rank.beat.active else 0.0
    verdict = slow.judge(
        [slow.StepTime(key, step_s) for key, step_s in sorted(steps.items())],
        settings,
        round_s=max((s.log.round_s or 0.0 for s in ranks.values() if s.log), default=0.0),
        since=c.slow_since,
        now_s=c.wall_s,
    )
    c.slow_since = dict(verdict.since)
    c.slow_steps = {key: step for key, step in c.slow_steps.items() if key in c.slow_since}
    c.stragglers = tuple(_status_of(ranks[s.key].member, s) for s in verdict.slow)
    for each in verdict.slow:
        if c.slow_steps.get(each.key) != each.step:
            c.slow_steps[each.key] = each.step
            _step(c, ranks[each.key], each)


def _key(slot: int, local: int, pod_attempt: int) -> str:
    """Return the key of a place in a pod. A restarted process continues on the same ladder."""
    return f"{slot}.{local}#{pod_attempt}"


def _status_of(member: MemberId, straggler: slow.Slow) -> StragglerStatus:
    return StragglerStatus(member, straggler.percent, straggler.since_s, str(straggler.action))


def _step(c: CoordinatorState, rank: KnownRank, straggler: slow.Slow) -> None:
    """Take the next step of the ladder against a rank that is slow."""
    text = f"rank {rank.member} takes {straggler.percent} % of the median step"
    c.happened("RankSlow", f"{text}; straggler.respond: {straggler.action}")
    agent = c.roster.agent_of(rank.member)
    if straggler.action is StragglerResponse.RESTART_IN_PLACE and agent is not None:
        rank.kill_asked = True
        kill = m.KillRank(rank.member, f"{text}; it is started again (RestartInPlace)")
        c.effects.append(ToAgent(agent.slot, agent.attempt, kill))
