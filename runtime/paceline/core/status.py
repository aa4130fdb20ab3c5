"""The status of a job: the coordinator's answer to GET /v1/status, as plain data.

The local runner, the operator and people with curl read it. The coordinator itself decides nothing
from it; a runner or operator does use it, for example `stopping`, `released` and `outcome`. It
holds three kinds of facts. What the coordinator decided itself (generation, states, changes,
outcome) is exact. What the round log says (`LogStatus`) comes from the lowest active member and is
as old as its last figures. What a rank measured about itself (`RankStatus.facts`) is for people.

Fields are only ever added, and a reader ignores fields that it does not know (C14).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace
from paceline_api.rounds import RoundSettings

from paceline.core.messages import Network
from paceline.core.protocol.ids import NO_GENERATION, GenerationId, MemberId

HAPPENINGS_MAX: Final = 256
"""Upper bound on the entries of the history in a status."""
CHANGES_MAX: Final = 64
"""Upper bound on the membership changes in a status."""
METRIC_ROUNDS: Final = 32
"""Number of rounds over which the means of the script's own metrics are taken."""


class Fact(StrEnum):
    """Names of the figures that a rank measures about itself.

    All values are numbers; totals grow from the rank's start. The figures of the round log are the
    fields of `LogStatus`; `core.log_figures` derives their names.
    """

    STEP_S = "step_seconds"
    """Median of its recent steps: from the return of step() until the next gradient is announced.
    """
    LAG_S = "lag_seconds"
    """Median time of its recent arrivals after the first rank of the same round."""
    WAIT_S = "wait_seconds_total"
    """Time that its main thread was parked in step(), waiting for other ranks and for the
    reduction."""
    EPOCH = "epoch"
    """Epochs done so far, including the completed part of the present one. From the log, so only
    the lowest active rank reports it."""

    GIVEN_UP = "given_up."
    """+ reason: number of streamed rounds that this rank aborted."""

    CARRIED = "carried."
    """+ transport: number of size classes of buffers that it moves, chosen when the channel was
    opened."""

    SAVES = "checkpoints_"
    """+ result: number of checkpoints. The three results are listed next."""
    SAVED = "checkpoints_written"
    """Number of checkpoints that this rank wrote."""
    SAVED_VERSION = "checkpoint_version"
    """Version of the last checkpoint that it published."""
    SAVE_FAILED = "checkpoints_failed"
    """Number of checkpoints that it could not write."""
    SAVE_SKIPPED = "checkpoints_skipped"
    """Number of checkpoints that were due while the one before was still being written."""
    SAVE_EXPOSED_S = "checkpoint_exposed_seconds"
    """Time that its communication thread spent on copying the state."""
    SAVE_HIDDEN_S = "checkpoint_hidden_seconds"
    """Time spent on writing the copies while training went on."""

    # Only in a run that `paceline plan` measures: means over rounds that wait for all ranks.
    OWN_BATCH = "gradient_samples"
    """Samples in a gradient of this rank."""
    OWN_SQUARE = "gradient_square"
    """Squared norm of a gradient of this rank."""
    MEAN_BATCH = "mean_gradient_samples"
    """Samples in an update."""
    MEAN_SQUARE = "mean_gradient_square"
    """Squared norm of the mean gradient over all ranks."""


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


class RankStatus(Struct, frozen=True):
    """The status of one rank process."""

    member: MemberId
    """[slot, process in the slot, attempt]."""
    state: RankPhase
    rank: int | None = None
    """Index in the current generation; None if it is not a member."""
    pid: int = 0
    """Process id on its host; 0 if unknown."""
    host: str = ""
    version: int = 0
    """Version of its committed state."""
    silent_ms: int = 0
    """Milliseconds since its last message."""
    facts: dict[str, float] = {}
    """The rank's own figures, by `Fact`. Figures from the log are in `Status.log`, once for all
    ranks: with a share of each member in each rank's figures, the status would grow with the
    square of the ranks."""
    carrier: Network = Network.UNKNOWN
    """Network that carries its data channel to other pods, as its agent detected it."""
    why: str = ""
    """If it is dead or suspect: what is known about it."""
    finished: bool = False
    """True if it has made the last round, even if its process died since."""


