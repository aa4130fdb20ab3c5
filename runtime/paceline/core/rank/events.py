"""Events that reach a rank's state machine, and the effects that it requests in return.

Messages of peers and of the coordinator (`core.messages`) are events as they are.

A driver carries out the effects of one event in this order:

    1. The effects that do not block (`Prompt`), in the order given. So messages leave before the
       thread blocks in a reduction. OpenChannel already makes the addresses of the peers known
       here, at its place in the list.
    2. The effects that may block (`Blocking`), in the order given.
    3. The outcomes of these effects, such as Hashed and Reduced, as new events in that order.

The driver handles no other event in between. Some effects are then still running: Reduce of a
streamed round, Save, Publish, SendPart, SendState and PassState go on in the background.

There are three drivers: the rank of a job (`worker.comm_thread`), of a simulation and of a
rehearsal. Each has a `match` over the effects, which mypy reports as incomplete as long as it lacks
a new one. The last two hold numbers in place of tensors, and share the effects on a rank's memory
(`testing.rank_memory`).
"""

from __future__ import annotations

from msgspec import Struct
from paceline_api.ids import GenerationId, MemberId
from paceline_api.types.enums import Pacing

from paceline.core.messages import (
    Ask,
    Commit,
    CommitChange,
    Complain,
    Dismiss,
    Fatal,
    Leaving,
    LogPart,
    PeerMessage,
    Prepare,
    Prepared,
    PromiseRefused,
    Register,
    Release,
    Saved,
    Started,
    StateTransfer,
    Stopped,
)
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.pending import BufferName, BufferOp
from paceline.core.protocol.progress import Progress
from paceline.core.protocol.records import DataPlan, GivenUp, Go, LoggedMetric, Operation
from paceline.core.protocol.snapshot import Kept, LogSnapshot

# ---- events: the main thread ---------------------------------------------------------------------


class Begin(Struct, frozen=True, tag=True):
    """Model and data are known. The main thread blocks until Resume."""

    fingerprint: str
    """Hash of the model's parameters, which must be equal on all ranks."""
    plan: DataPlan
    """Data that the script wants to be dealt."""
    lookahead: int
    """Number of leases that this rank may hold (D1)."""
    pacing: Pacing = Pacing.ROUND
    """Pacing that the optimizer needs if the job leaves it open."""
    data: str = ""
    """Address at which peers reach the data channel. It may depend on the model's devices."""
    segments: int = 1
    """Number of segments of the gradients."""
    seed: int | None = None
    """Seed of torch's random numbers if the script feeds itself; None if it does not matter."""
    copies: tuple[tuple[str, int], ...] = ()
    """Names and hashes of the parameters that all ranks of a group hold alike, as in `Hashed`."""
    whole: str = ""
    """Fingerprint and hash of the weights of a rank in a group, if it holds no shard of any
    parameter; empty otherwise."""
    shards: tuple[tuple[str, str], ...] = ()
    """Addresses of the ranks of the other shards, in a group (`Endpoints.shards`)."""


class Step(Struct, frozen=True, tag=True):
    """A gradient is complete in GRAD. The main thread blocks until Resume."""

    leases: tuple[int, ...]
    samples: int
    unit: int
    """Unit of GRAD, which holds sum(sample gradients) / unit (D3)."""
    finite: bool = True
    """False if the gradient has a NaN or an Inf."""
    metrics: tuple[LoggedMetric, ...] = ()
    """User metrics of the step."""
    foreign: bool = False
    """True if the gradient was computed on other weights, before this rank had those of the job."""
    operation: Operation | None = None
    """Operation of a script, whose tensors the driver has; None for a gradient in GRAD."""
    where: str = ""
    """File and line of the script at which it called the operation."""


class Coming(Struct, frozen=True, tag=True):
    """The first segment of the batch in hand is final, and finite as far as the host knows (R28).

    Its Step must have the same fields, otherwise the batch is dropped.
    """

    leases: tuple[int, ...]
    samples: int
    unit: int
    operation: Operation | None = None
    """Operation of a script that averages the gradients; None for a gradient in GRAD."""
    where: str = ""
    """File and line of the script at which it called backward()."""


class Want(Struct, frozen=True, tag=True):
    """The loader has no batch left. The main thread blocks until Resume."""


class Skip(Struct, frozen=True, tag=True):
    """The script's loop took a batch and made no step of it. The main thread does not block."""

    lease: int
    samples: int


