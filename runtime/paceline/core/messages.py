"""The messages of the protocol, with sender and receiver.

There are two paths. Rank to rank is fast: msgpack over zmq. Rank to agent to coordinator is slow:
JSON over a socket within the pod, and one web socket for each pod (R43). `core.wire` encodes and
decodes the messages. A message that can arrive late carries the generation that it belongs to (R1,
R4).
"""

from __future__ import annotations

from typing import Final

from msgspec import Raw, Struct
from paceline_api.errors import printable_lines
from paceline_api.ids import NO_GENERATION, GenerationId, MemberId
from paceline_api.membership import MembershipSettings
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Network, Pacing

from paceline.core.protocol.records import (
    AnnounceKind,
    DataPlan,
    Gen,
    Go,
    LeftOut,
    LoggedMetric,
    Record,
    Request,
    Share,
)
from paceline.core.protocol.rows import Rows
from paceline.core.protocol.snapshot import Kept, LogSnapshot

# ---- rank -> rank -----------------------------------------------------------------------------


class Announce(Struct, frozen=True, tag="announce"):
    """A rank announces what it has for `round`.

    From a rank to the starter of the round; above `TREE_ABOVE` members, to the head of the rank's
    group (R41).
    """

    generation: GenerationId
    round: int
    """Number of the round."""
    kind: AnnounceKind
    share: Share
    """The pending contributions of the rank."""


class Word(Struct, frozen=True, omit_defaults=True):
    """One announcement that differs from what the log predicts, and when it reached the head."""

    kind: AnnounceKind
    share: Share
    age_us: int = 0
    """Time since it reached the head, in microseconds."""


class Gathered(Struct, frozen=True, tag="gathered", omit_defaults=True):
    """Announcements of a group that reached its head since the last such message (R41).

    From the head of a group to the starter of `round`.
    """

    generation: GenerationId
    round: int
    group: int
    """Number of the group in the grid (`core.protocol.tree`)."""
    ordinary: bytes = b""
    """One bit for each member of the group, as in GO: the member has the share that the log
    predicts."""
    quiet: bytes = b""
    """One bit for each member of the group, as in GO: the member is idle and contributes nothing.
    """
    ages: bytes = b""
    """Time since the announcements of the ordinary and then of the idle members reached the head
    (`core.protocol.bits`)."""
    coming: bytes = b""
    """One bit for each member that has announced COMING with the share that the log predicts."""
    coming_ages: bytes = b""
    """Time since these announcements reached the head."""
    metrics: tuple[LoggedMetric, ...] = ()
    """User metrics, summed over the ordinary members."""
    words: tuple[Word, ...] = ()
    """The announcements of all other members."""
    operation: Share | None = None
    """Share of the first ordinary member, for its operation, in the job of a script."""


class Start(Struct, frozen=True, tag="start"):
    """GO of a round.

    From the starter to every member; above `TREE_ABOVE` members, by way of the heads.
    """

    go: Go
    onward: tuple[MemberId, ...] = ()
    """Members to whom the receiver forwards the message."""

    @property
    def generation(self) -> GenerationId:
        """Generation of the round."""
        return self.go.generation


class LogPart(Struct, frozen=True, tag="part"):
    """The records that a member lacks (R7).

    From the holder to a member that is behind. If one of the records is a GO, the round's result
    follows as a separate payload.
    """

    generation: GenerationId
    records: tuple[Record, ...]
    """Records that the receiver lacks, in order."""


class AskState(Struct, frozen=True, tag="ask-state"):
    """A request for the committed state (R15).

    From a joiner to the donor.
    """

    generation: GenerationId
    member: MemberId
    at_least: int
    """Oldest version that is accepted."""


class StateTransfer(Struct, frozen=True, tag="state"):
    """The committed state at the version of the log; the tensors follow as payload.

    From the donor to a joiner, and from there to further joiners (R45).
    """

    generation: GenerationId
    log: LogSnapshot
    """Log of the sender; it ends at the version of the state."""
    onward: tuple[MemberId, ...] = ()
    """Joiners to whom the receiver forwards the state."""


