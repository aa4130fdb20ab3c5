"""Suspicion of silent or stuck ranks, and the timeouts behind it (R6, R25, R35).

Silence makes a rank suspect, never dead. Its living agent kills it, which is evidence. Without an
agent the change continues without the rank, if R6 allows that. A silent agent makes all of its
ranks silent, since it passes on their messages (R43). They are suspect, and the agent is asked to
kill them only if it is back and they are still silent.

A rank whose communication thread is stuck is not silent, since another thread sends its heartbeats.
They report for how long that thread has been at one piece of work. If that is too long for any
reduction, a PREPARE ends the round. A stuck rank cannot answer it, and a missing answer counts as
silence.
"""

from __future__ import annotations

from paceline_api.ids import NO_GENERATION, pod_of
from paceline_api.times import NS_PER_MS, NS_PER_S

from paceline.core import messages as m
from paceline.core.coordinator import ending, slot_zero
from paceline.core.coordinator.events import ToAgent, WakeAt
from paceline.core.coordinator.roster import KnownPod, KnownRank
from paceline.core.coordinator.state import CoordinatorPhase, CoordinatorState
from paceline.core.coordinator.timeouts import (
    GONE_NS,
    INIT_NS,
    RESTORE_NS,
    SLOWEST_BYTES_PER_S,
    USUAL_TIMES,
)
from paceline.core.coordinator.wording import format_clock, named


def suspect_the_silent(c: CoordinatorState) -> None:
    """Mark as suspect each rank that has been silent, or owed an answer, for too long."""
    silent = []
    for rank in c.roster.ranks.values():
        if rank.dismissed or not _is_listened_for(c, rank):
            continue
        limit_ns, since_ns = _patience(c, rank)
        silent_ns = c.now_ns - since_ns
        if silent_ns >= limit_ns:
            silent.append((rank.member, silent_ns))
    for member, silent_ns in sorted(silent):
        rank = c.roster.rank(member)
        rank.mute = c.owes_an_answer(member)
        _suspect(c, rank, f"silent for {silent_ns / NS_PER_S:.1f} s")


def _is_listened_for(c: CoordinatorState, rank: KnownRank) -> bool:
    """Return True if the silence of this rank is judged."""
    if rank.register is None or rank.suspect or c.roster.is_dead(rank.member):
        return False
    # A released rank whose line is closed may take its time: its agent reports the end.
    return rank.gone_ns is None or not c.is_over


def _suspect(c: CoordinatorState, rank: KnownRank, why: str) -> None:
    """Mark a rank as suspect, so that it is not asked anything, and report that."""
    rank.suspect = why
    c.happened("RankSilent", f"rank {rank.member} is {why}")


def kill_the_silent(c: CoordinatorState) -> None:
    """Ask the agents of suspect ranks to kill them, which turns suspicion into evidence."""
    for rank in sorted(_to_be_killed(c), key=lambda s: s.member):
        agent = c.roster.agent_of(rank.member)
        if agent is not None and is_awake(c, agent) and _kill_due_ns(c, rank, agent) <= c.now_ns:
            _kill(c, rank)


def _kill(c: CoordinatorState, rank: KnownRank) -> None:
    agent = c.roster.agent_of(rank.member)
    if agent is not None:
        rank.kill_asked = True
        kill = m.KillRank(rank.member, rank.suspect)
        c.effects.append(ToAgent(agent.slot, agent.attempt, kill))


def _suspect_the_stuck(c: CoordinatorState, rank: KnownRank, why: str) -> None:
    """Mark a rank as suspect because its own heartbeats report that it is stuck.

    Its heartbeats come from another thread, so further ones do not clear it.
    """
    rank.mute = True
    _suspect(c, rank, why)
    _kill(c, rank)


def _to_be_killed(c: CoordinatorState) -> list[KnownRank]:
    return [
        rank
        for member, rank in c.roster.ranks.items()
        if rank.suspect and not rank.kill_asked and not c.roster.is_dead(member)
    ]


