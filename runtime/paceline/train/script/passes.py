"""Passes of the script over its DataLoaders: where it is, and which batches it has taken (S4, S9).

A loader becomes a training loader with the first synchronizing `backward()` during an iteration
over it. That iteration is a *pass*, and each later one from its first batch on. Other iterations,
such as evaluations, belong to the place that they are in. A pass ends when its loader has no batch
left and all of its batches are averaged, or when the loop over it is left.

Many loops fetch ahead: those of accelerate and of transformers take the next batch before they give
the present one. Such a batch is not averaged with the others, so a rank that joins takes it again.
How many batches are held is seen from the second step on: a step takes as many batches as it uses,
and the first one took those that are held beside.

A rank that joins reads its slot's data again up to the first batch that is not averaged. Data that
cannot be read twice, such as a queue's, say so by an attribute `rewinds` that is False: that rank
goes on with what comes next, and keeps what it had to read on its way.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from types import FrameType
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.core.protocol.places import BEFORE, Path, Spot, SpotAction
from paceline.train.script.held_arrays import SentArrays, sent
from paceline.train.script.own_counts import CarriedValues, Counts, OwnCounts, plain, settled_in
from paceline.train.script.positions import (
    counter_above,
    number_of,
    outermost_reader,
    set_number,
)
from paceline.train.script.reach import reach
from paceline.worker.script_engine import LeftBehindError, ScriptEngine

log = logging.getLogger("paceline.rank")

_ITER: Final = DataLoader.__iter__


def samples_in(batch: object) -> int:
    """Return the number of samples in a batch: the length of its first tensor, or 1."""
    match batch:
        case torch.Tensor():
            return int(batch.shape[0]) if batch.dim() else 1
        case dict():
            return samples_in(next(iter(batch.values()), None))
        case list() | tuple():
            return samples_in(batch[0]) if batch else 1
    return 1


def _samplers_of(loader: DataLoader[Any]) -> list[Any]:
    batches: Any = loader.batch_sampler
    samplers: list[Any] = [loader.sampler]
    while batches is not None:  # accelerate wraps the batch sampler of the script
        samplers += [batches, getattr(batches, "sampler", None)]
        batches = getattr(batches, "batch_sampler", None)
    return samplers


def epoch_of(loader: DataLoader[Any]) -> int | None:
    """Return the epoch that the script has told the loader's sampler, if it tells it."""
    epochs = (getattr(sampler, "epoch", None) for sampler in _samplers_of(loader))
    return next((epoch for epoch in epochs if isinstance(epoch, int)), None)


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Tell the loader's sampler an epoch, as the script does."""
    for sampler in _samplers_of(loader):
        if isinstance(getattr(sampler, "epoch", None), int) and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def rewinds(loader: DataLoader[Any]) -> bool:
    """Return False if the data of a loader say that they cannot be read twice.

    Frameworks put a dataset into one of their own, which has it as its attribute `dataset`.

    Args:
        loader: The loader.
    """
    data: Any = getattr(loader, "dataset", None)
    visited: list[Any] = []
    while data is not None and not any(data is each for each in visited):
        if getattr(data, "rewinds", True) is False:
            return False
        visited.append(data)
        data = getattr(data, "dataset", None)
    return True


@dataclass(slots=True)
class Pace:
    """Counts by which the job knows how far the loop over one loader is ahead of its steps."""

    ahead: int | None = None
    """Batches that the script holds when it begins a step, beside those that the step uses; None
    before the second step."""
    step: int = 1
    """Batches that a step uses."""
    averaged: int = 1
    """Averaged backward passes of a step."""