class WeightsHash(Struct, frozen=True, tag="weights-hash"):
    """The hash of a member's weights, sent every few rounds to detect drift (I5, R23).

    From a member to the lowest active rank. Above `TREE_ABOVE` members, to the lowest active rank
    of its group, which sends its own hash to the lowest of all.
    """

    generation: GenerationId
    member: MemberId
    version: int
    value: int
    """Hash of the committed weights."""


# ---- rank -> coordinator, forwarded by its agent ----------------------------------------------


class Endpoints(Struct, frozen=True, omit_defaults=True):
    """The addresses at which peers reach a rank."""

    trigger: str
    """Address for messages between ranks (zmq)."""
    data: str
    """Address for the data channel: `Transport.address`."""
    shards: tuple[tuple[str, str], ...] = ()
    """The same two addresses of the other ranks of its replica group, by shard (R53)."""

    def of(self, shard: int) -> Endpoints:
        """Return the addresses at which the ranks of a shard meet, without `shards`."""
        if shard == 0 and not self.shards:
            return self
        return Endpoints(*((self.trigger, self.data), *self.shards)[shard])


class Register(Struct, frozen=True, tag="register"):
    """The state of a rank, from the rank to the coordinator.

    It is the first message of a rank for each connection of its agent, and is sent again when one
    of its facts changes.
    """

    member: MemberId
    pid: int
    host: str
    endpoints: Endpoints
    promise: GenerationId
    """Highest generation that it has promised to follow (R3)."""
    last: GenerationId
    """Generation of its last GEN record; NO_GENERATION if it has none."""
    version: int
    """Version of its committed state."""
    has_state: bool
    """True if it has the committed state of the job."""
    ready: bool
    """True if its model and data are known, so it may become a member."""
    leaving: bool = False
    """True if it drains."""
    request: int = 0
    """Highest request number in its log (R18)."""
    fingerprint: str = ""
    """Hash of the names, shapes and types of its parameters; equal on all ranks."""
    plan: DataPlan | None = None
    """The data of its script, if its data loader is known."""
    lookahead: int = 2
    """Number of leases that it has to be able to hold (D1)."""
    pacing: Pacing = Pacing.ROUND
    """Pacing that its optimizer needs if the job leaves the choice open (docs/design/rounds.md)."""
    seed: int | None = None
    """Random seed of a script that loads its own data: ranks with equal seeds probably load equal
    batches."""
    members: Rows = ()
    """Members of its last GEN record."""
    gen_active: Rows = ()
    """Members that are active in that record (R6)."""
    released: tuple[GenerationId, int] | None = None
    """The record and version with which it was released; None if it was not (R17)."""
    checkpoint: Kept | None = None
    """The newest checkpoint that it can see. Looked up again before each report without state."""


class Doing(Struct, frozen=True, array_like=True):
    """The present work of a rank's communication thread, as observed by another thread (R35)."""

    for_ms: int
    """Time that it has spent on its present piece of work; at most 1,000 if it waits for messages.
    If its data thread has been busy for longer, that time counts."""
    round: int = -1
    """Round whose reduction that is; -1 if it is not in a reduction."""
    usual_ms: int = 0
    """Longest of its recent reductions."""
    payload_bytes: int = 0
    """Number of bytes that a reduction sums."""


class Away(Struct, frozen=True, array_like=True):
    """The script of a rank has not returned to step() for a long time.

    The value stays the same until it does.
    """

    since_s: float
    """Unix time since which it has been away."""
    file: str = ""
    """File in which the script was when this was noticed, with `line`; empty if no frame belongs to
    the script."""
    line: int = 0