def is_awake(c: CoordinatorState, agent: KnownPod) -> bool:
    """Return True if the agent was heard within half of the freeze timeout (R43)."""
    return c.now_ns - agent.heard_ns < c.freeze_ns // 2


def _kill_due_ns(c: CoordinatorState, rank: KnownRank, agent: KnownPod) -> int:
    """Return the time at which the agent is asked to kill the rank.

    By then the agent has been heard for the whole freeze timeout without a pause. A rank that is
    only silent has been so for as long. For a rank that owes an answer or is stuck, heartbeats do
    not count.

    Args:
        c: The state.
        rank: The suspect rank.
        agent: Its connected agent.

    Returns:
        Monotonic time in nanoseconds.
    """
    since_ns = agent.awake_ns if rank.mute else max(agent.awake_ns, rank.heard_ns)
    return since_ns + c.freeze_ns


def name_those_never_heard(c: CoordinatorState) -> None:
    """Report each rank once that has run for a minute without a call of `pl.init()`.

    Its script may never call it and work on its own for days, or hang before the call and hold up
    the job. The rank is not killed: it may be reading its data, which can take an hour.
    """
    if c.phase is CoordinatorPhase.RELEASED:
        return
    new = [s for s in _never_heard(c) if not s.unheard and _init_due_ns(s) <= c.now_ns]
    if new:
        for rank in new:
            rank.unheard = True
        c.happened("ScriptTakesNoPart", never_heard(c))


def give_up_silent_agents(c: CoordinatorState) -> None:
    """Stop waiting, after the release, for agents that have been silent for the freeze timeout.

    Only an agent can report that its ranks have ended, and a stopped agent never does. Before the
    release an agent's silence counts as the silence of its ranks.
    """
    for pod in _whose_word_is_awaited(c):
        if c.now_ns - pod.heard_ns >= c.freeze_ns:
            pod.silent = True
            text = f"the agent of replica {pod.slot} says nothing; the job ends without its word"
            c.happened("AgentSilent", text)


def _whose_word_is_awaited(c: CoordinatorState) -> list[KnownPod]:
    """Return the agents that still have to report the end of their ranks after the release."""
    if c.phase is not CoordinatorPhase.RELEASED:
        return []
    return [p for p in c.roster.pods.values() if p.connected and p.living and not p.silent]


def _never_heard(c: CoordinatorState) -> list[KnownRank]:
    """Return the living ranks that have not registered."""
    return [
        rank
        for member, rank in c.roster.ranks.items()
        if rank.register is None and rank.alive_ns is not None and not c.roster.is_dead(member)
    ]


def _init_due_ns(rank: KnownRank) -> int:
    assert rank.alive_ns is not None
    return rank.alive_ns + INIT_NS


def never_heard(c: CoordinatorState) -> str:
    """Describe the ranks that have run for a minute without `pl.init()`.

    Args:
        c: The state.

    Returns:
        Their names, where they run, and what to do; empty if there are none.
    """
    late = sorted((s for s in _never_heard(c) if s.unheard), key=lambda s: s.member)
    if not late:
        return ""
    one = len(late) == 1
    names = named([f"{rank.member} ({_process(c, rank)})" for rank in late])
    who = f"rank {names} has" if one else f"ranks {names} have"
    held_up = f"; the job waits for {'it' if one else 'them'}" if c.gen is None and c.waits else ""
    pid = late[0].pid or "PID"
    return (
        f"{who} run for a minute without pl.init(){held_up}. If the script hangs, "
        f"`py-spy dump --pid {pid}` on its host or in its pod shows where, and `paceline logs` "
        "shows what it wrote last; if it still reads its data, call pl.init() before that; if it "
        "is a script for torchrun, start it by `paceline launch SCRIPT` (docs/porting.md). "
        "Only spec.activeDeadlineSeconds ends it"
    )


