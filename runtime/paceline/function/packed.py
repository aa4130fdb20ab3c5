"""What of a function travels with its job: a few files of text, by name."""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.function.errors import FunctionError

FOLDER: Final = "function"
"""Of the run folder, in which the files lie for each rank."""
PROGRAM: Final = "function.py"
"""Imports, what the function uses, itself, and its call."""
DESCRIPTION: Final = "function.json"
BYTES_MAX: Final = 900_000
"""Of all files: a ConfigMap, with which they come to a cluster, holds 1 MiB."""


class Description(msgspec.Struct, frozen=True):
    """What the start of the function has to know."""

    name: str
    python: tuple[int, int]
    """Version of the Python that it was written for."""
    packages: tuple[str, ...] = ()
    """Installed before it starts, as `pip install` takes them."""


def files_of(description: Description, program: str) -> dict[str, str]:
    """The files by name. Raises FunctionError if they are too large."""
    files = {PROGRAM: program, DESCRIPTION: msgspec.json.encode(description).decode()}
    size = sum(len(text.encode()) for text in files.values())
    if size > BYTES_MAX:
        raise FunctionError(
            f"function {description.name} with what it uses and its arguments has {size:,} bytes, "
            f"more than the {BYTES_MAX:,} that travel with a job",
            hint="read large data from a file or a volume inside the function",
        )
    return files
