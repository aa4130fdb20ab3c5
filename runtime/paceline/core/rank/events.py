"""What can happen to a rank, and what it wants done about it.

Peer messages and coordinator messages (`core.messages`) are events as they are. Effects are
carried out by the driver in the order given, each to its end, before the next event is handled.
"""

from __future__ import annotations

from msgspec import Struct
from paceline_api.types.enums import Pacing

from paceline.core.messages import (
    Ask,
    Commit,
    CommitChange,
    Complain,
    Dismiss,
    Fatal,
    Leaving,
    Part,
    PeerMessage,
    Prepare,
    Prepared,
    Refused,
    Register,
    Release,
    Saved,
    Started,
    State,
    Stopped,
)
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.ids import GenerationId, MemberId
from paceline.core.protocol.pending import BufferName, BufferOp
from paceline.core.protocol.progress import Progress
from paceline.core.protocol.records import DataPlan, GivenUp, Go, LoggedMetric
from paceline.core.protocol.snapshot import Kept, LogSnapshot

# ---- events: the main thread ---------------------------------------------------------------------


class Begin(Struct, frozen=True, tag=True):
    """Model and data are known. The main thread blocks until Resume."""

    fingerprint: str
    plan: DataPlan
    lookahead: int
    pacing: Pacing = Pacing.ROUND
    data: str = ""
    """Where peers reach the data channel, which may depend on the model's devices."""
    segments: int = 1
    """Of the gradients."""
    seed: int | None = None
    """Of torch's random numbers, where the script feeds itself; None: it does not matter."""
    copies: tuple[tuple[str, int], ...] = ()
    """As in `Hashed`."""
    whole: str = ""
    """Of a group's rank whose parameters show no shard: what they are and hold. Empty elsewhere."""
    shards: tuple[tuple[str, str], ...] = ()
    """Of a group: where the ranks of the other shards are reached (`Endpoints.shards`)."""


class Step(Struct, frozen=True, tag=True):
    """A gradient is complete in GRAD. The main thread blocks until Resume."""

    leases: tuple[int, ...]
    samples: int
    unit: int
    finite: bool = True
    metrics: tuple[LoggedMetric, ...] = ()
    foreign: bool = False
    """Computed before this rank had the job's weights, which were others."""


class Coming(Struct, frozen=True, tag=True):
    """The first segment of the batch in hand is final, and finite as far as the host knows (R28);
    its Step will say the same of leases, samples and unit, or the batch is dropped."""

    leases: tuple[int, ...]
    samples: int
    unit: int


class Want(Struct, frozen=True, tag=True):
    """The loader has nothing left in hand. The main thread blocks until Resume."""


class Skip(Struct, frozen=True, tag=True):
    """The loop took a batch and made no step of it."""

    lease: int
    samples: int


class Flush(Struct, frozen=True, tag=True):
    """With a pipeline: the main thread blocks until Resume, when nothing of its own is under way
    any more (R36)."""


class Rest(Struct, frozen=True, tag=True):
    """The main thread does something else for a while (evaluating); it does not block."""


class Unrest(Struct, frozen=True, tag=True):
    """It comes back. Blocks until Resume."""


class Finish(Struct, frozen=True, tag=True):
    """The script's loop has ended. The main thread blocks until Exit."""

    stop: bool = False
    """And the job with it, on all ranks (`pl.stop`)."""


# ---- events: the driver --------------------------------------------------------------------------


class ChannelOpened(Struct, frozen=True, tag=True):
    why: str = ""
    """It moves buffers as it does, for people; empty where there is nothing to choose."""


class ChannelFailed(Struct, frozen=True, tag=True):
    """Opening, or the reduction under way, failed. `aborted`: a PREPARE ended it."""

    why: str
    lost: MemberId | None = None
    aborted: bool = False


class Reduced(Struct, frozen=True, tag=True):
    """The reduction is complete on this rank; the sum lies in the scratch buffer (R21)."""

    transfer_ns: int = 0
    """What it took, without waiting for a batch of this rank's own."""


class Voided(Struct, frozen=True, tag=True):
    """A segment of a streamed round came back flagged: nobody completes it (R31)."""

    own: GivenUp | None
    """Why this rank has flagged it; None if others have."""


class Hashed(Struct, frozen=True, tag=True):
    version: int
    value: int
    copies: tuple[tuple[str, int], ...] = ()
    """In a group: names and hashes of the parameters that each of its ranks holds alike."""


class Found(Struct, frozen=True, tag=True):
    """What the folder of the checkpoints holds: the newest one, or why it cannot be used."""

    checkpoint: Kept | None
    problem: str = ""


class Restored(Struct, frozen=True, tag=True):
    """The checkpoint that COMMIT named is the committed state; its log."""

    log: LogSnapshot


class NotRestored(Struct, frozen=True, tag=True):
    """It cannot be loaded here, whatever its manifest says."""

    problem: str


class Written(Struct, frozen=True, tag=True):
    """A checkpoint lies on the disk under a name that nobody reads; `problem`: it does not."""

    version: int
    problem: str = ""


class Published(Struct, frozen=True, tag=True):
    """It has its name now; `problem`: it has not."""

    version: int
    problem: str = ""


