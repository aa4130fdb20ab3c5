"""Rendering of log lines, lists and explanations as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from paceline_api.errors import printable, printable_lines
from paceline_api.times import NS_PER_S

from paceline.jobs.interface import Explanation, JobEvent, JobStatus, LogLine

COLOURS: Final = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)
"""ANSI foreground colors; ranks with neighboring numbers have different ones."""
DIM: Final = 2


def log_line(line: LogLine, *, colour: bool, times: bool, raw: bool = False) -> str:
    """Return a log line as `rank 3 | text`, or `agent-0-1 | text`, dim, for an agent's line.

    Args:
        line: The line.
        colour: Color the prefix with ANSI escapes.
        times: Begin with the time of day, in UTC.
        raw: Keep escape sequences in the text, which may control the terminal.

    Returns:
        One line of text without a line end; it may contain line ends of the text itself.
    """
    head = f"rank {line.rank}" if line.rank is not None else printable(line.source)
    text = line.text if raw else printable_lines(line.text)
    code = COLOURS[line.rank % len(COLOURS)] if line.rank is not None else DIM
    at = f"{_time_of_day(line.wall_ns / NS_PER_S)}.{line.wall_ns // 1_000_000 % 1000:03} "
    mark = f"{at if times else ''}{head} |"
    return f"\x1b[{code}m{mark}\x1b[0m {text}" if colour else f"{mark} {text}"


def jobs(statuses: Iterable[JobStatus], *, wide: bool) -> list[str]:
    """Return a table of jobs with a heading, one line for each; empty if there are none."""
    names = ["JOB", "STATE", "READY", "ROUND", "DONE", "AGE"]
    rows = [
        [
            job.name,
            job.state,
            f"{job.ready}/{job.replicas}",
            str(job.round),
            "" if job.progress is None else f"{job.progress:.0%}",
            age(job.age_s),
            *([job.place, job.message.partition("\n")[0]] if wide else []),
        ]
        for job in statuses
    ]
    return columns([names + (["PLACE", "MESSAGE"] if wide else []), *rows]) if rows else []


def events(events: Iterable[JobEvent], now_s: float, *, wide: bool) -> list[str]:
    """Return a table of events with a heading, one line for each; empty if there are none."""
    rows = [
        [
            age(max(0.0, now_s - event.wall_s)),
            "Warning" if event.warning else "Normal",
            event.reason,
            *([event.source, str(event.count)] if wide else []),
            event.message.partition("\n")[0],
        ]
        for event in events
    ]
    more = ["FROM", "TIMES"] if wide else []
    return columns([["AGE", "TYPE", "REASON", *more, "MESSAGE"], *rows]) if rows else []


def explanation(explanation: Explanation) -> list[str]:
    """Return an explanation as lines: verdict, evidence, and the commands to type next."""
    lines = [explanation.verdict, *(f"  - {why}" for why in explanation.because)]
    lines += ["", "next:", *(f"    {command}" for command in explanation.commands)]
    return [printable_lines(line) for line in lines]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns by their widest cells; line ends in a cell are escaped."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def age(seconds: float) -> str:
    """Return a duration in its two largest units: 45s, 3m20s, 2h5m, 4d7h."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{whole % 60}s" if minutes else f"{whole}s"


def _time_of_day(wall_s: float) -> str:
    return f"{datetime.fromtimestamp(wall_s, UTC):%H:%M:%S}"
