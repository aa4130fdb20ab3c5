"""The loader deals each sample once, with and without workers, whatever leases come and go."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from paceline.core.messages import DealtBatch
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import batches_of, total_leases
from paceline.errors import DataError, UnsupportedError, UsageError
from paceline.train import context
from paceline.train.loader import DataLoader
from paceline.train.optimizer import DistributedOptimizer
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from testing.lone_session import LoneSession, started

SAMPLES = 44


class Numbers(Dataset[Any]):
    """A dataset whose sample number i is i."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Job:
    """A session, a one-number model, its optimizer, and the samples that it has trained on."""

    def __init__(self, session: LoneSession, loader: DataLoader[Any]) -> None:
        self.session = session
        self.loader = loader
        self.model = nn.Linear(1, 1)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.optimizer = DistributedOptimizer(inner, self.model)
        self.stepped: list[int] = []
        """Sample numbers in the order of their applied steps."""

    def backward(self, numbers: torch.Tensor) -> None:
        self.model(numbers[:, None].float()).mean().backward()

    def step(self, numbers: list[int]) -> None:
        before = len(self.session.applied)
        self.optimizer.step()
        if len(self.session.applied) > before:
            self.stepped += numbers

    def check(self) -> None:
        """Check that each lease ended once and that its samples are those that were applied."""
        session, plan = self.session, self.loader._plan
        assert session.ledger() == list(range(total_leases(plan)))
        applied = [batches_of(plan, lease) for lease in session.applied]
        assert self.stepped == [number for lease in applied for b in lease for number in b]
        assert session.released


def make_job(session: LoneSession, batch: int, **options: Any) -> Job:
    started(session)
    return Job(session, DataLoader(Numbers(), batch, **options))


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_sample_is_dealt_once_per_epoch(workers: int, accumulate: int) -> None:
    job = make_job(LoneSession(), 4, num_workers=workers, accumulate=accumulate, seed=4)
    epochs: list[Counter[int]] = []
    for _ in job.loader.epochs(3):
        numbers: list[int] = []
        epochs.append(Counter())
        for batch in job.loader:
            numbers += batch.tolist()
            epochs[-1].update(batch.tolist())
            job.backward(batch)
            job.step(numbers)
            if job.optimizer.builder._lease is None:
                numbers = []
    assert epochs == [Counter(range(SAMPLES))] * 3
    job.check()


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_revoked_leases_are_not_trained(workers: int, accumulate: int) -> None:
    """Revoke leases at random.

    Prefetched batches of a revoked lease never reach the user, a step of a lease that was revoked
    meanwhile does not count, nothing is trained twice, and nobody waits forever.
    """
    dice = random.Random(workers * 10 + accumulate)

    def revoke(version: int, held: list[int]) -> list[int]:
        return [lease for lease in held if dice.random() < 0.2]

    job = make_job(LoneSession(revoke=revoke), 3, num_workers=workers, accumulate=accumulate)
    numbers: list[int] = []
    for _ in job.loader.epochs(4):
        for batch in job.loader:
            builder = job.optimizer.builder
            assert builder._lease is not None
            if builder._lease.first:
                numbers = []
                assert job.session.holds(builder._lease.lease)
            numbers += batch.tolist()
            if dice.random() < 0.1 and job.session.holds(builder._lease.lease):
                job.session.lose(builder._lease.lease)
            job.backward(batch)
            job.step(numbers)
    job.check()
    assert job.session.elsewhere
    assert not job.session.dropped


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_without_leases_waits_and_continues(workers: int) -> None:
    """Grant one lease at a time, so that the sampler is exhausted after each batch (D1)."""

    class Poor(LoneSession):
        def begin(self, gradients, committed, plan, lookahead):  # type: ignore[no-untyped-def]
            assert lookahead == 2 + 2 * workers
            super().begin(gradients, committed, plan, 1)

    job = make_job(Poor(), 11, num_workers=workers)
    for _ in job.loader.epochs(2):
        for batch in job.loader:
            job.backward(batch)
            job.step(batch.tolist())
    job.check()
    assert job.session.parked_idle >= (7 if workers else 0)


def test_the_lookahead_covers_what_torch_prefetches() -> None:
    for workers, factor, accumulate, want in ((0, None, 1, 2), (1, None, 1, 4), (2, 6, 5, 5)):
        session = LoneSession()
        job = make_job(
            session, 2, num_workers=workers, prefetch_factor=factor, accumulate=accumulate
        )
        job.loader._start(1)
        assert session.lookahead == want
        context.install(None)


Habit = Callable[[Job, torch.Tensor], None]


