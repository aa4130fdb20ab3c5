"""Sets environment variables that a library reads when it starts, and restores them.

They are changed in the user's own process, so the old values are kept until the job is over.
"""

from __future__ import annotations

import os

_before: dict[str, str | None] = {}
"""Old value of each variable that was changed. None means that it was not set."""


def set_variable(name: str, value: str) -> None:
    """Set an environment variable until `restore_variables` is called."""
    _before.setdefault(name, os.environ.get(name))
    os.environ[name] = value


def restore_variables() -> None:
    """Give every variable that `set_variable` changed its old value back."""
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()