@dataclass(eq=False, slots=True)
class Iteration:
    """What is known of one iteration over a loader."""

    number: int
    """Number of the loader."""
    index: int
    """Number of the iteration among those over this loader."""
    epoch: int | None
    pace: Pace
    """What is known of the script's loop over the loader."""
    skipped: int = 0
    """Batches before the first one that it gives: another rank had averaged them, or the script has
    told its loader to begin behind them."""
    given: int = 0
    """Batches that it has given."""
    samples: int = 0
    """Samples of the last of them."""
    is_empty: bool = False
    """True if the loader has no batch left."""
    is_left: bool = False
    """True if its loop reads no more."""
    is_abandoned: bool = False
    """True if this rank has joined elsewhere: the script gets no more of it."""
    is_asked: bool = False
    """True if the script has asked for a batch since the last averaged backward pass."""
    at_step: int = 0
    """Batches that it had given when the present step began."""
    averaged: int = 0
    """Averaged backward passes of the present step."""
    used: int = 0
    """Batches that were averaged, of those that it has given."""
    rest: int | None = None
    """Batches that were not averaged when this rank joined; None if nobody knows their number."""
    uncounted: int = 0
    """Batches before these that a loop of another rank has counted."""
    is_behind: bool = False
    """True if this rank has joined with it, so that its loop has not counted these."""
    handed: int = 0
    """Number of these that a Trainer of transformers has taken."""
    carried: dict[int, CarriedValues] = field(default_factory=dict)
    """Number of a batch of the loader that is not averaged -> what the script carried when it was
    given."""
    first_carried: CarriedValues | None = None
    """That with its first batch."""

    @property
    def cursor(self) -> int:
        """Return the number of batches of the loader that were averaged."""
        return self.skipped + self.used

    @property
    def is_over(self) -> bool:
        """Return True if the loader has no batch left, and all are known to be averaged."""
        known = self.pace.ahead is not None or self.given <= 1
        return self.is_empty and self.used == self.given and known

    @property
    def is_held(self) -> bool:
        """Return True if the script holds the last batches of the loader."""
        return self.is_empty and self.used < self.given and bool(self.pace.ahead)

    @property
    def _ahead(self) -> int:
        """Return how many batches the script held in its first step; known in the second one."""
        if self.is_empty:  # nothing shows how many the second step would have taken
            return min(1, self.at_step - 1)
        return max(0, self.at_step - (self.given - self.at_step))

    def look(self) -> None:
        """Find out how many batches were averaged in the first step."""
        if self.is_asked and self.at_step and self.pace.ahead is None:
            self.used = self.at_step - self._ahead

    def begin_step(self) -> None:
        """Note that a backward pass is about to be averaged; it may begin a new step."""
        if not self.is_asked:
            return  # one of several backward passes of a step, as of a GAN
        if self.at_step and self.pace.ahead is None:
            self.look()
            ahead = self._ahead
            self.pace.ahead, self.pace.step = ahead, self.at_step - ahead
            self.pace.averaged = self.averaged
        self.at_step, self.averaged = self.given, 0

    def end_step(self) -> None:
        """Note that the backward pass was averaged; it may end the step."""
        self.averaged += 1
        pace = self.pace
        if pace.ahead is None:
            self.used = self.given
        elif not self.is_empty:
            self.used = max(self.used, self.given - pace.ahead)
        elif self.averaged % pace.averaged == 0:
            self.used = min(self.given, self.used + pace.step)
        self.is_asked = False