def skip_before(job: Job, batch: torch.Tensor) -> None:
    pass


def skip_after_backward(job: Job, batch: torch.Tensor) -> None:
    job.backward(batch)


def skip_by_zero_grad(job: Job, batch: torch.Tensor) -> None:
    job.backward(batch)
    job.optimizer.zero_grad()


def skip_by_model_zero_grad(job: Job, batch: torch.Tensor) -> None:
    job.backward(batch)
    job.model.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "skip", [skip_before, skip_after_backward, skip_by_zero_grad, skip_by_model_zero_grad]
)
def test_a_batch_without_a_step_is_dropped_and_leaves_no_gradient(
    skip: Habit, accumulate: int
) -> None:
    job = make_job(LoneSession(), 4, accumulate=accumulate)
    count = 0
    numbers: list[Any] = []
    for _ in job.loader.epochs(2):
        for batch in job.loader:
            job.optimizer.zero_grad()
            builder = job.optimizer.builder
            assert builder._lease is not None
            if builder._lease.first:
                numbers = []
            count += 1
            if count % 5 == 0 and (accumulate == 1 or builder._lease.last):
                skip(job, batch)
                continue
            assert accumulate == 2 or not any(
                p.grad is not None and p.grad.any() for p in job.model.parameters()
            )
            numbers += batch.tolist()
            job.backward(batch)
            job.step(numbers)
    job.check()
    assert len(job.session.dropped) >= 2


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_an_epoch_early_drops_the_rest_of_it(workers: int) -> None:
    job = make_job(LoneSession(), 4, num_workers=workers, accumulate=2)
    steps: Counter[int] = Counter()
    for epoch in job.loader.epochs(3):
        numbers: list[int] = []
        for index, batch in enumerate(job.loader):
            numbers += batch.tolist()
            job.backward(batch)
            job.step(numbers)
            steps[epoch] += 1
            if index % 2 == 1:
                numbers = []
            if epoch == 1 and index == 2:  # in the middle of a lease
                break
    assert steps == {0: 11, 1: 3, 2: 11}
    job.check()
    assert sorted(job.session.dropped) == [7, 8, 9, 10, 11]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_looking_at_one_batch_consumes_nothing(workers: int, accumulate: int) -> None:
    """Look at a batch in each epoch, as the official DDP tutorial does to find the batch size."""
    job = make_job(LoneSession(), 4, num_workers=workers, accumulate=accumulate)
    for _ in job.loader.epochs(2):
        looks = [next(iter(job.loader)).tolist() for _ in range(2)]
        batches, numbers = [], list[int]()
        for index, batch in enumerate(job.loader):
            batches.append(batch.tolist())
            numbers += batches[-1]
            job.backward(batch)
            job.step(numbers)
            if index % accumulate == accumulate - 1:
                numbers = []
        assert looks == [batches[0], batches[0]]
        assert len(batches) == SAMPLES // 4
    job.check()
    assert not job.session.dropped


def test_looking_at_a_batch_keeps_the_unit_of_waiting_work() -> None:
    job = make_job(LoneSession(announce_every=2), 20)  # batches of 20, 20 and 4
    for _ in job.loader.epochs(1):
        for index, batch in enumerate(job.loader):
            job.backward(batch)
            job.optimizer.step()
            if index == 1:
                break
        before = job.session.gradients.unit
        next(iter(job.loader))
        assert job.session.gradients.unit == before
        for batch in job.loader:
            job.backward(batch)
            job.optimizer.step()
    assert job.session.applied == [0, 1, 2]
    assert job.session.dropped == []


@pytest.mark.parametrize("what", ["step", "backward"])
def test_training_on_a_batch_that_was_only_looked_at_is_an_error(what: str) -> None:
    job = make_job(LoneSession(), 4)
    for _ in job.loader.epochs(1):
        job.backward(next(iter(job.loader)))
        with pytest.raises(UsageError, match="whose loop over the loader was dropped"):
            job.optimizer.step() if what == "step" else next(iter(job.loader))
        break


def test_a_skipped_batch_leaves_waiting_work_unchanged() -> None:
    job = make_job(LoneSession(announce_every=2), 11)
    for _ in job.loader.epochs(1):
        for index, batch in enumerate(job.loader):
            job.backward(batch)
            if index == 1:
                job.optimizer.zero_grad()
                continue
            job.optimizer.step()
    assert job.session.ledger() == [0, 1, 2, 3]
    assert job.session.dropped == [1]
    assert job.session.applied == [0, 2, 3]