class Connected(Struct, frozen=True, tag=True):
    """A connection to a coordinator stands; what was said over an older one may be lost."""


class Drain(Struct, frozen=True, tag=True):
    """SIGTERM reached the pod, or the coordinator chose this replica to leave."""


class Tick(Struct, frozen=True, tag=True):
    """The time asked for by WakeAt has come."""


Event = (
    Begin
    | Coming
    | Step
    | Want
    | Skip
    | Flush
    | Rest
    | Unrest
    | Finish
    | ChannelOpened
    | ChannelFailed
    | Reduced
    | Voided
    | Hashed
    | Found
    | Restored
    | NotRestored
    | Written
    | Published
    | Connected
    | Drain
    | Tick
    | PeerMessage
    | Prepare
    | Commit
    | CommitChange
    | Release
    | Dismiss
    | Ask
)


# ---- effects -------------------------------------------------------------------------------------


class ToPeer(Struct, frozen=True):
    member: MemberId
    message: PeerMessage


class ToCoordinator(Struct, frozen=True):
    message: Register | Prepared | Refused | Started | Stopped | Saved | Complain | Leaving | Fatal


class ChangeBuffers(Struct, frozen=True):
    op: BufferOp


class OpenChannel(Struct, frozen=True):
    """Wire the data channel of this generation, then report ChannelOpened or ChannelFailed."""

    commit: Commit


class CloseChannel(Struct, frozen=True):
    """Abandon the data channel and whatever runs on it."""


class Reduce(Struct, frozen=True):
    """Sum over the members; own contribution: what lies in `source` times `factor`, or zeros.

    In a streamed round segment by segment, while events are handled; then Reduced or Voided."""

    go: Go
    source: BufferName | None
    factor: float
    in_hand: bool = False
    """backward() still adds to `source`: a segment is contributed once it is handed over (R30)."""
    divisor: float = 0.0
    """Of the average, in a streamed round whose sum alone makes a step: for each segment as soon as
    it is summed. 0: it is made when all are."""
    gives_up: bool = False
    """What GO names of this rank does not exist any more: the round is void (R31)."""
    unit: int = 0
    """`Weighing.residual_unit`; 0 of a rank without state, too."""


class GiveUp(Struct, frozen=True):
    """The batch in hand will not come, or too late: from here on contribute zeros and the flag."""

    why: GivenUp


class Apply(Struct, frozen=True):
    """Turn the reduced sum into the next version of the committed state."""

    go: Go
    weighing: Weighing
    hash: bool


class Queue(Struct, frozen=True):
    """Keep the reduced sum until the donor's state is here (R15)."""

    go: Go


class DropQueue(Struct, frozen=True):
    """Queued sums are of no use any more, nor are states of other generations than this one."""

    generation: GenerationId


class InstallPart(Struct, frozen=True):
    """Apply the holder's sum, which came with Part, as if this rank had reduced it (R7)."""

    go: Go
    weighing: Weighing


class InstallState(Struct, frozen=True):
    """Replace the committed state by the donor's, then apply these queued sums."""

    queued: tuple[tuple[Go, Weighing], ...]


class SendPart(Struct, frozen=True):
    to: MemberId
    part: Part
    with_result: bool


class SendState(Struct, frozen=True):
    """Snapshot the committed state now and stream it in the background."""

    to: MemberId
    state: State


class PassState(Struct, frozen=True):
    """Send the donor's state on as it came, before it is installed (R45)."""

    to: MemberId
    state: State


class RefusePeer(Struct, frozen=True):
    """Count a message of a peer that names members which are not in the group; nothing is sent."""


class Restore(Struct, frozen=True):
    """Load this checkpoint as the committed state, then report Restored."""

    checkpoint: Kept


class Save(Struct, frozen=True):
    """Copy the committed state now and write it in the background, then report Written."""

    log: LogSnapshot
    finished: bool
    """The job ends with this version, and not because a stop was asked for (C1)."""


class Publish(Struct, frozen=True):
    """Version `version` may leave the group (R19): give it its name, then report Published."""

    version: int


class Unsave(Struct, frozen=True):
    """Throw away what was written and not published."""


class Resume(Struct, frozen=True):
    """Copy the committed weights into the model and let the main thread go on."""

    version: int
    fresh: bool
    stopped: bool
    progress: Progress
    under_way: bool = False
    """A gradient of its own is, and `progress` is without it (R36)."""


class Held(Struct, frozen=True):
    """The leases that this rank may work on: held and not yet worked off."""

    leases: tuple[int, ...]


class WakeAt(Struct, frozen=True):
    """Deliver Tick then; only the latest one counts."""

    at_ns: int


class Exit(Struct, frozen=True):
    """The rank's part is over. `finished`: the log's final version is in the model (R17)."""

    finished: bool
    why: str


Effect = (
    ToPeer
    | ToCoordinator
    | ChangeBuffers
    | OpenChannel
    | CloseChannel
    | Reduce
    | GiveUp
    | Apply
    | Queue
    | DropQueue
    | InstallPart
    | InstallState
    | SendPart
    | SendState
    | PassState
    | RefusePeer
    | Restore
    | Save
    | Publish
    | Unsave
    | Resume
    | Held
    | WakeAt
    | Exit
)
