"""What the coordinator tells about a job: the answer of GET /v1/status, as plain data.

Read by the local runner, the operator and people with curl. It is a report, never an input: nothing
is decided from it. Three kinds of facts are kept apart. What the coordinator decided itself
(generation, states, changes, outcome) is exact. What the round log holds (`LogStatus`) comes from
the lowest active member and is as old as its last figures. What a rank measured about
itself (`RankStatus.facts`) is for people.

Fields are only ever added, and a reader ignores those that it does not know (C14).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace
from paceline_api.rounds import RoundSettings

from paceline.core.messages import Network
from paceline.core.protocol.ids import NO_GENERATION, GenerationId, MemberId
from paceline.core.protocol.shadow import PARTIAL

HAPPENINGS_MAX: Final = 256
CHANGES_MAX: Final = 64
METRIC_ROUNDS: Final = 32
"""The script's figures are shown as means over so many rounds."""


class Fact(StrEnum):
    """Names of a rank's figures. All are numbers; totals grow from the rank's start."""

    # What this rank measured about itself.
    STEP_S = "step_seconds"
    """Median of its recent steps: batch in hand until the gradient is announced."""
    LAG_S = "lag_seconds"
    """Median of its recent arrivals after the first rank of the same round."""
    WAIT_S = "wait_seconds_total"
    """Its main thread was parked in step(), waiting for others and for the reduction."""
    EPOCH = "epoch"
    """Of the batch in its hand."""

    GIVEN_UP = "given_up."
    """+ reason: streamed rounds that it made void."""

    CARRIED = "carried."
    """+ transport: size classes of buffers that it moves, chosen when the channel was opened."""

    SAVED = "checkpoints_written"
    SAVED_VERSION = "checkpoint_version"
    """Of the last one that it published."""
    SAVE_FAILED = "checkpoints_failed"
    SAVE_SKIPPED = "checkpoints_skipped"
    """Due while the one before was not on the disk yet."""
    SAVE_EXPOSED_S = "checkpoint_exposed_seconds"
    """Its communication thread copied the state."""
    SAVE_HIDDEN_S = "checkpoint_hidden_seconds"
    """The copies were written, beside training."""

    # In a run that `paceline plan` measures: means over rounds that wait for everybody.
    OWN_BATCH = "gradient_samples"
    """Of a gradient of this rank."""
    OWN_SQUARE = "gradient_square"
    """Its squared norm."""
    MEAN_BATCH = "mean_gradient_samples"
    """Of an update."""
    MEAN_SQUARE = "mean_gradient_square"
    """Squared norm of the gradient that it makes of all ranks'."""

    # What its log says; equal on all members at equal version, so the lowest active one tells it.
    LOG = "log."
    ROUNDS = "log.rounds."
    """+ trigger."""
    STREAMED = "log.streamed"
    """Rounds that were reduced while backward() ran."""
    GRADIENTS = "log.gradients"
    GRADIENTS_BEFORE = "log.gradients_before"
    LEFT_OUT = "log.samples_left_out"
    APPLIED = "log.samples_applied"
    LATE = "log.samples_late"
    DROPPED = "log.samples_dropped."
    """+ reason."""
    REDEALT = "log.samples_redealt"
    DISCOUNTED = "log.samples_discounted"
    UPDATES = "log.updates"
    EPOCHS_EXACT = "log.epochs_exact"
    EPOCHS_SHORT = "log.epochs_short"
    PROGRESS = "log.progress"
    LEFT_S = "log.seconds_left"
    """At the speed of the last minutes, as this rank has seen it: nearly equal on all."""
    ROUND_S = "log.round_seconds"
    AVOIDED_S = "log.wait_avoided_seconds"
    """Of all ranks, worked out from GO and when GO reached this rank: nearly equal on all."""
    SHARE = "log.share."
    """+ member: rounds with a contribution of it, as a share of the rounds that it was active."""
    SHADOW_ROUNDS = "log.shadow.rounds"
    SHADOW_FRESH = "log.shadow.fresh"
    SHADOW_WAITED_S = "log.shadow.waited_seconds"
    SHADOW_SAVED_S = "log.shadow.saved_seconds."
    """+ mode."""
    SHADOW_LATE = "log.shadow.late."
    """+ mode."""
    METRIC = "log.metric."
    """+ name that the script gave to `pl.log`: mean over the last METRIC_ROUNDS rounds."""
    METRIC_SUM = "log.metric_sum."
    METRIC_WEIGHT = "log.metric_weight."
    """+ name, both: over all rounds."""
    METRIC_EPOCH = "log.metric_epoch."
    """+ name: mean over the last finished epoch."""