class Heartbeat(Struct, frozen=True, tag="heartbeat", omit_defaults=True):
    """The facts about a rank on which the coordinator's decisions depend.

    From a rank to its agent, every 0.2 s, or less often in large jobs (`BeatEvery`). The agent
    forwards what changed in `PodBeat`.
    """

    member: MemberId
    promise: GenerationId
    """Highest generation that it has promised to follow (R3)."""
    last: GenerationId
    """Generation of its last GEN record."""
    version: int
    """Version of its committed state."""
    leaving: bool = False
    """True if it drains."""
    stopped: bool = False
    """True if it has committed the stop round."""
    doing: Doing | None = None
    """Present work of its communication thread."""
    active: bool = False
    """True if it is an active member."""
    benched: bool = False
    """True if it is benched (R13)."""
    done: bool = False
    """True if its training loop has ended."""
    outside: bool = False
    """True if its script has ended since it can never join the others (S10)."""
    step_s: float = 0.0
    """Median duration of its recent steps, in seconds; stragglers are detected by it."""
    away: Away | None = None
    """Set while its script has not returned to step() for long."""


class RankFigures(Struct, frozen=True, tag="figures"):
    """The figures of a rank for `status`, by `core.status.Fact`.

    They are sent with every n-th beat of the pod (R42). The only decision that uses them is the
    detection of stragglers, which needs the pace of the rounds.
    """

    member: MemberId
    version: int
    facts: dict[str, float]


class Prepared(Struct, frozen=True, tag="prepared"):
    """The promise of a rank to follow a generation, with a report of its state (R3, R5)."""

    id: GenerationId
    """The generation that was proposed."""
    member: MemberId
    last: GenerationId
    """Generation of its last GEN record."""
    version: int
    """Version of its committed state."""
    index: int
    """Number of records in its log."""
    digest: str
    """Chained hash of its log."""
    tail: tuple[tuple[int, str], ...]
    """(index, digest) after each of its last records, to check that logs are prefixes of each
    other."""
    accepted: GenerationId
    """The last COMMIT that it has; the next one may be sent as the difference to it (R44)."""
    members: Rows
    """Members of its last GEN record."""
    with_state: Rows
    """Members that had state in that record."""
    active: Rows
    """Members that are active at the end of its log. R6 uses those of the GEN record, `gen_active`.
    """
    benched: Rows
    """Members that are benched at the end of its log."""
    gen_active: Rows
    """Members that were active in its last GEN record."""
    started: int
    """Version at which the job's first generation began."""
    has_state: bool
    """True if it has the committed state of the job."""
    ready: bool
    """True if its model and data are known."""
    leaving: bool
    """True if it drains."""
    stopped: bool
    """True if it has committed the stop round."""
    request: int
    """Highest request number in its log (R18)."""
    checkpoint: Kept | None = None
    """The newest checkpoint that it can see."""
    checkpoint_problem: str = ""
    """Reason why the newest checkpoint that it can see cannot be used; empty if it can."""
    skips: tuple[int, ...] = ()
    """Leases that are skipped according to its log (R56)."""


class PromiseRefused(Struct, frozen=True, tag="refused"):
    """The answer to a PREPARE or COMMIT that contradicts an earlier promise (R3)."""

    id: GenerationId
    member: MemberId
    promise: GenerationId
    """The promise that stands against it."""


class Started(Struct, frozen=True, tag="started"):
    """The rank has the complete log and its links are wired, so rounds may run (R7)."""

    id: GenerationId
    member: MemberId
    has_state: bool
    channel_why: str = ""
    """Reason why the data channel moves buffers as it does, for users."""


class Stopped(Struct, frozen=True, tag="stopped"):
    """The rank has committed the stop round (R17)."""

    id: GenerationId
    member: MemberId
    version: int


class Saved(Struct, frozen=True, tag="saved"):
    """A checkpoint was published or could not be written; training continues in both cases."""

    member: MemberId
    version: int
    problem: str = ""
    """Reason why it could not be written; empty if it was published."""


class Complain(Struct, frozen=True, tag="complain"):
    """The data channel of this rank failed, so a new generation is needed."""

    id: GenerationId
    member: MemberId
    round: int
    """Round that the rank had reached."""
    why: str
    """Description of the failure, for users."""
    lost: MemberId | None = None
    """The peer whose connection failed, if it is known."""


