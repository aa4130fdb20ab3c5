"""The time limits of the coordinator that no user sets, each with its reason.

Limits that follow from the size of the job are in `core.coordinator.pace`. Those that a user sets
are in `core.coordinator.events.Config`.
"""

from __future__ import annotations

from typing import Final

from paceline_api.times import NS_PER_MS, NS_PER_S

CONNECT_NS: Final = 30 * NS_PER_S
"""Time limit for a member to connect to the others after COMMIT. If it cannot, it reports that."""
COMPLAINT_NS: Final = 200 * NS_PER_MS
"""Wait after a complaint about a data channel. The evidence of a death usually follows it."""
COMPLAINT_MAX_NS: Final = 30 * NS_PER_S
"""Upper bound on the wait after a complaint. It doubles with each generation without a round."""
GONE_NS: Final = 500 * NS_PER_MS
"""Time after which a closed connection makes a rank suspect, if its agent is not connected."""
INIT_NS: Final = 60 * NS_PER_S
"""Time from the start of a script after which a missing `pl.init()` is reported. Importing torch
takes seconds."""
RESTORE_NS: Final = 600 * NS_PER_S
"""Upper bound on the time to read a checkpoint."""
USUAL_TIMES: Final = 10
"""Factor over the longest of the last reductions beyond which a reduction is stuck."""
SLOWEST_BYTES_PER_S: Final = 5_000_000
"""Assumed minimum rate of a first reduction, in bytes of gradients per second. It also applies to
other work on all of the state."""
JUDGE_NS: Final = NS_PER_S
"""Interval between two judgments of stragglers. Heartbeats are at least as frequent in small jobs.
"""
OVERTIME_NS: Final = 10 * NS_PER_S
"""Time after the release at which running scripts are reported. At most half of the finish
deadline."""