def unheard_since(c: CoordinatorState, rank: KnownRank) -> str:
    """Return since when a rank is known to run without `pl.init()`.

    Args:
        c: The state.
        rank: The rank.

    Returns:
        Empty within the first minute, and once it has called `pl.init()`.
    """
    if not rank.unheard or rank.register is not None or rank.alive_ns is None:
        return ""
    since = format_clock(c.wall_offset_s + rank.alive_ns / NS_PER_S)
    return f"has not called pl.init() since {since}"


def _process(c: CoordinatorState, rank: KnownRank) -> str:
    """Return the pid, host and start time of a process.

    The pid is unknown if the agent has reported it only to an earlier coordinator.

    Args:
        c: The state.
        rank: The rank, whose start was reported.

    Returns:
        Text for a message.
    """
    agent = c.roster.pods.get(pod_of(rank.member))
    pid = f"pid {rank.pid}" if rank.pid else "pid not known"
    host = f" on {agent.host}" if agent is not None and agent.host else ""
    assert rank.alive_ns is not None
    return f"{pid}{host}, since {format_clock(c.wall_offset_s + rank.alive_ns / NS_PER_S)}"


def name_a_stuck_script(c: CoordinatorState, rank: KnownRank) -> None:
    """Report once for each process that its script has not come back to step().

    The rank itself ends such a process at the step deadline.
    """
    if rank.beat.away is not None and not rank.away_reported and c.outcome is None:
        rank.away_reported = True
        c.happened("ScriptStuck", _stuck_script(c, rank, rank.beat.away))


def stuck_scripts(c: CoordinatorState) -> str:
    """Describe the scripts that have not come back to step(), with their lines; empty if none."""
    stuck = [(rank, rank.beat.away) for rank in c.roster.present() if rank.beat.away is not None]
    return named([_stuck_script(c, rank, away) for rank, away in stuck], "; ")


def _stuck_script(c: CoordinatorState, rank: KnownRank, away: m.Away) -> str:
    host = f" on {rank.register.host}" if rank.register is not None else ""
    where = f" ({away.file}, line {away.line})" if away.file else ""
    return (
        f"the script of rank {rank.member}{host} has not come back to step() since "
        f"{format_clock(away.since_s)}{where}; it is ended after "
        f"{c.config.step_deadline_ns // NS_PER_S} s (spec.stepDeadlineSeconds)"
    )


def break_off_the_stuck(c: CoordinatorState) -> None:
    """Give up a round that does not end, for a new membership (R35).

    A rank outside the membership blocks no round. If it is stuck it would never become a member, so
    it is suspected and killed.
    """
    for rank in c.roster.present():
        if rank.member not in c.index and _is_stuck_outside(c, rank):
            assert rank.beat.doing is not None
            when = (
                "after the release"
                if c.phase is CoordinatorPhase.RELEASED
                else "before its first round"
            )
            why = f"stuck for {rank.beat.doing.for_ms / 1e3:.1f} s {when}"
            _suspect_the_stuck(c, rank, why)
    if c.gen is None or c.phase not in (CoordinatorPhase.RUNNING, CoordinatorPhase.RELEASED):
        return
    members = [c.roster.rank(member) for member in c.gen.members]
    bound_ns = c.stuck_ns = _longest_work_ns(c, members)
    c.long_at_work = {s.member for s in members if _is_long_at_work(c, s.beat.doing)}
    for rank in members:
        doing = rank.beat.doing
        if doing is None or not rank.present or rank.promise != c.gen.id:
            continue
        if doing.for_ms * NS_PER_MS < bound_ns:
            continue
        where = f"in the reduction of round {doing.round}" if doing.round >= 0 else "at one thing"
        why = f"rank {rank.member} has been {where} for {doing.for_ms / 1e3:.1f} s"
        if c.phase is CoordinatorPhase.RELEASED:  # no PREPARE is sent after the release
            _suspect_the_stuck(c, rank, why)
            continue
        c.happened("RoundStuck", f"{why}, the bound is {bound_ns / NS_PER_S:.1f} s")
        c.want_change(why, 0)
        return


