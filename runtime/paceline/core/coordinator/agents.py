"""Evidence: what agents and the inventory say about processes, and what failures mean (R25, C8)."""

from __future__ import annotations

from paceline_api.errors import EXIT_BAD_INPUT
from paceline_api.failures import ruled
from paceline_api.types.enums import FailureAction

from paceline.core import messages as m
from paceline.core.coordinator import ending, hearing, scripts, silence
from paceline.core.coordinator.events import ToAgent
from paceline.core.coordinator.report import carrier
from paceline.core.coordinator.roster import KnownPod, KnownRank
from paceline.core.coordinator.sizes import pods_to_drain
from paceline.core.coordinator.state import CoordinatorState, Phase
from paceline.core.messages import Network
from paceline.core.protocol.ids import MemberId


def from_agent(c: CoordinatorState, message: m.AgentMessage) -> bool:
    """Whether anything has changed that a decision is made from."""
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
            pod = c.roster.pod(*m.pod_of(message.member), c.now_ns)
            _rank_gone(c, c.roster.rank(message.member))
        case m.RankStarted():
            pod = c.roster.pod(*m.pod_of(message.member), c.now_ns)
            pod.living.add(message.member)
            seen = c.roster.rank(message.member)
            seen.pid, seen.alive_ns = message.pid, c.now_ns
            seen.newborn = c.gen is not None and seen.register is None
        case m.RankDead():
            pod = c.roster.pod(*m.pod_of(message.member), c.now_ns)
            pod.living.discard(message.member)
            hearing.committed(c, message.version)
            c.roster.rank(message.member).finished = message.released is not None
            # What never ran has no script that could have failed.
            ran = message.error is not None or c.roster.rank(message.member).pid > 0
            fails = ran and scripts.note(c, message)
            _died(c, message.member, message.why, message.exit_code, fails=fails)
            ending.prove(c, message.released)
            _count_failure(c, message, fails=fails)
        case m.AgentDone():
            pod = c.roster.pod(message.slot, message.attempt, c.now_ns)
            pod.done = message.outcome
            pod.living.clear()
            if message.outcome == "failed" and c.phase is not Phase.RELEASED:
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
    for seen in c.roster.of_pod(pod.slot, pod.attempt):
        if seen.connected and seen.member not in here:
            _rank_gone(c, seen)
        if seen.suspect:
            seen.kill_asked = False  # over the connection before, where it may be lost
    for member in hello.living:
        seen = c.roster.rank(member)
        seen.newborn = seen.register is None and (seen.newborn or pod.newborn)
        if seen.alive_ns is None:
            seen.alive_ns = c.now_ns
    pod.known, pod.newborn = True, False
    for dead in hello.failures:
        fails = scripts.note(c, dead)
        _died(c, dead.member, dead.why, dead.exit_code, fails=fails)
    for member in hello.dead:
        _died(c, member, "reaped by its agent", 0)
    if c.phase is Phase.RELEASED:
        ending.close(c, pod)
    if c.pace_told is not None and c.pace_told != c.config.pace.to_agent(0, 0):
        c.effects.append(ToAgent(pod.slot, pod.attempt, c.pace_told))
    ending.prove(c, hello.released)
    for register in hello.registers:
        hearing.from_rank(c, register)


def gone(c: CoordinatorState, slot: int, attempt: int) -> None:
    """The pod's connection is closed: nobody of it is heard any more (R43)."""
    c.roster.pod(slot, attempt, c.now_ns).connected = False
    for seen in c.roster.of_pod(slot, attempt):
        if seen.connected:
            _rank_gone(c, seen)


def _rank_gone(c: CoordinatorState, seen: KnownRank) -> None:
    seen.connected, seen.gone_ns = False, c.now_ns


def _carried(
    c: CoordinatorState, pod: KnownPod, said: tuple[tuple[MemberId, Network], ...] | None
) -> None:
    """`said`: None where it is what was said before."""
    generation = c.gen.id if c.gen else None
    changed = generation != c.carrier_of
    if said is not None:
        carriers = dict(said)
        for member in pod.living:
            seen, found = c.roster.rank(member), carriers.get(member, Network.UNKNOWN)
            changed = changed or found is not seen.carrier
            seen.carrier = found
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
    """`fails`: its script has ended it, which is told in every phase."""
    seen = c.roster.rank(member)
    if seen.dead:
        return
    seen.dead, seen.connected = why or "it has ended", False
    quiet = seen.dismissed or c.phase is Phase.RELEASED
    if fails or not quiet:
        c.happened("RankDied", f"rank {member}: {why}", {"exit_code": str(exit_code)})


def _count_failure(c: CoordinatorState, message: m.RankDead, *, fails: bool) -> None:
    """`fails`: its script has ended it."""
    seen = c.roster.rank(message.member)
    if message.exit_code == 0 or seen.kill_asked or c.phase is Phase.ENDED:
        return
    if c.phase is Phase.RELEASED:
        _after_the_release(c, message)
        return
    action = ruled(c.config.failure_rules, message.exit_code)
    # Once the last round is made, deaths are no failures of the job (R17).
    if action is FailureAction.FAIL_JOB and not ending.some_stopped(c):
        ending.fail(c, "FailurePolicy", f"rank {message.member}: {message.why}")
        return
    if action is FailureAction.IGNORE:
        return
    never_trained = not c.had_state and (c.gen is not None or not seen.ready)
    at_the_start = never_trained and not scripts.costs_a_batch(c, message)
    if (message.exit_code > 0 or fails) and at_the_start and action is None:
        # No rank has ever trained: a mistake in the script or the image, not bad luck.
        known = "hint: " in message.why
        hint = "" if known else "it failed before the first round, so it is not started again"
        ending.fail(c, "ScriptFailed", f"rank {message.member}: {message.why}", hint)
        return
    mistake = message.exit_code == EXIT_BAD_INPUT and not message.restarts and not seen.leaving
    if mistake and action is None and not ending.some_stopped(c):
        # Only the user can mend it. Its agent ends for it, but says so later than it says this: by
        # then the others may have worked off the data.
        ending.fail(c, "RankFailed", f"rank {message.member}: {message.why}")
        return
    # What the user has ruled to be mended by a new process is not held against the script (R55).
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
    """R17: no death takes anything away from a job that is complete. Only what a script itself says
    is told as a failure: that it could not do what it wanted with the final weights."""
    if message.released is None:
        return
    if message.exit_code > 0:
        ending.fail(c, "ScriptFailed", f"rank {message.member} after the end: {message.why}")
    else:
        c.happened("ScriptCutShort", f"rank {message.member}: {message.why}")


def set_inventory(c: CoordinatorState, inventory: m.Inventory) -> None:
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
    """Who is silent and not in the inventory any more is known dead (R25)."""
    inventory = c.roster.inventory
    if inventory is None:
        return
    gone = [x for x, seen in c.roster.ranks.items() if not seen.dead and c.roster.is_dead(x)]
    for member in sorted(gone):
        _died(c, member, f"its pod is gone (inventory {inventory.revision})", 0)


def drain_surplus(c: CoordinatorState) -> None:
    if not c.told:
        return
    for pod in pods_to_drain(c.roster, c.replicas, c.index if c.gen else None):
        pod.draining = True
        c.happened("Draining", f"replica {pod.slot} leaves: {c.replicas} are wanted")
        c.effects.append(ToAgent(pod.slot, pod.attempt, m.DrainPod("scaled down")))
