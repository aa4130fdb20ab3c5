"""Output errors never end a run: a closed pipe, a closed terminal, a full disk."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
from paceline.cli.screen import Screen
from paceline.local.timeline import Timeline
from paceline_api.status import Status


def closed_pipe() -> TextIO:
    read_end, write_end = os.pipe()
    os.close(read_end)
    return os.fdopen(write_end, "w")


def closed_terminal() -> TextIO:
    ours, theirs = pty.openpty()
    os.close(ours)
    return os.fdopen(theirs, "w")


def full_disk() -> TextIO:
    return Path("/dev/full").open("w")


@pytest.mark.parametrize("gone", [closed_pipe, closed_terminal, full_disk])
@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_continues_when_its_output_can_no_longer_be_written(
    monkeypatch: pytest.MonkeyPatch, gone: Callable[[], TextIO], *, quiet: bool
) -> None:
    async def run() -> None:
        async with Screen(quiet=quiet) as screen:
            for number in range(3):
                screen.show(Status("job", "c", version=number), Timeline())
                screen.say("an event")
                screen.on_line("of a rank")
                await asyncio.sleep(0.01)

    with gone() as stderr, gone() as stdout:
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr(sys, "stdout", stdout)
        asyncio.run(run())
        monkeypatch.undo()
