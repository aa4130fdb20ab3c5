"""The coordinator's decisions: who is a member, since when, and when it is over (R1-R7, R16-R18).

Reading order: events, roster (what is known of processes), state, forming (reports -> the next
generation, a pure function), machine, and the modules that it calls: hearing (ranks), agents
(evidence), changing, silence, ending. The sockets are in `paceline.coordinator`.
"""

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
from paceline.core.status import Outcome

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
