"""Which iterations over loaders are passes, and which of their batches are averaged (S4, S9)."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, chain, count, islice, repeat, starmap, takewhile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paceline.core.protocol.places import Path, Spot
from paceline.train.script.own_counts import Counts
from paceline.train.script.passes import Passes, samples_in
from paceline.worker.script_engine import LeftBehindError
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

Loader = DataLoader[Any]


class Engine:
    """Engine of a rank whose operations are made at once."""

    def __init__(self) -> None:
        self.operations = SimpleNamespace(path=Path[Any]())

    def ask(self) -> None:
        raise AssertionError("this rank has the state")

    def load(self) -> None:
        self.operations.path.load()


class Script:
    """What a script does with its loaders and its model."""

    def __init__(self) -> None:
        engine: Any = Engine()
        self.path: Path[Any] = engine.operations.path
        self.passes = Passes(engine)
        self.passes.install()
        self.sent: list[int] = []
        """What a rank that joins gets as the cursor of the first loader, operation by operation."""
        self.counts: list[Counts] = []
        """The script's own counts that it gets with it."""

    @property
    def here(self) -> Spot:
        return self.path.here

    def backward(self, *, steps: bool = True) -> Spot:
        """Make a synchronizing backward pass, and a step; return the operation that it is."""
        if self.passes.before_backward() and self.passes.cursors.get(0):
            self.sent.append(self.passes.cursors[0])
            self.counts.append(self.passes.read_own()[0])
        made = self.here
        self.path.made()
        self.passes.after_backward()
        if steps:
            self.passes.stepped()
        return made


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)  # restored after the test
    return Script()


def loader(size: int = 8, **words: Any) -> Loader:
    return DataLoader(list(range(size)), batch_size=2, **words)  # type: ignore[arg-type]


def test_an_iteration_without_backward_is_no_pass(script: Script) -> None:
    assert len(list(loader())) == 4
    assert script.here == Spot(0, 0)
    assert not script.passes.training


def test_the_first_backward_makes_an_iteration_a_pass(script: Script) -> None:
    made = [script.backward() for _ in loader()]
    assert made == [Spot(1, number) for number in range(4)]
    assert script.here == Spot(2, 0)
    assert script.passes.cursors == {0: 4}


