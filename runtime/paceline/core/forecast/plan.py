"""A plan: forecasts beside what the job has now, what they are worth, and where groups win."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from paceline.core.forecast.arrivals import arrival_s
from paceline.core.forecast.book import Book, Measurement, rows
from paceline.core.forecast.model import Forecast, Model, Row, Setting, check
from paceline.core.protocol.waits import quorum_of

GROUPS_MAX: Final = 1024
"""Tried for a crossover."""
NEEDED_FOR: Final = (1, 4, 16)
"""Groups of which is said how quick they would have to be."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the job is, and what shall be forecast of it."""

    job: str
    settings: RoundSettings
    members: int
    model: int
    ranks: tuple[int, ...]
    """Sizes: all ranks of the job."""
    models: tuple[int, ...]
    """Ranks to a copy of the model; those of which nothing is known are left out."""
    batches: tuple[float, ...]
    """Samples of one gradient; empty: as was measured."""
    speedups: Mapping[int, float]
    """Of a step by M ranks that share the model, where somebody has said so."""


@dataclass(frozen=True, slots=True)
class Line:
    mode: str
    own: bool
    """The job as it is."""
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class Compared:
    """A measurement beside what was forecast of it."""

    source: str
    at_s: float
    setting: Setting
    step_s: float
    spread_s: float | None
    """From the first arrival to the last, on the mean."""
    predicted_s: float | None
    by: str
    """Where the forecast came from: the plan that was shown before, or the other rows."""
    error: float | None
    """Of the step, as a share; above 0: it was predicted too slow."""


@dataclass(frozen=True, slots=True)
class Needed:
    groups: int
    speedup: float
    """Of a step, from which so many groups win."""


@dataclass(frozen=True, slots=True)
class Contest:
    """Groups of M ranks against M times as many replicas."""

    model: int
    speedup: float | None
    """SU(M); None: not known."""
    groups: int | None
    """The fewest that win; None: not up to GROUPS_MAX, or not known."""
    gain: float | None
    """Of so many."""
    needed: tuple[Needed, ...]
    """Empty where nothing is known of one rank with the whole model."""


@dataclass(frozen=True, slots=True)
class Plan:
    job: str
    compared: tuple[Compared, ...]
    lines: tuple[Line, ...]
    contests: tuple[Contest, ...]
    alpha_s: float
    beta_s_per_byte: float
    noise_scale: float | None
    """Samples; None: not known."""
    error: float | None
    """The largest one."""
    advice: str


BY_PLAN: Final = "plan before"
BY_ROWS: Final = "other rows"


def make(asked: Asked, book: Book) -> Plan:
    """`book`: with at least one row."""
    known = rows(book)
    model = Model.fit(known, dict(asked.speedups))
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


def _batch(known: Sequence[Row], asked: Asked) -> float:
    own = [row.setting.batch for row in known if row.setting.model == asked.model]
    return median(own or [row.setting.batch for row in known])


def _lines(asked: Asked, model: Model, batches: Sequence[float]) -> Iterator[Line]:
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
                    yield Line(name, is_own, model.forecast(setting))


def _modes(settings: RoundSettings, members: int) -> list[tuple[Mode, int]]:
    """The job's own mode, then others that wait for another number."""
    found: dict[int, Mode] = {}
    if settings.mode is not Mode.DEADLINE:  # which starts by the time, not by a number
        found[quorum_of(settings.mode, settings, members)] = settings.mode
    for mode, quorum in (
        (Mode.FULL, members),
        (Mode.QUORUM, max(1, members - 1)),
        (Mode.MAJORITY, members // 2 + 1),
    ):
        found.setdefault(quorum, mode)
    return sorted(((mode, quorum) for quorum, mode in found.items()), key=lambda one: -one[1])


def _compared(
    book: Book, known: Sequence[Row], model: Model, speedups: dict[int, float]
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
    if one.row is None:
        return None
    times, members = one.row.computing_s, one.setting.members
    return arrival_s(times, members, members) - arrival_s(times, members, 1)


def _contest(model: Model, m: int, batch: float) -> Contest:
    if 1 not in model.speedups:
        return Contest(m, model.speedups.get(m), None, None, ())
    needed = tuple(Needed(n, model.needed_speedup(n, m, batch)) for n in NEEDED_FOR)
    speedup = model.speedups.get(m)
    crossed = model.crossover(m, batch, groups_max=GROUPS_MAX) if speedup is not None else None
    if crossed is None:
        return Contest(m, speedup, None, None, needed)
    return Contest(m, speedup, crossed.groups, crossed.gain, needed)


def _advice(lines: Sequence[Line], error: float | None) -> str:
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