def works(c: CoordinatorState, rank: KnownRank, before: m.Doing | None) -> bool:
    """Note the work of a communication thread from its last heartbeat (R35).

    Args:
        c: The state, updated in place.
        rank: The rank.
        before: Its work according to the heartbeat before.

    Returns:
        True if `break_off_the_stuck` may now find a rank that it did not find before.
    """
    now = rank.beat.doing
    if rank.member not in c.index:
        return _is_stuck_outside(c, rank)
    if c.phase not in (CoordinatorPhase.RUNNING, CoordinatorPhase.RELEASED):
        return False
    if before is not None and (
        now is None or now.usual_ms < before.usual_ms or now.payload_bytes < before.payload_bytes
    ):  # it may have been the longest of all reductions, so compute the bound again when needed
        c.stuck_ns = c.freeze_ns
        if c.long_at_work:
            return True
    c.long_at_work.discard(rank.member)
    if now is None or not _is_long_at_work(c, now):
        return False
    c.long_at_work.add(rank.member)
    return now.for_ms * NS_PER_MS >= c.stuck_ns


def _is_stuck_outside(c: CoordinatorState, rank: KnownRank) -> bool:
    """Return True if a rank that is not a member has been at one piece of work for too long.

    Two kinds of ranks are judged differently. A rank that owes an answer is judged by that. A
    rank with weights, which may be unknown to this coordinator, waits for the others in a round and
    for a PREPARE. After the release no PREPARE comes any more, so such a rank is judged here too.

    Args:
        c: The state.
        rank: The rank.

    Returns:
        True if the rank is to be suspected.
    """
    waits = rank.has_state or rank.last != NO_GENERATION
    return (
        rank.beat.doing is not None
        and not (waits and c.phase is not CoordinatorPhase.RELEASED)
        and not c.owes_an_answer(rank.member)
        and rank.beat.doing.for_ms * NS_PER_MS >= _longest_work_ns(c, [rank])
    )


def _is_long_at_work(c: CoordinatorState, doing: m.Doing | None) -> bool:
    return doing is not None and doing.for_ms * NS_PER_MS >= c.freeze_ns


def _longest_work_ns(c: CoordinatorState, members: list[KnownRank]) -> int:
    """Return the upper bound on one piece of work, in nanoseconds.

    It is never below the time that a working reduction takes: where the estimate is too low, each
    generation that ends without a round doubles it.

    Args:
        c: The state.
        members: Ranks whose last reductions and payloads count.

    Returns:
        The freeze timeout plus the estimate, doubled per futile generation.
    """
    doing = [rank.beat.doing for rank in members if rank.beat.doing is not None]
    usual_ns = max((d.usual_ms for d in doing), default=0) * NS_PER_MS
    payload_bytes = max((d.payload_bytes for d in doing), default=0)
    slow_ns = payload_bytes * NS_PER_S // SLOWEST_BYTES_PER_S
    work_ns = max(USUAL_TIMES * usual_ns, slow_ns)
    return (c.freeze_ns + work_ns) << min(c.futile, 10)


def _patience(c: CoordinatorState, rank: KnownRank) -> tuple[int, int]:
    """Return the tolerated silence of a rank and the start of its present silence.

    Args:
        c: The state.
        rank: The rank.

    Returns:
        (bound, start) in nanoseconds. The rank is suspect at their sum.
    """
    freeze_ns = c.freeze_ns
    if rank.gone_ns is not None:
        agent = c.roster.agent_of(rank.member)
        if agent is None:
            return GONE_NS, rank.gone_ns
        return freeze_ns, max(rank.gone_ns, agent.awake_ns)
    if c.owes_an_answer(rank.member):
        asked_ns = min(c.asked_ns, rank.heard_ns)
        if c.phase is not CoordinatorPhase.STARTING:
            return freeze_ns, asked_ns
        # All members wait for one that does not connect, until they report that. Killing the ranks
        # that still send heartbeats before that would end the job.
        restoring = c.commit is not None and c.commit.restore is not None
        bound_ns = max(freeze_ns, RESTORE_NS) if restoring else freeze_ns
        return min(
            (bound_ns + c.config.connect_timeout_ns, asked_ns), (bound_ns, rank.heard_ns), key=sum
        )
    return freeze_ns, rank.heard_ns