class Leaving(Struct, frozen=True, tag="leaving"):
    """A draining rank without pending work asks to be dismissed (R16)."""

    id: GenerationId
    member: MemberId
    early: bool
    """True if its script left the training loop before the job was complete (D7)."""


class Fatal(Struct, frozen=True, tag="fatal"):
    """The job cannot go on: a script raised, weights differ, or a parameter has another shape."""

    member: MemberId
    reason: str
    """One word for programs."""
    message: str
    """Description of the error, for users."""


# ---- coordinator -> rank ----------------------------------------------------------------------


class Prepare(Struct, frozen=True, tag="prepare"):
    """Propose a new generation; the rank answers with `Prepared` or `PromiseRefused` (R3)."""

    id: GenerationId


class Commit(Struct, frozen=True, tag="commit"):
    """The new membership, and which rank repairs which (R7, R15)."""

    gen: Gen
    """Record of the new membership."""
    holder: MemberId
    """The rank that sends the missing records and the last result."""
    behind: tuple[tuple[MemberId, int, str], ...]
    """Members whose log lacks records, each with the (index, digest) at its end."""
    donor: MemberId
    """The rank that sends its state to the joiners."""
    joiners: tuple[MemberId, ...]
    """Members without state."""
    endpoints: tuple[tuple[MemberId, Endpoints], ...]
    """Addresses of the members and of the holder."""
    restore: Kept | None = None
    """The checkpoint that members with state load first, because all ranks were lost (R26); else
    None."""


class MemberChange(Struct, frozen=True):
    """A member that is new, or whose facts changed since the last COMMIT."""

    member: MemberId
    endpoints: Endpoints
    lookahead: int | None
    """Number of leases that it may hold. None if it is the holder and not a member."""


class CommitChange(Struct, frozen=True, tag="commit-change"):
    """A COMMIT as the difference to the one before, for a rank that has that one (R44)."""

    id: GenerationId
    base: GenerationId
    """Generation of the COMMIT that the receiver has."""
    removed: Rows
    """Members and holder of the base that are neither any more."""
    places: tuple[MemberChange, ...]
    """New members, and members whose facts changed."""
    without_state: Rows
    """Members without state."""
    passive: Rows
    """Members that are not active."""
    version: int
    left_out: tuple[LeftOut, ...]
    holder: MemberId
    behind: tuple[tuple[MemberId, int, str], ...]
    """Members whose log lacks records, as in `Commit`."""
    donor: MemberId
    skips: tuple[int, ...] = ()
    unwanted: int = 0
    """Number of slots of a script that nobody is wanted in, as in `Gen`."""


class Release(Struct, frozen=True, tag="release"):
    """The job is over for a rank whose log ends with this record and version (R17)."""

    generation: GenerationId
    version: int
    """Last version of the weights."""


class Dismiss(Struct, frozen=True, tag="dismiss"):
    """Leave now: the drain of this rank is complete, or the job failed."""

    why: str
    """The reason, for users."""


class Ask(Struct, frozen=True, tag="ask"):
    """A request for the next round: other settings, or stop (R18)."""

    request: Request


# ---- rank <-> agent ---------------------------------------------------------------------------


class Introduce(Struct, frozen=True, tag="introduce"):
    """The agent has a new connection to a coordinator.

    From an agent to its rank. The rank registers again and repeats what may have been lost with the
    connection before.
    """

    connection: int
    """Number of the connection. The rank puts it into every message for that connection."""


class RankEnvelope(Struct, frozen=True):
    """A message for the coordinator at the other end of a connection.

    From a rank to its agent.
    """

    connection: int
    """Number of the connection."""
    message: RankMessage | Heartbeat


class BeatEvery(Struct, frozen=True, tag="beat-every"):
    """The interval of the heartbeats, and the number of beats between figures (R42).

    From the coordinator to the agents, which forward it to their ranks. It is valid for the
    connection over which it came.
    """

    ms: int
    """Milliseconds from one beat to the next."""
    figures: int
    """Figures are sent with every beat whose number is a multiple of this."""


