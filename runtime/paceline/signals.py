"""The signals that ask a process of Paceline to end, handled alike by each of its programs."""

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

    SIGINT and SIGHUP stay ignored if they were when the process started: that is how `nohup` keeps
    a program when its terminal closes, and how a shell script keeps Ctrl-C from what it has started
    in the background.
    """
    for number in ENDING:
        if number is signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end, number)
