"""Evidence about processes from agents and the inventory, and its consequences (R25, C8)."""

from __future__ import annotations

from paceline_api.errors import EXIT_BAD_INPUT
from paceline_api.failures import ruled
from paceline_api.ids import MemberId, pod_of
from paceline_api.types.enums import FailureAction, Network

from paceline.core import messages as m
from paceline.core.coordinator import ending, hearing, scripts, silence
from paceline.core.coordinator.events import ToAgent
from paceline.core.coordinator.report import carrier
from paceline.core.coordinator.roster import KnownPod, KnownRank
from paceline.core.coordinator.sizes import pods_to_drain
from paceline.core.coordinator.state import CoordinatorPhase, CoordinatorState


def from_agent(c: CoordinatorState, message: m.AgentMessage) -> bool:
    """Process a message of an agent.

    Args:
        c: The state, updated in place.
        message: The message, in the order in which the agent sent it.

    Returns:
        True if something changed that decisions read.
    """
    pods, beats = len(c.roster.pods), False
    match message:
        case m.AgentHello():
            pod = c.roster.pod(message.slot, message.attempt, c.now_ns)
            _hello(c, pod, message)
        case m.PodBeat():
            pod = c.roster.pod(message.slot, message.attempt, c.now_ns)
            beats = hearing.beats(c, message)
            _carried(c, pod, message.carriers)
        case m.RankGone():
            pod = c.roster.pod(*pod_of(message.member), c.now_ns)
            _rank_gone(c, c.roster.rank(message.member))
        case m.RankStarted():
            pod = c.roster.pod(*pod_of(message.member), c.now_ns)
            pod.living.add(message.member)
            rank = c.roster.rank(message.member)
            rank.pid, rank.alive_ns = message.pid, c.now_ns
            rank.newborn = c.gen is not None and rank.register is None
        case m.RankDead():
            pod = c.roster.pod(*pod_of(message.member), c.now_ns)
            pod.living.discard(message.member)
            hearing.committed(c, message.version)
            c.roster.rank(message.member).finished = message.released is not None
            # A process that never ran has no script that could have failed.
            ran = message.error is not None or c.roster.rank(message.member).pid > 0
            fails = ran and scripts.note(c, message)
            _died(c, message.member, message.why, message.exit_code, fails=fails)
            ending.prove(c, message.released)
            _count_failure(c, message, fails=fails)
        case m.AgentDone():
            pod = c.roster.pod(message.slot, message.attempt, c.now_ns)
            pod.done = message.outcome
            pod.living.clear()
            if message.outcome == "failed" and c.phase is not CoordinatorPhase.RELEASED:
                ending.fail(c, message.reason, message.message)
    news = beats or pod.silent or len(c.roster.pods) > pods
    if not silence.is_awake(c, pod):
        pod.awake_ns, news = c.now_ns, True
    pod.heard_ns, pod.silent = c.now_ns, False
    return news or not isinstance(message, m.PodBeat)


def _hello(c: CoordinatorState, pod: KnownPod, hello: m.AgentHello) -> None:
    pod.connected, pod.host = True, hello.host
    pod.awake_ns = pod.heard_ns = c.now_ns
    pod.living = set(hello.living)
    here = {register.member for register in hello.registers}
    for rank in c.roster.of_pod(pod.slot, pod.attempt):
        if rank.connected and rank.member not in here:
            _rank_gone(c, rank)
        if rank.suspect:
            rank.kill_asked = False  # the request may be lost with the old connection
    for member in hello.living:
        rank = c.roster.rank(member)
        rank.newborn = rank.register is None and (rank.newborn or pod.newborn)
        if rank.alive_ns is None:
            rank.alive_ns = c.now_ns
    pod.known, pod.newborn = True, False
    for dead in hello.failures:
        fails = scripts.note(c, dead)
        _died(c, dead.member, dead.why, dead.exit_code, fails=fails)
    for member in hello.dead:
        _died(c, member, "reaped by its agent", 0)
    if c.phase is CoordinatorPhase.RELEASED:
        ending.close(c, pod)
    if c.sent_pace is not None and c.sent_pace != c.config.pace.to_agent(0, 0):
        c.effects.append(ToAgent(pod.slot, pod.attempt, c.sent_pace))
    ending.prove(c, hello.released)
    for register in hello.registers:
        hearing.from_rank(c, register)


def gone(c: CoordinatorState, slot: int, attempt: int) -> None:
    """Note that the connection of a pod was closed: none of its ranks can be heard (R43).

    This is not evidence of a death (R25).
    """
    c.roster.pod(slot, attempt, c.now_ns).connected = False
    for rank in c.roster.of_pod(slot, attempt):
        if rank.connected:
            _rank_gone(c, rank)


def _rank_gone(c: CoordinatorState, rank: KnownRank) -> None:
    rank.connected, rank.gone_ns = False, c.now_ns


def _carried(
    c: CoordinatorState, pod: KnownPod, networks: tuple[tuple[MemberId, Network], ...] | None
) -> None:
    """Note the networks that carry a pod's data channels, and report a change of the job's.

    Args:
        c: The state, updated in place.
        pod: The pod.
        networks: The network of each rank; None if nothing changed since the pod's last report.
    """
    generation = c.gen.id if c.gen else None
    changed = generation != c.carrier_of
    if networks is not None:
        carriers = dict(networks)
        for member in pod.living:
            rank, network = c.roster.rank(member), carriers.get(member, Network.UNKNOWN)
            changed = changed or network is not rank.carrier
            rank.carrier = network
    if not changed:
        return
    c.carrier_of = generation
    now = carrier(c)
    if now and now is not c.carrier:
        c.carrier = now
        c.happened("Carrier", f"{now} carries the gradients between replicas", {"carrier": now})


