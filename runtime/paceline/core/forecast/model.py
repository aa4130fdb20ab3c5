"""The forecast model: from measured runs to step time, gradients and progress in another setting.

A step lasts until the member that the mode waits for has arrived, plus what the reduction adds,
plus the update. If n pieces are reduced while backward() computes the next ones, computing and
reduction together take max(1 + C/n, 1/3 + 2/3/n + C) times the computing time (docs/benchmarks.md,
B10); with one piece, 1 + C. C is the reduction time over the computing time.
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
from paceline.core.forecast.link import LinkModel, MeasuredSum


@dataclass(frozen=True, slots=True)
class Setting:
    """The size, quorum, batch and ranks per copy of the model to forecast for."""

    members: int
    """P: number of copies of the model. Each is one rank or a group of ranks."""
    quorum: int
    """Number of members that a round waits for; all of them in mode Full."""
    batch: float
    """Samples in one gradient of a member."""
    model: int = 1
    """M: number of ranks in a member."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the whole job."""
        return self.members * self.model


@dataclass(frozen=True, slots=True)
class RunRow:
    """The measurements of one run."""

    setting: Setting
    """The setting of the run."""
    computing_s: tuple[tuple[float, ...], ...]
    """Computing time of each step, for each member: seconds from the end of step() to the next
    call. All above 0."""
    sums: tuple[MeasuredSum, ...]
    """One measured reduction for each segment of the gradient; empty for a single member."""
    payload_bytes: int
    """Size of the gradient on one rank, in bytes."""
    streamed: bool
    """True if most rounds were reduced while backward() ran."""
    update_s: float
    """Mean seconds of a step spent on the update, the weight copy and the protocol."""
    step_s: float
    """Mean seconds from one round to the next."""
    noise_scale: float | None
    """Gradient noise scale in samples; None if it was not measured."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted speed and cost of one setting."""

    setting: Setting
    step_s: float
    """Seconds from one round to the next."""
    gradients_per_s: float
    """Gradients applied per second, over all members."""
    efficiency: float
    """Share of the samples that is progress; 1 if the noise scale is unknown."""
    goodput: float
    """Samples per second that are progress."""
    cost: float
    """Rank-seconds for 1,000 samples that are progress."""


@dataclass(frozen=True, slots=True)
class Crossover:
    """The fewest groups of M ranks that beat M times as many replicas."""

    groups: int
    gain: float
    """Speed of these groups relative to the replicas; above 1."""