class RankPhase(StrEnum):
    """What a rank is doing, in the order in which it usually happens."""

    STARTING = "starting"
    """Its process runs, but is not ready yet: imports, model, data."""
    JOINING = "joining"
    """Passive: ready, but not active yet."""
    STANDBY = "standby"
    """Ready, and more than the largest allowed size that is reached."""
    ACTIVE = "active"
    BENCHED = "benched"
    """Passive because it never finished a step (R13)."""
    SUSPECT = "suspect"
    """Silent. Only evidence makes it dead (R25)."""
    DRAINING = "draining"
    FINISHED = "finished"
    """It has committed the stop round."""
    DEAD = "dead"


class RankStatus(Struct, frozen=True):
    member: MemberId
    """[slot, process in the slot, attempt]"""
    state: RankPhase
    rank: int | None = None
    """Index in the current generation; None if it is no member."""
    pid: int = 0
    host: str = ""
    version: int = 0
    silent_ms: int = 0
    """Since its last message."""
    facts: dict[str, float] = {}
    """Its own figures, by `Fact`. What its log says is in `Status.log`, once for all: with a share
    of each member in each rank's the status would grow with the square of the ranks."""
    carrier: Network = Network.UNKNOWN
    """What carries its data channel to other pods, as its agent has found out."""
    why: str = ""
    """Dead, suspect: what is known about it."""
    finished: bool = False
    """It has made the last round, whatever became of its process since."""


class ShadowStatus(Struct, frozen=True):
    """What partial modes would have changed in the rounds of Shadow (`core.protocol.shadow`): a
    forecast from the arrival times as they were. A rank that is not waited for would arrive at
    others."""

    rounds: int = 0
    fresh: int = 0
    """Gradients in them."""
    waited_s: float = 0.0
    """Waiting for the last arrival, summed over the ranks."""
    saved_s: dict[str, float] = {}
    """By mode: part of it that the mode would have saved."""
    late: dict[str, int] = {}
    """By mode: gradients that would have missed their round."""


class StragglerStatus(Struct, frozen=True):
    """A rank that is slow for long (`paceline_api.slow`)."""

    member: MemberId
    percent: int
    """Its median step in percent of the median of all ranks; 200 is twice as slow."""
    since_wall_s: float
    action: str
    """The step of `spec.straggler.respond` that is in force."""


class LogStatus(Struct, frozen=True):
    """What the round log says, from the rank that is furthest."""

    rounds: dict[str, int] = {}
    """By trigger: why they started."""
    streamed: int = 0
    """Those of them that were reduced while backward() ran."""
    gradients: int = 0
    """Contributions applied; one is one optimizer step of one rank."""
    gradients_before: int = 0
    """Part of them that was applied before the job was started or resumed the last time."""
    samples_left_out: int = 0
    """In each epoch: fewer than a step has, so that `drop_last` leaves them out."""
    samples_applied: int = 0
    samples_late: int = 0
    """Part of the applied that was not fresh."""
    samples_dropped: dict[str, int] = {}
    """By reason."""
    samples_redealt: int = 0
    """Given to other ranks, since their holder died, left or was benched."""
    samples_discounted: float = 0.0
    updates: int = 0
    """Steps of the optimizer; fewer than rounds under `pacing: Samples`."""
    epochs_exact: int = 0
    """Finished epochs of which each sample was applied exactly once."""
    epochs_short: int = 0
    """Finished epochs with dropped samples."""
    progress: float | None = None
    """0 to 1, by samples of all epochs or by `pl.steps`; None if nothing says where the end is."""
    left_s: float | None = None
    """Seconds until then, at the speed of the last minutes; None while that is not known."""
    round_s: float = 0.0
    """Median of the recent rounds."""
    avoided_s: float = 0.0
    """Waiting, summed over ranks, that the mode has saved against Full."""
    shares: dict[str, float] = {}
    """By member: rounds with a contribution of it, as a share of the rounds that it was active."""
    shadow: ShadowStatus | None = None
    """None if no round ran in Shadow."""
    metrics: dict[str, float] = {}
    """The script's own figures (`pl.log`), as weighted means over the last METRIC_ROUNDS rounds."""
    metrics_of_epoch: dict[str, float] = {}
    """The same over the last finished epoch."""
    metric_sums: dict[str, tuple[float, float]] = {}
    """Of each figure the weighted sum and the weight over all rounds. The mean between two statuses
    is the quotient of what has come to them."""


