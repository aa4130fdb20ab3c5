"""Simulated ranks whose script steps its own optimizers (docs/design/scripts.md)."""

from __future__ import annotations

from collections.abc import Generator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.log import is_slot_0
from paceline.core.protocol.places import BufferTurns, Path, Spot, SpotAction
from paceline.core.protocol.records import BACKWARD, DataPlan, DropReason, Go, Operation
from paceline.core.rank import events as ev
from paceline.core.rank.state import Main
from paceline_api.ids import MemberId
from paceline_api.types.enums import Mode

from testing.simulation.faults import Fault, plant
from testing.simulation.links import Copies
from testing.simulation.ranks import Batch, SimRank
from testing.simulation.simulation import Simulation
from testing.simulation.sums import Label, Sum, add
from testing.simulation.world import World

PARTS = (("float32", 4),)


@dataclass
class ScriptWorld(World):
    """A job whose scripts all run one program: a list of places, points and passes in turn."""

    program: tuple[int, ...] = (2, 3, 1, 3, 1)
    """Calls at each point, and batches in each pass."""
    calls_in_pass: int = 0
    """Calls after each batch."""
    evaluates: int = 0
    """Number of batches of a pass after which it evaluates, as at each point. The model has buffers
    then, which it sends with some forward passes. 0 for a model without."""
    backwards: int = 1
    """Backward passes that are averaged for each batch."""
    kinds: bool = False
    """True if these are passes of different models; otherwise each adds to the average before."""
    lag: float = 0.0
    """Share of the backward passes that take `lag_ms` longer."""
    lag_ms: float = 60.0
    call_in_backward: bool = False
    """True if each backward pass makes a call after its first segment, as SyncBatchNorm does."""
    abandoned: float = 0.0
    """Share of the backward passes that the script begins again after their first segment."""
    uneven: bool = False
    """True if slot 0 has one batch less in the last pass, which no call follows."""
    stray: int = 0
    """Slot whose script calls `barrier` where the others call `all_reduce` the third
    backward(); 0 for none."""
    outside: int = 0
    """Slot whose script goes through no loader, since slot 0 reads for it; 0 for none."""

    @property
    def plan(self) -> DataPlan:
        """Plan of a script, which deals nothing."""
        return DataPlan(slots=self.replicas * self.procs)


class Copied(NamedTuple):
    """The state of a script that waits in an operation."""

    weights: Sum
    model: Sum
    done: Spot
    spot: Spot
    ended: bool
    kept: dict[Spot, Sum]
    turns: BufferTurns
    cursor: int


@dataclass
class Values:
    """What each operation returned anywhere: one value (the first property of scripts)."""

    places: int
    """Number of ranks that the script was started with."""
    procs: int
    """Number of ranks of a replica."""
    of: dict[Spot, dict[SimRank, Sum]] = field(default_factory=dict)
    loaded: list[Spot] = field(default_factory=list)
    """Spots at which a rank loaded the state of a donor."""
    models: dict[Spot, tuple[SimRank, Sum]] = field(default_factory=dict)
    """Weights behind each backward pass, and the first rank that had them."""
    model_of: dict[Label, int] = field(default_factory=dict)
    """Model that each gradient is of."""
    hashed: dict[int, tuple[SimRank, Sum]] = field(default_factory=dict)
    """Weights that are hashed at each version, and the first rank that had them."""
    late: int = 0
    """Number of averages that were taken by ranks that were late."""
    divisors: set[float] = field(default_factory=set)
    """Divisors of all steps (S17.4)."""
    saved: list[Sum] = field(default_factory=list)
    """Weights of each script of slot 0 at its end, where it would save them."""

    def check(self, spot: Spot, result: Sum, rank: SimRank) -> None:
        """Check that an operation returns on this rank what it returned elsewhere.

        A rank that died may have been the only one that completed its last operation, and the
        others then make it without that rank. No rank takes part for which the script has no work
        (S1).
        """
        place = rank.me.slot * self.procs + rank.me.local
        assert place < self.places, f"{rank.me} takes part in {spot} of {self.places} ranks"
        known = self.of.setdefault(spot, {})
        for other, value in known.items():
            same = value == result or not other.alive
            assert same, f"{rank.me} got {result} in {spot}, {other.me} {value}"
        known[rank] = result

    def check_model(self, spot: Spot, model: Sum, rank: SimRank) -> None:
        """Check that all ranks have equal weights behind a backward pass (S17)."""
        other, known = self.models.setdefault(spot, (rank, dict(model)))
        same = known == model or not other.alive
        assert same, f"weights of {rank.me} and {other.me} differ at {spot}"

    def check_hash(self, version: int, model: Sum, rank: SimRank) -> None:
        """Check that ranks hash equal weights at equal versions (S17.11)."""
        other, known = self.hashed.setdefault(version, (rank, dict(model)))
        same = known == model or not other.alive
        assert same, f"{rank.me} and {other.me} hash different weights at version {version}"


