"""`paceline status` and `paceline scale`: see a running local job, and change its size."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from paceline_api.errors import EXIT_BAD_INPUT, EXIT_FAILURE, PacelineError
from rich.console import Console
from rich.live import Live

from paceline import clock
from paceline.cli.table import line, table
from paceline.core.status import Status
from paceline.local import control, index

WATCH_S: Final = 0.5
LINE_S: Final = 1.0
STATUS: Final = "status.json"
"""What a run leaves in its folder."""


class NoSuchJobError(PacelineError):
    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint, exit_code=EXIT_BAD_INPUT)


def status(name: str | None, *, watch: bool, as_json: bool) -> int:
    """The exit code: 0, or 1 if no job is running and none was named."""
    console = Console(highlight=False, soft_wrap=True)
    ended = _ended(name)
    if ended is not None:
        _show_ended(console, ended, as_json=as_json)
        return 0
    entries = index.running(os.environ)
    if name is None and len(entries) != 1:
        _list(console, entries, as_json=as_json)
        return 0 if entries else EXIT_FAILURE
    entry = _pick(name, entries)
    if watch:
        _watch(console, entry, as_json=as_json)
    else:
        _show(console, control.look(entry), as_json=as_json)
    return 0


def scale(name: str, replicas: int) -> None:
    entry = _pick(name, index.running(os.environ))
    scaled = control.scale(entry, replicas)
    print(f"job {entry.job}: {scaled.before} -> {scaled.after} replicas")


def _pick(name: str | None, entries: list[index.Entry]) -> index.Entry:
    """The job that is meant: by its name, or by its run folder. NoSuchJobError."""
    if name is None:
        return entries[0]
    if (entry := index.of_run_dir(Path(name))) is not None:
        return entry
    named = [entry for entry in entries if entry.job == name]
    if len(named) == 1:
        return named[0]
    if named:
        listed = ", ".join(entry.run_dir for entry in named)
        raise NoSuchJobError(
            f"{len(named)} jobs with the name {name} are running",
            hint=f"name the run folder instead: {listed}",
        )
    if (Path(name) / STATUS).exists():
        raise NoSuchJobError(f"the run in {name} has ended", hint="paceline status shows how")
    others = ", ".join(entry.job for entry in entries) or "none"
    raise NoSuchJobError(
        f"no job {name} is running here as this user",
        hint=f"running jobs: {others}; start one with `paceline run job.yaml`",
    )


def _ended(name: str | None) -> Status | None:
    """Of a run that has ended, by its folder."""
    if name is None or index.of_run_dir(Path(name)) is not None:
        return None
    try:
        return msgspec.json.decode((Path(name) / STATUS).read_bytes(), type=Status)
    except OSError:
        return None


def _show(console: Console, view: control.View, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(view.status).decode(), flush=True)
        return
    console.print(f"job {view.job}, logs in {view.run_dir}", markup=False)
    console.print(table(view.status, view))


def _show_ended(console: Console, status: Status, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(status).decode())
        return
    outcome = status.outcome
    how = "ended" if outcome is None else f"{outcome.reason}: {outcome.message}"
    console.print(f"job {status.job}: {how}", markup=False)
    console.print(table(status, control.View(status.job, "", status, 0.0, None)))


def _list(console: Console, entries: list[index.Entry], *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(entries).decode())
        return
    if not entries:
        print("no job is running here as this user", file=sys.stderr)
    for entry in entries:
        view = control.look(entry)
        console.print(f"{entry.job}  {line(view.status, view)}  {entry.run_dir}", markup=False)


def _watch(console: Console, entry: index.Entry, *, as_json: bool) -> None:
    """Until the job has ended, or Ctrl-C."""
    if as_json or not console.is_terminal:
        for view in _views(entry, LINE_S):
            if as_json:
                _show(console, view, as_json=True)
            else:
                console.print(line(view.status, view), markup=False)
        return
    with Live(console=console, auto_refresh=False) as live:
        for view in _views(entry, WATCH_S):
            live.update(table(view.status, view), refresh=True)


def _views(entry: index.Entry, every_s: float) -> Iterator[control.View]:
    while index.listens(entry):
        try:
            yield control.look(entry)
        except control.ControlError:
            if index.listens(entry):
                raise
            return
        clock.pause(every_s)
