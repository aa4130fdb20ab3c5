"""The signals that end a program of Paceline, and those that it keeps ignoring."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from paceline.signals import ENDING, on_request_to_end


async def received(*numbers: signal.Signals) -> list[signal.Signals]:
    """Send signals to this process, and return those that reached the callback."""
    result: list[signal.Signals] = []
    loop = asyncio.get_running_loop()
    on_request_to_end(loop, result.append)
    try:
        for number in numbers:
            os.kill(os.getpid(), number)
        for _ in range(3):
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
    finally:
        for number in ENDING:
            loop.remove_signal_handler(number)
    return result


@pytest.mark.parametrize("ignored", [(), (signal.SIGHUP,), (signal.SIGINT, signal.SIGHUP)])
def test_signals_ignored_at_the_start_stay_ignored(ignored: tuple[signal.Signals, ...]) -> None:
    """`nohup paceline run` used to end with its terminal, without a checkpoint."""
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        result = asyncio.run(received(signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert set(result) == set(ENDING) - set(ignored)
