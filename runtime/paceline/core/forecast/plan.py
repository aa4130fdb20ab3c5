"""A plan: forecasts beside the job as it is, the error of the forecasts, and where groups win."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from paceline.core.forecast.arrivals import arrival_s
from paceline.core.forecast.book import Book, Measurement, rows
from paceline.core.forecast.model import FittedModel, Forecast, RunRow, Setting, check
from paceline.core.protocol.waits import quorum_of

GROUPS_MAX: Final = 1024
"""Largest number of groups that is tried to find a crossover."""
NEEDED_FOR: Final = (1, 4, 16)
"""Numbers of groups for which the plan states the speedup that groups would need to win."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The job as it is now, and the settings to forecast."""

    job: str
    settings: RoundSettings
    """Round settings of the job."""
    members: int
    """Present number of members."""
    model: int
    """Present number of ranks per copy of the model."""
    ranks: tuple[int, ...]
    """Sizes to forecast, as total numbers of ranks."""
    models: tuple[int, ...]
    """Numbers of ranks per copy of the model to forecast; those without a known speedup are
    skipped."""
    batches: tuple[float, ...]
    """Samples in one gradient; empty: the batch that was measured."""
    speedups: Mapping[int, float]
    """Speedup of a step when M ranks share the model, by M, where the user gave one."""


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One forecast of the plan."""

    mode: str
    """Mode, with its quorum if the mode is Quorum."""
    own: bool
    """True for the job as it is now."""
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class Compared:
    """A measurement and what was forecast of it."""

    source: str
    """Name of the run; for an earlier membership of the run, with its generation."""
    at_s: float
    """Unix time at which the measured run began."""
    setting: Setting
    step_s: float
    """Measured seconds from one round to the next."""
    spread_s: float | None
    """Mean seconds from the first arrival to the last; None if arrivals were not measured."""
    predicted_s: float | None
    """Predicted seconds from one round to the next; None without a forecast."""
    by: str
    """Source of the forecast: the plan that was shown before, or the other rows."""
    error: float | None
    """Relative error of the predicted step time; above 0 the prediction was too slow."""


@dataclass(frozen=True, slots=True)
class NeededSpeedup:
    """The speedup that a number of groups needs to beat replicas."""

    groups: int
    speedup: float
    """Speedup of a step above which this many groups win."""


@dataclass(frozen=True, slots=True)
class Contest:
    """The comparison of groups of M ranks with M times as many replicas."""

    model: int
    """M: number of ranks in a group."""
    speedup: float | None
    """SU(M); None if it is unknown."""
    groups: int | None
    """Fewest groups that win; None if no number up to GROUPS_MAX wins, or if it is unknown."""
    gain: float | None
    """Speed of that many groups relative to the replicas."""
    needed: tuple[NeededSpeedup, ...]
    """Speedups that groups would need; empty if no rank with the whole model was measured."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of `paceline plan`, as plain data."""

    job: str
    compared: tuple[Compared, ...]
    """Measurements beside their forecasts, oldest first."""
    lines: tuple[PlanLine, ...]
    """The forecasts."""
    contests: tuple[Contest, ...]
    alpha_s: float
    """Fitted latency of one step of the ring, in seconds."""
    beta_s_per_byte: float
    """Fitted seconds for each byte that a rank sends."""
    noise_scale: float | None
    """Gradient noise scale in samples; None if it is unknown."""
    error: float | None
    """Largest relative error of the forecasts, as an absolute value; None if there is none to show.
    """
    advice: str
    """Recommendation of the plan, as text for the user."""


BY_PLAN: Final = "plan before"
BY_ROWS: Final = "other rows"


def make(asked: Asked, book: Book) -> Plan:
    """Make the plan of a job.

    Args:
        asked: The job as it is, and the settings to forecast.
        book: The measurements of the job, with at least one row.

    Returns:
        The plan.
    """
    known = rows(book)
    model = FittedModel.fit(known, dict(asked.speedups))
    batches = asked.batches or (_batch(known, asked),)
    lines = tuple(_lines(asked, model, batches))
    compared = tuple(_compared(book, known, model, dict(asked.speedups)))
    errors = [abs(each.error) for each in compared if each.error is not None]
    error = max(errors, default=None)
    contests = [m for m in sorted({2, *asked.models}) if m > 1]
    return Plan(
        job=asked.job,
        compared=compared,
        lines=lines,
        contests=tuple(_contest(model, m, batches[0]) for m in contests),
        alpha_s=model.link.alpha_s,
        beta_s_per_byte=model.link.beta_s_per_byte,
        noise_scale=model.noise_scale,
        error=error,
        advice=_advice(lines, error),
    )


