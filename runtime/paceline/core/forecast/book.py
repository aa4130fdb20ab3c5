"""The record of one job: what was measured, and which forecasts were shown before.

Each measurement is compared with the forecast that was shown before the measured run began, so the
forecast cannot have used it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from paceline.core.forecast.model import Forecast, RunRow, Setting

MEASURED_MAX: Final = 64
"""Upper bound on the measurements that a book keeps; the oldest are dropped first."""
SHOWN_MAX: Final = 256
"""Upper bound on the shown forecasts that a book keeps; the oldest are dropped first."""
ALIKE: Final = 0.01
"""Largest relative difference of two batch sizes that still count as equal: the last batch of an
epoch is smaller."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A forecast that was shown to a user."""

    at_s: float
    """Unix time at which it was shown."""
    setting: Setting
    step_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured step time of one setting in one run."""

    source: str
    """Name of the run; for an earlier membership of the run, with its generation."""
    at_s: float
    """Unix time at which the measured run or membership began."""
    setting: Setting
    step_s: float
    row: RunRow | None = None
    """The complete measurements; None if only the step time is known."""
    shown: Shown | None = None
    """The last forecast that was shown before this measurement began; None if there was none."""


@dataclass(frozen=True, slots=True)
class Book:
    """All measurements and shown forecasts of one job, oldest first."""

    measured: tuple[Measurement, ...] = ()
    shown: tuple[Shown, ...] = ()


def alike(one: Setting, other: Setting) -> bool:
    """Return True if a forecast for one setting also applies to the other."""
    same = (one.members, one.quorum, one.model) == (other.members, other.quorum, other.model)
    return same and abs(one.batch / other.batch - 1) <= ALIKE


def enter(book: Book, measurements: Iterable[Measurement]) -> Book:
    """Return the book with these measurements added.

    A measurement that is known already (same source and setting, of a run that went on) is replaced
    unless the new one lacks a row that the old one has. It keeps the forecast with which the old
    one was compared.

    Args:
        book: The book so far; it is not changed.
        measurements: The new measurements, in any order.

    Returns:
        A book with the newest MEASURED_MAX measurements, oldest first.
    """
    known = {_key(one): one for one in book.measured}
    for one in measurements:
        before = known.get(_key(one))
        if before is None:
            known[_key(one)] = replace(one, shown=_shown_before(book, one))
        elif one.row is not None or before.row is None:
            known[_key(one)] = replace(one, shown=before.shown)
    in_order = sorted(known.values(), key=lambda one: one.at_s)
    return replace(book, measured=tuple(in_order[-MEASURED_MAX:]))


def show(book: Book, forecasts: Iterable[Forecast], at_s: float) -> Book:
    """Return the book with these forecasts as shown; they replace those of the same settings.

    Args:
        book: The book so far; it is not changed.
        forecasts: The forecasts that are shown now.
        at_s: Unix time.

    Returns:
        A book with the newest SHOWN_MAX shown forecasts, oldest first.
    """
    new = [Shown(at_s, each.setting, each.step_s) for each in forecasts]
    kept = [s for s in book.shown if not any(alike(s.setting, each.setting) for each in new)]
    return replace(book, shown=tuple([*kept, *new][-SHOWN_MAX:]))


def rows(book: Book) -> list[RunRow]:
    """Return the newest row of each setting: the machine may have changed since older ones."""
    newest: dict[tuple[int, int, int, float], RunRow] = {}
    for one in book.measured:
        if one.row is not None:
            setting = one.setting
            key = (setting.members, setting.quorum, setting.model, round(setting.batch))
            newest[key] = one.row
    return list(newest.values())


def _key(one: Measurement) -> tuple[str, int, int, int]:
    setting = one.setting
    return one.source, setting.members, setting.quorum, setting.model


def _shown_before(book: Book, one: Measurement) -> Shown | None:
    """Return the newest forecast of the same setting that was shown before `one` began."""
    before = [s for s in book.shown if s.at_s <= one.at_s and alike(s.setting, one.setting)]
    return max(before, key=lambda shown: shown.at_s, default=None)