Wait = tuple[str, object]
Program = Generator[Wait, Sum | None, None]


class ScriptRank(SimRank):
    """One rank process with a script that follows the contract of DDP."""

    values: Values

    def begin(self) -> None:
        """Prepare the script; called once by the simulation."""
        self.path: Path[Sum] = Path()
        self.model: Sum = {}
        """The script's own weights: what it has added up, result by result."""
        self.copied: Copied | None = None
        self.last: Sum = {}
        self.was_left_out = False
        self.value: Sum | None = None
        """Result of the operation in which the script waits; None before it is complete."""
        self.average: tuple[Spot, Sum] | None = None
        """The last average, which a late rank takes."""
        self.call: Sum = {}
        """What this rank brings to the call in which it waits."""
        self.batch = None
        self.sending = True
        """True if the next forward pass sends the buffers of the model, if it has any."""
        self.turns = BufferTurns()
        self.cursor = 0
        """Batches of the pass that are averaged."""
        self.script: Program = self.program()

    # ---- the script ---------------------------------------------------------------------------

    def program(self) -> Program:
        """Run the program of the world once, from its first line."""
        world = self.sim.world
        assert isinstance(world, ScriptWorld)
        for place, length in enumerate(world.program):
            if place % 2 == 0:
                for _ in range(length):
                    yield "sleep", self.sim.rng.uniform(0, 5)
                    stray = world.stray > 0 and self.me.slot == world.stray
                    yield from self.operation("barrier" if stray else "all_reduce", samples=0)
                yield from self.forward(world, opens=True, trains=False)
                continue
            if world.outside and self.me.slot == world.outside:
                for _ in range(length):
                    yield from self.backward(world, 0, opens=True)
                continue
            act = self.path.begin_pass()
            while act is SpotAction.ASK:
                yield "need", None
                act = self.path.in_pass()
            assert act is not SpotAction.LOST, f"{self.me} is lost in pass {place}"
            if act is not SpotAction.SKIP:
                self.cursor = 0
                if act is SpotAction.LOAD:
                    self.load_copied()
                    self.begin_with_batch()
                short = world.uneven and self.me.slot == 0 and place == len(world.program) - 1
                for batch in range(self.cursor, length - short):
                    self.turns.at_batch, opens = (self.sending,), not self._sends
                    yield from self.forward(world, opens=True, trains=True)
                    for number in range(world.backwards):
                        yield from self.backward(world, number, opens=opens and number == 0)
                    self.cursor = batch + 1
                    for _ in range(world.calls_in_pass):
                        yield from self.operation("all_gather", samples=0, opens=False)
                    if world.evaluates and batch % world.evaluates == 0:
                        yield from self.forward(world, opens=False, trains=False)
            self.path.end_pass()
            if act is SpotAction.SKIP:
                yield from self.take_last_state()
                if self.copied is not None:
                    self.turns.behind = dict(self.copied.turns.behind)
            self.turns.behind.setdefault(place, (self.sending,))
            (self.sending,) = self.turns.behind[place]

    def begin_with_batch(self) -> None:
        """Make the forward passes of the batch in hand as the donor has made them (S5)."""
        (self.sending,) = self.turns.at_batch

    @property
    def _sends(self) -> bool:
        world = self.sim.world
        assert isinstance(world, ScriptWorld)
        return world.evaluates > 0 and self.sending

    def forward(self, world: ScriptWorld, *, opens: bool, trains: bool) -> Program:
        """Make a forward pass. It sends the buffers unless the one before was an evaluation."""
        if self._sends:
            yield from self.operation("broadcast of buffers", samples=0, opens=opens)
        if world.evaluates:
            self.sending = trains

    def backward(self, world: ScriptWorld, which: int, *, opens: bool) -> Program:
        """Make backward pass `which` of a batch. All segments but the last are handed over."""
        pause = self.sim.rng.uniform(*world.step_ms)
        pause += world.lag_ms if world.lag and self.sim.rng.random() < world.lag else 0.0
        model = which if world.kinds else 0
        if world.stray and self.me.slot == world.stray and self.path.here.number == 2:
            yield "sleep", pause * 0.6
            yield from self.operation("barrier", samples=0)
            return
        first, gap, called = self.path.here, pause / world.segments, False
        yield "sleep", gap
        handed, streams = 0, self.path.operation() is SpotAction.TAKE_PART
        while handed < world.segments - 1:
            made = self._backward(first, model, opens=opens)
            yield ("segment", made) if streams else ("sleep", 0.0)
            handed += 1
            yield "sleep", gap
            if handed == 1 and not called and world.call_in_backward:
                yield from self.operation("all_reduce in backward()", samples=0)
                called, streams = True, False
            elif handed == 1 and self.sim.rng.random() < world.abandoned:
                handed = 0
                self.abandon()
        if world.call_in_backward and not called:
            yield from self.operation("all_reduce in backward()", samples=0)
            called = True
        yield from self.operation(
            BACKWARD,
            samples=world.batch,
            opens=opens and not called,
            model=model,
            settles=which > 0 and not world.kinds,
        )

    def _backward(self, spot: Spot, model: int, *, opens: bool) -> Operation:
        return Operation(BACKWARD, *spot, opens, PARTS * self.sim.world.segments, model)

    def abandon(self) -> None:
        """Give up the backward pass in hand: what was handed over of it will not be completed."""
        if self.batch is not None and self._is_in_hand:
            self.batch.dropped = True
            self._go_on()

    @property
    def _is_in_hand(self) -> bool:
        return self.batch is not None and not (self.batch.dropped or self.batch.stepped)

    def hand_over_segment(self, operation: Operation) -> None:
        """Hand over the next segment of a backward pass."""
        samples, segments = self.sim.world.batch, self.sim.world.segments
        if not self._is_in_hand:
            self.labels += 1
            label = Label(self.me, self.labels)
            self.batch = Batch(label, -1, samples, segments, worth=samples)
        assert self.batch is not None
        self.batch.handed += 1
        if self.batch.handed == 1:
            self.post(ev.Coming((), samples, 1, operation, "train.py:1"))
        self._go_on()

    def operation(
        self,
        name: str,
        samples: int,
        *,
        opens: bool = True,
        model: int = 0,
        settles: bool = False,
    ) -> Program:
        """Make one operation, or repeat it while the rank follows."""
        here, world = self.path.here, self.sim.world
        assert isinstance(world, ScriptWorld)
        while True:
            act = self.path.operation()
            if act is SpotAction.ASK:
                yield "need", None
                continue
            if act is SpotAction.LOST:
                assert self.was_left_out, f"{self.me} is lost at {here}: {self.path}"
                yield "lost", None
            if act is SpotAction.LOAD:
                self.load_copied()
            if act is SpotAction.REPEAT:
                result = self.path.kept[here]
                break
            made = Operation(name, *here, opens, PARTS)
            if name == BACKWARD:
                made = replace(self._backward(here, model, opens=opens), settles=settles)
            answer = yield "operation", made, samples  # type: ignore[misc]
            if answer is not None:
                result = answer
                if name == BACKWARD:
                    if world.lag:  # others may make the next step while the optimizer works
                        yield "sleep", self.sim.rng.uniform(0, 5)
                    add(self.model, result)
                    self.values.check_model(here, self.model, self)
                break
            # The others went on without this rank, which now follows them from here.
            self.was_left_out = True
        self.values.check(here, result, self)
        self.path.made()

    def take_last_state(self) -> Program:
        """Load the last state behind the last pass (S14)."""
        here = self.path.here
        while (act := self.path.behind_pass()) is SpotAction.ASK:
            yield "need", None
        if act is SpotAction.LOAD:
            self.load_copied()
            self.path.repeat_from(here)

    def load_copied(self) -> None:
        """Load the donor's state at the spot where it was taken."""
        assert self.copied is not None
        self.model = dict(self.copied.model)
        self.path.load()
        self.turns, self.cursor = deepcopy(self.copied.turns), self.copied.cursor
        (self.sending,) = self.turns.now
        self.values.loaded.append(self.path.here)

    def start_script(self) -> None:
        """Start the process group; the script begins when the group does."""
        self.begin()
        self.post(ev.Begin("", self.sim.world.plan, 1))

    def _resume(self, effect: ev.Resume) -> None:
        self.resumed.append(effect)
        if effect.stopped and not self.state.has_state:
            return
        value, self.value = self.value, None
        if effect.late:
            assert self.average is not None
            spot, value = self.average
            assert spot == self.path.here, f"{self.me} waits in {self.path.here}, takes {spot}"
            self.values.late += 1
        self.sim.after(0.01, lambda: self.go_on(value))

    def go_on(self, value: Sum | None = None) -> None:
        """Let the script go on until it next waits."""
        if not self.running:
            return
        if self.stopped or self.hung:
            self.sim.after(20, lambda: self.go_on(value))
            return
        try:
            what, *words = self.script.send(value)
        except StopIteration:
            if is_slot_0(self.me):
                self.values.saved.append(dict(self.model))
            self.post(ev.Finish())
            return
        if what == "sleep":
            (ms,) = words
            assert isinstance(ms, float)
            self.sim.after(ms, self.go_on)
        elif what == "segment":
            (operation,) = words
            assert isinstance(operation, Operation)
            self.hand_over_segment(operation)
            self.sim.after(0.01, self.go_on)
        elif what == "need":
            self.post(ev.Need())
        elif what == "lost":
            self.sim.kill(self.me, why="starts again", restart=True)
        else:
            operation, samples = words
            assert isinstance(operation, Operation)
            assert isinstance(samples, int)
            if operation.is_call or not self._is_in_hand:
                self.labels += 1
            label = Label(self.me, self.labels)
            if operation.is_call:
                self.call = {label: 0}
            else:
                self.grad = {**self.grad, label: samples}
                self.values.model_of[label] = operation.model
            self.value = None
            self.sim.checkers.produced(label, -1, samples, finite=True)
            self.post(ev.Step((), samples, 1, operation=operation, where="train.py:1"))

    # ---- memory -------------------------------------------------------------------------------

    def note(self, go: Go, result: Sum) -> None:
        """Keep the result of an operation that the job has completed."""
        if go.operation is not None:
            spot = Spot(go.operation.place, go.operation.number)
            self.path.completed(spot, result, keep=go.operation.is_call)

    def _carry_out(self, effect: ev.Effect) -> ev.Event | None:
        if isinstance(effect, ev.Apply):
            if effect.hash:
                self.values.check_hash(self.state.log.version, self.model, self)
            if effect.weighing.step:
                self.values.divisors.add(effect.weighing.divisor)
        return super()._carry_out(effect)

    def apply(self, go: Go, weighing: Weighing, result: Sum) -> None:
        """Take the sum of a round, with which the script makes its own step."""
        self._take_result(go, result)
        self.sim.checkers.committed(self, go, weighing)

    install_part = apply

    def apply_queued(self, go: Go, weighing: Weighing, result: Sum) -> None:  # noqa: ARG002
        """Keep a sum that waited for the donor's state, if it is the result of a call."""
        self.note(go, result)

    def load(self, copied: Copies) -> None:
        """Take over what a donor sent; the script loads it where it begins."""
        assert isinstance(copied, Copied)
        if not self.state.follows:
            self.weights, self.copied = copied.weights, copied
            self.path.state, self.path.is_final = copied.spot, copied.ended
        else:
            self.path.follows, self.path.state = True, None
            self.model, self.turns = dict(copied.model), deepcopy(copied.turns)
        self.path.kept.update(copied.kept)
        self.path.done = copied.done

    def contribution(self, reduce: ev.Reduce) -> Sum:
        """Return what this rank adds to a reduction: what it brings to a call, or a gradient."""
        operation = reduce.go.operation
        if operation is not None and operation.is_call and reduce.source is not None:
            return dict(self.call)
        own = super().contribution(reduce)
        if operation is not None:
            models = {self.values.model_of[label] for label in own} - {operation.model}
            assert not models, f"{self.me} adds gradients of {models} to those of {operation}"
        return own

    def last_sum(self) -> Sum:
        """Return the sum that a rank needs if it lacks the last round."""
        return self.last

    def _take_result(self, go: Go, result: Sum) -> None:
        self.last = result
        is_step = go.operation is not None and not go.operation.is_call
        if is_step and go.operation is not None:
            self.average = Spot(*go.operation.spot), result
        if is_step and not self.state.follows:
            self.weights = self.plus(self.weights, result, 1)
        self.value = result
        self.note(go, result)

    def copy(self) -> Copied:
        """Return the state for a joiner: the script waits in an operation, or has ended."""
        operation = self.state.operation
        assert operation is not None or self.state.main is Main.DONE
        assert self.model == self.weights, f"{self.me} sends a state in the middle of a step"
        path = self.path
        spot = path.here if operation is None else Spot(operation.place, operation.number)
        ended, kept = operation is None, dict(path.kept)
        turns = BufferTurns((self.sending,), self.turns.at_batch, dict(self.turns.behind))
        return Copied(
            *(dict(self.weights), dict(self.model), path.done, spot, ended, kept),
            *(turns, self.cursor),
        )


