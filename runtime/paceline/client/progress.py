"""Progress bar of a job that is waited for, in a notebook or on a terminal."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Final, Self

from paceline_api.errors import printable
from paceline_api.status import as_number
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from paceline.jobs.interface import JobStatus

FIGURES_MAX: Final = 3
"""Upper bound on the script's figures that are shown, in their order; more would not fit on a line.
"""


class ProgressBar:
    """Context manager that shows a bar; after the block the bar's last state stays visible."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task("", total=1.0, words="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, status: JobStatus) -> None:
        """Update the bar with a status."""
        self._progress.update(
            self._task,
            description=printable(f"{status.name}  {status.state}"),
            completed=1.0 if status.state == "Complete" else status.progress or 0.0,
            words=printable(words(status)),
        )


def words(status: JobStatus) -> str:
    """Return the text behind the bar: replicas, round, speed, figures and remaining time."""
    parts = [f"{status.ready}/{status.replicas} replicas"] if not status.ended else []
    parts.append(f"round {status.round}")
    if status.rounds_per_s_now and not status.ended:
        parts.append(f"{status.rounds_per_s_now:.1f}/s")
    metrics = status.detail.log.metrics if status.detail is not None else {}
    parts += [
        f"{name} {as_number(value):.4g}" for name, value in list(metrics.items())[:FIGURES_MAX]
    ]
    if status.left_s is not None and not status.ended:
        left_s = math.ceil(status.left_s)
        parts.append(f"ETA {left_s // 60}:{left_s % 60:02}")
    return "  ".join(parts)


def console_for(wanted: bool | None) -> Console | None:
    """Return the console for a progress bar; None to show none.

    Args:
        wanted: True shows a bar, False does not, and None shows one in a notebook and on a
            terminal.

    Returns:
        The console.
    """
    console = Console(highlight=False)
    visible = console.is_jupyter or console.is_terminal
    return console if wanted or (wanted is None and visible) else None