def _died(
    c: CoordinatorState, member: MemberId, why: str, exit_code: int, *, fails: bool = False
) -> None:
    """Record the death of a rank and report it.

    Args:
        c: The state, updated in place.
        member: The dead rank.
        why: The evidence.
        exit_code: Exit code of the process; negative for a signal.
        fails: True if its script ended it. That is reported in every phase; other deaths are not
            reported after the release or a dismissal.
    """
    rank = c.roster.rank(member)
    if rank.dead:
        return
    rank.dead, rank.connected = why or "it has ended", False
    quiet = rank.dismissed or c.phase is CoordinatorPhase.RELEASED
    if fails or not quiet:
        c.happened("RankDied", f"rank {member}: {why}", {"exit_code": str(exit_code)})


def _count_failure(c: CoordinatorState, message: m.RankDead, *, fails: bool) -> None:
    """Judge a failed process: ignore it, count it, or end the job (C8).

    Args:
        c: The state, updated in place.
        message: The report of its agent.
        fails: True if its script ended it.
    """
    rank = c.roster.rank(message.member)
    if message.exit_code == 0 or rank.kill_asked or c.phase is CoordinatorPhase.ENDED:
        return
    if c.phase is CoordinatorPhase.RELEASED:
        _after_the_release(c, message)
        return
    action = ruled(c.config.failure_rules, message.exit_code)
    # After the last round, deaths are not failures of the job (R17).
    if action is FailureAction.FAIL_JOB and not ending.some_stopped(c):
        ending.fail(c, "FailurePolicy", f"rank {message.member}: {message.why}")
        return
    if action is FailureAction.IGNORE:
        return
    never_trained = not c.had_state and (c.gen is not None or not rank.ready)
    at_the_start = never_trained and not scripts.costs_a_batch(c, message)
    if (message.exit_code > 0 or fails) and at_the_start and action is None:
        # No rank has ever trained, so the script or the image is wrong: a restart would not help.
        known = "hint: " in message.why
        hint = "" if known else "it failed before the first round, so it is not started again"
        ending.fail(c, "ScriptFailed", f"rank {message.member}: {message.why}", hint)
        return
    mistake = message.exit_code == EXIT_BAD_INPUT and not message.restarts and not rank.leaving
    if mistake and action is None and not ending.some_stopped(c):
        # Only the user can fix this. The agent also ends for it, but reports its own end later. By
        # then the other ranks may have used up the data.
        why = f"rank {message.member}: {message.why}"
        if before := scripts.before_in_slot(c, message.member):
            why = f"{scripts.describe_failures(c, before)}; in its place {why}"
        ending.fail(c, "ScriptFailed", why)
        return
    # If a rule of the user restarts such processes, the script is not blamed for it (R55).
    script = scripts.repeated(c, message) if fails and action is None else ""
    if script and not ending.some_stopped(c):
        lines = scripts.last_lines(message)
        ending.fail(c, "ScriptFailed", f"{script}; last lines:\n{lines}" if lines else script)
        return
    c.failures += 1
    if c.failures > c.config.backoff_limit:
        ending.fail(
            c,
            "BackoffLimitExceeded",
            f"{c.failures} processes failed without a committed round in between; "
            f"the last one was rank {message.member}: {message.why}",
        )


def _after_the_release(c: CoordinatorState, message: m.RankDead) -> None:
    """Judge a death after the release: none changes the outcome, except a failing script (R17).

    Only what a released script itself reports is a failure: that it could not use the final
    weights.
    """
    if message.released is None:
        return
    if message.exit_code > 0:
        ending.fail(c, "ScriptFailed", f"rank {message.member} after the end: {message.why}")
    else:
        c.happened("ScriptCutShort", f"rank {message.member}: {message.why}")


def set_inventory(c: CoordinatorState, inventory: m.Inventory) -> None:
    """Take over an inventory of the pods that may live, unless a newer one is known (R25)."""
    known = c.roster.inventory
    if known is not None and inventory.revision <= known.revision:
        return
    c.roster.take(inventory)
    c.had_state = c.had_state or inventory.trained
    for slot, attempt in inventory.pods:
        if (slot, attempt) not in c.roster.pods:
            c.roster.pod(slot, attempt, c.now_ns).newborn = c.gen is not None
        c.roster.pod(slot, attempt, c.now_ns).listed = True


def declare_dead(c: CoordinatorState) -> None:
    """Record as dead each silent rank whose pod the newest inventory does not list (R25)."""
    inventory = c.roster.inventory
    if inventory is None:
        return
    gone = [x for x, rank in c.roster.ranks.items() if not rank.dead and c.roster.is_dead(x)]
    for member in sorted(gone):
        _died(c, member, f"its pod is gone (inventory {inventory.revision})", 0)


def drain_surplus(c: CoordinatorState) -> None:
    """Tell surplus pods to drain, if the owner of the job wants fewer replicas."""
    if not c.has_targets:
        return
    last = 0 if c.runs_script else None  # slot 0 writes what the job leaves behind (S14)
    for pod in pods_to_drain(c.roster, c.replicas, c.index if c.gen else None, last):
        pod.draining = True
        c.happened("Draining", f"replica {pod.slot} leaves: {c.replicas} are wanted")
        c.effects.append(ToAgent(pod.slot, pod.attempt, m.DrainPod("scaled down")))