class ShadowStatus(Struct, frozen=True):
    """The estimated effect of partial modes on rounds that ran in Shadow (`core.protocol.shadow`).

    It is a forecast from the observed arrival times. In another mode, a rank that nobody waits for
    would arrive at other times.
    """

    rounds: int = 0
    """Rounds that ran in Shadow."""
    fresh: int = 0
    """Gradients in these rounds."""
    waited_s: float = 0.0
    """Seconds waited for the last arrival, summed over the ranks."""
    saved_s: dict[str, float] = {}
    """Part of these seconds that each mode would have saved."""
    late: dict[str, int] = {}
    """Gradients that would have missed their round in each mode."""


class StragglerStatus(Struct, frozen=True):
    """A rank that has been slow for a long time (`paceline_api.slow`)."""

    member: MemberId
    percent: int
    """Median step of the rank in percent of the median over all ranks; 200 is twice as slow."""
    since_wall_s: float
    """Unix time since which it is a straggler."""
    action: str
    """The step of `spec.straggler.respond` that is in force."""


class LogStatus(Struct, frozen=True):
    """The content of the round log, as the most advanced rank reports it."""

    rounds: dict[str, int] = {}
    """Number of rounds by trigger: why they started."""
    streamed: int = 0
    """Number of rounds that were reduced while backward() ran."""
    gradients: int = 0
    """Contributions applied; one is one optimizer step of one rank."""
    gradients_before: int = 0
    """Part of these that was applied before the job was last started or resumed."""
    samples_left_out: int = 0
    """Samples of each epoch that `drop_last` leaves out: fewer than one step."""
    samples_applied: int = 0
    """Samples applied."""
    samples_late: int = 0
    """Part of the applied samples that was not fresh."""
    samples_dropped: dict[str, int] = {}
    """Samples dropped, by reason."""
    samples_redealt: int = 0
    """Samples dealt again because their holder died, left or was benched."""
    samples_discounted: float = 0.0
    """Samples by which the decay of late gradients reduced the applied ones."""
    updates: int = 0
    """Steps of the optimizer; fewer than rounds under `pacing: Samples`."""
    epochs_exact: int = 0
    """Finished epochs in which each sample was applied exactly once."""
    epochs_short: int = 0
    """Finished epochs with dropped samples."""
    progress: float | None = None
    """0 to 1, by the samples of all epochs or by `pl.steps`; None if the end is unknown."""
    left_s: float | None = None
    """Seconds to the end at the speed of the last minutes; None if unknown."""
    round_s: float = 0.0
    """Median duration of the recent rounds, in seconds."""
    avoided_s: float = 0.0
    """Seconds of waiting that the mode avoided compared with Full, summed over the ranks."""
    shares: dict[str, float] = {}
    """Rounds with a contribution of each member, as a share of the rounds in which it was active.
    """
    shadow: ShadowStatus | None = None
    """None if no round ran in Shadow."""
    metrics: dict[str, float] = {}
    """The script's own metrics (`pl.log`), as weighted means over the last METRIC_ROUNDS rounds."""
    metrics_of_epoch: dict[str, float] = {}
    """The same over the last finished epoch."""
    metric_sums: dict[str, tuple[float, float]] = {}
    """Weighted sum and weight of each metric over all rounds. The mean between two statuses is the
    difference of the sums divided by the difference of the weights."""


