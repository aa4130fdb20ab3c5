"""Rendering of a running job as a table for a terminal, or as one line."""

from __future__ import annotations

from typing import Protocol

from paceline_api.errors import printable, printable_lines
from paceline_api.ids import NO_GENERATION
from paceline_api.status import RankPhase, RankStatus, Status, place_of
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.core.status import Fact
from paceline.local.report import figures, shadow_line, straggler


class Speed(Protocol):
    """Protocol for the current speed of a job; a `Timeline` and a `JobStatus` have it."""

    @property
    def rounds_per_s_now(self) -> float:
        """Current rounds per second; 0 if it was not measured."""

    @property
    def left_s(self) -> float | None:
        """Seconds to the end of the job; None if unknown."""


_COLOURS = {
    RankPhase.ACTIVE: "green",
    RankPhase.DEAD: "red",
    RankPhase.SUSPECT: "red",
    RankPhase.BENCHED: "yellow",
    RankPhase.DRAINING: "yellow",
}


def table(status: Status | None, speed: Speed, *, wide: bool = False) -> RenderableType:
    """Return a table of the ranks with a heading and notes.

    Args:
        status: Status of the job; None while its coordinator starts.
        speed: Current speed of the job.
        wide: Add columns for member and host, the transport with the reason for its choice, and
            show reasons at full length.

    Returns:
        A renderable of rich.
    """
    if status is None:
        return Text("starting the coordinator", style="dim")
    ranks = Table(box=None, pad_edge=False, header_style="dim")
    names = ("rank", "state", "pid", "step", "lag", "share", "round")
    for name in (*names, *(("member", "host") if wide else ()), ""):
        ranks.add_column(name, justify="left" if name in ("state", "host", "") else "right")
    for rank in status.ranks:
        ranks.add_row(
            str(place_of(rank.member, status.procs)),
            _text(rank.state, style=_COLOURS.get(rank.state, "")),
            str(rank.pid or ""),
            _ms(rank, Fact.STEP_S),
            _ms(rank, Fact.LAG_S),
            _share(rank, status),
            str(rank.version),
            *((str(rank.member), _text(rank.host)) if wide else ()),
            _text(rank.why if wide else _short(rank.why), style="dim"),
        )
    notes = [*_figures(status), *_conditions(status), *_stragglers(status), *_shadow(status)]
    if wide and status.transport_why:
        notes.append(_text(f"{status.transport}: {status.transport_why}", style="dim"))
    return Group(_text(_head(status, speed), style="bold"), ranks, *notes)


def line(status: Status | None, speed: Speed) -> str:
    """Return a line with the heading, the ranks that are not dead, and the script's figures."""
    if status is None:
        return "starting the coordinator"
    ranks = []
    for rank in status.ranks:
        place = place_of(rank.member, status.procs)
        cells = [_ms(rank, Fact.STEP_S), _ms(rank, Fact.LAG_S), _share(rank, status)]
        step, lag, share = (cell or "-" for cell in cells)
        if rank.state is RankPhase.DEAD:
            continue
        slow = " SLOW" if rank.member in {s.member for s in status.stragglers} else ""
        ranks.append(f"{place}:{rank.state} step={step} lag={lag} share={share}{slow}")
    return printable(
        " | ".join([_head(status, speed), *ranks, *filter(None, [figures(status.log)])])
    )


def _text(text: str, style: str = "") -> Text:
    """Return text of ranks, scripts and nodes with escapes shown and without markup of rich."""
    return Text(printable_lines(text), style=style)


def _head(status: Status, speed: Speed) -> str:
    active = sum(rank.state is RankPhase.ACTIVE for rank in status.ranks)
    number = status.generation
    generation = number.short if number != NO_GENERATION else "none"
    parts = [
        f"round {status.version}",
        f"{speed.rounds_per_s_now:.1f}/s",
        f"mode {status.round_settings.mode}",
        *(["pipeline 1"] if status.round_settings.pipeline else []),
        f"generation {generation}",
        f"active {active}/{status.replicas * status.procs}",
    ]
    if status.carrier:
        parts.append(f"{status.transport} over {status.carrier}")
    if status.log.progress is not None:
        parts.append(f"{status.log.progress:.0%}")
    left_s = speed.left_s
    if left_s is not None:
        parts.append(f"ETA {int(left_s) // 60}:{int(left_s) % 60:02}")
    return "  ".join(parts)


def _figures(status: Status) -> list[Text]:
    text = figures(status.log)
    return [_text(text)] if text else []


def _conditions(status: Status) -> list[Text]:
    return [
        _text(f"{condition.type} ({condition.reason}): {condition.message}", style="yellow")
        for condition in status.conditions
        if condition.type != "RingReady"
    ]


def _stragglers(status: Status) -> list[Text]:
    return [_text(straggler(slow, status.procs), style="yellow") for slow in status.stragglers]


def _shadow(status: Status) -> list[Text]:
    shadow = status.log.shadow
    if shadow is None:
        return []
    return [_text(f"{mode}: {shadow_line(shadow, mode)}", style="dim") for mode in shadow.saved_s]


def _ms(rank: RankStatus, fact: Fact) -> str:
    seconds = rank.facts.get(fact)
    return "" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _share(rank: RankStatus, status: Status) -> str:
    share = status.log.shares.get(str(rank.member))
    return "" if share is None else f"{share:.0%}"


def _short(text: str) -> str:
    first = text.partition("\n")[0]
    return first if len(first) <= 60 else f"{first[:57]}..."