def test_a_skipped_lease_summed_with_waiting_work_drops_both() -> None:
    """Skip a lease whose first step is already part of a waiting sum.

    It cannot be subtracted from that sum again.
    """
    job = make_job(LoneSession(announce_every=2), 6, accumulate=2)
    for _ in job.loader.epochs(1):
        for index, batch in enumerate(job.loader):
            job.backward(batch)
            if index == 3:
                job.optimizer.zero_grad()
                continue
            job.optimizer.step()
    assert job.session.ledger() == [0, 1, 2, 3]
    assert sorted(job.session.dropped) == [0, 1]
    assert job.session.applied == [2, 3]


def test_skipping_batches_keeps_the_sum_and_unit_of_waiting_work() -> None:
    """Check that the work keeps the unit in which it was announced.

    Batches of another size that come in between do not change it.
    """
    waiting: list[tuple[int, list[torch.Tensor]]] = []

    def look(session: LoneSession) -> None:
        held = session.gradients
        flats = [held._whole(segment) for segment in range(len(held.layout.segments))]
        views = held.layout.views(flats)
        waiting.append((session.gradients.unit, [view.clone() for view in views]))

    class Looking(LoneSession):
        def wait_lease(self) -> bool:
            look(self)
            return super().wait_lease()

    job = make_job(Looking(announce_every=2), 20)  # batches of 20, 20 and 4
    for _ in job.loader.epochs(1):
        for index, batch in enumerate(job.loader):
            if index == 0:
                job.backward(batch)
                job.optimizer.step()
                look(job.session)
            if index == 2:
                assert job.session.gradients.unit == 4
    assert [unit for unit, _ in waiting] == [20, 20]
    torch.testing.assert_close(waiting[0][1], waiting[1][1])
    assert float(waiting[0][1][1]) == pytest.approx(1.0)
    assert job.session.applied == [0]
    assert sorted(job.session.dropped) == [1, 2]


def test_accumulating_by_hand_is_an_error() -> None:
    job = make_job(LoneSession(), 4)

    def train() -> None:
        for _ in job.loader.epochs(1):
            for index, batch in enumerate(job.loader):
                job.backward(batch)
                if index % 4 == 3:
                    job.optimizer.step()
                    job.optimizer.zero_grad()

    with pytest.raises(UsageError, match="several batches") as caught:
        train()
    assert "accumulate=K" in caught.value.hint


@pytest.mark.parametrize(("size", "accumulate"), [(20, 1), (20, 2), (44, 1)])
@pytest.mark.parametrize("ahead", ["of backward", "of step"])
def test_taking_the_next_batch_before_the_step_is_an_error(
    ahead: str, size: int, accumulate: int
) -> None:
    """Fetch the next batch early.

    The step would count for the batch after it, and the last batch would have none.
    """
    job = make_job(LoneSession(), size, accumulate=accumulate)

    def train() -> None:
        for _ in job.loader.epochs(2):
            batches = iter(job.loader)
            batch = next(batches, None)
            while batch is not None:
                following = next(batches, None) if ahead == "of backward" else None
                job.backward(batch)
                following = next(batches, None) if ahead == "of step" else following
                job.optimizer.step()
                batch = following

    with pytest.raises(UsageError, match="the next batch was taken before step") as caught:
        train()
    assert "num_workers" in caught.value.hint


def test_two_steps_for_one_batch_are_an_error() -> None:
    job = make_job(LoneSession(), 4)
    for _ in job.loader.epochs(1):
        for batch in job.loader:
            job.backward(batch)
            job.optimizer.step()
            with pytest.raises(UsageError, match="without a batch"):
                job.optimizer.step()
            with pytest.raises(UsageError, match="leave samples out"):
                job.optimizer.step(samples=4)
            break
        break


def test_the_length_is_the_nominal_number_of_batches_per_rank() -> None:
    job = make_job(LoneSession(), 4, accumulate=2)
    assert len(job.loader) == 12
    job.session.size = 4
    assert len(job.loader) == 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


