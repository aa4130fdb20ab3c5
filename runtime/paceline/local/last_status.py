"""Last status of a run, as a file of its folder: how the run ended and what it had done."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from paceline_api.bounded import read_file
from paceline_api.decoding import UNDECODABLE
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from paceline.core.status import Status

STATUS: Final = "status.json"
"""Name of the file in the run folder."""
STATUS_BYTES_MAX: Final = 32 * 2**20
"""Twice the largest answer of a runner (`local.control`), because the file has line breaks and
indents."""


class LastStatusError(PacelineError):
    """Raised for a file that does not say how its run ended.

    Args:
        path: The file.
        problem: What is wrong with it.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(
            f"{path} {problem}",
            hint=f"see the logs in {path.parent}; bring the file back, or start the job again",
            exit_code=EXIT_BAD_INPUT,
        )


def read_last_status(run_dir: Path) -> Status:
    """Return the status that a run has left when it ended.

    Args:
        run_dir: The run folder.

    Returns:
        The last status.

    Raises:
        FileNotFoundError: The run was killed, or has only just begun.
        LastStatusError: The file cannot be read, or is damaged.
    """
    path = run_dir / STATUS
    try:
        return msgspec.json.decode(read_file(path, STATUS_BYTES_MAX), type=Status)
    except FileNotFoundError:
        raise
    except OSError as error:
        told = (error.strerror or str(error)).lower()
        raise LastStatusError(path, f"cannot be read: {told}") from None
    except UNDECODABLE as error:
        raise LastStatusError(path, f"is damaged: {error}") from None