class Change(Struct, frozen=True):
    """One change of the membership, and what it cost."""

    generation: GenerationId
    reason: str
    """One word for programs: First, Joined, Left, Died, ChannelFailed, CoordinatorRestarted."""
    why: str
    """A sentence for people."""
    members: int
    version: int
    wall_s: float
    """Unix time at which its cause was known."""
    agree_s: float
    """From then until COMMIT was sent."""
    start_s: float | None = None
    """From then until all members had started (R7); None while it runs."""
    gap_s: float | None = None
    """Longest time between two commits around it, as heartbeats show it; None while unknown."""


class Happening(Struct, frozen=True):
    """One entry of the coordinator's history."""

    seq: int
    wall_s: float
    reason: str
    message: str
    facts: dict[str, str] = {}


class Condition(Struct, frozen=True):
    """In the manner of Kubernetes; only those that hold are listed."""

    type: str
    """RingReady, Degraded or Resizing."""
    reason: str
    message: str
    since_wall_s: float


class ScriptFailure(Struct, frozen=True):
    """One process that its script has ended: by an exception, an exit code or a crash (R55)."""

    member: MemberId
    what: str
    """The exception with file and line, or the exit code or signal."""
    samples: str = ""
    """Of the batch in its hand; empty where that is not known."""

    def __str__(self) -> str:
        samples = f", {self.samples}" if self.samples else ""
        return f"{self.what} on rank {self.member}{samples}"


class Outcome(Struct, frozen=True):
    """How the job ended. It never changes again."""

    complete: bool
    reason: str
    """One word for programs: Complete, ScriptFailed, ScriptEndedEarly, StateLost ..."""
    message: str
    """What happened, where (rank), and the last lines that it said."""
    hint: str = ""


class Status(Struct, frozen=True):
    job: str
    coordinator: str
    """Uid of the process that answers; another one after its restart."""
    seq: int = 0
    """Grows with everything worth telling. For `?after=`; set by the server."""
    wall_s: float = 0.0
    generation: GenerationId = NO_GENERATION
    """The last one that was committed."""
    replicas: int = 0
    """Wanted."""
    told: bool = True
    """False: nobody has pushed `replicas` to this coordinator, so nobody leaves for it."""
    procs: int = 1
    """Ranks per replica."""
    beat_ms: int = 200
    """From one beat of a pod to the next: what is told of its ranks is as old (R42)."""
    inventory: int = 0
    """Revision of the last inventory received."""
    settings: RoundSettings = RoundSettings()
    """In force, or asked for if no round has carried it yet."""
    ranks: tuple[RankStatus, ...] = ()
    """Living ones by member id, then the last of the dead."""
    version: int = 0
    """Rounds committed: the highest version that a member has reported."""
    transport: str = ""
    """What moves the gradients, such as mpi, or gloo+mpi where buffers of different size differ."""
    transport_why: str = ""
    """How that sums, and the measurements that led to it."""
    carrier: Network = Network.UNKNOWN
    """What carries them between pods: the worst of the members'; empty while one is not known, and
    for a job in one pod."""
    log: LogStatus = LogStatus()
    changes: tuple[Change, ...] = ()
    """Latest last; at most CHANGES_MAX."""
    happenings: tuple[Happening, ...] = ()
    """Latest last; at most HAPPENINGS_MAX."""
    stragglers: tuple[StragglerStatus, ...] = ()
    """The slowest first; those of the last moment if the job has ended."""
    conditions: tuple[Condition, ...] = ()
    restarts: int = 0
    """Processes that an agent has started in the place of another one, in the pods known here."""
    script_failures: tuple[ScriptFailure, ...] = ()
    """Latest last; the last ones of many."""
    unsaved: str = ""
    """Which rank could not write the last checkpoint, and why; empty if it was written."""
    stopping: bool = False
    """A rank has committed the stop round: a pod that ends from now on is not replaced."""
    released: bool = False
    """A rank was released with the final weights and has ended: the job is complete, whatever
    becomes of the others and of this coordinator (R17)."""
    outcome: Outcome | None = None
    """Set once the job has ended."""
    silent: tuple[int, ...] = ()
    """Replicas whose agents say nothing after the release; the job ends without their word."""


