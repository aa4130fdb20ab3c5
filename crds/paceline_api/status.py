"""The status of a job: the coordinator's answer to GET /v1/status, as its readers decode it.

The local runner, the operator, the command line and people with curl read it. The coordinator
decides nothing from it; a runner or operator does, for example from `stopping`, `released` and
`outcome`. It holds three kinds of facts. What the coordinator decided itself (generation, states,
changes, outcome) is exact. What the round log says (`LogStatus`) comes from the lowest active
member and is as old as its last figures. What a rank measured about itself (`RankStatus.facts`) is
for people.

Fields are only ever added. A reader skips fields that it does not know, and a field that is missing
gets its default (C14), so only the identity of a rank is required. In a cluster the coordinator
runs in a pod of a user, who can make it answer anything. Names and whole numbers therefore have
bounds, which the decoder checks. A reader that must not trust the answer bounds its bytes before it
decodes them, and cuts texts and lists afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from paceline_api.decoding import UNDECODABLE
from paceline_api.ids import NO_GENERATION, GenerationId, MemberId, WholeNumber, pod_of
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Network

NAME_MAX: Final = 256
"""Upper bound on the length of a name, in characters."""
HISTORY_MAX: Final = 256
"""Upper bound on the entries of the history in a status."""
CHANGES_MAX: Final = 64
"""Upper bound on the membership changes in a status."""
SILENT_MS: Final = 3000
"""Least age at which a heartbeat no longer overrules evidence of death (C4), in milliseconds."""
SILENT_BEATS: Final = 3
"""Heartbeat intervals after which a heartbeat is too old, if that is longer: large jobs beat more
rarely (R42)."""
STEP_S: Final = "step_seconds"
"""Name, in `RankStatus.facts`, of the median of a rank's recent steps."""
LAG_S: Final = "lag_seconds"
"""Name of the median time of a rank's recent arrivals after the first rank of the same round."""

Name = Annotated[str, Meta(max_length=NAME_MAX)]
Figure = float | None
"""A measurement. JSON has no infinity and no NaN: such a figure is written as null."""


def as_number(figure: Figure) -> float:
    """Return a figure as a number; NaN for one that is not finite."""
    return math.nan if figure is None else figure


class RankPhase(StrEnum):
    """The phase of a rank, in the usual order."""

    STARTING = "starting"
    """The process runs but is not ready yet: imports, model, data."""
    JOINING = "joining"
    """Ready, but not active yet."""
    STANDBY = "standby"
    """Ready, but not needed for the largest allowed size that the job has reached."""
    ACTIVE = "active"
    """A member that takes part in rounds."""
    BENCHED = "benched"
    """Passive because it did not finish a step in time (R13)."""
    SUSPECT = "suspect"
    """Silent beyond the timeout. Only evidence makes it dead (R25)."""
    DRAINING = "draining"
    """Leaving in an orderly way."""
    FINISHED = "finished"
    """The rank has committed the stop round."""
    DEAD = "dead"
    """There is evidence that its process has ended."""

    @classmethod
    def _missing_(cls, value: object) -> RankPhase:  # noqa: ARG003
        """Return JOINING for a phase of a newer release: alive, and in no round yet."""
        return cls.JOINING


class RankStatus(Struct, frozen=True):
    """The status of one rank process."""

    member: MemberId
    """[slot, process in the slot, attempt]."""
    state: RankPhase = RankPhase.JOINING
    rank: WholeNumber | None = None
    """Index in the current generation; None if it is not a member."""
    pid: WholeNumber = 0
    """Process id on its host; 0 if unknown."""
    host: str = ""
    version: WholeNumber = 0
    """Version of its committed state: the number of rounds that it has applied."""
    silent_ms: WholeNumber = 0
    """Milliseconds since its last message."""
    facts: Mapping[str, Figure] = {}
    """The rank's own figures, by name. Figures from the log are in `Status.log`, once for all
    ranks: with a share of each member in each rank's figures, the status would grow with the
    square of the ranks."""
    carrier: Network = Network.UNKNOWN
    """Network that carries its data channel to other pods, as its agent detected it."""
    why: str = ""
    """If it is dead or suspect: what is known about it."""
    finished: bool = False
    """True if it has made the last round, even if its process died since."""

    @property
    def pod(self) -> tuple[int, int]:
        """Slot and attempt of its pod."""
        return pod_of(self.member)

    @property
    def step_s(self) -> float:
        """Median of its recent steps in seconds; 0 if it has reported none."""
        return self.facts.get(STEP_S) or 0.0

    @property
    def lag_s(self) -> float | None:
        """Median of its arrivals behind the first rank, in seconds; None if it has no figure."""
        return self.facts.get(LAG_S)