def _batch(known: Sequence[RunRow], asked: Asked) -> float:
    """Return the median measured batch, if possible of rows with the job's own ranks per copy."""
    own = [row.setting.batch for row in known if row.setting.model == asked.model]
    return median(own or [row.setting.batch for row in known])


def _lines(asked: Asked, model: FittedModel, batches: Sequence[float]) -> Iterator[PlanLine]:
    quorum_now = quorum_of(asked.settings.mode, asked.settings, asked.members)
    own = (asked.members * asked.model, asked.model, asked.settings.mode, quorum_now)
    for ranks in asked.ranks:
        for m in asked.models:
            if ranks % m or m not in model.speedups:
                continue
            for batch in batches:
                for mode, quorum in _modes(asked.settings, ranks // m):
                    setting = Setting(ranks // m, quorum, batch, m)
                    is_own = (ranks, m, mode, quorum) == own and batch == batches[0]
                    name = f"Quorum {quorum}" if mode is Mode.QUORUM else str(mode)
                    yield PlanLine(name, is_own, model.forecast(setting))


def _modes(settings: RoundSettings, members: int) -> list[tuple[Mode, int]]:
    """Return the job's own mode, then other modes that wait for another number of members."""
    by_quorum: dict[int, Mode] = {}
    if settings.mode is not Mode.DEADLINE:  # a deadline waits for a time, not a number
        by_quorum[quorum_of(settings.mode, settings, members)] = settings.mode
    for mode, quorum in (
        (Mode.FULL, members),
        (Mode.QUORUM, max(1, members - 1)),
        (Mode.MAJORITY, members // 2 + 1),
    ):
        by_quorum.setdefault(quorum, mode)
    return sorted(((mode, quorum) for quorum, mode in by_quorum.items()), key=lambda one: -one[1])


def _compared(
    book: Book, known: Sequence[RunRow], model: FittedModel, speedups: dict[int, float]
) -> Iterator[Compared]:
    by_others = {id(each.row): each.forecast.step_s for each in check(known, speedups)}
    for one in book.measured:
        predicted_s, by = None, ""
        if one.shown is not None:
            predicted_s, by = one.shown.step_s, BY_PLAN
        elif id(one.row) in by_others:
            predicted_s, by = by_others[id(one.row)], BY_ROWS
        elif one.row is None and one.setting.model in model.speedups:
            predicted_s, by = model.forecast(one.setting).step_s, BY_ROWS
        yield Compared(
            source=one.source,
            at_s=one.at_s,
            setting=one.setting,
            step_s=one.step_s,
            spread_s=_spread_s(one),
            predicted_s=predicted_s,
            by=by,
            error=None if predicted_s is None else predicted_s / one.step_s - 1,
        )


def _spread_s(one: Measurement) -> float | None:
    """Return the mean seconds from the first arrival to the last; None without a row."""
    if one.row is None:
        return None
    times, members = one.row.computing_s, one.setting.members
    return arrival_s(times, members, members) - arrival_s(times, members, 1)


def _contest(model: FittedModel, m: int, batch: float) -> Contest:
    if 1 not in model.speedups:
        return Contest(m, model.speedups.get(m), None, None, ())
    needed = tuple(NeededSpeedup(n, model.needed_speedup(n, m, batch)) for n in NEEDED_FOR)
    speedup = model.speedups.get(m)
    crossed = model.crossover(m, batch, groups_max=GROUPS_MAX) if speedup is not None else None
    if crossed is None:
        return Contest(m, speedup, None, None, needed)
    return Contest(m, speedup, crossed.groups, crossed.gain, needed)


def _advice(lines: Sequence[PlanLine], error: float | None) -> str:
    own = next((line for line in lines if line.own), None)
    if own is None:
        return "The job as it is, its size and mode, is not among these: there is no comparison."
    if error is None:
        return "One row alone has no error to show: measure another size before you act on this."
    best = max(lines, key=lambda line: line.forecast.goodput)
    gain = best.forecast.goodput / own.forecast.goodput
    if best is own or gain - 1 <= error:
        return (
            "Nothing here is better than the job as it is by more than the error of the forecasts, "
            f"which is up to {error:.0%}."
        )
    there, here = best.forecast, own.forecast
    return (
        f"{there.setting.ranks} ranks in {best.mode} would make {gain:.2f} times the goodput of "
        f"the job as it is, at {there.cost / here.cost:.2f} times the cost; forecasts were wrong "
        f"by up to {error:.0%}. You decide."
    )
