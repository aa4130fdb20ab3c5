"""Rows of `status.ranks` of a TrainingJob: what the operator writes there, and clients read.

A row is a `RankStatus` without what changes between two heartbeats, with its times in whole
microseconds. `types.status.RankRow` is its schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline_api.ids import NUMBER_MAX, parse_member
from paceline_api.status import LAG_S, STEP_S, Figure, RankPhase, RankStatus
from paceline_api.times import US_PER_S

_TIMES: Final = {STEP_S: "stepMicroseconds", LAG_S: "lagMicroseconds"}
"""Field of a row for each figure that it has."""


def rank_row(rank: RankStatus, share: Figure) -> dict[str, Any]:
    """Return the row of a rank.

    Args:
        rank: The status of the rank.
        share: Rounds with a contribution of it, as a share of those in which it was active; None if
            unknown.

    Returns:
        The row, without the figures that are unknown.
    """
    row = {"member": str(rank.member), "state": str(rank.state), "round": rank.version}
    if rank.pid:
        row["pid"] = rank.pid
    if rank.step_s:
        row[_TIMES[STEP_S]] = microseconds(rank.step_s)
    if rank.lag_s is not None:
        row[_TIMES[LAG_S]] = microseconds(rank.lag_s)
    if share is not None:
        row["sharePercent"] = round(100 * max(0.0, min(share, 1.0)))
    return row


def read_rank_row(row: Mapping[str, Any]) -> tuple[RankStatus, float | None]:
    """Return the rank of a row, and its share of the rounds; None if unknown.

    An invalid name of a member raises ValueError.

    Args:
        row: The row.

    Returns:
        The rank, as far as the row describes it, and its share.
    """
    times = {figure: row[name] for figure, name in _TIMES.items() if row.get(name) is not None}
    rank = RankStatus(
        member=parse_member(row["member"]),
        state=RankPhase(str(row.get("state"))),
        pid=int(row.get("pid") or 0),
        version=int(row.get("round") or 0),
        facts={figure: value / US_PER_S for figure, value in times.items()},
    )
    percent = row.get("sharePercent")
    return rank, None if percent is None else percent / 100


def microseconds(seconds: float) -> int:
    """Return a duration in whole microseconds; 0 for a negative one."""
    return max(0, min(round(seconds * US_PER_S), NUMBER_MAX))