class OperationKind(StrEnum):
    """What the ranks of an unchanged script did together in one round."""

    STEP = "step"
    """They averaged a backward pass, and late ranks need not have come."""
    SETTLED = "settled"
    """They averaged a backward pass that waits for all ranks, as its gradients cannot be late."""
    CALL = "call"
    """A collective call, which waits for all ranks."""


class ShadowStatus(Struct, frozen=True):
    """The estimated effect of partial modes on rounds that ran in Shadow .

    It is a forecast from the observed arrival times. In another mode, a rank that nobody waits for
    would arrive at other times.
    """

    rounds: WholeNumber = 0
    """Rounds that ran in Shadow."""
    fresh: WholeNumber = 0
    """Gradients in these rounds."""
    waited_s: Figure = 0.0
    """Seconds waited for the last arrival, summed over the ranks."""
    saved_s: Mapping[Name, Figure] = {}
    """Part of these seconds that each mode would have saved."""
    late: Mapping[Name, WholeNumber] = {}
    """Gradients that would have missed their round in each mode."""


class StragglerStatus(Struct, frozen=True):
    """A rank that has been slow for a long time (`paceline_api.slow`)."""

    member: MemberId
    percent: WholeNumber = 0
    """Median step of the rank in percent of the median over all ranks; 200 is twice as slow."""
    since_wall_s: float = 0.0
    """Unix time since which it is a straggler."""
    action: Name = ""
    """The step of `spec.straggler.respond` that is in force."""


class LogStatus(Struct, frozen=True):
    """The content of the round log, as the most advanced rank reports it."""

    rounds: Mapping[Name, WholeNumber] = {}
    """Number of rounds by trigger: why they started."""
    streamed: WholeNumber = 0
    """Number of rounds that were reduced while backward() ran."""
    gradients: WholeNumber = 0
    """Contributions applied; one is one optimizer step of one rank."""
    gradients_before: WholeNumber = 0
    """Part of these that was applied before the job was last started or resumed."""
    samples_left_out: WholeNumber = 0
    """Samples of each epoch that `drop_last` leaves out: fewer than one step."""
    samples_applied: WholeNumber = 0
    """Samples applied."""
    samples_late: WholeNumber = 0
    """Part of the applied samples that was not fresh."""
    samples_dropped: Mapping[Name, WholeNumber] = {}
    """Samples dropped, by reason."""
    samples_redealt: WholeNumber = 0
    """Samples dealt again because their holder died, left or was benched."""
    samples_discounted: Figure = 0.0
    """Samples by which the decay of late gradients reduced the applied ones."""
    updates: WholeNumber = 0
    """Steps of the optimizer; fewer than rounds under `pacing: Samples`."""
    operations: Mapping[Name, WholeNumber] = {}
    """Operations of an unchanged script since the reporting rank began, by `OperationKind`."""
    epochs_exact: WholeNumber = 0
    """Finished epochs in which each sample was applied exactly once."""
    epochs_short: WholeNumber = 0
    """Finished epochs with dropped samples."""
    progress: Figure = None
    """0 to 1, by the samples of all epochs or by `pl.steps`; None if the end is unknown."""
    left_s: Figure = None
    """Seconds to the end at the speed of the last minutes; None if unknown."""
    round_s: Figure = 0.0
    """Median duration of the recent rounds, in seconds."""
    avoided_s: Figure = 0.0
    """Seconds of waiting that the mode avoided compared with Full, summed over the ranks."""
    shares: Mapping[Name, Figure] = {}
    """Rounds with a contribution of each member, as a share of the rounds in which it was active.
    """
    shadow: ShadowStatus | None = None
    """None if no round ran in Shadow."""
    metrics: Mapping[str, Figure] = {}
    """The script's own metrics (`pl.log`), as weighted means over the last 32 rounds."""
    metrics_of_epoch: Mapping[str, Figure] = {}
    """The same over the last finished epoch."""
    metric_sums: Mapping[str, tuple[Figure, Figure]] = {}
    """Weighted sum and weight of each metric over all rounds. The mean between two statuses is the
    difference of the sums divided by the difference of the weights."""