def at_rest(status: Status, outcome: Outcome | None) -> Status:
    """Return the status of a job of which nothing runs any more: it has ended, or is suspended.

    A rank that made the last round has finished, and what held while rounds ran (conditions,
    stragglers) holds no more."""
    ranks = tuple(
        replace(rank, state=RankPhase.FINISHED, why="") if rank.finished else rank
        for rank in status.ranks
    )
    return replace(status, ranks=ranks, conditions=(), stragglers=(), outcome=outcome)


def place_of(member: MemberId, procs: int) -> int:
    """The name of a rank in texts and faults that does not change when others leave."""
    return member.slot * procs + member.local


def log_status(facts: dict[str, float]) -> LogStatus:
    """`LogStatus` from the `log.*` figures of one rank; a figure that is missing counts 0."""

    def group(prefix: str) -> dict[str, float]:
        return {k.removeprefix(prefix): v for k, v in facts.items() if k.startswith(prefix)}

    def whole(name: str) -> int:
        return round(facts.get(name, 0))

    return LogStatus(
        rounds={name: round(value) for name, value in group(Fact.ROUNDS).items()},
        gradients=whole(Fact.GRADIENTS),
        gradients_before=whole(Fact.GRADIENTS_BEFORE),
        samples_left_out=whole(Fact.LEFT_OUT),
        samples_applied=whole(Fact.APPLIED),
        samples_late=whole(Fact.LATE),
        samples_dropped={name: round(value) for name, value in group(Fact.DROPPED).items()},
        samples_redealt=whole(Fact.REDEALT),
        samples_discounted=facts.get(Fact.DISCOUNTED, 0.0),
        updates=whole(Fact.UPDATES),
        streamed=whole(Fact.STREAMED),
        epochs_exact=whole(Fact.EPOCHS_EXACT),
        epochs_short=whole(Fact.EPOCHS_SHORT),
        progress=facts.get(Fact.PROGRESS),
        left_s=facts.get(Fact.LEFT_S),
        round_s=facts.get(Fact.ROUND_S, 0.0),
        avoided_s=facts.get(Fact.AVOIDED_S, 0.0),
        shares=group(Fact.SHARE),
        shadow=_shadow_status(facts) if whole(Fact.SHADOW_ROUNDS) else None,
        metrics=group(Fact.METRIC),
        metrics_of_epoch=group(Fact.METRIC_EPOCH),
        metric_sums={
            name: (total, facts.get(Fact.METRIC_WEIGHT + name, 0.0))
            for name, total in group(Fact.METRIC_SUM).items()
        },
    )


def _shadow_status(facts: dict[str, float]) -> ShadowStatus:
    saved_s = {mode: facts.get(Fact.SHADOW_SAVED_S + mode, 0.0) for mode in PARTIAL}
    late = {mode: round(facts.get(Fact.SHADOW_LATE + mode, 0)) for mode in PARTIAL}
    return ShadowStatus(
        rounds=round(facts[Fact.SHADOW_ROUNDS]),
        fresh=round(facts.get(Fact.SHADOW_FRESH, 0)),
        waited_s=facts.get(Fact.SHADOW_WAITED_S, 0.0),
        saved_s={str(mode): seconds for mode, seconds in saved_s.items()},
        late={str(mode): count for mode, count in late.items()},
    )