class Change(Struct, frozen=True):
    """One change of the membership, and what it cost."""

    generation: GenerationId
    reason: str
    """One word for programs: First, Joined, Left, Died, ChannelFailed, CoordinatorRestarted."""
    why: str
    """A sentence for users."""
    members: int
    """Number of members after it."""
    version: int
    """Version at which it took effect."""
    wall_s: float
    """Unix time at which its cause was known."""
    agree_s: float
    """Seconds from its cause until COMMIT was sent."""
    start_s: float | None = None
    """Seconds from its cause until all members had started (R7); None until then."""
    gap_s: float | None = None
    """Seconds from the last commit before it to the first commit after it, as heartbeats show them;
    None while unknown."""


class Happening(Struct, frozen=True):
    """One entry of the coordinator's history."""

    seq: int
    """Number of the entry."""
    wall_s: float
    """Unix time."""
    reason: str
    """One word for programs."""
    message: str
    """A sentence for users."""
    facts: dict[str, str] = {}
    """The facts in the sentence, for programs."""


class Condition(Struct, frozen=True):
    """A condition as in Kubernetes; only conditions that are true are listed."""

    type: str
    """RingReady, Degraded or Resizing."""
    reason: str
    message: str
    since_wall_s: float


class ScriptFailure(Struct, frozen=True):
    """A process that was ended by its script: by an exception, an exit code or a crash (R55)."""

    member: MemberId
    what: str
    """The exception with file and line, or the exit code or signal."""
    samples: str = ""
    """Samples of the batch that it worked on; empty if unknown."""

    def __str__(self) -> str:
        samples = f", {self.samples}" if self.samples else ""
        return f"{self.what} on rank {self.member}{samples}"


class Outcome(Struct, frozen=True):
    """How the job ended. It never changes again."""

    complete: bool
    """True if the job ended in success."""
    reason: str
    """One word for programs: Complete, ScriptFailed, ScriptEndedEarly, StateLost ..."""
    message: str
    """Description of the end: what happened, on which rank, and the last lines of its output."""
    hint: str = ""
    """Remedy for the user; may be empty."""


class Status(Struct, frozen=True):
    """The status of a job."""

    job: str
    coordinator: str
    """Uid of the process that answers; a new one after a restart."""
    seq: int = 0
    """Grows with each relevant change; for `?after=`. Set by the server."""
    wall_s: float = 0.0
    """Unix time of the answer."""
    generation: GenerationId = NO_GENERATION
    """The last committed generation; before the first one, the proposed generation."""
    replicas: int = 0
    """Number of replicas that the user wants."""
    told: bool = True
    """False if this coordinator has not received `replicas`: then no rank leaves because of it."""
    procs: int = 1
    """Ranks per replica."""
    beat_ms: int = 200
    """Milliseconds from one beat of a pod to the next: facts about its ranks are that old (R42)."""
    inventory: int = 0
    """Revision of the last inventory received."""
    settings: RoundSettings = RoundSettings()
    """Round settings in force, or requested if no round has carried them yet."""
    ranks: tuple[RankStatus, ...] = ()
    """Living ranks by member id, then the last of the dead ones."""
    version: int = 0
    """Number of rounds committed: the highest version that a member has reported."""
    transport: str = ""
    """Name of the transport of the gradients, such as mpi, or gloo+mpi if buffers of different
    sizes use different transports."""
    transport_why: str = ""
    """Description of how the transport computes sums, and the measurements that led to the choice.
    """
    carrier: Network = Network.UNKNOWN
    """Network that carries the gradients between pods: the worst one of the members. Empty if one
    is unknown, and for a job in one pod."""
    log: LogStatus = LogStatus()
    """The content of the round log."""
    changes: tuple[Change, ...] = ()
    """Membership changes, latest last; at most CHANGES_MAX."""
    happenings: tuple[Happening, ...] = ()
    """The coordinator's history, latest last; at most HAPPENINGS_MAX."""
    stragglers: tuple[StragglerStatus, ...] = ()
    """Stragglers, slowest first. If the job has ended, those of the last moment."""
    conditions: tuple[Condition, ...] = ()
    restarts: int = 0
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
    silent: tuple[int, ...] = ()
    """Replicas whose agents have been silent since the release; the job ends without them."""


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