# ---- agent <-> coordinator --------------------------------------------------------------------


class AgentHello(Struct, frozen=True, tag="agent-hello"):
    """The processes that an agent has; its first message for each connection (R43)."""

    slot: int
    """Slot of the pod."""
    attempt: int
    """Attempt of the pod. The attempt of a rank is attempt x ATTEMPT_STRIDE + restarts."""
    host: str
    metrics: str
    """URL at which the agent serves metrics; empty if it serves none."""
    living: tuple[MemberId, ...]
    """Ranks whose processes are alive."""
    dead: tuple[MemberId, ...]
    """Ranks whose processes the agent has reaped."""
    released: tuple[GenerationId, int] | None = None
    """The record and version with which one of the dead ranks was released (R17)."""
    registers: tuple[Register, ...] = ()
    """Registrations of the living ranks that have introduced themselves for this connection."""
    failures: tuple[RankDead, ...] = ()
    """The last failures of scripts in this pod, so that a new coordinator can take them into
    account (R55)."""


class PodBeat(Struct, frozen=True, tag="pod-beat", omit_defaults=True):
    """A sign of life of an agent, with the changes in the heartbeats of its ranks (R43)."""

    slot: int
    attempt: int
    heard: tuple[tuple[int, int], ...] = ()
    """(local, attempt) of the ranks that sent a heartbeat since the last beat of the pod: an agent
    that beats must not hide a rank that does not."""
    promise: GenerationId = NO_GENERATION
    """Promise of all ranks that are in `heard` and not in `changed`."""
    last: GenerationId = NO_GENERATION
    """Generation of the last GEN record of these ranks."""
    version: int = 0
    """Highest version of these ranks."""
    changed: tuple[Heartbeat, ...] = ()
    """Heartbeats that differ from the last one sent for the rank, or from the others of the pod."""
    carriers: tuple[tuple[MemberId, Network], ...] | None = None
    """Network that carries the data channel of each rank to other pods, as far as it is known.
    None: unchanged since the last beat over this connection."""


class RankGone(Struct, frozen=True, tag="rank-gone"):
    """The connection from a rank to its agent has closed.

    This is not evidence of a death: the process may live (R25).
    """

    member: MemberId


class RankStarted(Struct, frozen=True, tag="rank-started"):
    """The agent has started a rank process."""

    member: MemberId
    pid: int


STUCK: Final = "ScriptStuck"
"""Value of `ScriptError.type` for a script that did not return to step() in time."""


SCRIPT_ERROR_CHARS_MAX: Final = 1_000
"""Upper bound on the characters of each text of an exception, so that all of it fits into one
packet."""


class ScriptError(Struct, frozen=True, omit_defaults=True):
    """The exception that ended the script of a rank (R55)."""

    type: str
    """Name of the exception's class."""
    message: str
    """First line of the exception's text, without the class."""
    file: str = ""
    """File of the innermost line of the script, with `line`; empty if no frame belongs to the
    script."""
    line: int = 0

    def __str__(self) -> str:
        text = f"{self.type}: {self.message}" if self.message else self.type
        return f"{text} ({self.file}, line {self.line})" if self.file else text

    def printable(self) -> ScriptError:
        """Return the error with texts that messages can carry and terminals can show.

        An exception may contain control characters and halves of surrogate pairs.

        Returns:
            The error; each text has at most SCRIPT_ERROR_CHARS_MAX characters.
        """
        kind, message, file = (
            printable_lines(text)[:SCRIPT_ERROR_CHARS_MAX]
            for text in (self.type, self.message, self.file)
        )
        return ScriptError(kind, message, file, self.line)

    def is_same(self, other: ScriptError) -> bool:
        """Return True if both errors were raised by the same line.

        Messages are not compared, because they often name a sample. For stuck scripts only the file
        counts, because an endless loop may have many lines.

        Args:
            other: The error of another process.

        Returns:
            True for the same class, file and line. False if the file is unknown.
        """
        line, others = (0, 0) if self.type == STUCK else (self.line, other.line)
        at = (self.type, self.file, line)
        return bool(self.file) and at == (other.type, other.file, others)


