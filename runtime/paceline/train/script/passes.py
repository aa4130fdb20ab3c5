"""Passes of the script over its DataLoaders: where it is, and which batches it has taken (S4, S9).

A loader becomes a training loader with the first synchronizing `backward()` during an iteration
over it. That iteration is a *pass*, and each later one from its first batch on. Other iterations,
such as evaluations, belong to the place that they are in. A pass ends with its last batch, or when
the loop over it is left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from paceline.core.protocol.places import Act, Path, Spot
from paceline.worker.script_engine import LeftBehindError, ScriptEngine

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


def epoch_of(loader: DataLoader[Any]) -> int | None:
    """Return the epoch that the script has told the loader's sampler, if it tells it."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        epoch = getattr(sampler, "epoch", None)
        if isinstance(epoch, int):
            return epoch
    return None


@dataclass(eq=False, slots=True)
class Iteration:
    """What is known of one iteration over a loader."""

    number: int
    """Number of the loader."""
    epoch: int | None
    taken: int = 0
    """Batches that it has given."""
    samples: int = 0
    """Samples of the last of them."""


class Passes:
    """Follows the iterations over all loaders of the script. Main thread."""

    def __init__(self, engine: ScriptEngine) -> None:
        self._engine = engine
        self._loaders: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()
        self._known = 0
        self.training: set[int] = set()
        """Numbers of the training loaders, in the order in which loaders were first used."""
        self.epochs: dict[int, int] = {}
        """Place of a pass -> epoch that the script told its sampler."""
        self.cursors: dict[int, int] = {}
        """Number of a loader -> batches of it that were taken in this pass before the last backward
        pass was averaged."""
        self._resumes: dict[int, int] = {}
        """The donor's cursors of loaders that this rank has not begun to read."""
        self._open: list[Iteration] = []
        """Iterations that have given a batch and have not ended, the last one to give one last."""
        self._pass: Iteration | None = None
        """Iteration that is a pass; None at a point."""
        self.steps = 0
        """Backward passes that were averaged: what `pl.step` returns."""
        self.on_skipped: Callable[[], None] = lambda: None
        """Called after a pass that this rank has made alone."""
        self._counts = False
        """True if the script asks for the number of its step."""
        self._is_first = False
        """True until the first operation after a batch was taken."""

    def install(self) -> None:
        """Follow all DataLoaders, whatever the script does with them."""
        passes = self

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            return passes.begin(loader)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]

    @property
    def _path(self) -> Path[Any]:
        return self._engine.operations.path

    def begin(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Begin an iteration over a loader."""
        number = self._loaders.get(loader)
        if number is None:
            number = self._loaders[loader] = self._known
            self._known += 1
        epoch = epoch_of(loader)
        if self._path.skips and number in self.training:
            return Batches(self, islice(_ITER(loader), 1), Iteration(number, epoch))
        if self._path.follows and number in self.training:
            return self._follow(loader, number, epoch)
        iteration = Iteration(number, epoch)
        return Batches(self, self._resumed(loader, iteration), iteration)

    def _resumed(self, loader: DataLoader[Any], iteration: Iteration) -> Iterator[Any]:
        """Return the loader's own iterator, behind the batches that the donor had taken."""
        inner = _ITER(loader)
        iteration.taken = self._resumes.pop(iteration.number, 0)
        for _ in range(iteration.taken):
            next(inner, None)
        return inner

    def _follow(self, loader: DataLoader[Any], number: int, epoch: int | None) -> Iterator[Any]:
        """Begin a pass on a rank that follows: with one batch, or where the others are."""
        places = [place for place, at in self.epochs.items() if at == epoch]
        if epoch is not None and places:
            self._path.here = Spot(places[-1] - 1, 0)  # the script resumes from its own snapshot
        act = self._path.begin_pass()
        while act is Act.ASK:
            self._engine.ask()
            act = self._path.in_pass()
        if act is Act.LOST:
            raise LeftBehindError(f"pass {self._path.here.place} began without this rank")
        if act is Act.SKIP:
            # One batch, so that what the script makes of a pass, such as a mean, is defined.
            self._pass = Iteration(number, epoch)
            return Batches(self, islice(_ITER(loader), 1), self._pass)
        self._engine.load()
        self._resumes = dict(self.cursors)
        self._pass = Iteration(number, epoch)
        return Batches(self, self._resumed(loader, self._pass), self._pass)

    def took(self, iteration: Iteration, batch: object) -> None:
        """Note that an iteration has given a batch."""
        iteration.taken += 1
        iteration.samples = samples_in(batch)
        if iteration in self._open:
            self._open.remove(iteration)
        self._open.append(iteration)
        if self._pass is None and iteration.number in self.training:
            self._begin_pass(iteration)
        self._is_first = True

    def ended(self, iteration: Iteration) -> None:
        """Note that an iteration has no batch left, or that its loop was left."""
        if iteration is self._pass:
            skipped = self._path.skips
            self._path.end_pass()
            self._pass = None
            if skipped:
                self.on_skipped()
        if iteration in self._open:
            self._open.remove(iteration)

    def before_backward(self) -> bool:
        """Note that gradients are about to be averaged; return `Operation.opens`."""
        if self._open:
            # Loaders that are used together, as by zip(), are all training loaders.
            self.training.update(iteration.number for iteration in self._open)
            if self._pass is None:
                self._begin_pass(self._open[0])
        return self.opens()

    def _begin_pass(self, iteration: Iteration) -> None:
        self._pass, self.cursors = iteration, {}
        self._path.begin_pass()
        if iteration.epoch is not None:
            self.epochs[self._path.here.place] = iteration.epoch

    def opens(self) -> bool:
        """Return True if a script that joins can begin with the operation that comes next."""
        first, self._is_first = self._is_first, False
        return first or (self._pass is None and not self._counts)

    def step(self) -> int:
        """Return the number of the step that the script makes next (`pl.step`)."""
        self._counts = self._is_first = True
        if self._path.follows:
            while self._path.state is None:
                self._engine.ask()
            self._engine.load()
        return self.steps

    def samples(self) -> int:
        """Return the samples of the batch in hand; 1 if the script has no loader."""
        return max(1, self._open[-1].samples) if self._open else 1

    def after_backward(self) -> None:
        """Note that all batches that were taken so far are averaged."""
        self.steps += 1
        if self._pass is not None:
            self.cursors = {iteration.number: iteration.taken for iteration in self._open}


class Batches(Iterator[Any]):
    """The iterator over one loader that the script gets."""

    def __init__(self, passes: Passes, inner: Iterator[Any], iteration: Iteration) -> None:
        self._passes, self.inner, self._iteration = passes, inner, iteration
        self._over = False

    def __next__(self) -> Any:
        """Return the next batch."""
        try:
            batch = next(self.inner)
        except StopIteration:
            self._end()
            raise
        self._passes.took(self._iteration, batch)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        """Return the number of batches of the loader."""
        return len(self.inner)  # type: ignore[arg-type]

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._passes.ended(self._iteration)

    def __del__(self) -> None:
        """End the pass when the script leaves its loop."""
        if "_over" in self.__dict__:
            self._end()
