"""Events and effects of the coordinator's state machine, and its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct
from paceline_api.ids import MemberId, pod_of
from paceline_api.rounds import RoundSettings
from paceline_api.settings import (
    FINISH_DEADLINE_S,
    STEP_DEADLINE_S,
    FailureRuleSettings,
    StragglerSettings,
)
from paceline_api.status import Outcome
from paceline_api.times import NS_PER_S

from paceline.core import messages as m
from paceline.core.coordinator.pace import LoadBounds
from paceline.core.coordinator.timeouts import CONNECT_NS


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the job that decide about its membership. Times are in nanoseconds."""

    job: str
    """Name of the job."""
    replicas: int
    """Number of replicas (pods) that the job begins with."""
    procs: int = 1
    """Number of rank processes per replica."""
    min_replicas: int = 1
    """Minimum number of replicas with which training may begin."""
    settings: RoundSettings = RoundSettings()  # noqa: RUF009 - frozen
    """Settings of the rounds in the first generation."""
    settle_ns: int = 30 * NS_PER_S
    """How long the first generation waits for all wanted ranks."""
    stabilization_ns: int = NS_PER_S
    """How long a ready rank waits for others, so that they join with one change."""
    allowed_sizes: tuple[int, ...] = ()
    """Numbers of replicas that may train; empty if any number may."""
    freeze_timeout_ns: int = 30 * NS_PER_S
    """Silence after which a rank is suspect, and upper bound of every answer that it owes (R6)."""
    connect_timeout_ns: int = CONNECT_NS
    """How long members wait for each other after COMMIT."""
    finish_deadline_ns: int = FINISH_DEADLINE_S * NS_PER_S
    """How long scripts may run after the release. The agents enforce it."""
    step_deadline_ns: int = STEP_DEADLINE_S * NS_PER_S
    """How long a script may take between two calls of step(). The rank enforces it."""
    checkpoint_required: bool = False
    """True if a checkpoint that cannot be written fails the job."""
    backoff_limit: int = 6
    """Number of failed processes in a row that the job tolerates. A committed round resets the
    count (C8)."""
    failure_rules: tuple[FailureRuleSettings, ...] = ()
    """Rules of spec.failurePolicy: which failures do not count, and which end the job at once."""
    max_skipped_batches: int = 0
    """Number of batches that may be given up because the script fails with them (R56)."""
    pace: LoadBounds = LoadBounds()  # noqa: RUF009 - frozen
    """Heartbeat and decision intervals (R42)."""
    straggler: StragglerSettings | None = None
    """Rule by which a rank counts as slow, and the response. None: no rank is judged."""
    membership_settings: str = ""
    """Id of the `MembershipSettings` that are in force."""


# ---- events --------------------------------------------------------------------------------------


class FromRank(Struct, frozen=True):
    """A message of a rank, passed on by its agent (R43)."""

    message: m.RankMessage


class FromAgent(Struct, frozen=True):
    """A message of an agent about itself and its processes."""

    message: m.AgentMessage


class AgentGone(Struct, frozen=True):
    """The connection of a pod was closed. Not evidence: agent and ranks may live (R25)."""

    slot: int
    attempt: int


class SetInventory(Struct, frozen=True):
    """The owner of the job lists the pods that may live (R25)."""

    inventory: m.Inventory


class SetTargets(Struct, frozen=True):
    """The owner of the job wants another number of replicas, other settings, or a stop."""

    targets: m.Targets


class Tick(Struct, frozen=True):
    """The time of the latest `WakeAt` has come."""


Event = FromRank | FromAgent | AgentGone | SetInventory | SetTargets | Tick


def heard(message: m.AgentMessage | m.RankMessage) -> Event:
    """Return the event for a message that came over the connection of a pod."""
    return FromRank(message) if isinstance(message, m.RankMessage) else FromAgent(message)


# ---- effects -------------------------------------------------------------------------------------


class ToRank(Struct, frozen=True):
    """Send a message to one rank, through its agent.

    A message to many ranks is one object in all of their effects, so that it is sent once per pod
    (`by_pod`).
    """

    member: MemberId
    message: m.ToRank


class ToAgent(Struct, frozen=True):
    """Send a message to the agent of a pod."""

    slot: int
    attempt: int
    message: m.ToAgent | m.BeatEvery


class WakeAt(Struct, frozen=True):
    """Deliver a `Tick` at this time. Only the latest one counts."""

    at_ns: int


class Happened(Struct, frozen=True):
    """Report something worth a line in the log and an Event on the job."""

    reason: str
    message: str
    facts: dict[str, str] = {}


class JobEnded(Struct, frozen=True):
    """Report that the job has ended, with its outcome."""

    outcome: Outcome


class Retire(Struct, frozen=True):
    """Exit without a message to the ranks: a later coordinator exists (R3)."""

    why: str


Effect = ToRank | ToAgent | WakeAt | Happened | JobEnded | Retire


class ToRanks(Struct, frozen=True):
    """Send one message to several ranks of the same pod."""

    members: tuple[MemberId, ...]
    message: m.ToRank

    @property
    def pod(self) -> tuple[int, int]:
        """Slot and attempt of the pod."""
        return pod_of(self.members[0])


def by_pod(effects: list[Effect]) -> list[Effect | ToRanks]:
    """Merge neighboring messages to ranks of the same pod, so that each pod gets them once.

    Args:
        effects: Effects of one event, in the order in which they are to be carried out.

    Returns:
        The same effects in the same order. Each `ToRank` is part of a `ToRanks`.
    """
    joined: list[Effect | ToRanks] = []
    for effect in effects:
        if not isinstance(effect, ToRank):
            joined.append(effect)
            continue
        members: tuple[MemberId, ...] = (effect.member,)
        before = joined[-1] if joined else None
        if (
            isinstance(before, ToRanks)
            and before.message is effect.message
            and before.pod == pod_of(effect.member)
        ):
            members = (*before.members, effect.member)
            joined.pop()
        joined.append(ToRanks(members, effect.message))
    return joined
