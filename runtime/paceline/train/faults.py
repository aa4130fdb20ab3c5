"""Faults that a rank injects into itself, to test how a job reacts (`paceline run --inject`).

`core.faults` defines the grammar and the meaning of faults. This module carries out those that
happen inside a training process: a step that takes longer, a step whose duration is drawn, and a
gradient that is NaN. `step()` calls it when the gradient is complete and not yet announced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from paceline_api.times import NS_PER_S

from paceline import clock
from paceline.core.faults import Fault, FaultKind
from paceline.core.loads import Load, shifted_ns


class Faults:
    """Faults of this process.

    Args:
        faults: All faults of the job; those for other places are ignored.
        place: Place of this process, slot x procsPerReplica + process. It never changes.
    """

    def __init__(self, faults: Iterable[Fault], place: int) -> None:
        mine = [fault for fault in faults if fault.rank in (place, None)]
        slow = [fault for fault in mine if fault.kind is FaultKind.SLOW]
        self._slow = [fault for fault in slow if fault.load is None]
        self._loads = [(fault, fault.load) for fault in slow if fault.load is not None]
        self._factors = [fault for fault in mine if fault.kind is FaultKind.SLOW_FACTOR]
        self._shifts = [fault for fault in mine if fault.kind is FaultKind.SHIFT]
        self._nan = [fault for fault in mine if fault.kind is FaultKind.NAN]
        self._step = 0
        """Number of steps of this rank, from 0. Draws depend on it and not on the rounds, so they
        repeat."""
        self._dice = random.Random(f"paceline fault {place}")
        self._since_ns = clock.now_ns()

    def before_announcing(
        self, *, version: int, rank: int, size: int, poison: Callable[[], None]
    ) -> None:
        """Delay the step and poison its gradient, as the faults demand.

        Args:
            version: Version of the weights that the gradient was computed on.
            rank: Place of this process.
            size: Number of ranks in the present membership.
            poison: Sets the gradient to NaN.
        """
        took_ns = clock.now_ns() - self._since_ns
        step_ns = max([took_ns, *(self._drawn_ns(*load, rank) for load in self._loads)])
        delay_ns = step_ns - took_ns
        delay_ns += sum(f.delay_ns for f in self._slow if self._strikes(f, version, rank, size))
        delay_ns += sum(int(step_ns * (fault.factor - 1)) for fault in self._factors)
        delay_ns += sum(
            shifted_ns(f.least_ns, f.most_ns, rank=rank, step=self._step, ranks=size)
            for f in self._shifts
        )
        self._step += 1
        if delay_ns:
            clock.pause(delay_ns / NS_PER_S)
        due = [f for f in self._nan if f.at and f.at.reached(version=version, elapsed_ns=0)]
        if due:
            self._nan = [fault for fault in self._nan if fault not in due]
            poison()

    def step_ended(self) -> None:
        """Restart the clock from which `slow-factor` and drawn durations measure a step."""
        if self._factors or self._loads:
            self._since_ns = clock.now_ns()

    def _drawn_ns(self, fault: Fault, load: Load, rank: int) -> int:
        return round(fault.scale * load.draw_ns(seed=fault.seed, rank=rank, step=self._step))

    def _strikes(self, fault: Fault, version: int, rank: int, size: int) -> bool:
        if fault.rank is not None:
            return self._dice.random() < fault.probability
        # One random rank per round. The version is the seed, so all ranks draw the same rank.
        drawn = random.Random(f"paceline slow rank {version}")
        return drawn.randrange(size) == rank and drawn.random() < fault.probability
