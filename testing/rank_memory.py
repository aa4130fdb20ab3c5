"""A rank whose memory holds numbers in place of tensors, and the protocol's effects on it.

The ranks of a simulation and of a rehearsal carry out these effects here. They differ in their
numbers (`plus`) and in how they send them. `paceline.worker` does the same with tensors, in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from paceline.core.messages import LogPart, StateTransfer
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.pending import BufferName, BufferOp, Merge, Scale, Swap, Zero
from paceline.core.protocol.records import Go
from paceline.core.rank import events as ev
from paceline.core.rank.machine import Rank
from paceline_api.ids import GenerationId, MemberId

MemoryEffect = (
    ev.ChangeBuffers
    | ev.Apply
    | ev.Queue
    | ev.DropQueue
    | ev.InstallPart
    | ev.InstallState
    | ev.SendPart
    | ev.SendState
    | ev.PassState
)
Value = TypeVar("Value")
Copied = TypeVar("Copied")
"""State of a rank as it is sent."""


class RankMemory(ABC, Generic[Value, Copied]):
    """Memory of one rank. A `Value` never changes once it is stored, so it needs no copies."""

    def __init__(self, machine: Rank, zero: Value) -> None:
        self.machine, self._zero = machine, zero
        self.grad = self.late = zero
        self.result = zero
        """Sum of the last reduction."""
        self.weights = self.accumulated = zero
        self.queue: dict[int, Value] = {}
        """Sums by round, until the state of the donor is here."""
        self.part: Value | None = None
        """Sum that came with the last LogPart, if it had one."""
        self.staged: dict[GenerationId, Copied] = {}
        """States that donors sent, by generation."""

    @abstractmethod
    def plus(self, one: Value, other: Value, factor: float) -> Value:
        """Return `one + factor * other`."""

    @abstractmethod
    def send_part(self, to: MemberId, part: LogPart, result: Value | None) -> None:
        """Send records that a rank lacks, with the last sum if it needs it."""

    @abstractmethod
    def send_state(self, to: MemberId, state: StateTransfer, copied: Copied) -> None:
        """Send a state to a rank."""

    @abstractmethod
    def copy(self) -> Copied:
        """Return the committed state as it is sent."""

    @abstractmethod
    def load(self, copied: Copied) -> None:
        """Replace the committed state by one that a donor sent."""

    def contribution(self, reduce: ev.Reduce) -> Value:
        """Return what this rank adds to a reduction."""
        if reduce.source is None:
            return self._zero
        source = self.grad if reduce.source is BufferName.GRAD else self.late
        return self.plus(self._zero, source, reduce.factor)

    def last_sum(self) -> Value:
        """Return the sum that a rank needs if it lacks the last round."""
        return self.accumulated

    def change_memory(self, effect: MemoryEffect) -> None:
        """Carry out an effect on the memory."""
        match effect:
            case ev.ChangeBuffers(op=op):
                self._change_buffers(op)
            case ev.Apply(go=go, weighing=weighing):
                self.apply(go, weighing, self.result)
            case ev.Queue(go=go):
                self.queue[go.round] = self.result
            case ev.DropQueue(generation=generation):
                self.queue.clear()
                self.staged = {g: s for g, s in self.staged.items() if g == generation}
            case ev.InstallPart(go=go, weighing=weighing):
                assert self.part is not None, "R7: the part came without its sum"
                self.install_part(go, weighing, self.part)
            case ev.InstallState(queued=queued):
                self.load(self.staged.pop(self.machine.state.gen_id))
                for go, weighing in queued:
                    self.apply_queued(go, weighing, self.queue[go.round])
                self.queue.clear()
            case ev.SendPart(to=to, part=part, with_result=with_result):
                self.send_part(to, part, self.last_sum() if with_result else None)
            case ev.SendState(to=to, state=state):
                self.send_state(to, state, self.copy())
            case ev.PassState(to=to, state=state):
                self.send_state(to, state, self.staged[state.generation])

    def apply(self, go: Go, weighing: Weighing, result: Value) -> None:
        """Add the sum of a round to the accumulated one, and step the optimizer if it is due."""
        before = self._zero if weighing.first else self.accumulated
        self.accumulated = self.plus(before, result, weighing.unit)
        self.step_optimizer(go, weighing)

    def apply_queued(self, go: Go, weighing: Weighing, result: Value) -> None:
        """Apply a sum that waited for the donor's state."""
        self.apply(go, weighing, result)

    def install_part(self, go: Go, weighing: Weighing, result: Value) -> None:
        """Step with the accumulated sum of another rank."""
        self.accumulated = result
        self.step_optimizer(go, weighing)

    def step_optimizer(self, go: Go, weighing: Weighing) -> None:  # noqa: ARG002
        """Add the accumulated sum to the weights if the optimizer steps in this round."""
        if weighing.step:
            self.weights = self.plus(self.weights, self.accumulated, 1)

    def _change_buffers(self, op: BufferOp) -> None:
        match op:
            case Swap():
                late = self.late
                assert late == self._zero, f"R22: LATE of {self.machine.state.me} is not empty"
                self.late, self.grad = self.grad, self._zero
            case Merge(late_factor=late_factor, grad_factor=grad_factor):
                late = self.plus(self._zero, self.late, late_factor)
                self.late, self.grad = self.plus(late, self.grad, grad_factor), self._zero
            case Scale(which=BufferName.GRAD, factor=factor):
                self.grad = self.plus(self._zero, self.grad, factor)
            case Scale(factor=factor):
                self.late = self.plus(self._zero, self.late, factor)
            case Zero(which=BufferName.GRAD):
                self.grad = self._zero
            case Zero():
                self.late = self._zero
