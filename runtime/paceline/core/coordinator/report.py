"""Status of the job, made from the coordinator's state and history."""

from __future__ import annotations

import msgspec
from paceline_api.ids import ATTEMPT_STRIDE, MemberId, pod_of
from paceline_api.status import LiveCondition, LogStatus, RankPhase, RankStatus, Status
from paceline_api.times import NS_PER_MS
from paceline_api.types.enums import Network

from paceline.core.agent.network import worst
from paceline.core.coordinator import ending, joining, scripts, silence, slot_zero
from paceline.core.coordinator.roster import KnownRank
from paceline.core.coordinator.state import CoordinatorState
from paceline.core.coordinator.wording import GOES_ON
from paceline.core.protocol.records import DropReason
from paceline.core.status import Fact


def status(c: CoordinatorState) -> Status:
    """Return the status of the job, with all known ranks. It changes nothing."""
    gen = c.gen
    surplus = joining.stand_by(c)
    ranks = [_rank(c, member, surplus) for member in sorted(c.roster.ranks)]
    living = [r for r in ranks if r.state is not RankPhase.DEAD]
    dead = [r for r in ranks if r.state is RankPhase.DEAD]
    # A coordinator that started after the release has no generation but still receives figures. If
    # no member has sent any yet, use those of ranks that have left.
    reporters = [s for s in c.roster.ranks.values() if s.log is not None]
    furthest = max(
        [s for s in reporters if gen is None or s.member in c.index] or reporters,
        key=lambda s: s.figures_version,
        default=None,
    )
    return Status(
        job=c.config.job,
        coordinator=c.uid,
        wall_s=c.wall_s,
        generation=gen.id if gen else c.proposal,
        replicas=c.replicas,
        has_targets=c.has_targets,
        membership_settings=c.config.membership_settings,
        procs=c.config.procs,
        beat_ms=c.config.pace.beat_ns(c.expected_pods) // NS_PER_MS,
        inventory=c.roster.inventory.revision if c.roster.inventory else 0,
        settings=msgspec.to_builtins(c.settings),
        ranks=(*living, *dead),
        version=c.version,
        transport=_transport(c),
        transport_why=c.channel_why,
        carrier=carrier(c),
        log=(furthest.log if furthest else None) or LogStatus(),
        changes=tuple(c.history.changes),
        history=tuple(c.history.entries),
        stragglers=c.stragglers,
        conditions=_conditions(c),
        restarts=_restarts(c),
        script_failures=scripts.status(c),
        unsaved=c.unsaved,
        stopping=any(s.stopped for s in c.roster.ranks.values()) or c.released is not None,
        released=c.proven,
        outcome=c.outcome,
        silent=tuple(sorted(pod.slot for pod in c.roster.pods.values() if pod.silent)),
    )


def _transport(c: CoordinatorState) -> str:
    prefix = Fact.CARRIED
    facts = (name for member in c.index for name in c.roster.rank(member).facts)
    return "+".join(
        sorted({name.removeprefix(prefix) for name in facts if name.startswith(prefix)})
    )


def _restarts(c: CoordinatorState) -> int:
    """Return the number of restarted processes of all pods.

    Each place of each pod counts its own restarts (`ATTEMPT_STRIDE`).

    Args:
        c: The state.

    Returns:
        The sum over places.
    """
    highest: dict[tuple[int, int, int], int] = {}
    for slot, local, attempt in c.roster.ranks:
        pod, restarts = divmod(attempt, ATTEMPT_STRIDE)
        highest[slot, local, pod] = max(restarts, highest.get((slot, local, pod), 0))
    return sum(highest.values())


def carrier(c: CoordinatorState) -> Network:
    """Return the network of the job: the worst of its members', UNKNOWN within a single pod."""
    members = c.gen.members if c.gen else ()
    if len({member.slot for member in members}) < 2:
        return Network.UNKNOWN
    return worst(c.roster.rank(member).carrier for member in members)


