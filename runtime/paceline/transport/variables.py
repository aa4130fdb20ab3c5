"""Environment variables of this process that a library reads when it starts, and their way back.

They are changed in the user's own process, so what was changed is remembered until the job is over.
"""

from __future__ import annotations

import os

_before: dict[str, str | None] = {}
"""Of each variable that was changed: its value then; None: it was not set."""


def set_variable(name: str, value: str) -> None:
    """Set it until `restore_variables`."""
    _before.setdefault(name, os.environ.get(name))
    os.environ[name] = value


def restore_variables() -> None:
    """Give every variable that was set here the value that it had before."""
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()
