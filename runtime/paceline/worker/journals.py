"""Reads the journals of a recorded run, one file per rank. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paceline_api.decoding import UNDECODABLE
from paceline_api.ids import MemberId
from paceline_api.types.enums import Wire

from paceline.core.replay.journal import Entry, Opened, unpack
from paceline.errors import ReplayError

FOLDER: Final = "record"
"""Name of the journals' folder inside the run folder."""


def not_replayable(run_dir: Path, wire: Wire) -> ReplayError:
    """Return the error for a run whose sums were rounded in transit, so no journal has all bits."""
    return ReplayError(
        f"{run_dir}: gradients travelled as {wire}, and what rounding took away is in no journal",
        hint="record a run with spec.collective.wire: Float32",
    )


def read_journals(run_dir: Path) -> dict[MemberId, list[Entry]]:
    """Read the journals of all ranks of a run.

    Args:
        run_dir: The run folder.

    Returns:
        The entries of each rank, in the order in which they were written.

    Raises:
        ReplayError: There is no journal, or one of them cannot be read.
    """
    journals: dict[MemberId, list[Entry]] = {}
    for path in sorted((run_dir / FOLDER).glob("*.journal")):
        try:
            entries = list(unpack(path.read_bytes()))
        except (OSError, *UNDECODABLE) as error:
            raise ReplayError(f"{path} is not a journal of this version: {error}") from None
        if entries and isinstance(entries[0], Opened):
            journals[entries[0].member] = entries[1:]
    if not journals:
        raise ReplayError(
            f"{run_dir} has no journals, which ranks write only where they are asked to",
            hint="run the job with --record",
        )
    return journals