MISUSES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "empty": (lambda: DataLoader(Numbers(0), 4), DataError, "empty"),
    "batch 0": (lambda: DataLoader(Numbers(), 0), DataError, "batch_size=0"),
    "batch -1": (lambda: DataLoader(Numbers(), -1), DataError, "batch_size=-1"),
    "batch 1.5": (
        lambda: DataLoader(Numbers(), 1.5),  # type: ignore[arg-type]
        DataError,
        "batch_size=1.5",
    ),
    "accumulate": (lambda: DataLoader(Numbers(), 4, accumulate=0), DataError, "accumulate=0"),
    "shuffle": (lambda: DataLoader(Numbers(), 4, shuffle=True), UnsupportedError, "shuffle"),
    "sampler": (lambda: DataLoader(Numbers(), 4, sampler=[1]), UnsupportedError, "sampler"),
    "batch sampler": (
        lambda: DataLoader(Numbers(), 4, batch_sampler=[[1]]),
        UnsupportedError,
        "batch_sampler",
    ),
    "in_order": (
        lambda: DataLoader(Numbers(), 4, in_order=False),
        UnsupportedError,
        "in_order=False",
    ),
    "iterable": (lambda: DataLoader(Stream(), 4), UnsupportedError, "IterableDataset"),
    "no length": (lambda: DataLoader(Endless(), 4), DataError, "no length"),
    "no epoch": (lambda: next(iter(DataLoader(Numbers(), 4))), UsageError, "outside of epochs"),
    "no optimizer": (
        lambda: next(DataLoader(Numbers(), 4).epochs(1)),
        UsageError,
        "without an optimizer of the job",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises_an_error_with_a_hint(name: str) -> None:
    started(LoneSession())
    call, kind, words = MISUSES[name]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert getattr(caught.value, "hint", "")


@pytest.mark.parametrize(
    ("epochs", "ranks", "options", "words"),
    [
        (0, 1, {}, r"epochs\(0\)"),
        (1, 5, {"batch_size": 11}, "4 steps of 11, for 5 ranks"),
        (1, 1, {"batch_size": 45, "drop_last": True}, "0 steps of 45"),
        (1, 2, {"batch_size": 11, "accumulate": 4}, "1 steps of 44, for 2 ranks"),
    ],
)
def test_too_little_data_is_an_error(
    epochs: int, ranks: int, options: dict[str, Any], words: str
) -> None:
    session = started(LoneSession())
    session.size = ranks
    job = Job(session, DataLoader(Numbers(), **options))
    with pytest.raises(DataError, match=words):
        next(job.loader.epochs(epochs))


def test_a_second_loop_over_epochs_is_an_error() -> None:
    job = make_job(LoneSession(), 22)
    for _ in job.loader.epochs(1):
        for batch in job.loader:
            job.backward(batch)
            job.optimizer.step()
    with pytest.raises(UsageError, match="after training had started"):
        next(job.loader.epochs(1))


def test_the_plan_has_the_options_of_the_loader() -> None:
    session = started(LoneSession())
    job = Job(session, DataLoader(Numbers(), 8, accumulate=2, seed=5, drop_last=True))
    numbers: list[int] = []
    for _ in job.loader.epochs(2):
        for batch in job.loader:
            numbers += batch.tolist()
            job.backward(batch)
            job.optimizer.step()
    assert session.plan == DataPlan(
        samples=SAMPLES, batch=8, accumulate=2, epochs=2, seed=5, drop_last=True
    )
    assert len(numbers) == 2 * 32


class Watched(Numbers):
    """Records what the session was working on before each sample was loaded."""

    def __init__(self, session: LoneSession) -> None:
        super().__init__()
        self.session = session
        self.reads: list[tuple[int, DealtBatch | None]] = []

    def __getitem__(self, index: int) -> int:
        self.reads.append((index, self.session.working_on))
        return index


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rank_records_the_batch_before_it_loads_its_samples(accumulate: int) -> None:
    """Check that a sample that cannot be loaded is reported by its batch.

    This must hold whatever ends the process (R55).
    """
    session = started(LoneSession())
    data = Watched(session)
    job = Job(session, DataLoader(data, 4, accumulate=accumulate))
    for _ in job.loader.epochs(2):
        for numbers in job.loader:
            batch = session.working_on
            assert batch is not None
            assert numbers.tolist() == batches_of(session.plan, batch.lease)[batch.part]
            job.backward(numbers)
            job.step(numbers.tolist())
        assert session.working_on is None, "what stands behind the loop is of no batch"
    assert len(data.reads) == 2 * SAMPLES
    for index, batch in data.reads:
        assert batch is not None
        assert index in batches_of(session.plan, batch.lease)[batch.part]


@pytest.mark.long
def test_with_workers_the_rank_records_the_batch_that_it_waits_for() -> None:
    job = make_job(LoneSession(), 4, num_workers=2)
    session = job.session
    for _ in job.loader.epochs(2):
        for numbers in job.loader:
            batch = session.working_on
            assert batch is not None
            assert numbers.tolist() == batches_of(session.plan, batch.lease)[batch.part]
            job.backward(numbers)
            job.step(numbers.tolist())
