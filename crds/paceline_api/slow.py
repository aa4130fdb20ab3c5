"""Straggler detection: which ranks are persistently slow, and which response is in force.

The coordinator (and so a local run) and the operator share this one decision. A rank is slow when
its median step takes `slowdownFactor` times the median of all ranks, and at least `GAP_MIN_S` more,
for `windowRounds` rounds. While it stays slow, the responses in `spec.straggler.respond` follow
each other, a cooldown apart. A rank without a current measurement (it was restarted, or is joining)
keeps its place in that list; only a rank that was measured as fast leaves it. The module is pure:
earlier results come in as arguments, and what to remember is returned.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from paceline_api.settings import StragglerSettings
from paceline_api.times import NS_PER_S
from paceline_api.types.enums import StragglerResponse

MIN_S: Final = 1.0
"""Least seconds for which a rank must be slow, and least seconds between two responses."""
GAP_MIN_S: Final = 0.010
"""Least seconds by which a slow step must exceed the median. Where ranks share processors, steps of
a few milliseconds differ by more than any factor, and a replacement would gain nothing."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Step time of one rank that is alive."""

    key: str
    """Identity of the rank; it stays the same for as long as its responses continue."""
    step_s: float
    """Median step in seconds; 0 if the rank is not active or was not measured."""


@dataclass(frozen=True, slots=True)
class Slow:
    """One rank that is persistently slow."""

    key: str
    percent: int
    """Median step in percent of the median of all ranks."""
    since_s: float
    """Time since which the rank is slow, on the clock of `now_s`."""
    step: int
    """Index in `spec.straggler.respond` of the response that is in force."""
    action: StragglerResponse


@dataclass(frozen=True, slots=True)
class SlowVerdict:
    """Result of one judgment."""

    slow: tuple[Slow, ...] = ()
    """Ranks that were slow for long enough, the slowest first."""
    since: Mapping[str, float] = field(default_factory=dict)
    """Time since which each rank is slow, confirmed or not; pass it to the next judgment."""
    look_again_s: float | None = None
    """Time at which the verdict may change without a new measurement; or None."""


def judge(
    paces: Iterable[StepTime],
    settings: StragglerSettings,
    *,
    round_s: float,
    since: Mapping[str, float],
    now_s: float,
    confirmed: Collection[str] = (),
) -> SlowVerdict:
    """Return which ranks are persistently slow, and the response to each.

    Args:
        paces: Step times of all ranks that are alive.
        settings: `spec.straggler`.
        round_s: Seconds of a round, which turn `windowRounds` into a time.
        since: `SlowVerdict.since` of the last judgment.
        now_s: Current time in seconds.
        confirmed: Keys of ranks that are slow for long enough, whatever `since` says.

    Returns:
        The verdict.
    """
    paces = list(paces)
    measured = [p for p in paces if p.step_s > 0]
    # The lower median: of two ranks, the faster one is the norm.
    norm_s = statistics.median_low([p.step_s for p in measured]) if len(measured) > 1 else 0.0
    window_s = max(MIN_S, settings.window_rounds * round_s)
    kept: dict[str, float] = {}
    slow: list[Slow] = []
    looks: list[float] = []
    for pace in paces:
        if pace.step_s <= 0 or not norm_s:
            if pace.key in since:
                kept[pace.key] = since[pace.key]
            continue
        if pace.step_s < max(settings.slowdown_factor * norm_s, norm_s + GAP_MIN_S):
            continue
        first_s = kept[pace.key] = since.get(pace.key, now_s)
        if now_s - first_s < window_s and pace.key not in confirmed:
            looks.append(first_s + window_s)
            continue
        step, next_s = _step(settings, now_s - first_s)
        if next_s is not None:
            looks.append(first_s + next_s)
        percent = round(100 * pace.step_s / norm_s)
        slow.append(Slow(pace.key, percent, first_s, step, settings.respond[step]))
    slow.sort(key=lambda s: -s.percent)
    return SlowVerdict(tuple(slow), kept, min(looks, default=None))


def cooldown_s(settings: StragglerSettings) -> float:
    """Return the seconds between two responses to the stragglers of a job."""
    return max(MIN_S, settings.cooldown_ns / NS_PER_S)


def _step(settings: StragglerSettings, slow_s: float) -> tuple[int, float | None]:
    """Return the index of the response in force, and the slow time in seconds until the next."""
    last, each_s = len(settings.respond) - 1, cooldown_s(settings)
    step = min(int(slow_s // each_s), last)
    return step, (step + 1) * each_s if step < last else None