class MembershipChange(Struct, frozen=True):
    """One change of the membership, and what it cost."""

    generation: GenerationId = NO_GENERATION
    reason: Name = ""
    """One word for programs: First, Joined, Left, Died, ChannelFailed, CoordinatorRestarted."""
    why: str = ""
    """A sentence for users."""
    members: WholeNumber = 0
    """Number of members after it."""
    version: WholeNumber = 0
    """Version at which it took effect."""
    wall_s: float = 0.0
    """Unix time at which its cause was known."""
    agree_s: float = 0.0
    """Seconds from its cause until COMMIT was sent."""
    start_s: float | None = None
    """Seconds from its cause until all members had started (R7); None until then."""
    gap_s: float | None = None
    """Seconds from the last commit before it to the first commit after it, as heartbeats show them;
    None while unknown."""


class HistoryEntry(Struct, frozen=True):
    """One entry of the coordinator's history."""

    seq: WholeNumber = 0
    """Number of the entry."""
    wall_s: float = 0.0
    """Unix time."""
    reason: Name = ""
    """One word for programs."""
    message: str = ""
    """A sentence for users."""
    facts: Mapping[str, str] = {}
    """The facts in the sentence, for programs."""


class LiveCondition(Struct, frozen=True):
    """A condition as in Kubernetes; only conditions that are true are listed."""

    type: Name = ""
    """RingReady, Degraded or Resizing."""
    reason: Name = ""
    message: str = ""
    since_wall_s: float = 0.0


class ScriptFailure(Struct, frozen=True):
    """A process that was ended by its script: by an exception, an exit code or a crash (R55)."""

    member: MemberId
    what: str = ""
    """The exception with file and line, or the exit code or signal."""
    samples: str = ""
    """Samples of the batch that it worked on; empty if unknown."""

    def __str__(self) -> str:
        samples = f", {self.samples}" if self.samples else ""
        return f"{self.what} on rank {self.member}{samples}"


class Outcome(Struct, frozen=True):
    """The end of a job, which never changes again."""

    complete: bool = False
    """True if the job ended in success."""
    reason: Name = ""
    """One word for programs: Complete, ScriptFailed, ScriptEndedEarly, StateLost ..."""
    message: str = ""
    """Description of the end: what happened, on which rank, and the last lines of its output."""
    hint: str = ""
    """Remedy for the user; may be empty."""