@dataclass(frozen=True, slots=True)
class FittedModel:
    """The coefficients that were fitted to the measured runs of one job."""

    per_sample_s: float
    """Computing seconds per sample on a rank that has its machine to itself."""
    sharing_s: float
    """Additional computing seconds per sample for each rank of the job: ranks on one machine share
    its cores."""
    shape: tuple[tuple[float, ...], ...]
    """Computing times of each measured member, divided by the mean over all members."""
    link: LinkModel
    """Coefficients of the allreduce time."""
    payload_bytes: float
    """Size of the gradient of the whole model, in bytes."""
    pieces: int
    """Number of pieces of the gradient that are reduced in turn while backward() runs; 1: the whole
    gradient is reduced after backward()."""
    update_s: float
    """Seconds of a step spent on the update, the weight copy and the protocol."""
    speedups: dict[int, float]
    """Speedup of computing SU(M), by the number M of ranks that share one copy of the model. If no
    rank with the whole model was measured, it is relative to the smallest M that was measured."""
    noise_scale: float | None
    """Gradient noise scale in samples; None if it is unknown."""

    @classmethod
    def fit(cls, rows: Sequence[RunRow], speedups: dict[int, float] | None = None) -> Self:
        """Fit the model to measured runs.

        Args:
            rows: At least one row, all of one job.
            speedups: SU(M) by M, given by the user. They replace what the rows show.

        Returns:
            The fitted model.
        """
        given = speedups or {}
        smallest = min(row.setting.model for row in rows)
        sharing_s, per_sample_s = _computing([r for r in rows if r.setting.model == smallest])
        measured = {smallest: 1.0}
        for m in {row.setting.model for row in rows} - {smallest}:
            measured[m] = fmean(
                (per_sample_s + sharing_s * row.setting.ranks) * row.setting.batch / _mean_s(row)
                for row in rows
                if row.setting.model == m
            )
        # Given speedups are relative to a rank with the whole model.
        base = given.get(smallest, 1.0)
        if smallest > 1 and base != 1.0:
            measured = {1: 1.0} | {m: base * speedup for m, speedup in measured.items()}
        largest = max(rows, key=lambda row: row.setting.members)
        mean_s = fmean(map(fmean, largest.computing_s))
        scales = [row.noise_scale for row in rows if row.noise_scale is not None]
        streamed = [row for row in rows if row.streamed and row.sums]
        return cls(
            per_sample_s=base * per_sample_s,
            sharing_s=base * sharing_s,
            shape=tuple(thinned([x / mean_s for x in each]) for each in largest.computing_s),
            link=LinkModel.fit(each for row in rows for each in row.sums),
            payload_bytes=median(row.payload_bytes * row.setting.model for row in rows),
            pieces=max((len(row.sums) for row in streamed), default=1),
            update_s=fmean(row.update_s for row in rows),
            speedups=measured | given,
            noise_scale=median(scales) if scales else None,
        )

    def forecast(self, setting: Setting) -> Forecast:
        """Return the predicted speed and cost of a setting.

        A setting whose number of ranks per copy of the model has no known speedup raises KeyError.

        Args:
            setting: The size, quorum and batch to predict for.

        Returns:
            The forecast.
        """
        p, m = setting.members, setting.model
        alone_s = (self.per_sample_s + self.sharing_s * setting.ranks) * setting.batch
        computing_s = alone_s / self.speedups[m]
        times = [[x * computing_s for x in each] for each in self.shape]
        full_s = self._step_s(arrival_s(times, p, p), setting)
        at_s = arrival_s(times, p, setting.quorum)
        step_s = self._step_s(at_s, setting)
        rate = p / full_s
        if setting.quorum < p:  # a late member goes on by itself and contributes to a later round
            rate = max(rate, sum(1 / (step_s + late) for late in late_s(times, p, at_s)))
        share = efficiency(rate * step_s * setting.batch, self.noise_scale)
        goodput = rate * setting.batch * share
        return Forecast(setting, step_s, rate, share, goodput, 1000 * setting.ranks / goodput)

    def _step_s(self, arrived_s: float, setting: Setting) -> float:
        """Return the seconds of a step whose round starts `arrived_s` after the step began."""
        pieces = self.pieces if setting.model == 1 else 1  # groups do not stream
        carried_s = pieces * self.link.seconds(
            setting.members, self.payload_bytes / setting.model / pieces
        )
        return streamed_s(arrived_s, carried_s, pieces) + self.update_s

    def needed_speedup(self, groups: int, model: int, batch: float) -> float:
        """Return the speedup of a step above which groups beat replicas, both in mode Full.

        Args:
            groups: Number of groups.
            model: Number of ranks in a group; the replicas are `groups` x `model` ranks with a copy
                each.
            batch: Samples in one gradient of a member.

        Returns:
            The speedup SU(M) at which both are equally fast.
        """
        scaling, more_epochs = self._replicas(groups, model, batch)
        return hybrid.needed(model=model, scaling=scaling, epochs=more_epochs)

    def gain(self, groups: int, model: int, batch: float) -> float:
        """Return the speed of groups relative to as many ranks with a copy each, both in mode Full.

        Args:
            groups: Number of groups.
            model: Number of ranks in a group.
            batch: Samples in one gradient of a member.

        Returns:
            The ratio; above 1 the groups win.
        """
        scaling, more_epochs = self._replicas(groups, model, batch)
        speedup = self.speedups[model]
        return hybrid.gain(speedup=speedup, model=model, scaling=scaling, epochs=more_epochs)

    def _replicas(self, groups: int, model: int, batch: float) -> tuple[float, float]:
        """Return SE(MN)/SE(N) and E(N)/E(MN) for N = `groups` replicas and M = `model`."""
        few = self.forecast(Setting(groups, groups, batch))
        many = self.forecast(Setting(groups * model, groups * model, batch))
        scale, samples = self.noise_scale, groups * batch
        share = epochs(samples, scale) / epochs(samples * model, scale) if scale else 1.0
        return few.step_s / many.step_s, share

    def crossover(self, model: int, batch: float, *, groups_max: int) -> Crossover | None:
        """Return the fewest groups that beat replicas; None if no number that is tried does.

        Args:
            model: Number of ranks in a group.
            batch: Samples in one gradient of a member.
            groups_max: Largest number of groups to try; only powers of two are tried.

        Returns:
            The crossover, or None.
        """
        groups = 1
        while groups <= groups_max:
            if (gain := self.gain(groups, model, batch)) > 1:
                return Crossover(groups, gain)
            groups *= 2
        return None


def streamed_s(computing_s: float, carried_s: float, pieces: int) -> float:
    """Return the seconds of computing and reduction of one step, without the update.

    Two thirds of the computing time are backward(). It produces `pieces` pieces of the gradient,
    and each piece is reduced as soon as it is complete.

    Args:
        computing_s: Seconds until the rank that is waited for has its whole gradient.
        carried_s: Seconds for the reduction of all pieces together.
        pieces: Number of pieces; 1 means that nothing overlaps.

    Returns:
        Seconds from the beginning of the step to the complete sum.
    """
    backward = 2 / 3
    ready_s = computing_s * (1 - backward + backward / pieces)
    return max(computing_s + carried_s / pieces, ready_s + carried_s)


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """A measured row and the forecast of it that the other rows give."""

    row: RunRow
    forecast: Forecast

    @property
    def error(self) -> float:
        """Relative error of the predicted step time; above 0 the prediction was too slow."""
        return self.forecast.step_s / self.row.step_s - 1


def check(rows: Sequence[RunRow], speedups: dict[int, float] | None = None) -> list[CheckedRow]:
    """Predict each row from the other rows.

    Args:
        rows: The measured rows of one job.
        speedups: SU(M) by M, given by the user.

    Returns:
        One entry for each row that the others can predict. A row is left out if it is the only one,
        or if the others know nothing of its number of ranks per copy of the model.
    """
    checked = []
    for i, row in enumerate(rows):
        others = [*rows[:i], *rows[i + 1 :]]
        if not others:
            continue
        model = FittedModel.fit(others, speedups)
        if row.setting.model in model.speedups:
            checked.append(CheckedRow(row, model.forecast(row.setting)))
    return checked


def _computing(rows: Sequence[RunRow]) -> tuple[float, float]:
    """Return the computing seconds per sample: those that each rank adds, and those alone."""
    return fit_two([(row.setting.ranks, 1.0, _mean_s(row) / row.setting.batch) for row in rows])


def _mean_s(row: RunRow) -> float:
    """Return the mean computing time of a step over all members."""
    return fmean(map(fmean, row.computing_s))
