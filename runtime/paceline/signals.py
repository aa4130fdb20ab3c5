"""The signals that ask a process of Paceline to end. All of its programs handle them alike."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Final

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def on_request_to_end(
    loop: asyncio.AbstractEventLoop, end: Callable[[signal.Signals], None]
) -> None:
    """Call `end` with each signal that asks this process to end.

    SIGINT and SIGHUP stay ignored if they were ignored when the process started. That is how
    `nohup` keeps a program when its terminal closes, and how a shell script keeps Ctrl-C from
    programs that it has started in the background.

    Args:
        loop: Event loop on which `end` is called.
        end: Takes the signal.
    """
    for number in ENDING:
        if number is signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end, number)