def _rank(c: CoordinatorState, member: MemberId, surplus: set[MemberId]) -> RankStatus:
    rank = c.roster.rank(member)
    return RankStatus(
        member=member,
        state=RankPhase.STANDBY if member in surplus else _state(c, member, rank),
        rank=c.index.get(member),
        pid=rank.pid,
        host=_host(c, rank),
        version=rank.version,
        silent_ms=(c.now_ns - rank.heard_ns) // NS_PER_MS if rank.heard_ns else 0,
        facts=_own(rank),
        carrier=rank.carrier,
        why=rank.dead or rank.suspect or silence.unheard_since(c, rank),
        finished=rank.finished or rank.stopped is not None,
    )


def _host(c: CoordinatorState, rank: KnownRank) -> str:
    if rank.register is not None:
        return rank.register.host
    pod = c.roster.pods.get(pod_of(rank.member))
    return pod.host if pod is not None else ""


def _own(rank: KnownRank) -> dict[str, float]:
    """Return what a rank has measured about itself; its step time comes from its heartbeat."""
    return {**rank.facts, Fact.STEP_S: rank.beat.step_s} if rank.beat.step_s else rank.facts


def _state(c: CoordinatorState, member: MemberId, rank: KnownRank) -> RankPhase:
    if rank.dead or c.roster.is_dead(member):
        return RankPhase.DEAD
    if rank.suspect:
        return RankPhase.SUSPECT
    if rank.stopped is not None:
        return RankPhase.FINISHED
    if rank.leaving:
        return RankPhase.DRAINING
    if member in c.index:
        if rank.beat.active:
            return RankPhase.ACTIVE
        if rank.beat.benched:
            return RankPhase.BENCHED
        return RankPhase.JOINING
    return RankPhase.JOINING if rank.ready else RankPhase.STARTING


def _skipped(c: CoordinatorState) -> int:
    """Return the number of samples that the job has skipped, as far as figures report it.

    The number is the same on all ranks but for the age of their figures.

    Args:
        c: The state.

    Returns:
        The highest number that any rank reports.
    """
    logs = (s.log for s in c.roster.ranks.values() if s.log is not None)
    return max((log.samples_dropped.get(DropReason.SKIPPED, 0) for log in logs), default=0)


def _conditions(c: CoordinatorState) -> tuple[LiveCondition, ...]:
    conditions = []
    now = c.wall_s
    if c.gen is not None and not c.unstarted and c.outcome is None and c.due_ns is None:
        text = f"{len(c.gen.members)} ranks in generation {c.gen.id}"
        conditions.append(LiveCondition("RingReady", "GenerationStarted", text, now))
    unheard = []
    if c.outcome is None and (text := silence.never_heard(c)):
        unheard = [LiveCondition("Degraded", "ScriptTakesNoPart", text, now)]
    conditions += unheard if c.gen is not None else []
    if c.outcome is None and (text := silence.stuck_scripts(c)):
        conditions.append(LiveCondition("Degraded", "ScriptStuck", text, now))
    if text := ending.running_scripts(c):
        conditions.append(LiveCondition("Degraded", "ScriptStillRuns", text, now))
    if c.outcome is None and (text := slot_zero.waits(c)):
        conditions.append(LiveCondition("Degraded", "WaitingForRank0", text, now))
    if c.starts_over and c.outcome is None:
        conditions.append(LiveCondition("Degraded", "ScriptStartsOver", c.starts_over, now))
    if (skipped := _skipped(c)) and c.outcome is None:
        text = f"{skipped:,} samples were taken from the loader and no step was made of them"
        conditions.append(LiveCondition("Degraded", "SamplesSkipped", text, now))
    if c.waits:
        conditions.append(LiveCondition("Degraded", "WaitingForEvidence", c.waits, now))
    if c.gen is None:
        conditions += unheard  # the last condition of a type is shown where only one fits
    if c.unsaved:
        conditions.append(
            LiveCondition("Degraded", "CheckpointFailed", f"{c.unsaved}; {GOES_ON}", now)
        )
    k = c.settings.quorum
    active = len(c.gen.active) if c.gen else 0
    if c.gen is not None and k > active:
        text = f"quorum {k} is asked for, {active} ranks are active"
        conditions.append(LiveCondition("Degraded", "QuorumReduced", text, now))
    running = sum(1 for pod in c.roster.running_pods() if not pod.draining)
    if c.has_targets and running != c.replicas:
        text = f"{running} replicas run, {c.replicas} are wanted"
        conditions.append(LiveCondition("Resizing", "ReplicasDiffer", text, now))
    return tuple(conditions)
