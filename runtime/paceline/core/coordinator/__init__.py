"""Decisions of the coordinator: membership, generations and the end of a job (R1-R7, R16-R18).

The package is pure: events go in, effects come out, and the time is an argument. The sockets and
the timer are in `paceline.coordinator`.

Reading order: `events`; `roster` (known processes); `state`; `forming` (reports to the next
generation, a pure function); `machine`; and the modules that `machine` calls: `hearing` (messages
of ranks), `agents` (evidence), `changing`, `silence`, `ending`.
"""

from paceline_api.status import Outcome

from paceline.core.coordinator.events import (
    AgentGone,
    Config,
    Effect,
    Event,
    FromAgent,
    FromRank,
    Happened,
    JobEnded,
    Retire,
    SetInventory,
    SetTargets,
    Tick,
    ToAgent,
    ToRank,
    ToRanks,
    WakeAt,
    by_pod,
    heard,
)
from paceline.core.coordinator.machine import Coordinator

__all__ = [
    "AgentGone",
    "Config",
    "Coordinator",
    "Effect",
    "Event",
    "FromAgent",
    "FromRank",
    "Happened",
    "JobEnded",
    "Outcome",
    "Retire",
    "SetInventory",
    "SetTargets",
    "Tick",
    "ToAgent",
    "ToRank",
    "ToRanks",
    "WakeAt",
    "by_pod",
    "heard",
]
