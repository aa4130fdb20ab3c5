"""The output of the ranks on its way through the agent."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

from paceline.agent.logs import LogOutput

WRITES = 5_000
"""More writes than fit into the pipe that wakes the event loop."""


def test_a_signal_is_handled_however_much_was_written_meanwhile(tmp_path: Path) -> None:
    """Guard against a lost SIGCHLD, which would be a dead rank that nobody reports."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        handled = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, handled.set)
        with (tmp_path / "stdout").open("wb") as stdout:
            output = LogOutput(loop, stdout.fileno(), tmp_path / "logs")
            for _ in range(WRITES):
                output.write("rank", b"shown\n", b"kept\n")
            assert _all_written(output)  # the loop has had no turn
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(handled.wait(), 10)
            output.close()
        assert (tmp_path / "stdout").read_bytes() == b"shown\n" * WRITES
        assert (tmp_path / "logs" / "rank").read_bytes() == b"kept\n" * WRITES

    asyncio.run(scenario())


def test_a_waiting_reader_continues_once_the_output_has_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        read_fd, write_fd = os.pipe()
        output = LogOutput(asyncio.get_running_loop(), write_fd, tmp_path / "logs")
        free = asyncio.Event()
        output.write("rank", b"x" * 3_000_000, b"")
        assert output.full
        output.when_free(free.set)
        drain = threading.Thread(target=_read_all, args=[read_fd])
        drain.start()
        await asyncio.wait_for(free.wait(), 10)
        assert not output.full
        output.close()
        os.close(write_fd)
        drain.join(10)

    asyncio.run(scenario())


def _all_written(output: LogOutput) -> bool:
    """Wait until the writer thread has handled everything submitted so far."""
    done = threading.Event()
    output._thread.submit(done.set)
    return done.wait(10)


def _read_all(fd: int) -> None:
    while os.read(fd, 65536):
        pass
    os.close(fd)
