"""The files of a function that travel with its job: a few texts, by name."""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.function.errors import FunctionError

FOLDER: Final = "function"
"""Subfolder of the run folder that holds the files for each rank."""
PROGRAM: Final = "function.py"
"""Name of the program: imports, what the function uses, the function itself, and its call."""
DESCRIPTION: Final = "function.json"
"""Name of the file with the Description."""
BYTES_MAX: Final = 900_000
"""Upper bound on the size of all files in bytes. A ConfigMap carries them to a cluster, and it
holds 1 MiB."""


class Description(msgspec.Struct, frozen=True):
    """Facts that are needed to start the function; they travel as JSON."""

    name: str
    python: tuple[int, int]
    """Version of the Python that the function was written for: major, minor."""
    packages: tuple[str, ...] = ()
    """Requirements that are installed before the function starts, as `pip install` takes them."""


def files_of(description: Description, program: str) -> dict[str, str]:
    """Return the files of a packed function, by name.

    Args:
        description: What must be known to start it.
        program: Source of the program.

    Returns:
        The text of each file.

    Raises:
        FunctionError: Together they have more than BYTES_MAX bytes.
    """
    files = {PROGRAM: program, DESCRIPTION: msgspec.json.encode(description).decode()}
    size = sum(len(text.encode()) for text in files.values())
    if size > BYTES_MAX:
        raise FunctionError(
            f"function {description.name} with what it uses and its arguments has {size:,} bytes, "
            f"more than the {BYTES_MAX:,} that travel with a job",
            hint="read large data from a file or a volume inside the function",
        )
    return files
