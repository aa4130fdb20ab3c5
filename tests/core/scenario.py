"""Golden scenarios: commands in plain words, then the trace that they give.

    # its subject, and the rule
    world replicas=2 mode=Solo leases=12
    when "0.0#0 commits 3": cut 1
    at 900: crash
    end Complete
    finish 0.0#0
    ---
    coordinator a starts
    ...

`end` says how the job ends, `finish` which ranks have to be released. `at MS:` runs a command at
that time, `when "TEXT":` once a line of the trace contains the text. Times are fixed and nothing is
random, so the trace is always the same. PACELINE_GOLDEN=write writes the traces again.

    kill RANK | lose SLOT | start SLOT | drain SLOT | join | cut SLOT | heal SLOT | hang SLOT |
    wake SLOT | crash | coordinator NAME | stop | mode MODE QUORUM | never RANK ROUND (the reduction
    does not complete there) | break RANK (its data channel fails) |
    hold MESSAGE FROM TO | drop MESSAGE FROM TO | let (deliver the held messages)
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct
from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.messages import CommitChange
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.records import Go
from paceline_api.ids import parse_member
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import MaxAgePolicy, Mode

from testing.simulation.ranks import SimRank
from testing.simulation.simulation import BrokenPromiseError, Simulation
from testing.simulation.world import MS, World

FOLDER = Path(__file__).parent / "scenarios"


class Calm(random.Random):
    """A random generator that always returns the middle, so that rare events do not happen."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def random(self) -> float:
        return 0.99


@dataclass
class Scenario:
    name: str
    title: str
    world: World
    timed: list[tuple[float, str]]
    triggered: list[tuple[str, str]]
    end: str
    finish: list[str]
    head: str
    trace: list[str]

    @staticmethod
    def read(path: Path) -> Scenario:
        head, _, trace = path.read_text().partition("---\n")
        scenario = Scenario(
            path.stem, "", World(), [], [], "Complete", [], head, trace.splitlines()
        )
        for line in filter(None, map(str.strip, head.splitlines())):
            word, _, rest = line.partition(" ")
            match word:
                case "#":
                    scenario.title = scenario.title or rest
                case "world":
                    scenario.world = _world(rest)
                case "end":
                    scenario.end = rest
                case "finish":
                    scenario.finish = rest.split()
                case "at":
                    ms, _, command = rest.partition(":")
                    scenario.timed.append((float(ms), command.strip()))
                case "when":
                    text, _, command = rest.lstrip('"').partition('":')
                    scenario.triggered.append((text, command.strip()))
                case _:
                    raise ValueError(f"{path.name}: {line!r}")
        return scenario

    def run(self) -> list[str]:
        """Return the trace, or raise BrokenPromiseError with the story if an invariant breaks."""
        return Play(self).run()


def _world(text: str) -> World:
    facts: dict[str, Any] = dict(pair.split("=", 1) for pair in shlex.split(text))
    settings = RoundSettings(
        mode=Mode(facts.pop("mode", "Full")),
        quorum=int(facts.pop("quorum", 0)),
        late=MaxAgePolicy(facts.pop("late", "Drop")),
        max_age=int(facts.pop("max_age", 0)),
        bench_after_ns=int(facts.pop("bench_ms", 10**6)) * MS,
        grace_ns=0,
    )
    slow = {int(k): float(v) for k, v in (x.split(":") for x in facts.pop("slow", "").split() if x)}
    step = float(facts.pop("step", 50))
    numbers: dict[str, Any] = {key: int(value) for key, value in facts.items()}
    return World(
        settings=settings,
        slow=slow,
        delay_ms=(1, 1),
        step_ms=(step, step),
        until_ms=8000,
        **numbers,
    )