def heard(c: CoordinatorState, rank: KnownRank, *, answers: bool) -> None:
    """Note that a rank was heard, and clear its suspicion if this message may.

    Args:
        c: The state, updated in place.
        rank: The rank.
        answers: True for anything but a heartbeat or figures, which another thread may send. Only
            such a message clears a rank that owed an answer or was stuck.
    """
    rank.heard_ns = c.now_ns
    if rank.suspect and (answers or not rank.mute):
        rank.suspect, rank.mute = "", False
        c.changed = True
        c.happened("RankBack", f"rank {rank.member} answers again")
        if c.released is not None:  # RELEASE went only to ranks that could be asked then
            c.tell(rank.member, m.Release(*c.released))
            return
        c.want_change(f"rank {rank.member} answers again", 0)


def forgive_own_sleep(c: CoordinatorState, now_ns: int) -> None:
    """Restart all timeouts if this process itself was stopped: it could not have heard anybody."""
    late_ns = now_ns - c.wake_ns if c.wake_ns is not None else 0
    if late_ns > c.freeze_ns // 2:
        for rank in c.roster.ranks.values():
            rank.heard_ns = now_ns
            rank.gone_ns = None if rank.gone_ns is None else now_ns
        for pod in c.roster.pods.values():
            pod.heard_ns = pod.awake_ns = now_ns
        c.asked_ns = c.wake_ns = now_ns


def wake(c: CoordinatorState) -> None:
    """Request a Tick for the next time at which something follows from time alone.

    Messages until then can only move that time back, so heartbeats do not compute it again. When it
    comes, all ranks are looked at once. That happens as often as one rank may be silent.
    """
    times = []
    if c.due_ns is not None and c.phase is not CoordinatorPhase.PREPARING:
        times.append(c.due_ns)
    if c.joins_ns is not None:
        times.append(c.joins_ns)
    ranks = c.roster.ranks.values()
    times.extend(sum(_patience(c, rank)) for rank in ranks if _is_listened_for(c, rank))
    for rank in _to_be_killed(c):
        agent = c.roster.agent_of(rank.member)
        if agent is not None and is_awake(c, agent):
            times.append(_kill_due_ns(c, rank, agent))
    if c.phase is not CoordinatorPhase.RELEASED:
        times += [_init_due_ns(rank) for rank in _never_heard(c)]
    times += [p.heard_ns + c.freeze_ns for p in _whose_word_is_awaited(c)]
    if c.phase is CoordinatorPhase.RELEASED and not c.overtime_reported:
        times.append(ending.overtime_due_ns(c))
    if c.without_slot_0_ns is not None:
        times.append(slot_zero.due_ns(c))
    c.wake_ns = min((t for t in times if t > c.now_ns), default=None)
    if c.wake_ns is not None:
        c.effects.append(WakeAt(c.wake_ns))


def wake_by(c: CoordinatorState, at_ns: int) -> None:
    """Request a Tick at this time, unless one comes earlier."""
    if c.wake_ns is None or not c.now_ns < c.wake_ns <= at_ns:
        c.wake_ns = at_ns
        c.effects.append(WakeAt(at_ns))


def answered(c: CoordinatorState, rank: KnownRank) -> None:
    """Request a Tick for the shorter timeout of a rank that has just given its last owed answer."""
    wake_by(c, sum(_patience(c, rank)))