class ScriptSimulation(Simulation):
    """One history of a job whose scripts step their own optimizers."""

    def __init__(self, world: ScriptWorld, seed: int) -> None:
        super().__init__(world, seed)
        self.values = Values(places=world.replicas * world.procs, procs=world.procs)

    def make_rank(self, me: MemberId) -> SimRank:
        """Return a new rank process with such a script."""
        rank = ScriptRank(self, me)
        rank.values = self.values
        return rank

    def check_accounts(self) -> None:
        """Check that nothing is pending when the job is over (S17.12)."""
        for rank in self.finished:
            left = rank.state.pending
            assert left.empty, f"{rank.me} ends with {left.steps} and {left.drops} pending"

    def check_absent(self) -> None:
        """Check that each batch of a slot was applied, or counted while the slot had no rank.

        With partial rounds, a rank that does not end well may take one late gradient along (S17.9).
        """
        assert isinstance(self.world, ScriptWorld)
        log, batch = self.finished[0].state.log, self.world.batch
        if self.world.uneven:
            return  # nothing says how many batches there are of each slot
        total, absent = log.ledger.total(), log.ledger.dropped.get(DropReason.ABSENT, 0)
        wanted = log.updates * log.plan.script * batch
        lost = wanted - total.applied - total.dropped - absent
        late = 0 if log.settings.mode is Mode.FULL else len(self.ranks) - len(self.finished)
        if not 0 <= lost <= late * batch:
            raise self._broken(f"S9: {lost} of {wanted} samples are missing, {absent} are absent")

    def check_slot_0(self) -> None:
        """Check that the script of slot 0 ended with the final weights (the fifth property)."""
        assert isinstance(self.world, ScriptWorld)
        saved, final = self.values.saved, self.finished[0].weights
        if not saved:
            raise self._broken("S14: complete, and the script of slot 0 has not ended")
        if saved[-1] != final and not self.world.uneven:
            raise self._broken(f"S14: slot 0 saved {saved[-1]}, and the weights are {final}")


def run_script(world: ScriptWorld, seed: int, what: list[Fault]) -> ScriptSimulation:
    """Run one history to its end; raises BrokenPromiseError with its story if a promise breaks."""
    sim = ScriptSimulation(world, seed)
    sim.start()
    plant(sim, what)
    sim.run()
    if sim.finished:
        sim.checkers.at_end()
        sim.check_accounts()
        sim.check_slot_0()
        sim.check_absent()
    return sim
