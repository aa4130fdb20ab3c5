"""From runs that were measured to steps, gradients and progress at another size or in another mode.

A step is the arrival of the member that the mode waits for, then what the reduction adds: with n
pieces that are reduced while backward() makes the next ones, max(1 + C/n, 1/3 + 2/3/n + C) times
the computing (docs/benchmarks.md, B10), with one piece 1 + C; then the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Self

from paceline.core.forecast import hybrid
from paceline.core.forecast.arrivals import arrival_s, late_s, thinned
from paceline.core.forecast.efficiency import efficiency, epochs
from paceline.core.forecast.fitting import fit_two
from paceline.core.forecast.link import Link, Sum


@dataclass(frozen=True, slots=True)
class Setting:
    """What can be chosen."""

    members: int
    """P: copies of the model, each one rank or a group of them."""
    quorum: int
    """Members that a round waits for; all of them in Full."""
    batch: float
    """Samples of one gradient of a member."""
    model: int = 1
    """M: ranks of a member."""

    @property
    def ranks(self) -> int:
        return self.members * self.model


@dataclass(frozen=True, slots=True)
class Row:
    """One run that was measured."""

    setting: Setting
    computing_s: tuple[tuple[float, ...], ...]
    """Of each member: its steps, from the end of step() to the next call. All > 0."""
    sums: tuple[Sum, ...]
    """One for each segment of the gradient; none for a member alone."""
    payload_bytes: int
    """Of the gradient, on one rank."""
    streamed: bool
    """Most rounds were reduced while backward() ran."""
    update_s: float
    """Of a round: update, copy, and what the protocol takes."""
    step_s: float
    """From one round to the next."""
    noise_scale: float | None


@dataclass(frozen=True, slots=True)
class Forecast:
    setting: Setting
    step_s: float
    """From one round to the next."""
    gradients_per_s: float
    """Applied."""
    efficiency: float
    """Share of the samples that is progress; 1 if the noise scale is not known."""
    goodput: float
    """Samples per second that are progress."""
    cost: float
    """Rank seconds for 1,000 such samples."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """The fewest replicas from which M ranks to a copy of the model beat M times as many copies."""

    groups: int
    gain: float


@dataclass(frozen=True, slots=True)
class Model:
    per_sample_s: float
    """Computing, of a rank that has its machine for itself."""
    sharing_s: float
    """More of it for each rank of the job: ranks of one machine share its cores."""
    shape: tuple[tuple[float, ...], ...]
    """Times of each measured member, over the mean of all."""
    link: Link
    payload_bytes: float
    """Of the whole model's gradient."""
    pieces: int
    """That are reduced one after the other beside backward(); 1: all behind it."""
    update_s: float
    speedups: dict[int, float]
    """Of computing, by ranks that share a copy of the model, SU(M). Where nothing is known of one
    rank with the whole model: in multiples of the fewest that were measured."""
    noise_scale: float | None

    @classmethod
    def fit(cls, rows: Sequence[Row], speedups: dict[int, float] | None = None) -> Self:
        """`rows`: at least one, of one job; `speedups`: by M, instead of what the rows say."""
        given = speedups or {}
        smallest = min(row.setting.model for row in rows)
        sharing_s, per_sample_s = _computing([r for r in rows if r.setting.model == smallest])
        found = {smallest: 1.0}
        for m in {row.setting.model for row in rows} - {smallest}:
            found[m] = fmean(
                (per_sample_s + sharing_s * row.setting.ranks) * row.setting.batch / _mean_s(row)
                for row in rows
                if row.setting.model == m
            )
        # What is given is in multiples of a rank with the whole model.
        base = given.get(smallest, 1.0)
        if smallest > 1 and base != 1.0:
            found = {1: 1.0} | {m: base * speedup for m, speedup in found.items()}
        largest = max(rows, key=lambda row: row.setting.members)
        mean_s = fmean(map(fmean, largest.computing_s))
        scales = [row.noise_scale for row in rows if row.noise_scale is not None]
        streamed = [row for row in rows if row.streamed and row.sums]
        return cls(
            per_sample_s=base * per_sample_s,
            sharing_s=base * sharing_s,
            shape=tuple(thinned([x / mean_s for x in each]) for each in largest.computing_s),
            link=Link.fit(each for row in rows for each in row.sums),
            payload_bytes=median(row.payload_bytes * row.setting.model for row in rows),
            pieces=max((len(row.sums) for row in streamed), default=1),
            update_s=fmean(row.update_s for row in rows),
            speedups=found | given,
            noise_scale=median(scales) if scales else None,
        )

    def forecast(self, setting: Setting) -> Forecast:
        """KeyError if nothing is known of the speed of so many ranks to a copy of the model."""
        p, m = setting.members, setting.model
        alone_s = (self.per_sample_s + self.sharing_s * setting.ranks) * setting.batch
        computing_s = alone_s / self.speedups[m]
        times = [[x * computing_s for x in each] for each in self.shape]
        full_s = self._step_s(arrival_s(times, p, p), setting)
        at_s = arrival_s(times, p, setting.quorum)
        step_s = self._step_s(at_s, setting)
        rate = p / full_s
        if setting.quorum < p:  # who is late goes on by itself, and comes in a later round
            rate = max(rate, sum(1 / (step_s + late) for late in late_s(times, p, at_s)))
        share = efficiency(rate * step_s * setting.batch, self.noise_scale)
        goodput = rate * setting.batch * share
        return Forecast(setting, step_s, rate, share, goodput, 1000 * setting.ranks / goodput)

    def _step_s(self, arrived_s: float, setting: Setting) -> float:
        pieces = self.pieces if setting.model == 1 else 1  # groups do not stream
        carried_s = pieces * self.link.seconds(
            setting.members, self.payload_bytes / setting.model / pieces
        )
        return streamed_s(arrived_s, carried_s, pieces) + self.update_s

    def needed_speedup(self, groups: int, model: int, batch: float) -> float:
        """Of a step, from which `groups` groups of `model` ranks beat as many ranks with a copy
        each, in Full."""
        scaling, more_epochs = self._replicas(groups, model, batch)
        return hybrid.needed(model=model, scaling=scaling, epochs=more_epochs)

    def gain(self, groups: int, model: int, batch: float) -> float:
        """Of `groups` groups of `model` ranks over as many ranks with a copy each, in Full."""
        scaling, more_epochs = self._replicas(groups, model, batch)
        speedup = self.speedups[model]
        return hybrid.gain(speedup=speedup, model=model, scaling=scaling, epochs=more_epochs)

    def _replicas(self, groups: int, model: int, batch: float) -> tuple[float, float]:
        """SE(MN)/SE(N) and E(N)/E(MN), of N = `groups` replicas."""
        few = self.forecast(Setting(groups, groups, batch))
        many = self.forecast(Setting(groups * model, groups * model, batch))
        scale, samples = self.noise_scale, groups * batch
        share = epochs(samples, scale) / epochs(samples * model, scale) if scale else 1.0
        return few.step_s / many.step_s, share

    def crossover(self, model: int, batch: float, *, groups_max: int) -> Crossover | None:
        """None if up to `groups_max` groups, tried as powers of two, copies win."""
        groups = 1
        while groups <= groups_max:
            if (found := self.gain(groups, model, batch)) > 1:
                return Crossover(groups, found)
            groups *= 2
        return None


