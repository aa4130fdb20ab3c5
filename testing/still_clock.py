"""Runs a module whose event loop has a clock that stands still: `python still_clock.py MODULE`.

No timer of asyncio ever fires there. What the program notices all the same, it has learnt from an
event and not by looking again and again.
"""

from __future__ import annotations

import asyncio
import runpy
import sys


def always_zero(self: asyncio.BaseEventLoop) -> float:
    return 0.0


def main() -> None:
    asyncio.BaseEventLoop.time = always_zero  # type: ignore[method-assign]
    runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
