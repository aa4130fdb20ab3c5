"""Faults that can happen to a job, each with a name and a time: the vocabulary of histories."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace
from paceline.core import messages as m
from paceline.core.protocol.sampling import total_leases
from paceline_api.ids import pod_of
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from testing.simulation.pods import SimPod
from testing.simulation.ranks import SimRank
from testing.simulation.simulation import Simulation


class Kind(StrEnum):
    """Kinds of faults."""

    KILL = "kill"
    """Kill one rank; its agent lives and restarts it."""
    WIPE = "wipe"
    """Kill every rank at the same time; the agents live."""
    LOSE = "lose"
    """Remove a pod with everything in it; only the inventory reports the loss."""
    CUT = "cut"
    """Disconnect a pod from all coordinators: a false suspicion."""
    RECONNECT = "reconnect"
    """Replace a pod's connections; messages in flight on them are lost."""
    ORPHAN = "orphan"
    """Kill the agent of a pod; its ranks notice and exit (D6)."""
    DAZE = "daze"
    """Stop an agent (SIGSTOP): neither it nor its ranks exchange messages with a coordinator."""
    HANG = "hang"
    """Hang the main thread of a rank."""
    FREEZE = "freeze"
    """Stop a rank (SIGSTOP)."""
    STUCK = "stuck"
    """Block the communication thread of a rank while its heartbeats go on. From FOR_EVER_MS on it
    never ends."""
    DRAIN = "drain"
    JOIN = "join"
    """Request and start one more replica."""
    SHRINK = "shrink"
    """Request one replica fewer."""
    CRASH = "crash"
    """Kill all coordinators; another one starts."""
    TWIN = "twin"
    """Start a second coordinator beside the first."""
    SLEEP = "sleep"
    """Stop the coordinators (SIGSTOP)."""
    BREAK = "break"
    """Make links between ranks fail for a while."""
    MODE = "mode"
    """Request other settings."""
    RAISE = "raise"
    """Raise in the script of a rank, at the same line in each such fault."""
    BAD = "bad"
    """Raise in the script whenever it computes a certain lease, on any rank, from now on."""


BY_CHANCE = tuple(kind for kind in Kind if kind not in (Kind.RAISE, Kind.BAD))
"""Kinds that every job has to survive."""

FOR_EVER_MS = 600


@dataclass(frozen=True)
class Fault:
    """One fault of a history."""

    at_ms: float
    kind: Kind
    ms: float = 100.0
    """Duration of the fault, or the delay until a replacement starts."""
    pick: int = 0
    """Selects one of the possible victims."""


def plant(sim: Simulation, faults: list[Fault]) -> None:
    """Schedule the faults, with times relative to now."""
    for fault in faults:
        sim.after(fault.at_ms, lambda f=fault: happen(sim, f))  # type: ignore[misc]


def plant_at_the_end(sim: Simulation, faults: list[Fault]) -> None:
    """Schedule the faults relative to the moment when the first rank has made the last round."""
    sim.at_the_end.append(lambda: plant(sim, faults))


def happen(sim: Simulation, fault: Fault) -> None:
    """Inject one fault; it does nothing if no rank lives or the job has finished."""
    if fault.kind is Kind.BAD:
        lease = fault.pick % max(1, total_leases(sim.world.plan))
        sim.tell(f"lease {lease} is bad")
        sim.bad.add(lease)
        return
    after = bool(sim.world.after_ms)
    there = (r for r in sim.ranks.values() if r.running or (after and r.released))
    live = [r for r in there if pod_of(r.me) not in sim.links.cut]
    if not live or (sim.finished and not after):
        return
    rank = live[fault.pick % len(live)]
    match fault.kind:
        case Kind.CRASH | Kind.TWIN | Kind.SLEEP:
            _to_coordinators(sim, fault)
        case Kind.WIPE:
            for each in live:
                sim.kill(each.me, restart=True)
        case Kind.RAISE:
            sim.script_raises(rank.me, None)
        case Kind.KILL | Kind.LOSE | Kind.ORPHAN | Kind.DRAIN | Kind.JOIN | Kind.SHRINK:
            _to_processes(sim, fault, rank, len(live))
        case Kind.CUT:
            _cut(sim, rank, fault.ms)
        case Kind.RECONNECT:
            pod = sim.pods[pod_of(rank.me)]
            sim.tell(f"pod {pod.key} gets a new connection")
            names = sim.links.names(pod)
            sim.links.disconnect(pod, noticed=False)
            for name in names:
                sim.after(fault.ms % 30, lambda n=name: sim.connect(pod, n))  # type: ignore[misc]
        case Kind.DAZE:
            _daze(sim, sim.pods[pod_of(rank.me)], fault.ms)
        case Kind.BREAK:
            sim.tell(f"links fail for {fault.ms:.0f} ms")
            sim.broken_until = sim.now + int(fault.ms * 10**6)
            rank.abort("link broke", aborted=False)
        case Kind.MODE:
            mode = list(Mode)[fault.pick % len(Mode)]
            quorum = 1 + fault.pick % max(1, sim.world.replicas)
            sim.set_targets(m.Targets(settings=_with(sim.world.settings, mode, quorum)))
        case _:
            _to_threads(sim, fault, rank)


