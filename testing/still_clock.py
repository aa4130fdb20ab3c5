"""Run a module whose event loop has a clock that stands still: `python still_clock.py MODULE`.

No timer of asyncio ever fires there. Whatever the program still notices, it has learned from an
event and not by polling.
"""

from __future__ import annotations

import asyncio
import runpy
import sys


def always_zero(self: asyncio.BaseEventLoop) -> float:
    """Return 0.0, the constant time of every event loop."""
    return 0.0


def main() -> None:
    """Replace the clock and run the module."""
    asyncio.BaseEventLoop.time = always_zero  # type: ignore[method-assign]
    runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