class DealtBatch(Struct, frozen=True, array_like=True):
    """One batch of a lease; `core.protocol.sampling` turns it into sample numbers."""

    lease: int
    part: int
    """Number of the batch within the lease."""


class RankDead(Struct, frozen=True, tag="rank-dead", omit_defaults=True):
    """Evidence that a rank is dead: its agent has reaped the process (R25)."""

    member: MemberId
    """The rank that died."""
    exit_code: int
    """Exit code; negative for a signal."""
    why: str
    """Description of the end, for users."""
    restarts: bool
    """True if the agent starts another process in its place."""
    released: tuple[GenerationId, int] | None = None
    """The record and version with which it was released, which is evidence of success; else None
    (R17)."""
    error: ScriptError | None = None
    """The last exception of its script; None if it was killed, or ended without an exception."""
    batch: DealtBatch | None = None
    """The batch that it was loading or computing; None between batches, and for a script that loads
    its own data."""
    version: int = 0
    """Version of the weights with which its last step() returned. It shows that rounds were made
    even if no heartbeat reported them."""


class AgentDone(Struct, frozen=True, tag="agent-done"):
    """All ranks of the pod have ended, and none will be restarted."""

    slot: int
    attempt: int
    outcome: str
    """"finished", "drained" or "failed"."""
    message: str = ""
    reason: str = "RankFailed"
    """If it failed: one word for programs."""


class ToPod(Struct, frozen=True, tag="to-pod"):
    """A message for several ranks of a pod: a COMMIT is sent once for all of them (R43)."""

    members: tuple[MemberId, ...]
    """Ranks that get the message."""
    message: Raw
    """A `ToRank` message; the agent does not decode it."""


class KillRank(Struct, frozen=True, tag="kill-rank"):
    """Kill a suspect rank whose agent is alive, to obtain evidence (R6)."""

    member: MemberId
    why: str
    """Reason, for users."""


class DrainPod(Struct, frozen=True, tag="drain-pod"):
    """Drain all ranks of the pod and end (scale-down)."""

    why: str
    """Reason, for users."""


class Closing(Struct, frozen=True, tag="closing"):
    """RELEASE was sent: members end by themselves, and no process is started any more."""


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """The job is over: end all remaining processes."""

    why: str
    """Reason, for users."""


# ---- runner or operator -> coordinator (HTTP bodies) ------------------------------------------


class Inventory(Struct, frozen=True):
    """The pods that may have living processes at this revision; no others may (R25)."""

    revision: int
    """Number of the inventory; a later one replaces it."""
    pods: tuple[tuple[int, int], ...]
    """(slot, attempt) of each pod."""
    trained: bool = False
    """True if the status has shown a committed round. Some rank may then hold weights that a new
    coordinator does not know of, so nothing starts from scratch before all ranks are accounted
    for (R26)."""


class Targets(Struct, frozen=True):
    """The targets that the user sets. Fields that are None stay as they are."""

    replicas: int | None = None
    """Number of replicas."""
    settings: RoundSettings | None = None
    """Round settings."""
    membership: MembershipSettings | None = None
    """Settings that the coordinator keeps to alone."""
    membership_id: str = ""
    """Id of `membership`, as its sender counts it; the coordinator reports it back."""
    stop: bool = False
    """Stop the job with the next round."""


PeerMessage = Announce | Gathered | Start | LogPart | AskState | StateTransfer | WeightsHash
RankMessage = (
    Register
    | RankFigures
    | Prepared
    | PromiseRefused
    | Started
    | Stopped
    | Saved
    | Complain
    | Leaving
    | Fatal
)
AgentMessage = AgentHello | PodBeat | RankStarted | RankGone | RankDead | AgentDone
ToRank = Prepare | Commit | CommitChange | Release | Dismiss | Ask
ToAgent = KillRank | DrainPod | Closing | Shutdown