def _with(settings: RoundSettings, mode: Mode, quorum: int) -> RoundSettings:
    return replace(settings, mode=mode, quorum=quorum)


def _daze(sim: Simulation, pod: SimPod, ms: float) -> None:
    sim.tell(f"the agent of pod {pod.key} is stopped for {ms:.0f} ms")
    pod.frozen = True

    def over() -> None:
        sim.tell(f"the agent of pod {pod.key} goes on")
        pod.thaw()

    sim.after(ms, over)


def _to_threads(sim: Simulation, fault: Fault, rank: SimRank) -> None:
    name = {Kind.HANG: "hung", Kind.FREEZE: "stopped", Kind.STUCK: "stuck"}[fault.kind]
    sim.tell(f"rank {rank.me} is {name} for {fault.ms:.0f} ms")
    if fault.kind is Kind.STUCK and rank.reducing is None:
        rank.work_since = sim.now
    setattr(rank, name, True)
    if fault.kind is Kind.STUCK and fault.ms >= FOR_EVER_MS:
        return

    def over() -> None:
        sim.tell(f"rank {rank.me} is no longer {name}")
        setattr(rank, name, False)
        if name != "hung":
            rank.thaw()

    sim.after(fault.ms, over)


def _to_coordinators(sim: Simulation, fault: Fault) -> None:

    def start() -> None:
        sim.start_coordinator(f"c{len(sim.all_coordinators)}")  # names must be unique

    match fault.kind:
        case Kind.CRASH:
            for each in list(sim.coordinators):
                sim.kill_coordinator(each)
            sim.after(fault.ms % 200, start)
        case Kind.TWIN:
            start()
        case _:
            for coordinator in list(sim.coordinators.values()):
                sim.tell(f"coordinator {coordinator.name} sleeps for {fault.ms:.0f} ms")
                coordinator.stopped = True
                sim.after(fault.ms, coordinator.thaw)


def _to_processes(sim: Simulation, fault: Fault, rank: SimRank, live: int) -> None:
    pod = sim.pods[pod_of(rank.me)]
    if not pod.alive:
        return  # lost already: it is replaced once
    match fault.kind:
        case Kind.KILL:
            sim.kill(rank.me, restart=True)
        case Kind.LOSE:
            sim.remove_pod(pod)
            sim.after(fault.ms, lambda: sim.replace_pod(pod.key[0]))
        case Kind.ORPHAN:
            sim.kill_agent(pod)
            sim.after(fault.ms, lambda: sim.replace_pod(pod.key[0]))
        case Kind.DRAIN if live > 1:
            sim.drain(pod.key)
            sim.after(fault.ms, lambda: sim.replace_pod(pod.key[0]))
        case Kind.JOIN | Kind.SHRINK:
            _scale(sim, 1 if fault.kind is Kind.JOIN else -1)


def _scale(sim: Simulation, step: int) -> None:
    """Change to the next number of replicas that the job may have; the API refuses others."""
    before = (sim.targets.replicas if sim.targets else None) or sim.world.replicas
    sizes = sim.world.allowed or (before + step,)
    further = [n for n in sizes if n > 0 and (n - before) * step > 0]
    if not further:
        return
    wanted = min(further, key=lambda n: abs(n - before))
    for _ in range(wanted - before):
        sim.replace_pod(1 + max(slot for slot, _ in sim.pods))
    sim.set_targets(m.Targets(replicas=wanted))


def _cut(sim: Simulation, rank: SimRank, ms: float) -> None:
    """Cut a pod's control channel; the pod goes on with its peers as long as they do."""
    pod = sim.pods[pod_of(rank.me)]
    sim.tell(f"pod {pod.key} is cut off for {ms:.0f} ms")
    sim.links.cut.add(pod.key)
    sim.links.disconnect(pod)

    def heal() -> None:
        sim.links.cut.discard(pod.key)
        sim.tell(f"pod {pod.key} is connected again")
        for name in list(sim.coordinators):
            sim.connect(pod, name)

    sim.after(ms, heal)
