"""What can happen to the coordinator, and what it wants done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec import Struct
from paceline_api.rounds import RoundSettings
from paceline_api.settings import (
    FINISH_DEADLINE_S,
    STEP_DEADLINE_S,
    FailureRuleSettings,
    StragglerSettings,
)

from paceline.core import messages as m
from paceline.core.coordinator.pace import Pace
from paceline.core.protocol.ids import MemberId
from paceline.core.status import Outcome

NS_PER_S = 10**9
NS_PER_MS = 10**6
CONNECT_NS: Final = 30 * NS_PER_S
"""A member has connected to the others after COMMIT within this, or says that it could not."""


@dataclass(frozen=True, slots=True)
class Config:
    """What the job asks of its membership; times in nanoseconds."""

    job: str
    replicas: int
    procs: int = 1
    min_replicas: int = 1
    settings: RoundSettings = RoundSettings()  # noqa: RUF009 - frozen
    settle_ns: int = 30 * NS_PER_S
    """How long the first generation waits for all wanted ranks."""
    stabilization_ns: int = NS_PER_S
    """How long a rank that is ready waits for others to join with it."""
    allowed_sizes: tuple[int, ...] = ()
    """Numbers of replicas that may train; empty: any."""
    freeze_timeout_ns: int = 30 * NS_PER_S
    """Silence after which a rank is suspect; also the bound of every answer it owes (R6)."""
    connect_timeout_ns: int = CONNECT_NS
    """Bound of the members' own waiting for each other after COMMIT."""
    finish_deadline_ns: int = FINISH_DEADLINE_S * NS_PER_S
    """How long scripts may run after the release; their agents see to it."""
    step_deadline_ns: int = STEP_DEADLINE_S * NS_PER_S
    """How long a script may take between two calls of step(); its rank sees to it."""
    checkpoint_required: bool = False
    """A checkpoint that cannot be written fails the job."""
    backoff_limit: int = 6
    """Failed processes without a committed round in between, after which the job fails (C8)."""
    failure_rules: tuple[FailureRuleSettings, ...] = ()
    """Of spec.failurePolicy: which of them do not count, or end the job at once."""
    max_skipped_batches: int = 0
    """Likewise: how many batches with which the script fails are given up instead (R56)."""
    pace: Pace = Pace()  # noqa: RUF009 - frozen
    straggler: StragglerSettings | None = None
    """When a rank counts as slow and what is done about it; None: nobody is judged."""


# ---- events --------------------------------------------------------------------------------------


class FromRank(Struct, frozen=True):
    """By way of its agent (R43)."""

    message: m.RankMessage


class FromAgent(Struct, frozen=True):
    message: m.AgentMessage


class AgentGone(Struct, frozen=True):
    """The connection of a pod was closed. Not evidence: agent and ranks may live (R25)."""

    slot: int
    attempt: int


class SetInventory(Struct, frozen=True):
    inventory: m.Inventory


class SetTargets(Struct, frozen=True):
    targets: m.Targets


class Tick(Struct, frozen=True):
    pass


Event = FromRank | FromAgent | AgentGone | SetInventory | SetTargets | Tick


def heard(message: m.AgentMessage | m.RankMessage) -> Event:
    """What comes over the connection of a pod, as an event."""
    return FromRank(message) if isinstance(message, m.RankMessage) else FromAgent(message)


# ---- effects -------------------------------------------------------------------------------------


class ToRank(Struct, frozen=True):
    """By way of its agent. What goes to many is one object for all of them, so that it is sent to
    each pod once (`by_pod`)."""

    member: MemberId
    message: m.ToRank


class ToAgent(Struct, frozen=True):
    slot: int
    attempt: int
    message: m.ToAgent | m.BeatEvery


class WakeAt(Struct, frozen=True):
    """Deliver Tick then; only the latest one counts."""

    at_ns: int


class Happened(Struct, frozen=True):
    """Worth a line in the log and an Event on the job."""

    reason: str
    message: str
    facts: dict[str, str] = {}


class JobEnded(Struct, frozen=True):
    outcome: Outcome


class Retire(Struct, frozen=True):
    """A later coordinator exists: exit without a word to the ranks (R3)."""

    why: str


Effect = ToRank | ToAgent | WakeAt | Happened | JobEnded | Retire


class ToRanks(Struct, frozen=True):
    """The same to some ranks of one pod."""

    members: tuple[MemberId, ...]
    message: m.ToRank

    @property
    def pod(self) -> tuple[int, int]:
        return m.pod_of(self.members[0])


def by_pod(effects: list[Effect]) -> list[Effect | ToRanks]:
    """The same effects in the same order; what neighbours of one pod are told is put together."""
    found: list[Effect | ToRanks] = []
    for effect in effects:
        if not isinstance(effect, ToRank):
            found.append(effect)
            continue
        members: tuple[MemberId, ...] = (effect.member,)
        before = found[-1] if found else None
        if (
            isinstance(before, ToRanks)
            and before.message is effect.message
            and before.pod == m.pod_of(effect.member)
        ):
            members = (*before.members, effect.member)
            found.pop()
        found.append(ToRanks(members, effect.message))
    return found
