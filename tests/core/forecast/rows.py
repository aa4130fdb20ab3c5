"""Rows of a job that behaves exactly as the forecast model says."""

from __future__ import annotations

from typing import Final

from paceline.core.forecast.link import LinkModel, MeasuredSum
from paceline.core.forecast.model import RunRow, Setting

MS: Final = 1e-3


def ideal(members: int, *, model: int = 1) -> RunRow:
    """Return the row of an ideal job with this number of members.

    A sample takes 1 ms and 0.1 ms more for each rank; an update takes 1 ms; the link has 1 ms
    latency and 10 ns per byte.
    """
    setting = Setting(members, members, 32, model)
    computing_s = 32 * (1 * MS + 0.1 * MS * setting.ranks) / {1: 1.0, 2: 1.6}[model]
    link, payload = LinkModel(1 * MS, 1e-8), 4_000_000 // model
    parts = (payload // 4, 3 * payload // 4)
    sums = tuple(MeasuredSum(members, part, link.seconds(members, part)) for part in parts)
    step_s = computing_s + link.seconds(members, payload) + 1 * MS
    return RunRow(
        setting=setting,
        computing_s=((computing_s,),) * members,
        sums=sums if members > 1 else (),
        payload_bytes=payload,
        streamed=False,
        update_s=1 * MS,
        step_s=step_s,
        noise_scale=None,
    )
