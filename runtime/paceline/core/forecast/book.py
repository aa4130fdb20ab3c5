"""What was measured of one job, and what was forecast of it before.

A measurement is set beside the forecast that was shown before it was made, so that a forecast
cannot have known it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from paceline.core.forecast.model import Forecast, Row, Setting

MEASURED_MAX: Final = 64
SHOWN_MAX: Final = 256
ALIKE: Final = 0.01
"""Batches that differ by no greater share are the same: the last one of an epoch is smaller."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A forecast that somebody was shown."""

    at_s: float
    """Unix time."""
    setting: Setting
    step_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    source: str
    """The run, and of an earlier membership of it the generation."""
    at_s: float
    """Unix time of its beginning."""
    setting: Setting
    step_s: float
    row: Row | None = None
    """None if only the step is known."""
    shown: Shown | None = None
    """The last forecast before it."""


@dataclass(frozen=True, slots=True)
class Book:
    """Of one job; the oldest first."""

    measured: tuple[Measurement, ...] = ()
    shown: tuple[Shown, ...] = ()


def alike(one: Setting, other: Setting) -> bool:
    """Whether a forecast of one is about the other."""
    same = (one.members, one.quorum, one.model) == (other.members, other.quorum, other.model)
    return same and abs(one.batch / other.batch - 1) <= ALIKE


def enter(book: Book, found: Iterable[Measurement]) -> Book:
    """With these. One that is known already, of a run that went on, is replaced by what says no
    less, and keeps the forecast that it was set beside."""
    known = {_key(one): one for one in book.measured}
    for one in found:
        before = known.get(_key(one))
        if before is None:
            known[_key(one)] = replace(one, shown=_shown_before(book, one))
        elif one.row is not None or before.row is None:
            known[_key(one)] = replace(one, shown=before.shown)
    in_order = sorted(known.values(), key=lambda one: one.at_s)
    return replace(book, measured=tuple(in_order[-MEASURED_MAX:]))


def show(book: Book, forecasts: Iterable[Forecast], at_s: float) -> Book:
    """These are shown now, instead of earlier ones of the same settings."""
    new = [Shown(at_s, each.setting, each.step_s) for each in forecasts]
    kept = [s for s in book.shown if not any(alike(s.setting, each.setting) for each in new)]
    return replace(book, shown=tuple([*kept, *new][-SHOWN_MAX:]))


def rows(book: Book) -> list[Row]:
    """The newest of each setting: the machine may have changed since."""
    newest: dict[tuple[int, int, int, float], Row] = {}
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
    before = [s for s in book.shown if s.at_s <= one.at_s and alike(s.setting, one.setting)]
    return max(before, key=lambda shown: shown.at_s, default=None)
