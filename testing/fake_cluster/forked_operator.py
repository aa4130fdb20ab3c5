"""The operator, forked from a process that has imported it already.

A test on a real API server starts one operator or more, each of which would spend its first two
CPU-seconds on imports. Only that is saved: the process has its own pid, session and signals.
"""

from __future__ import annotations

import sys
from typing import ClassVar

from testing.processes.forked_call import ForkedCall


class ForkedOperator(ForkedCall):
    """An operator process with an interface like `Popen`."""

    MODULE: ClassVar = __name__
    PURPOSE: ClassVar = "operators"
    PRELOADED: ClassVar = (__name__, "testing.processes.keeper", "paceline_operator.__main__")


def operator(*words: str) -> int:
    """Run the operator with the options in `words` and return its exit code."""
    from paceline_operator.__main__ import main

    sys.argv = ["paceline-operator", *words]
    return main()