class Passes:
    """Follows the iterations over all loaders of the script. Main thread."""

    def __init__(self, engine: ScriptEngine) -> None:
        self._engine = engine
        self._loaders: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()
        self._known = 0
        self._begun: Counter[int] = Counter()
        """Number of a loader -> iterations over it that were begun."""
        self._paces: dict[int, Pace] = {}
        self._iterates: dict[type, Callable[[Any], Iterator[Any]]] = {DataLoader: _ITER}
        """Class of loaders -> what begins an iteration over one."""
        self._unused: dict[int, tuple[list[Any], Iterator[Any]]] = {}
        """Number of a loader whose data cannot be read twice -> a batch that was given while this
        rank followed, and was not averaged, and the iterator behind it."""
        self.training: dict[int, int] = {}
        """Number of a training loader, in the order in which loaders were first used -> index of
        the first iteration over it that is a pass. A look at a batch before training is none."""
        self.epochs: dict[int, int] = {}
        """Place of a pass -> epoch that the script told its sampler."""
        self.cursors: dict[int, int] = {}
        """Number of a loader -> batches of it that were averaged in this pass."""
        self._resumes: dict[int, int] = {}
        """The donor's cursors of loaders that this rank has not begun to read."""
        self._open: list[Iteration] = []
        """Iterations that have given a batch and are still there, the last one to give one last."""
        self._pass: Iteration | None = None
        """Iteration that is a pass; None at a point."""
        self.steps = 0
        """Backward passes that were averaged: what `pl.step` returns."""
        self.step_at = BEFORE
        """Operation that came next when the script last asked for the number of its step."""
        self.is_over = False
        """True once the script has ended: iterations that it has left open mean nothing more."""
        self.on_skipped: Callable[[], None] = lambda: None
        """Called after a pass that this rank has made alone."""
        self.on_batch: Callable[[], None] = lambda: None
        """Called where a rank that joins may begin: before the first operation of a step."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called where this rank joins in this way, with the state loaded."""
        self.on_end: Callable[[int], None] = lambda _: None
        """Called with the place of a pass that has ended."""
        self.on_joined: Callable[[], None] = lambda: None
        """Called with the first batch of a pass that this rank has joined."""
        self.counts = OwnCounts()
        """Counts that the script keeps by itself."""
        self.own_counts: Counts = []
        """The donor's own counts, on a rank that joins."""
        self.own_arrays: SentArrays = {}
        self._of_pass = CarriedValues(), CarriedValues()
        """What the script carried with the first batch of the last pass, and at its end."""
        self.held = 0
        """Batches of the pass that the donor's script holds for later, on a rank that joins."""
        self.joined: Iteration | None = None
        """The pass that this rank has joined, until it ends."""
        self.moves_counts = False
        """True while iterators that count batches are moved on: loaders give None then."""
        self._counts = False
        """True if the script asks for the number of its step."""
        self._stepped_into_pass = False
        """True from where this rank joins in `pl.step`, within a pass, until it reads from the
        loader: its loop takes batches by next()."""
        self._is_first = False
        """True until the first operation after a batch was asked for."""
        self._is_averaging = False
        """True from `before_backward` to `after_backward`."""

    def install(self) -> None:
        """Follow all DataLoaders, whatever the script does with them."""
        self._follow_kind(DataLoader)

    def install_for_torchdata(self) -> None:
        """Follow the loaders of torchdata, if the script has imported it.

        Its StatefulDataLoader is a DataLoader that begins its iterations by itself.
        """
        module = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
        kind = getattr(module, "StatefulDataLoader", None)
        if kind is not None and kind not in self._iterates:
            self._iterates[kind] = kind.__iter__
            self._follow_kind(kind)

    def _follow_kind(self, kind: Any) -> None:
        passes = self

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            return passes.begin(loader)

        kind.__iter__ = iterate

    def _iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Begin an iteration of the loader's own, which nobody follows."""
        kind = next(kind for kind in type(loader).__mro__ if kind in self._iterates)
        return self._iterates[kind](loader)

    @property
    def _path(self) -> Path[Any]:
        return self._engine.operations.path

    def begin(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Begin an iteration over a loader."""
        number = self._loaders.get(loader)
        if number is None:
            number = self._loaders[loader] = self._known
            self._known += 1
        index, self._begun[number] = self._begun[number], self._begun[number] + 1
        pace = self._paces.setdefault(number, Pace())
        iteration = Iteration(number, index, epoch_of(loader), pace)
        if self._pass is not None and self._pass.number == number and torch.is_grad_enabled():
            # The loop before is over, although something still holds its iterator. Without
            # gradients this is an evaluation of the data of the pass.
            self.ended(self._pass)
        is_joining = self._path.skips or self._path.follows or self._stepped_into_pass
        if is_joining and self._trains(iteration):
            return Batches(self, None, iteration, loader)
        return Batches(self, self._resumed(loader, iteration), iteration, loader)

    def enter(self, loader: DataLoader[Any], iteration: Iteration) -> Iterator[Any]:
        """Return the batches of a training loader, from which this rank reads while it joins.

        As on the other ranks, a pass begins with the first batch that the script asks for.
        """
        if self._stepped_into_pass:
            self._stepped_into_pass = False
            epoch = self.epochs.get(self._path.here.place)
            if epoch is not None and epoch != iteration.epoch:
                set_epoch(loader, epoch)
            return self._resume(loader, iteration)
        if self._path.skips:
            return self._one(loader, iteration.number)
        if self._path.follows:
            return self._follow(loader, iteration)
        return self._resumed(loader, iteration)

    def _trains(self, iteration: Iteration) -> bool:
        first = self.training.get(iteration.number)
        return first is not None and iteration.index >= first

    def _resumed(self, loader: DataLoader[Any], iteration: Iteration) -> Iterator[Any]:
        """Return the loader's own iterator, behind the batches that the donor had taken."""
        cursor = self._resumes.pop(iteration.number, 0)
        if iteration.number in self._unused:
            first, inner = self._unused.pop(iteration.number)
            iteration.skipped = iteration.uncounted = cursor
            return chain(first, inner)
        inner = self._iterate(loader)
        # Not 0 if the script has loaded the state of its loader.
        begins = int(getattr(inner, "_num_yielded", 0))
        iteration.skipped = max(cursor, begins)
        iteration.uncounted = iteration.skipped - begins
        if not rewinds(loader):
            return inner
        if cursor > begins and isinstance(loader.dataset, IterableDataset):
            log.warning(
                "this rank reads %d batches of its stream again, which are averaged; if the stream "
                "cannot be read twice, give its dataset the attribute rewinds = False",
                cursor - begins,
            )
        for _ in range(begins, cursor):
            next(inner, None)
        try:
            iteration.rest = len(loader) - iteration.skipped
        except TypeError:  # of an IterableDataset
            iteration.rest = None
        return inner

    def _one(self, loader: DataLoader[Any], number: int) -> Iterator[Any]:
        """Return one batch, so that what the script makes of a pass, such as a mean, is defined."""
        if rewinds(loader):
            return islice(self._iterate(loader), 1)
        if number not in self._unused:
            inner = self._iterate(loader)
            self._unused[number] = list(islice(inner, 1)), inner
        return iter(self._unused[number][0])

    def _follow(self, loader: DataLoader[Any], iteration: Iteration) -> Iterator[Any]:
        """Begin a pass on a rank that follows: with one batch, or where the others are."""
        epoch = iteration.epoch
        places = [place for place, at in self.epochs.items() if at == epoch]
        if epoch is not None and places:
            self._path.here = Spot(places[-1] - 1, 0)  # the script resumes from its own snapshot
        act = self._path.begin_pass()
        while act is SpotAction.ASK:
            self._engine.ask(lambda spot: spot.place == self._path.here.place)
            act = self._path.in_pass()
        if act is SpotAction.LOST:
            number = self._path.here.place // 2 + 1
            raise LeftBehindError(f"pass {number} over the training loader began without this rank")
        if act is SpotAction.SKIP:
            self._pass = iteration
            return self._one(loader, iteration.number)
        self._engine.load()
        self.on_begin()
        return self._resume(loader, iteration)

    def _resume(self, loader: DataLoader[Any], iteration: Iteration) -> Iterator[Any]:
        """Go on in a pass where the donor is."""
        self._resumes = dict(self.cursors)
        self._pass = self.joined = iteration
        inner = self._resumed(loader, iteration)
        iteration.is_behind = True
        return inner

    def took(self, iteration: Iteration, batch: object) -> None:
        """Note that an iteration has given a batch."""
        iteration.given += 1
        iteration.samples = samples_in(batch)
        if iteration is self.joined and iteration.given == 1:
            self.on_joined()
            self._take_own_counts()
        if iteration in self._open:
            self._open.remove(iteration)
        self._open.append(iteration)
        if self._pass is None and self._trains(iteration):
            self._begin_pass(iteration)
        if self._pass is iteration or not self.training:
            carried = self.counts.read()
            iteration.carried[iteration.skipped + iteration.given - 1] = carried
            iteration.first_carried = iteration.first_carried or carried
        self._asked(iteration)

    def _asked(self, iteration: Iteration) -> None:
        iteration.is_asked = True
        if self._pass in (None, iteration) or self._is_used_with_pass(iteration):
            self._begin_step()  # no rank begins with a batch of an evaluation within a pass

    def _is_used_with_pass(self, iteration: Iteration) -> bool:
        """Return True for another training loader, as in zip(); False for an evaluation."""
        of_pass = self._pass is not None and iteration.number == self._pass.number
        return self._trains(iteration) and not of_pass

    def _begin_step(self) -> None:
        self._is_first = True
        self.on_batch()

    def emptied(self, iteration: Iteration) -> None:
        """Note that an iteration has no batch left. The script may still hold some."""
        iteration.is_empty = True
        if iteration is self._pass and iteration.is_over:
            self.ended(iteration)
        elif iteration is self._pass or not self.training:
            self._asked(iteration)

    def left(self, iteration: Iteration) -> None:
        """Note that nothing reads from an iteration any more. The script may hold batches of it."""
        if iteration is self._pass and iteration.is_held:
            iteration.is_left = True
        else:
            self.ended(iteration)

    def ended(self, iteration: Iteration) -> None:
        """Note that all batches of an iteration are averaged, or that its loop was left."""
        if iteration is self._pass:
            self._of_pass = iteration.first_carried or CarriedValues(), self.counts.read()
            skipped, place = self._path.skips, self._path.here.place
            self._path.end_pass()
            self._pass = self.joined = None
            if skipped:
                self.on_skipped()
                self._take_last_state()
            self.on_end(place)
        if iteration in self._open:
            self._open.remove(iteration)

    def _take_last_state(self) -> None:
        """Load the last state behind the last pass: what the script saves has to be that (S14)."""
        here = self._path.here
        while (act := self._path.behind_pass()) is SpotAction.ASK and not self.is_over:
            self._engine.ask(lambda _: False)
        if act is SpotAction.LOAD:
            self._engine.load()
            self._path.repeat_from(here)

    def before_backward(self) -> bool:
        """Note that a backward pass has begun whose gradients will be averaged.

        Returns:
            `Operation.opens` of the averaging, if no call comes before it.
        """
        # Loaders that are used together, as by zip(), are all training loaders. One that is empty
        # has been evaluated, unless all of its batches were taken before the first step. Of several
        # iterations over one loader only the last is read.
        used = list({each.number: each for each in self._open if not each.is_empty}.values())
        if not used and not self.training:
            used = self._open[-1:]
        if used:
            for each in used:
                self.training.setdefault(each.number, each.index)
            if self._pass is None:
                self._begin_pass(used[0])
        opens = self.opens()
        if not self._is_averaging:  # another model's pass may end inside of this one
            for iteration in self._trained:
                iteration.begin_step()
        self._is_averaging = True
        return opens

    @property
    def _trained(self) -> list[Iteration]:
        return [each for each in self._open if self._trains(each)]

    def _count(self) -> None:
        if self._pass is not None:
            self.cursors.update((each.number, each.cursor) for each in self._trained)
            if self._pass.pace.ahead is not None:  # the cursor goes back in the second step
                carried, cursor = self._pass.carried, self._pass.cursor
                self._pass.carried = {at: each for at, each in carried.items() if at >= cursor}

    def _begin_pass(self, iteration: Iteration) -> None:
        self._pass, self.cursors = iteration, {}
        self._path.begin_pass()
        if iteration.epoch is not None:
            self.epochs[self._path.here.place] = iteration.epoch

    def opens(self) -> bool:
        """Return True if a script that joins can begin with the operation that comes next."""
        for iteration in self._trained:
            iteration.look()
        self._count()
        first, self._is_first = self._is_first, False
        return first or (self._pass is None and not self._counts)

    def step(self) -> int:
        """Return the number of the step that the script makes next (`pl.step`)."""
        self._counts = True
        self._begin_step()
        if self._path.follows:
            while self._path.state is None:
                self._engine.ask(lambda _: True)
            self._engine.load()
            self.on_begin()
            self._step_into(self._path.here)
            if self._path.is_final:
                self._path.repeat_from(self.step_at)
        self.step_at = self._path.here
        return self.steps

    def read_held(self) -> int:
        """Return the number of batches of this pass that the script holds for later."""
        return (self._pass.pace.ahead or 0) if self._pass is not None else 0

    def read_own(self) -> tuple[Counts, SentArrays]:
        """Return what the script carries, for a rank that joins where this one is."""
        carried = CarriedValues()
        if self._pass is not None:
            carried = self._pass.carried.get(self._pass.cursor, carried)
        elif not self._counts:  # a rank that joins in `pl.step` is not where this one is
            carried = settled_in(self.counts.read(), *self._of_pass)
        arrays = {
            path: {name: sent(value) for name, value in held.items()}
            for path, held in carried.arrays.items()
        }
        return plain(carried.numbers), arrays

    def has_one_item_for_each_batch(self, begins: int, behind: int, loop: FrameType) -> bool:
        """Return False if a loop over enumerate() gives the next batch another number elsewhere.

        Args:
            begins: First number of the loop.
            behind: Batches that this rank is not given.
            loop: Frame of the loop.
        """
        last = self.counts.last_number(self.own_counts, loop)
        if last is None or behind <= self.held:
            return True  # the loop of the donor had no item of this pass
        return 0 <= begins + behind - 1 - last <= self.held

    def joined_here(self) -> None:
        """Take the script's own counts from the donor, which waits in the same operation."""
        if self._pass is None:
            self._take_own_counts()

    def _take_own_counts(self) -> None:
        self.counts.begin(reach())
        self.counts.take(self.own_counts, self.own_arrays)

    def _step_into(self, here: Spot) -> None:
        """Leave the pass that this rank has made alone for the place of the donor."""
        if self._pass is not None:
            self._pass.is_abandoned = True
            self._pass = self.joined = None
        self._stepped_into_pass = not here.is_at_point

    def samples(self) -> int:
        """Return the samples of the batch in hand; 1 if the script has no loader."""
        present = self._pass or (self._open[-1] if self._open else None)
        return max(1, present.samples) if present is not None else 1

    def after_backward(self) -> None:
        """Note that the gradients are averaged, and with them the batches that were used."""
        self.steps, self._is_averaging = self.steps + 1, False
        for iteration in self._trained:
            iteration.end_step()
        self._count()

    def stepped(self) -> None:
        """Note that an optimizer has made its step.

        A pass whose last batches were held, and whose loop reads no more, ends here, and not with
        its last backward pass: what follows until the step, such as DDP's exchange of unused
        parameters, is no place to begin.
        """
        if self._pass is not None and self._pass.is_over and self._pass.is_left:
            self.ended(self._pass)


class Batches(Iterator[Any]):
    """The iterator over one loader that the script gets."""

    def __init__(
        self,
        passes: Passes,
        inner: Iterator[Any] | None,
        iteration: Iteration,
        loader: DataLoader[Any],
    ) -> None:
        self._passes, self._inner, self._iteration = passes, inner, iteration
        self._loader = loader
        self._behind = 0
        """Batches that the script is not given, and that its loop has not counted."""

    def _begun(self) -> Iterator[Any]:
        """Return the loader's own iterator. A rank that joins begins it when it is first used."""
        if self._inner is None:
            self._inner = self._passes.enter(self._loader, self._iteration)
            self._behind = self._iteration.uncounted if self._iteration.is_behind else 0
        return self._inner

    def __next__(self) -> Any:
        """Return the next batch; None for one that this rank is not given and its loop counts."""
        if self._passes.moves_counts:
            self._behind = max(0, self._behind - 1)
            return None
        if self._iteration.is_abandoned:
            raise StopIteration
        inner = self._begun()
        if self._behind:
            self._move_counts(sys._getframe(1))  # noqa: SLF001
        try:
            batch = next(inner)
        except StopIteration:
            self._passes.emptied(self._iteration)
            raise
        self._passes.took(self._iteration, batch)
        return batch

    def _move_counts(self, frame: FrameType) -> None:
        """Let iterators that count batches count those that this rank is not given.

        Args:
            frame: Frame that reads from this iterator.
        """
        reader = outermost_reader(self, is_loader=lambda each: isinstance(each, Batches))
        if (counted := counter_above(reader, frame)) is not None:
            self._move_number(*counted)
        self._passes.moves_counts = True
        try:
            while reader is not self and self._behind > 0:
                next(reader)
        except StopIteration:
            pass  # its limit is reached, and the loop ends here
        finally:
            self._passes.moves_counts, self._behind = False, 0

    def _move_number(self, counter: Any, loop: FrameType) -> None:
        """Set the number of an enumerate() that is not around the loader itself.

        Args:
            counter: What counts the items of a generator or another iterator.
            loop: Frame of its loop.

        Raises:
            LeftBehindError: The number is not known, or cannot be set.
        """
        if type(counter) is enumerate:
            begins = number_of(counter)
            is_right = self._passes.has_one_item_for_each_batch(begins, self._behind, loop)
            if is_right and set_number(counter, begins + self._behind):
                return
        name = type(counter).__name__
        raise LeftBehindError(
            f"{loop.f_code.co_filename}:{loop.f_lineno}: {name}() counts the items of something "
            "that reads from the loader, and where it is on the other ranks cannot be known or set "
            f"on this one; put {name}() around the loader itself"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._begun(), name)

    def __len__(self) -> int:
        """Return the number of batches of the loader."""
        return len(self._begun())  # type: ignore[arg-type]

    def __del__(self) -> None:
        """End the pass when the script leaves its loop, unless it holds batches."""
        if "_iteration" in self.__dict__:
            self._passes.left(self._iteration)