def test_each_iteration_over_a_training_loader_is_a_pass_of_its_own(script: Script) -> None:
    sampler: Any = DistributedSampler(list(range(8)), num_replicas=2, rank=0)  # type: ignore[arg-type]
    data = loader(sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert [script.backward() for _ in data] == [Spot(2 * epoch + 1, n) for n in range(2)]
    assert script.passes.epochs == {1: 0, 3: 1, 5: 2}


def test_a_loop_that_is_left_ends_its_pass(script: Script) -> None:
    for number, _ in enumerate(loader()):
        script.backward()
        if number == 1:
            break
    del _
    assert script.here == Spot(2, 0)


def test_an_endless_cycle_over_a_loader_makes_a_pass_of_each_round(script: Script) -> None:
    def cycle(data: Loader) -> Iterator[Any]:
        while True:
            yield from data

    made = [script.backward() for _ in islice(cycle(loader()), 10)]
    assert [spot.place for spot in made] == [1, 1, 1, 1, 3, 3, 3, 3, 5, 5]


def test_an_evaluation_within_a_pass_belongs_to_the_pass(script: Script) -> None:
    evaluation, made = loader(4), []
    for _ in loader():
        made.append(script.backward())
        assert len(list(evaluation)) == 2
        assert script.passes.samples() == 2
    assert made == [Spot(1, number) for number in range(4)]
    assert script.passes.cursors == {0: 4}
    assert script.passes.training == {0: 0}


def test_no_rank_begins_with_an_evaluation_within_a_pass(script: Script) -> None:
    evaluation, opens = loader(4), []
    for step, _ in enumerate(loader()):
        opens.append(script.passes.opens())
        script.backward()
        if step % 2 == 0:
            opens += [script.passes.opens() for _ in evaluation]
    assert opens == [True, False, False, True] * 2


def test_no_rank_begins_with_an_evaluation_of_the_data_of_a_pass(script: Script) -> None:
    data, opens = loader(), []
    for _ in data:
        script.backward()
        with torch.no_grad():
            opens += [script.passes.opens() for _ in data]
    assert not any(opens)


def test_an_evaluation_before_the_first_backward_leaves_the_pass_as_it_is(script: Script) -> None:
    evaluation, made = loader(4), []
    for step, _ in enumerate(loader()):
        if step == 0:
            list(evaluation)
        made.append(script.backward())
    assert made == [Spot(1, number) for number in range(4)]


def test_loaders_that_are_used_together_are_all_training_loaders(script: Script) -> None:
    for _ in zip(loader(), loader(), strict=True):
        script.backward()
    assert script.passes.training == {0: 0, 1: 0}


def ahead(data: Loader, held: int = 1) -> Iterator[Any]:
    """Give the batches of a loader late, as accelerate and timm do."""
    batches: deque[Any] = deque()
    for batch in data:
        batches.append(batch)
        if len(batches) > held:
            yield batches.popleft()
    while batches:
        yield batches.popleft()


def accelerated(data: Loader) -> Iterator[Any]:
    """Give the batches of a loader as accelerate does."""
    batches = iter(data)
    present = next(batches)
    while True:
        try:
            following = next(batches)
        except StopIteration:
            yield present
            break
        yield present
        present = following


def grouped(data: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Give groups of batches, as transformers' Trainer takes them for one step."""
    while group := list(islice(data, size)):
        yield group


@pytest.mark.parametrize(
    ("give", "size"), [(ahead, 6), (ahead, 8), *((accelerated, size) for size in (2, 4, 6, 8))]
)
def test_the_last_backward_of_a_loop_that_fetches_ahead_is_in_the_pass(
    script: Script, give: Callable[[Loader], Iterator[Any]], size: int
) -> None:
    data = loader(size)
    for place in (1, 3):
        assert [script.backward() for _ in give(data)] == [
            Spot(place, number) for number in range(size // 2)
        ]
    assert script.here == Spot(4, 0)


@pytest.mark.parametrize("held", [0, 1, 2, 3])
def test_batches_that_were_fetched_ahead_are_not_averaged(script: Script, held: int) -> None:
    data = loader(16)
    for _ in range(2):
        for _ in ahead(data, held):
            script.backward()
    # Nobody can join at the last batches of those that are held: nothing shows where they begin.
    assert script.sent == list(range(1, 9 - max(1, held))) * 2
    assert script.passes.cursors == {0: 8}
    assert script.here == Spot(4, 0)


def test_a_pass_with_batches_ahead_ends_behind_the_last_step(script: Script) -> None:
    for give in (ahead, accelerated):
        for _ in give(loader(8)):
            script.backward(steps=False)
            assert not script.here.is_at_point
            assert not script.passes.opens(), "nobody can begin between a backward pass and a step"
            script.passes.stepped()
        assert script.here.is_at_point


def test_an_operation_behind_the_last_step_but_one_opens_nothing(script: Script) -> None:
    for _ in ahead(loader(12), 2):
        script.backward()
        assert not script.passes.opens() or script.here == Spot(2, 0)


@pytest.mark.parametrize("batches", [4, 5, 6])
def test_batches_that_were_fetched_for_a_step_are_averaged_with_it(
    script: Script, batches: int
) -> None:
    data = loader(2 * batches)
    made = [[script.backward() for _ in grouped(accelerated(data), 2)] for _ in range(2)]
    steps = (batches + 1) // 2
    assert made == [[Spot(place, n) for n in range(steps)] for place in (1, 3)]
    assert script.sent == [2 * n for n in range(1, steps)] * 2
    assert script.here == Spot(4, 0)


def test_backward_passes_of_one_step_with_a_batch_ahead_count_it_once(script: Script) -> None:
    for _ in accelerated(loader(8)):
        script.backward()
        script.backward()
    assert script.sent == [1, 2, 3]
    assert script.here == Spot(2, 0)


def test_a_call_before_the_second_step_does_not_count_a_batch_ahead(script: Script) -> None:
    for number, _ in enumerate(accelerated(loader(8))):
        if number == 1:
            assert script.passes.opens()
            assert script.passes.cursors == {0: 1}
            break
        script.backward()


def test_an_iterator_that_is_still_held_does_not_prolong_its_pass(script: Script) -> None:
    data, held = loader(), []
    for place in (1, 3):
        held.append(iter(data))
        assert [script.backward() for _ in islice(held[-1], 4)] == [
            Spot(place, number) for number in range(4)
        ]


def test_an_evaluation_of_the_data_of_a_pass_leaves_the_pass_as_it_is(script: Script) -> None:
    data = loader()
    made = []
    for _ in data:
        made.append(script.backward())
        with torch.no_grad():
            assert len(list(data)) == 4
    assert made == [Spot(1, number) for number in range(4)]


def test_accumulation_without_reduction_counts_batches_and_not_operations(script: Script) -> None:
    made = [script.backward() for number, _ in enumerate(loader()) if number % 2]
    assert made == [Spot(1, 0), Spot(1, 1)]
    assert script.passes.cursors == {0: 4}


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_change_nothing(script: Script, *, persistent: bool) -> None:
    data = loader(num_workers=1, persistent_workers=persistent)
    for place in (1, 3):
        assert [script.backward() for _ in data] == [Spot(place, n) for n in range(4)]


def test_a_rank_that_joins_skips_the_batches_that_are_averaged(script: Script) -> None:
    passes, path = script.passes, script.path
    passes.training, passes.cursors = {0: 0}, {0: 2}
    path.follows, path.done, path.state = True, Spot(1, 1), Spot(1, 2)
    assert [batch.tolist() for batch in loader()] == [[4, 5], [6, 7]]
    assert not path.follows


class Queue(IterableDataset[int]):
    """Numbers, each of which is given once, whoever reads them."""

    def __init__(self, *, rewinds: bool) -> None:
        self.rewinds, self.given = rewinds, 0

    def __iter__(self) -> Iterator[int]:
        while self.given < 8:
            self.given += 1
            yield self.given - 1


class Part(IterableDataset[int]):
    """A framework's own dataset around the script's."""

    def __init__(self, dataset: Queue) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset)


def joins_in_the_second_pass(script: Script, data: Loader) -> list[list[int]]:
    """Return the batches of a rank that joins where two batches of the second pass are averaged."""
    passes, path = script.passes, script.path
    passes.training, passes.cursors = {0: 0}, {0: 2}
    path.follows, path.done, path.state = True, Spot(3, 1), Spot(3, 2)
    skipped: list[list[int]] = [batch.tolist() for batch in data]
    assert path.follows
    taken: list[list[int]] = []
    for batch in data:
        taken.append(batch.tolist())
        script.backward()
    return [*skipped, *taken]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_rank_that_joins_takes_all_batches_of_a_stream_that_cannot_be_read_twice(
    script: Script, *, wrapped: bool
) -> None:
    queue = Queue(rewinds=False)
    data: Loader = DataLoader(Part(queue) if wrapped else queue, batch_size=2)
    # The first batch is given in the pass that is over, and again, as it was not averaged.
    assert joins_in_the_second_pass(script, data) == [[0, 1], [0, 1], [2, 3], [4, 5], [6, 7]]
    assert script.passes.cursors == {0: 2 + 4}, "the place in the pass goes on from the donor's"


def test_a_rank_that_joins_says_how_many_batches_of_a_stream_it_reads_again(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    data: Loader = DataLoader(Queue(rewinds=True), batch_size=2)
    assert joins_in_the_second_pass(script, data) == [[0, 1], [6, 7]]
    assert "reads 2 batches of its stream again" in caplog.text
    assert "rewinds = False" in caplog.text


class StatefulDataLoader(DataLoader[Any]):
    """A loader that begins its iterations by itself and behind its state, as torchdata's does."""

    behind = 0

    def __iter__(self) -> Any:
        inner = self._get_iterator()
        for _ in range(self.behind):
            next(inner)
        self.behind = 0
        return inner


@pytest.fixture
def stateful(script: Script, monkeypatch: pytest.MonkeyPatch) -> Loader:
    """A loader of torchdata's class, as far as Paceline knows."""

    class Kind(StatefulDataLoader):
        pass

    Kind.__iter__ = StatefulDataLoader.__iter__  # type: ignore[method-assign]
    module = SimpleNamespace(StatefulDataLoader=Kind)
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader.stateful_dataloader", module)
    for _ in range(2):  # once for each model
        script.passes.install_for_torchdata()
    return Kind(list(range(8)), batch_size=2)  # type: ignore[arg-type]


def test_passes_over_a_stateful_loader_are_followed(script: Script, stateful: Loader) -> None:
    assert [script.backward() for _ in stateful] == [Spot(1, number) for number in range(4)]
    assert script.passes.cursors == {0: 4}


def test_a_rank_that_joins_skips_the_rest_up_to_the_cursor_behind_the_state_of_its_loader(
    script: Script, stateful: Any
) -> None:
    passes, path = script.passes, script.path
    passes.training, passes.cursors = {0: 0}, {0: 3}
    path.follows, path.done, path.state = True, Spot(1, 2), Spot(1, 3)
    stateful.behind = 2
    assert [batch.tolist() for batch in stateful] == [[6, 7]]


@pytest.mark.parametrize("held", [0, 1, 2])
def test_a_rank_that_joins_gets_the_counts_of_the_batch_with_which_it_joins(
    script: Script, held: int
) -> None:
    def train(data: Loader) -> None:
        taken, batches, held_batches = 0, iter(data), deque[Any]()
        while taken < len(data):
            held_batches.append(next(batches))
            taken += 1
            if len(held_batches) > held:
                held_batches.popleft()
                script.backward()
        while held_batches:
            held_batches.popleft()
            script.backward()

    train(loader(16))
    sent = [
        [steady["taken"] for path, steady, _, _ in counts if " train:" in path]
        for counts in script.counts
    ]
    assert len(sent) >= 5
    assert sent == [[cursor] for cursor in script.sent]


def looks_then_trains(script: Script, *, holds: bool) -> list[tuple[int, Spot]]:
    """Look at a batch before training; return the number and the place of each backward pass."""
    data = loader()
    held = iter(data)
    next(held)
    if not holds:
        del held
    return [(number, script.backward()) for _ in range(2) for number, _ in enumerate(iter(data))]


@pytest.mark.parametrize("holds", [True, False])
def test_a_look_at_a_batch_before_training_is_no_pass(script: Script, holds: bool) -> None:
    made = looks_then_trains(script, holds=holds)
    assert made == [(n, Spot(place, n)) for place in (1, 3) for n in range(4)]
    assert script.passes.training == {0: 1}
    assert script.passes.cursors == {0: 4}
    other = Script()
    joins(other)
    other.passes.training = dict(script.passes.training)
    assert looks_then_trains(other, holds=holds) == made[2:]


def test_a_pass_that_a_rank_joins_begins_with_the_first_batch_that_is_asked_for(
    script: Script,
) -> None:
    joins(script)
    first, second = loader(), loader()
    unused, other = iter(first), iter(second)
    made = [(number, script.backward()) for number, _ in enumerate(zip(first, other, strict=True))]
    assert made == [(2, Spot(1, 2)), (3, Spot(1, 3))]
    assert len(unused) == 4


def joins(script: Script) -> None:
    """Let the script join a pass of which two batches are averaged."""
    passes, path = script.passes, script.path
    passes.training = {0: 0, 1: 0}
    passes.cursors = {0: 2, 1: 2}
    path.follows, path.done, path.state = True, Spot(1, 1), Spot(1, 2)


@pytest.mark.parametrize(
    "loop",
    [
        lambda: enumerate(loader()),
        lambda: (each for each in enumerate(loader())),
        lambda: islice(enumerate(loader()), 4),
        lambda: enumerate(islice(loader(), 4)),
        lambda: enumerate(zip(loader(), loader(), strict=False)),
        lambda: ((step, batch) for batch, step in zip(loader(), range(4), strict=False)),
    ],
)
def test_a_loop_that_joins_counts_its_batches_as_the_others_do(
    script: Script, loop: Callable[[], Iterator[tuple[int, Any]]]
) -> None:
    joins(script)
    results = [(step, batch) for step, batch in loop()]
    assert [step for step, _ in results] == [2, 3]
    batches = [batch[0] if isinstance(batch, list | tuple) else batch for _, batch in results]
    assert [batch.tolist() for batch in batches] == [[4, 5], [6, 7]]


def test_a_limit_of_batches_holds_for_a_loop_that_joins(script: Script) -> None:
    joins(script)
    assert [batch.tolist() for batch in islice(loader(), 3)] == [[4, 5]]


def bar(data: Iterator[Any] | Loader) -> Iterator[Any]:
    yield from data


def one_ahead(data: Iterator[Any]) -> Iterator[Any]:
    batch = next(data)
    for later in data:
        yield batch
        batch = later
    yield batch


class Prefetcher:
    """An iterator of the script's own that holds one batch."""

    def __init__(self, data: Iterator[Any]) -> None:
        self.data, self.held = data, next(data, None)

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Any:
        if self.held is None:
            raise StopIteration
        batch, self.held = self.held, next(self.data, None)
        return batch


class Wrapped:
    """An iterator of the script's own that reads a batch when it is asked."""

    def __init__(self, data: Iterator[Any]) -> None:
        self.data = data

    def __iter__(self) -> Wrapped:
        return self

    def __next__(self) -> Any:
        return next(self.data)


def pairs(data: Iterator[Any]) -> Iterator[Any]:
    while batches := list(islice(data, 2)):
        yield batches


def trained(script: Script, items: Iterator[Any], start: int = 0) -> list[int]:
    """Train in a loop over enumerate(), and return the numbers that it gave."""
    numbers = []
    for number, item in enumerate(items, start):
        numbers.append(number)
        for _ in item if isinstance(item, list) else [item]:
            script.backward()
    return numbers


@pytest.mark.parametrize(
    ("between", "held"),
    [
        (bar, 0),
        (one_ahead, 1),
        (Wrapped, 0),
        (partial(map, lambda batch: batch * 2), 0),
        (lambda data: map(torch.neg, map(torch.neg, data)), 0),
        (lambda data: bar(map(torch.neg, Wrapped(data))), 0),
        (lambda data: chain(data, []), 0),
        (lambda data: starmap(torch.add, zip(data, repeat(1), strict=False)), 0),
        (lambda data: takewhile(lambda batch: batch is not None, data), 0),
        (lambda data: accumulate(data, torch.add), 0),
    ],
)
def test_the_number_of_a_loop_over_a_generator_is_that_of_the_other_ranks(
    script: Script, between: Callable[[Any], Iterator[Any]], held: int
) -> None:
    data = loader(16)
    for _ in range(2):
        script.sent, script.counts = [], []
        assert trained(script, between(iter(data)), start=5) == [*range(5, 13)]
    assert script.sent == [*range(1, 8)]
    for cursor, counts in zip(script.sent, script.counts, strict=True):
        other = Script()
        joins(other)
        other.passes.own_counts, other.passes.held = counts, held
        other.passes.cursors = {0: cursor}
        assert trained(other, between(iter(loader(16))), start=5) == [*range(5 + cursor, 13)]


def test_a_rank_stays_outside_if_a_generator_gives_not_one_item_for_each_batch(
    script: Script,
) -> None:
    assert trained(script, pairs(iter(loader(16)))) == [*range(4)]
    other = Script()
    joins(other)
    other.passes.own_counts, other.passes.cursors = script.counts[-1], {0: script.sent[-1]}
    with pytest.raises(LeftBehindError, match=rf"{__file__}:\d+: enumerate\(\) counts the items"):
        trained(other, pairs(iter(loader(16))))


@pytest.mark.parametrize(
    "loop",
    [
        lambda data: islice(bar(data), 4),
        lambda data: islice(map(torch.neg, iter(data)), 4),
        lambda data: zip(count(), bar(data), strict=False),
        lambda data: zip(bar(data), range(4), strict=False),
    ],
)
def test_a_rank_stays_outside_if_a_number_over_a_generator_cannot_be_set(
    script: Script, loop: Callable[[Loader], Iterator[Any]]
) -> None:
    joins(script)
    with pytest.raises(LeftBehindError, match=rf"{__file__}:\d+: (islice|zip)\(\) counts"):
        next(loop(loader()))


def test_loaders_that_are_read_side_by_side_by_generators_need_no_number(script: Script) -> None:
    joins(script)
    rows = list(zip(bar(loader()), bar(loader()), strict=True))
    assert [[int(batch[0]) for batch in each] for each in rows] == [[4, 4], [6, 6]]


def test_a_count_within_a_generator_is_right(
    script: Script,
) -> None:
    joins(script)
    assert [step for step, _ in bar(enumerate(loader()))] == [2, 3]


def test_a_loop_without_a_loader_gets_the_number_of_its_step(script: Script) -> None:
    numbers = []
    for _ in range(3):
        numbers.append(script.passes.step())
        script.backward()
    assert numbers == [0, 1, 2]


def test_a_rank_that_joins_gets_the_number_of_the_step_with_the_state(script: Script) -> None:
    script.passes.steps, script.path.follows, script.path.state = 7, True, Spot(0, 9)
    assert script.passes.step() == 7
    assert script.here == Spot(0, 9)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ([], 1),
        ({}, 1),
        ("text", 1),
        ([[1, 2]], 1),
    ],
)
def test_a_batch_without_a_tensor_is_one_sample(batch: object, samples: int) -> None:
    assert samples_in(batch) == samples