class Flush(Struct, frozen=True, tag=True):
    """The main thread waits until no gradient of this rank is under way (R36).

    This is for jobs with a pipeline. The main thread blocks until Resume.
    """


class Need(Struct, frozen=True, tag=True):
    """A script that follows has come to what the job has not completed (S3).

    Its rank asks to be made active. The main thread blocks until Resume, when it has the state.
    """


class Rest(Struct, frozen=True, tag=True):
    """The main thread does something else for a while, such as evaluating; it does not block."""


class Unrest(Struct, frozen=True, tag=True):
    """The main thread is back from Rest. It blocks until Resume."""


class Finish(Struct, frozen=True, tag=True):
    """The script's loop has ended. The main thread blocks until Exit."""

    stop: bool = False
    """True if the script also ends the job on all ranks (`pl.stop`)."""
    outside: bool = False
    """True if the script has ended since it can never join the others (S10)."""


# ---- events: the driver --------------------------------------------------------------------------


class ChannelOpened(Struct, frozen=True, tag=True):
    """The data channel of the generation is open; outcome of OpenChannel."""

    why: str = ""
    """Why the transport moves buffers as it does, for people; empty if there is no choice."""


class ChannelFailed(Struct, frozen=True, tag=True):
    """Opening the data channel failed, or the reduction on it did."""

    why: str
    """Cause of the failure, for people."""
    lost: MemberId | None = None
    """Peer that was lost; None if it is not known or there is none."""
    aborted: bool = False
    """True if an order such as PREPARE aborted it."""


class Reduced(Struct, frozen=True, tag=True):
    """The reduction is complete on this rank, and the sum is in the scratch buffer (R21)."""

    transfer_ns: int = 0
    """Duration of the reduction, without waiting for this rank's own batch."""


class Voided(Struct, frozen=True, tag=True):
    """A segment of a streamed round came back flagged, so no rank completes the round (R31)."""

    own: GivenUp | None
    """Why this rank flagged it; None if only others did."""


class Hashed(Struct, frozen=True, tag=True):
    """The hash of the committed weights that Apply requested."""

    version: int
    value: int
    copies: tuple[tuple[str, int], ...] = ()
    """Names and hashes of the parameters that all ranks of a group hold alike; empty elsewhere."""


class CheckpointFound(Struct, frozen=True, tag=True):
    """Newest checkpoint in the folder, or why it cannot be used."""

    checkpoint: Kept | None
    problem: str = ""


class Restored(Struct, frozen=True, tag=True):
    """The checkpoint that COMMIT named is the committed state now; outcome of Restore."""

    log: LogSnapshot
    """Log of the checkpoint."""


class NotRestored(Struct, frozen=True, tag=True):
    """The checkpoint cannot be loaded here, despite its manifest; outcome of Restore."""

    problem: str


class Written(Struct, frozen=True, tag=True):
    """A checkpoint is on the disk under a temporary name, or could not be written."""

    version: int
    problem: str = ""
    """Why it could not be written; empty if it was."""


class Published(Struct, frozen=True, tag=True):
    """A checkpoint has its final name, or could not be given it."""

    version: int
    problem: str = ""
    """Why it could not be renamed; empty if it was."""


class Connected(Struct, frozen=True, tag=True):
    """A new connection to a coordinator is open; messages over an older one may be lost."""


class Drain(Struct, frozen=True, tag=True):
    """SIGTERM reached the pod, or the coordinator chose this replica to leave."""


class Tick(Struct, frozen=True, tag=True):
    """The time that WakeAt requested has come."""