class Play:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.sim = Simulation(scenario.world, 0)
        self.sim.rng = Calm()
        self.trace: list[str] = []
        self.triggered = list(scenario.triggered)
        self.gates: list[tuple[str, str, str, str]] = []
        self.held: list[Callable[[], None]] = []
        self.sim.links.gate = self._gate
        self._spy()

    def _spy(self) -> None:
        """Add commits to the trace, and run the commands that its lines trigger."""
        tell, committed = self.sim.tell, self.sim.checkers.committed
        self.named: dict[Go, str] = {}
        """The slots that contribute to each round."""

        def record(line: str) -> None:
            tell(line)
            self.trace.append(line)
            for text, command in [x for x in self.triggered if x[0] in line]:
                self.triggered.remove((text, command))
                self.do(command)

        def commits(rank: SimRank, go: Go, weighing: Weighing) -> None:
            committed(rank, go, weighing)
            if go not in self.named:  # A joiner that was behind may have moved on since.
                named = [s for s in rank.state.log.read(go).shares if s.count]
                self.named[go] = " ".join(f"{s.member.slot}{'' if s.fresh else '~'}" for s in named)
            self.sim.tell(f"{rank.me} commits {go.round} ({go.trigger}: {self.named[go]})")

        setattr(self.sim, "tell", record)  # noqa: B010
        setattr(self.sim.checkers, "committed", commits)  # noqa: B010

    def run(self) -> list[str]:
        for ms, command in self.scenario.timed:
            self.sim.after(ms, lambda c=command: self.do(c))  # type: ignore[misc]
        self.sim.start()
        self.sim.run()
        if self.sim.finished:
            self.sim.checkers.at_end()
        left = [text for text, _ in self.scenario.triggered if (text, _) in self.triggered]
        if left:
            raise BrokenPromiseError(f"never came true: {left}\n{self.sim.story()}")
        ended = {c.outcome.reason for c in self.sim.all_coordinators if c.outcome is not None}
        if not self.sim.finished and self.scenario.end not in ended:
            raise BrokenPromiseError(f"ended as {ended}\n{self.sim.story()}")
        if self.scenario.end == "Complete" and not self.sim.finished:
            raise BrokenPromiseError(f"nobody finished: {ended}\n{self.sim.story()}")
        finished = {str(r.me) for r in self.sim.finished}
        if not finished >= set(self.scenario.finish):
            raise BrokenPromiseError(f"only {finished} have finished\n{self.sim.story()}")
        return self.trace

    # ---- commands -------------------------------------------------------------------------

    def do(self, command: str) -> None:
        word, *args = command.split()
        if word not in ("hold", "drop", "let", "never"):
            self.sim.tell(f"> {command}")
        getattr(self, f"_do_{word}")(*args)

    def _pod(self, slot: str) -> Any:
        pods = [p for k, p in sorted(self.sim.pods.items()) if k[0] == int(slot) and p.alive]
        return pods[-1]

    def _ranks(self, slot: str) -> list[SimRank]:
        return [self.sim.ranks[x] for x in self._pod(slot).living]

    def _do_kill(self, rank: str) -> None:
        self.sim.kill(parse_member(rank), restart=False)

    def _do_lose(self, slot: str) -> None:
        self.sim.remove_pod(self._pod(slot))

    def _do_start(self, slot: str) -> None:
        self.sim.start_pod(int(slot))

    def _do_drain(self, slot: str) -> None:
        self.sim.drain(self._pod(slot).key)

    def _do_join(self) -> None:
        replicas = len([p for p in self.sim.pods.values() if p.alive]) + 1
        self.sim.start_pod(1 + max(slot for slot, _ in self.sim.pods))
        self.sim.set_targets(m.Targets(replicas=replicas))

    def _do_cut(self, slot: str) -> None:
        pod = self._pod(slot)
        self.sim.links.cut.add(pod.key)
        self.sim.links.disconnect(pod)

    def _do_heal(self, slot: str) -> None:
        pod = self._pod(slot)
        self.sim.links.cut.discard(pod.key)
        for name in list(self.sim.coordinators):
            self.sim.connect(pod, name)

    def _do_hang(self, slot: str) -> None:
        for rank in self._ranks(slot):
            rank.hung = True

    def _do_wake(self, slot: str) -> None:
        for rank in self._ranks(slot):
            rank.hung = False

    def _do_crash(self) -> None:
        for name in list(self.sim.coordinators):
            self.sim.kill_coordinator(name)

    def _do_coordinator(self, name: str) -> None:
        self.sim.start_coordinator(name)

    def _do_stop(self) -> None:
        self.sim.set_targets(m.Targets(stop=True))

    def _do_mode(self, mode: str, quorum: str) -> None:
        rules = RoundSettings(
            mode=Mode(mode), quorum=int(quorum), bench_after_ns=10**12, grace_ns=0
        )
        self.sim.set_targets(m.Targets(settings=rules))

    def _do_ask(self, name: str, number: str, mode: str) -> None:
        """Set a mode as a coordinator that has not received newer requests would."""
        state = self.sim.coordinators[name].state
        state.request_number = int(number) - 1
        rules = RoundSettings(mode=Mode(mode), bench_after_ns=10**12, grace_ns=0)
        self.sim.to_coordinators(coord.SetTargets(m.Targets(settings=rules)), name)

    def _do_never(self, rank: str, round_: str) -> None:
        self.sim.reductions.never[parse_member(rank), int(round_)] = None

    def _do_break(self, rank: str) -> None:
        self.sim.ranks[parse_member(rank)].abort("link broke", aborted=False)

    def _do_hold(self, kind: str, src: str, dst: str) -> None:
        self.gates.append(("hold", kind, src, dst))

    def _do_drop(self, kind: str, src: str, dst: str) -> None:
        self.gates.append(("drop", kind, src, dst))

    def _do_let(self) -> None:
        self.gates.clear()
        held, self.held = self.held, []
        for send in held:
            send()

    def _gate(self, lane: tuple[object, ...], message: Struct, send: Callable[[], None]) -> bool:
        ends = [str(x) for x in lane[:2]]
        name = "Commit" if isinstance(message, CommitChange) else type(message).__name__
        for how, kind, src, dst in self.gates:
            if name == kind and src in ("*", ends[0]) and dst in ("*", ends[1]):
                if how == "hold":
                    self.held.append(send)
                self.sim.tell(f"({how}: {kind} {ends[0]} -> {ends[1]})")
                return True
        return False


def all_scenarios() -> list[Scenario]:
    return [Scenario.read(path) for path in sorted(FOLDER.glob("*.txt"))]