class Status(Struct, frozen=True):
    """The status of a job."""

    job: Name = ""
    coordinator: Name = ""
    """Uid of the process that answers; a new one after a restart."""
    seq: WholeNumber = 0
    """Grows with each relevant change; for `?after=`. Set by the server."""
    wall_s: float = 0.0
    """Unix time of the answer."""
    generation: GenerationId = NO_GENERATION
    """The last committed generation; before the first one, the proposed generation."""
    replicas: WholeNumber = 0
    """Number of replicas that the user wants."""
    has_targets: bool = field(default=True, name="told")
    """False if this coordinator has not received `replicas`: then no rank leaves because of it. One
    that does not report this needs none."""
    membership_settings: str = ""
    """`MembershipSettings.id` of those in force; empty if the coordinator does not report it."""
    procs: WholeNumber = 1
    """Ranks per replica."""
    beat_ms: WholeNumber = 200
    """Milliseconds from one beat of a pod to the next: facts about its ranks are that old (R42)."""
    inventory: WholeNumber = 0
    """Revision of the last inventory received."""
    settings: Mapping[Name, Name | int | float | bool | None] = {}
    """Round settings in force, or requested if no round has carried them yet: the fields of
    `RoundSettings`, as far as the coordinator's release knows them."""
    ranks: tuple[RankStatus, ...] = ()
    """Living ranks by member id, then the last of the dead ones."""
    version: WholeNumber = 0
    """Number of rounds committed: the highest version that a member has reported."""
    transport: Name = ""
    """Name of the transport of the gradients, such as mpi, or gloo+mpi if buffers of different
    sizes use different transports."""
    transport_why: str = ""
    """Description of how the transport computes sums, and the measurements that led to the choice.
    """
    carrier: Network | None = None
    """Network that carries the gradients between pods: the worst one of the members. Empty if one
    is unknown, and for a job in one pod; None if the job's release does not measure it."""
    log: LogStatus = LogStatus()
    """The content of the round log."""
    changes: tuple[MembershipChange, ...] = ()
    """Membership changes, latest last; at most CHANGES_MAX."""
    history: tuple[HistoryEntry, ...] = field(default=(), name="happenings")
    """The coordinator's history, latest last; at most HISTORY_MAX."""
    stragglers: tuple[StragglerStatus, ...] = ()
    """Stragglers, slowest first. If the job has ended, those of the last moment."""
    conditions: tuple[LiveCondition, ...] = ()
    restarts: WholeNumber = 0
    """Number of processes that an agent started to replace another one, in the pods known here."""
    script_failures: tuple[ScriptFailure, ...] = ()
    """The last script failures, latest last."""
    unsaved: str = ""
    """Which rank could not write the last checkpoint, and why; empty if it was written."""
    stopping: bool = False
    """True if a rank has committed the stop round: a pod that ends from now on is not replaced."""
    released: bool = False
    """True if a rank was released with the final weights and has ended: the job is complete, even
    if other ranks or this coordinator fail (R17)."""
    outcome: Outcome | None = None
    """Set once the job has ended."""
    silent: tuple[WholeNumber, ...] = ()
    """Replicas whose agents have been silent since the release; the job ends without them."""

    @property
    def membership(self) -> str:
        """The committed generation as incarnation.counter; empty before the first one."""
        return self.generation.short if self.changes else ""

    @property
    def round_settings(self) -> RoundSettings:
        """The round settings, with defaults for those that the coordinator does not report."""
        return msgspec.convert(self.settings, RoundSettings)

    @property
    def living(self) -> tuple[RankStatus, ...]:
        """Ranks that are not dead."""
        return tuple(rank for rank in self.ranks if rank.state is not RankPhase.DEAD)

    def condition(self, kind: str) -> LiveCondition | None:
        """Return the last condition of a type; None if there is none."""
        return next((one for one in reversed(self.conditions) if one.type == kind), None)

    def is_heard(self, rank: RankStatus) -> bool:
        """Return True if a recent heartbeat of the rank itself shows that it lives."""
        silent_max_ms = max(SILENT_MS, SILENT_BEATS * self.beat_ms)
        silent = rank.state in (RankPhase.DEAD, RankPhase.SUSPECT)
        return not silent and rank.silent_ms < silent_max_ms

    def speaking_pods(self) -> set[tuple[int, int]]:
        """Return the pods that have a rank with a recent heartbeat."""
        return {rank.pod for rank in self.ranks if self.is_heard(rank)}

    def registered_pods(self) -> set[tuple[int, int]]:
        """Return the pods with a process that has not been declared dead."""
        return {rank.pod for rank in self.living}

    def full_pods(self, procs: int) -> set[tuple[int, int]]:
        """Return the pods of whose ranks at least `procs` take part in the membership."""
        counts: dict[tuple[int, int], int] = {}
        for rank in self.ranks:
            if rank.state in (RankPhase.ACTIVE, RankPhase.BENCHED) and rank.rank is not None:
                counts[rank.pod] = counts.get(rank.pod, 0) + 1
        return {pod for pod, count in counts.items() if count >= procs}

    def standby_pods(self) -> set[tuple[int, int]]:
        """Return the pods whose ranks stand by, since the allowed size in use is full."""
        return {rank.pod for rank in self.ranks if rank.state is RankPhase.STANDBY}

    def highest_attempts(self) -> dict[int, int]:
        """Return the highest attempt of a pod that ever registered, by slot (C3)."""
        highest: dict[int, int] = {}
        for slot, attempt in (rank.pod for rank in self.ranks):
            highest[slot] = max(highest.get(slot, 0), attempt)
        return highest


class StatusError(ValueError):
    """Raised for bytes that are no status."""


_DECODER: Final = msgspec.json.Decoder(Status)


def decode_status(raw: bytes | bytearray) -> Status:
    """Decode a status of this or another release.

    Fields that this release does not know are skipped without being built.

    Args:
        raw: The JSON. A reader that must not trust its sender bounds it before.

    Returns:
        The status.

    Raises:
        StatusError: The bytes are not JSON of this form, or exceed the bound of a field.
    """
    try:
        return _DECODER.decode(raw)
    except UNDECODABLE as error:
        raise StatusError(str(error)) from None


def at_rest(status: Status, outcome: Outcome | None) -> Status:
    """Return the status of a job of which nothing runs any more, because it ended or was suspended.

    A rank that made the last round counts as finished. Conditions and stragglers are removed,
    because they describe running rounds.

    Args:
        status: The last status.
        outcome: How the job ended; None if it is suspended.

    Returns:
        The final status.
    """
    ranks = tuple(
        replace(rank, state=RankPhase.FINISHED, why="") if rank.finished else rank
        for rank in status.ranks
    )
    return replace(status, ranks=ranks, conditions=(), stragglers=(), outcome=outcome)


def place_of(member: MemberId, procs: int) -> int:
    """Return the place of a rank: the number in texts and faults that survives changes."""
    return member.slot * procs + member.local