Event = (
    Begin
    | Coming
    | Step
    | Want
    | Skip
    | Flush
    | Need
    | Rest
    | Unrest
    | Finish
    | ChannelOpened
    | ChannelFailed
    | Reduced
    | Voided
    | Hashed
    | CheckpointFound
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
    """Send a message to another rank; does not block."""

    member: MemberId
    message: PeerMessage


class ToCoordinator(Struct, frozen=True):
    """Send a message to the coordinator by way of the agent; does not block."""

    message: (
        Register
        | Prepared
        | PromiseRefused
        | Started
        | Stopped
        | Saved
        | Complain
        | Leaving
        | Fatal
    )


class ChangeBuffers(Struct, frozen=True):
    """Carry out an operation on the gradient buffers."""

    op: BufferOp


class OpenChannel(Struct, frozen=True):
    """Open the data channel of this generation, then report ChannelOpened or ChannelFailed."""

    commit: Commit


class CloseChannel(Struct, frozen=True):
    """Abandon the data channel and whatever runs on it."""


class Reduce(Struct, frozen=True):
    """Sum the gradients over the members, then report Reduced or ChannelFailed.

    A streamed round is summed segment by segment while events are handled. It ends with Reduced,
    Voided or ChannelFailed.
    """

    go: Go
    source: BufferName | None
    """Buffer that this rank contributes, times `factor`; None if it contributes zeros."""
    factor: float
    in_hand: bool = False
    """True if backward() still adds to `source`: a segment is contributed once it is handed over
    (R30)."""
    divisor: float = 0.0
    """Divisor of the average in a streamed round whose sum alone makes a step, applied to each
    segment as soon as it is summed. With 0, the average is made from all segments at the end."""
    gives_up: bool = False
    """True if what GO names of this rank no longer exists, so that the round is void (R31)."""
    unit: int = 0
    """Unit of the rounding residuals (`Weighing.residual_unit`); 0 on a rank without state."""


class GiveUp(Struct, frozen=True):
    """Contribute zeros and the void flag from here on: the batch in hand is dropped or too late."""

    why: GivenUp


class Apply(Struct, frozen=True):
    """Turn the reduced sum into the next version of the committed state."""

    go: Go
    weighing: Weighing
    hash: bool
    """True to report Hashed afterwards."""


class Queue(Struct, frozen=True):
    """Keep the reduced sum until the state of the donor is here (R15)."""

    go: Go


class DropQueue(Struct, frozen=True):
    """Discard the queued sums, and received states of other generations than this one."""

    generation: GenerationId


class InstallPart(Struct, frozen=True):
    """Apply the sum that the holder sent with Part, as if this rank had reduced it (R7)."""

    go: Go
    weighing: Weighing


class InstallState(Struct, frozen=True):
    """Replace the committed state by the donor's, then apply the queued sums."""

    queued: tuple[tuple[Go, Weighing], ...]
    """Rounds whose sums are applied, in order."""


class SendPart(Struct, frozen=True):
    """Send the records that a member lacks, with the last result if `with_result` (R7)."""

    to: MemberId
    part: LogPart
    with_result: bool


class SendState(Struct, frozen=True):
    """Copy the committed state now and send it in the background."""

    to: MemberId
    state: StateTransfer


class PassState(Struct, frozen=True):
    """Forward the received state of the donor unchanged, before it is installed (R45)."""

    to: MemberId
    state: StateTransfer


class RefusePeer(Struct, frozen=True):
    """Count a message of a peer that names ranks outside of the group; nothing is sent."""


class Restore(Struct, frozen=True):
    """Load this checkpoint as the committed state, then report Restored or NotRestored."""

    checkpoint: Kept


class Save(Struct, frozen=True):
    """Copy the committed state now and write it in the background, then report Written."""

    log: LogSnapshot
    finished: bool
    """True if the job ends with this version, and not because a stop was requested (C1)."""


class Publish(Struct, frozen=True):
    """Give the written checkpoint its final name, then report Published (R19)."""

    version: int
    """Version that may leave the group."""


class Unsave(Struct, frozen=True):
    """Delete a checkpoint that was written and not published."""


class Resume(Struct, frozen=True):
    """Copy the committed weights into the model and let the main thread go on."""

    version: int
    fresh: bool
    """True if the gradient for which the main thread waited is in its own round, applied or under
    way."""
    stopped: bool
    """True if `version` is the job's final one."""
    progress: Progress
    under_way: bool = False
    """True if a gradient of this rank is under way; `progress` does not count it (R36)."""
    late: bool = False
    """True if the main thread of a script takes the average of the last step, which was made while
    it computed its gradient (S17.2)."""


class Held(Struct, frozen=True):
    """Tell the loader the leases that this rank may work on: held and not worked off."""

    leases: tuple[int, ...]


class WakeAt(Struct, frozen=True):
    """Deliver Tick at this time; a later WakeAt replaces an earlier one."""

    at_ns: int


class Exit(Struct, frozen=True):
    """End this rank's part in the job."""

    finished: bool
    """True if the log's final version is in the model (R17)."""
    why: str


Blocking = Reduce | OpenChannel | Restore
Prompt = (
    ToPeer
    | ToCoordinator
    | ChangeBuffers
    | CloseChannel
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
    | Save
    | Publish
    | Unsave
    | Resume
    | Held
    | WakeAt
    | Exit
)
Effect = Prompt | Blocking