def streamed_s(computing_s: float, carried_s: float, pieces: int) -> float:
    """A step without its update: two thirds of the computing are backward(), beside which
    `pieces` of the gradient are summed, each as soon as it is there; all take `carried_s`."""
    backward = 2 / 3
    ready_s = computing_s * (1 - backward + backward / pieces)
    return max(computing_s + carried_s / pieces, ready_s + carried_s)


@dataclass(frozen=True, slots=True)
class Checked:
    """A row beside what the others say about it."""

    row: Row
    forecast: Forecast

    @property
    def error(self) -> float:
        """Of the step, as a share of what was measured; above 0: it was predicted too slow."""
        return self.forecast.step_s / self.row.step_s - 1


def check(rows: Sequence[Row], speedups: dict[int, float] | None = None) -> list[Checked]:
    """Each row predicted from the other ones; one of which they say nothing is left out."""
    checked = []
    for i, row in enumerate(rows):
        others = [*rows[:i], *rows[i + 1 :]]
        if not others:
            continue
        model = Model.fit(others, speedups)
        if row.setting.model in model.speedups:
            checked.append(Checked(row, model.forecast(row.setting)))
    return checked


def _computing(rows: Sequence[Row]) -> tuple[float, float]:
    """Seconds of a sample: more for each rank of the job, and alone."""
    return fit_two([(row.setting.ranks, 1.0, _mean_s(row) / row.setting.batch) for row in rows])


def _mean_s(row: Row) -> float:
    return fmean(map(fmean, row.computing_s))
