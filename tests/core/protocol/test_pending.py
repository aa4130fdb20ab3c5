"""The gradient buffers, checked against a naive oracle that stores every batch as a fraction."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.core.protocol.pending import BufferName, BufferOp, Merge, Pending, Scale, Swap, Zero
from paceline.core.protocol.records import DropReason
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import MaxAgePolicy

from testing.examples import examples
from testing.makers import member

ME = member(0)


@dataclass
class Memory:
    """GRAD and LATE as numbers: batch k adds one gradient of value 7^k per sample."""

    grad: Fraction = Fraction(0)
    late: Fraction = Fraction(0)

    def do(self, ops: list[BufferOp]) -> None:
        for op in ops:
            match op:
                case Swap():
                    assert self.late == 0, "R22: LATE is in use"
                    self.late, self.grad = self.grad, Fraction(0)
                case Merge(late_factor=late, grad_factor=grad):
                    self.late = self.late * Fraction(late) + self.grad * Fraction(grad)
                    self.grad = Fraction(0)
                case Scale(which=BufferName.GRAD, factor=factor):
                    self.grad *= Fraction(factor)
                case Scale(factor=factor):
                    self.late *= Fraction(factor)
                case Zero(which=BufferName.GRAD):
                    self.grad = Fraction(0)
                case Zero():
                    self.late = Fraction(0)


@dataclass
class Run:
    """One rank with its memory, and the naive oracle: the sum of each batch by its number."""

    pending: Pending = field(default_factory=Pending)
    memory: Memory = field(default_factory=Memory)
    twin: dict[int, Fraction] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    version: int = 0
    applied: Fraction = Fraction(0)
    counted: int = 0

    def step(self, samples: int, same_unit: bool) -> None:
        grad = self.pending.grad
        unit = grad.unit if grad.steps and same_unit else samples
        if grad.steps and unit != grad.unit:  # The training layer rescales GRAD to the new unit.
            self.memory.grad *= Fraction(grad.unit, unit)
        step = self.pending.add(
            version=self.version, leases=(), samples=samples, unit=unit, metrics=()
        )
        value = Fraction(7**step.seq * samples)
        self.memory.grad += value / unit
        self.twin[step.seq], self.samples[step.seq] = value, samples

    def round(self, rules: RoundSettings, *, with_grad: bool, named: bool) -> None:
        share, ops = self.pending.share(
            ME,
            round_=self.version,
            age=lambda version: self.version - version,
            settings=rules,
            with_grad=with_grad,
            fresh=with_grad,
            holds=lambda _: True,
        )
        self.memory.do(ops)
        if named:
            which, ops = self.pending.contribute(share.upto)
            self.memory.do(ops)
            value = Fraction(0)
            if share.count and which is not None:
                value = self.memory.grad if which is BufferName.GRAD else self.memory.late
            factor = Fraction(share.unit)
            self.applied += value * factor
            self.counted += share.samples + sum(d.samples for d in share.drops)
            self.memory.do(self.pending.applied(share))
        self.version += 1
        if self.pending.grad.steps and not with_grad:
            self.memory.do(self.pending.merge())


moves = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 9), st.booleans()),
        st.tuples(st.just("round"), st.booleans(), st.booleans()),
        st.tuples(st.just("merge"), st.booleans(), st.booleans()),
    ),
    max_size=30,
)


@settings(max_examples=examples(300), derandomize=True, deadline=None, database=None)
@given(moves)
def test_every_batch_is_applied_once_with_its_samples(what: list[tuple[str, int, bool]]) -> None:
    run = Run()
    rules = RoundSettings(max_age=0)
    for kind, a, b in what:
        if kind == "step":
            run.step(a, b)
        elif kind == "merge":
            run.memory.do(run.pending.merge())
        else:
            run.round(rules, with_grad=bool(a), named=b)
    run.round(rules, with_grad=True, named=True)
    assert run.applied == sum(run.twin.values())
    assert run.counted == run.pending.produced == sum(run.samples.values())
    assert run.pending.empty
    assert run.memory.grad == run.memory.late == 0


@settings(max_examples=examples(300), derandomize=True, deadline=None, database=None)
@given(moves, st.sampled_from([MaxAgePolicy.DROP, MaxAgePolicy.DECAY]), st.integers(1, 3))
def test_stale_batches_are_dropped_or_discounted_and_counted(
    what: list[tuple[str, int, bool]], late: MaxAgePolicy, max_age: int
) -> None:
    run = Run()
    rules = RoundSettings(max_age=max_age, late=late)
    for kind, a, b in what:
        if kind == "step":
            run.step(a, b)
        elif kind == "round":
            run.round(rules, with_grad=bool(a), named=b)
    run.round(rules, with_grad=True, named=True)
    everything = sum(run.twin.values(), Fraction(0))
    assert run.applied <= everything
    assert run.counted == run.pending.produced
    assert run.pending.empty


def test_a_decayed_buffer_is_discounted_only_for_its_added_age() -> None:
    run = Run()
    run.step(4, True)
    run.version = 5
    rules = RoundSettings(max_age=2, late=MaxAgePolicy.DECAY, decay_factor=0.5)
    run.round(rules, with_grad=True, named=False)
    assert run.memory.grad == Fraction(7) / 8
    again, ops = run.pending.share(
        ME,
        round_=6,
        age=lambda _: 6,
        settings=rules,
        with_grad=True,
        fresh=False,
        holds=lambda _: True,
    )
    run.memory.do(ops)
    assert (again.discount, run.memory.grad) == (1 / 16, Fraction(7) / 16)


def test_a_rank_that_was_left_out_contributes_nothing_from_its_buffers() -> None:
    """The step in progress still adds to a sum that was dropped (R8)."""
    run = Run()
    run.step(4, True)
    run.memory.do(run.pending.lose_all(grad_in_use=True))
    assert run.memory.grad != 0
    run.step(4, True)
    assert run.pending.void
    run.memory.do(run.pending.drop(BufferName.GRAD, DropReason.REVOKED, lambda _: False))
    assert run.memory.grad == 0
    assert run.pending.lost == run.pending.produced == 8


def test_revoked_work_is_dropped_with_its_whole_buffer() -> None:
    pending = Pending()
    for lease in (1, 2):
        pending.add(version=0, leases=(lease,), samples=4, unit=4, metrics=())
    assert pending.drop_revoked(lambda x: x == 2, grad_in_use=True) == []
    ops = pending.drop_revoked(lambda x: x == 2, grad_in_use=False)
    assert ops == [Zero(BufferName.GRAD)]
    assert [(d.reason, d.samples, d.leases) for d in pending.drops] == [
        (DropReason.REVOKED, 4, (2,))
    ]
    assert pending.lost == 4


def test_equal_drops_are_counted_one_by_one() -> None:
    pending = Pending()
    shares = []
    for _ in range(2):
        pending.add(version=0, leases=(), samples=4, unit=4, metrics=())
        pending.drop(BufferName.GRAD, DropReason.NONFINITE, lambda _: True)
        shares.append(
            pending.share(
                ME,
                round_=0,
                age=lambda _: 0,
                settings=RoundSettings(),
                with_grad=True,
                fresh=True,
                holds=lambda _: True,
            )[0]
        )
    pending.applied(shares[0])
    assert len(pending.drops) == 1, "one is in the log, the other is still to be announced"
