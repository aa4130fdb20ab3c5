"""Every message of the protocol, with who sends it to whom.

Two paths carry them: rank to rank (fast, msgpack over zmq), and rank to agent to coordinator (slow,
JSON over a line within the pod and one web socket for it, R43). `core.wire` turns them into bytes.
A message that can arrive late carries the generation that it belongs to (R1, R4).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Raw, Struct
from paceline_api.errors import printable_lines
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Pacing

from paceline.core.protocol.ids import NO_GENERATION, GenerationId, MemberId
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


class Network(StrEnum):
    """What carries the gradients of a rank to other pods. From the worst to the best, the unknown
    aside; `core.agent.network` finds it out."""

    UNKNOWN = ""
    TCP = "TCP"
    RDMA = "RDMA"
    GPUDIRECT = "GPUDirect"
    """RDMA to and from the memory of GPUs."""


# ---- rank -> rank -----------------------------------------------------------------------------


class Announce(Struct, frozen=True, tag="announce"):
    """A rank -> the starter of `round`; above `TREE_ABOVE` members to the head of its group."""

    generation: GenerationId
    round: int
    kind: AnnounceKind
    share: Share


class Word(Struct, frozen=True, omit_defaults=True):
    """One announcement that the log does not tell, and how long ago it came to the head."""

    kind: AnnounceKind
    share: Share
    age_us: int = 0


class Gathered(Struct, frozen=True, tag="gathered", omit_defaults=True):
    """The head of a group -> the starter of `round`: what it has heard since its last one (R41)."""

    generation: GenerationId
    round: int
    group: int
    """Its number in the grid (`core.protocol.tree`)."""
    ordinary: bytes = b""
    """A bit for each member of the group, as in GO."""
    quiet: bytes = b""
    ages: bytes = b""
    """How long ago the ordinary and then the quiet ones came to the head (`core.protocol.bits`)."""
    coming: bytes = b""
    """A bit for each that has said COMING of an ordinary share."""
    coming_ages: bytes = b""
    metrics: tuple[LoggedMetric, ...] = ()
    """User's figures, summed over the ordinary ranks."""
    words: tuple[Word, ...] = ()
    """Of all others."""


class Start(Struct, frozen=True, tag="start"):
    """The starter -> every member: GO; above `TREE_ABOVE` members by way of the heads."""

    go: Go
    onward: tuple[MemberId, ...] = ()
    """To whom the receiver passes it on."""

    @property
    def generation(self) -> GenerationId:
        return self.go.generation


class Part(Struct, frozen=True, tag="part"):
    """The holder -> a member that is behind (R7): the records it lacks; the round's result follows
    as a payload of its own if one of them is a GO."""

    generation: GenerationId
    records: tuple[Record, ...]


class AskState(Struct, frozen=True, tag="ask-state"):
    """A joiner -> the donor: stream your state, of this version or newer (R15)."""

    generation: GenerationId
    member: MemberId
    at_least: int


class State(Struct, frozen=True, tag="state"):
    """The donor -> a joiner, and on from there (R45): committed state of the log's version; tensors
    follow as payload."""

    generation: GenerationId
    log: LogSnapshot
    onward: tuple[MemberId, ...] = ()
    """Joiners to whom the receiver passes it on."""


class WeightsHash(Struct, frozen=True, tag="weights-hash"):
    """A member -> the lowest active one, or that of its group, which sends its own to the lowest of
    all; now and then: members must not drift (I5, R23)."""

    generation: GenerationId
    member: MemberId
    version: int
    value: int


# ---- rank -> coordinator, passed on by its agent ----------------------------------------------


class Endpoints(Struct, frozen=True, omit_defaults=True):
    """Where peers reach a rank."""

    trigger: str
    """Fast path (zmq)."""
    data: str
    """`Transport.address`."""
    shards: tuple[tuple[str, str], ...] = ()
    """The same two of the other ranks of its group, by shard (R53)."""

    def of(self, shard: int) -> Endpoints:
        """Where the ranks of that shard meet. Without `shards`."""
        if shard == 0 and not self.shards:
            return self
        return Endpoints(*((self.trigger, self.data), *self.shards)[shard])


class Register(Struct, frozen=True, tag="register"):
    """First message of a rank for each connection of its agent, and again when one of its facts
    changes."""

    member: MemberId
    pid: int
    host: str
    endpoints: Endpoints
    promise: GenerationId
    last: GenerationId
    """Its last GEN record, NO_GENERATION without one."""
    version: int
    has_state: bool
    ready: bool
    """Model and data are known: may become a member."""
    leaving: bool = False
    request: int = 0
    """Highest request number in its log (R18)."""
    fingerprint: str = ""
    """Of the parameters' names, shapes and types; equal on all ranks."""
    plan: DataPlan | None = None
    lookahead: int = 2
    pacing: Pacing = Pacing.ROUND
    """What its optimizer needs where the job leaves the choice open (docs/design/rounds.md)."""
    seed: int | None = None
    """Of a script that feeds itself: equal ones are likely to draw equal batches."""
    members: Rows = ()
    """Of its last GEN record, with the active ones of that record (R6)."""
    gen_active: Rows = ()
    released: tuple[GenerationId, int] | None = None
    """It was released with this record and version (R17)."""
    checkpoint: Kept | None = None
    """The newest one that it sees; looked for again before each report without state."""


class Doing(Struct, frozen=True, array_like=True):
    """What the communication thread of a rank is at; another thread tells (R35)."""

    for_ms: int
    """So long it has been at its present piece of work; a second at most if it waits for news."""
    round: int = -1
    """Whose reduction that is; -1: it is in none."""
    usual_ms: int = 0
    """The longest of its last reductions."""
    payload_bytes: int = 0
    """What a reduction sums."""


class Away(Struct, frozen=True, array_like=True):
    """The script of a rank has not come back to step() for long; the same as long as it stays."""

    since_s: float
    """Wall time."""
    file: str = ""
    """With `line`: where the script was when that was found; empty if no frame is its own."""
    line: int = 0


class Heartbeat(Struct, frozen=True, tag="heartbeat", omit_defaults=True):
    """What decides: to its agent every fifth of a second, and on from there in `PodBeat`."""

    member: MemberId
    promise: GenerationId
    last: GenerationId
    version: int
    leaving: bool = False
    stopped: bool = False
    doing: Doing | None = None
    active: bool = False
    benched: bool = False
    done: bool = False
    """Its training loop has ended."""
    step_s: float = 0.0
    """Median of its recent steps: who is slow is judged by it."""
    away: Away | None = None


class Figures(Struct, frozen=True, tag="figures"):
    """For `status` only, by `core.status.Fact`; with every so many beats of the pod (R42). No
    decision reads them but the pace of the rounds, which tells stragglers."""

    member: MemberId
    version: int
    facts: dict[str, float]


class Prepared(Struct, frozen=True, tag="prepared"):
    """A promise, and the report that comes with it (R3, R5)."""

    id: GenerationId
    member: MemberId
    last: GenerationId
    version: int
    index: int
    """Number of records in its log."""
    digest: str
    """Chained hash of the log."""
    tail: tuple[tuple[int, str], ...]
    """(index, digest) at the ends of its last records, to check that logs are prefixes."""
    accepted: GenerationId
    """The last COMMIT that it has; the next one may be told as what changes (R44)."""
    members: Rows
    """Of its last GEN record, with the next two."""
    with_state: Rows
    active: Rows
    """At the end of its log; R6 asks about those of the GEN record, `gen_active`."""
    benched: Rows
    gen_active: Rows
    started: int
    """Version at which the job's first generation began."""
    has_state: bool
    ready: bool
    leaving: bool
    stopped: bool
    request: int
    checkpoint: Kept | None = None
    checkpoint_problem: str = ""
    """Why the newest checkpoint that it sees cannot be used."""
    skips: tuple[int, ...] = ()
    """Leases that its log has given up (R56)."""


class Refused(Struct, frozen=True, tag="refused"):
    """Answer to a PREPARE or COMMIT that an own promise stands against (R3)."""

    id: GenerationId
    member: MemberId
    promise: GenerationId


class Started(Struct, frozen=True, tag="started"):
    """The rank has the whole log and its links; rounds may run (R7)."""

    id: GenerationId
    member: MemberId
    has_state: bool
    channel_why: str = ""
    """Why the data channel moves buffers as it does, for people."""


class Stopped(Struct, frozen=True, tag="stopped"):
    """The rank has committed the stop round (R17)."""

    id: GenerationId
    member: MemberId
    version: int


class Saved(Struct, frozen=True, tag="saved"):
    """A checkpoint is published, or could not be written; training goes on either way."""

    member: MemberId
    version: int
    problem: str = ""


class Complain(Struct, frozen=True, tag="complain"):
    """The data channel failed under this rank; it needs a new generation."""

    id: GenerationId
    member: MemberId
    round: int
    why: str
    lost: MemberId | None = None


class Leaving(Struct, frozen=True, tag="leaving"):
    """A draining rank without pending work asks to be dismissed (R16)."""

    id: GenerationId
    member: MemberId
    early: bool
    """Its script left the training loop before the job was over (D7)."""


class Fatal(Struct, frozen=True, tag="fatal"):
    """The job cannot go on: a script raised, weights differ, a parameter has another shape."""

    member: MemberId
    reason: str
    message: str


# ---- coordinator -> rank ----------------------------------------------------------------------


class Prepare(Struct, frozen=True, tag="prepare"):
    id: GenerationId


class Commit(Struct, frozen=True, tag="commit"):
    """The new membership, and who repairs whom (R7, R15)."""

    gen: Gen
    holder: MemberId
    behind: tuple[tuple[MemberId, int, str], ...]
    """Members whose log lacks records, with the (index, digest) at its end."""
    donor: MemberId
    joiners: tuple[MemberId, ...]
    """Members without state; the donor streams it to them."""
    endpoints: tuple[tuple[MemberId, Endpoints], ...]
    """Of members and holder."""
    restore: Kept | None = None
    """All ranks were lost: the members with state load this checkpoint first (R26)."""


class Place(Struct, frozen=True):
    """A member of whom the last COMMIT did not say this."""

    member: MemberId
    endpoints: Endpoints
    lookahead: int | None
    """None: it is the holder, and no member."""


class CommitChange(Struct, frozen=True, tag="commit-change"):
    """A COMMIT to a rank that has the one before: only what is different (R44)."""

    id: GenerationId
    base: GenerationId
    """Whose COMMIT the receiver has."""
    removed: Rows
    """Members and holder of the base that are neither any more."""
    places: tuple[Place, ...]
    """Who came, and whose facts changed."""
    without_state: Rows
    passive: Rows
    """Members that are not active."""
    version: int
    left_out: tuple[LeftOut, ...]
    holder: MemberId
    behind: tuple[tuple[MemberId, int, str], ...]
    donor: MemberId
    skips: tuple[int, ...] = ()


class Release(Struct, frozen=True, tag="release"):
    """The job is over for whoever's log holds this record and version (R17)."""

    generation: GenerationId
    version: int


class Dismiss(Struct, frozen=True, tag="dismiss"):
    """Leave now; nothing of yours is needed (drain done, or the job failed)."""

    why: str


class Ask(Struct, frozen=True, tag="ask"):
    request: Request


# ---- rank <-> agent ---------------------------------------------------------------------------


class Introduce(Struct, frozen=True, tag="introduce"):
    """An agent -> its rank: there is a new connection to a coordinator. Say who you are, and again
    what the one before may have lost."""

    connection: int
    """Its number, which is in every word that is said for it."""


class Said(Struct, frozen=True):
    """A rank -> its agent: a word for the coordinator at the other end of that connection."""

    connection: int
    message: RankMessage | Heartbeat


class BeatEvery(Struct, frozen=True, tag="beat-every"):
    """To agents, which pass it on: how often they beat, and with how many beats figures come (R42).
    It holds for the connection over which it came."""

    ms: int
    figures: int


# ---- agent <-> coordinator --------------------------------------------------------------------


class AgentHello(Struct, frozen=True, tag="agent-hello"):
    """First message of an agent: which processes it has, after a reconnection too (R43)."""

    slot: int
    attempt: int
    """Of the pod; a rank's own attempt is attempt x ATTEMPT_STRIDE + restarts."""
    host: str
    metrics: str
    living: tuple[MemberId, ...]
    dead: tuple[MemberId, ...]
    released: tuple[GenerationId, int] | None = None
    """One of the dead was released with this record and version (R17)."""
    registers: tuple[Register, ...] = ()
    """Of the living, as far as they have introduced themselves for this connection."""
    failures: tuple[RankDead, ...] = ()
    """The last ends of scripts that failed here: a new coordinator judges by them too (R55)."""


class PodBeat(Struct, frozen=True, tag="pod-beat", omit_defaults=True):
    """That an agent lives, and what its ranks' heartbeats say, in few words (R43)."""

    slot: int
    attempt: int
    heard: tuple[tuple[int, int], ...] = ()
    """(local, attempt) of the ranks of which a heartbeat has come since the last beat of the pod:
    an agent that beats must not hide a rank that does not."""
    promise: GenerationId = NO_GENERATION
    last: GenerationId = NO_GENERATION
    version: int = 0
    """These three of all who were heard and are not in `changed`; the highest version of theirs."""
    changed: tuple[Heartbeat, ...] = ()
    """Of those who say something else than they said last, or than the others of the pod."""
    carriers: tuple[tuple[MemberId, Network], ...] | None = None
    """What carries the data channel of its ranks to other pods, as far as it knows; None: what it
    said last over this connection."""


class RankGone(Struct, frozen=True, tag="rank-gone"):
    """Its line to the agent has ended. Not evidence: the process may live (R25)."""

    member: MemberId


class RankStarted(Struct, frozen=True, tag="rank-started"):
    member: MemberId
    pid: int


STUCK: Final = "ScriptStuck"
"""`ScriptError.type` of a script that did not come back to step() in time."""


SCRIPT_ERROR_CHARS_MAX: Final = 1_000
"""Of each text of an exception; all of it fits into one packet."""


class ScriptError(Struct, frozen=True, omit_defaults=True):
    """The exception that ended the script of a rank (R55)."""

    type: str
    message: str
    """Its first line, without the type."""
    file: str = ""
    """With `line`: the innermost line of the script; empty if no frame is the script's own."""
    line: int = 0

    def __str__(self) -> str:
        text = f"{self.type}: {self.message}" if self.message else self.type
        return f"{text} ({self.file}, line {self.line})" if self.file else text

    def printable(self) -> ScriptError:
        """Return it with text that messages can carry and terminals may show: an exception may hold
        control characters and halves of surrogate pairs."""
        kind, message, file = (
            printable_lines(text)[:SCRIPT_ERROR_CHARS_MAX]
            for text in (self.type, self.message, self.file)
        )
        return ScriptError(kind, message, file, self.line)

    def is_same(self, other: ScriptError) -> bool:
        """Return True if both were raised by the same line; messages often name a sample. An
        endless loop may have many lines, so of stuck scripts the file counts."""
        line, others = (0, 0) if self.type == STUCK else (self.line, other.line)
        at = (self.type, self.file, line)
        return bool(self.file) and at == (other.type, other.file, others)


class DealtBatch(Struct, frozen=True, array_like=True):
    """One batch of a lease: what `core.protocol.sampling` turns into sample numbers."""

    lease: int
    part: int


class RankDead(Struct, frozen=True, tag="rank-dead", omit_defaults=True):
    """Evidence (R25): the agent has reaped it."""

    member: MemberId
    exit_code: int
    """Negative for a signal."""
    why: str
    restarts: bool
    """The agent starts another process in its place."""
    released: tuple[GenerationId, int] | None = None
    """It was released with this record and version: evidence of success (R17)."""
    error: ScriptError | None = None
    """What its script raised last; None if it was killed, or ended without an exception."""
    batch: DealtBatch | None = None
    """The batch that it was loading or computing; None between batches, and of a script that feeds
    itself."""
    version: int = 0
    """Of the weights that its last step() returned with: rounds were made, whether or not a
    heartbeat has told of them."""


class AgentDone(Struct, frozen=True, tag="agent-done"):
    """All ranks of the pod have ended and none will be started again."""

    slot: int
    attempt: int
    outcome: str
    """"finished", "drained" or "failed"."""
    message: str = ""
    reason: str = "RankFailed"
    """Failed: one word for programs."""


class ToPod(Struct, frozen=True, tag="to-pod"):
    """For ranks of the pod: a COMMIT comes once, however many they are (R43)."""

    members: tuple[MemberId, ...]
    message: Raw
    """`ToRank`; the agent does not open it."""


class KillRank(Struct, frozen=True, tag="kill-rank"):
    """A silent rank whose agent lives is killed first, which is evidence (R6)."""

    member: MemberId
    why: str


class DrainPod(Struct, frozen=True, tag="drain-pod"):
    """Drain all ranks of the pod and end (scale-down)."""

    why: str


class Closing(Struct, frozen=True, tag="closing"):
    """RELEASE is out: ranks that take part end by themselves, and none is started any more."""


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """The job is over: end what is left."""

    why: str


# ---- runner or operator -> coordinator (HTTP bodies) ------------------------------------------


class Inventory(Struct, frozen=True):
    """At this revision only these pods may have living processes (R25)."""

    revision: int
    pods: tuple[tuple[int, int], ...]
    """(slot, attempt) of each pod."""
    trained: bool = False
    """The status has shown a committed round: some rank may hold weights that a new coordinator
    does not know of, so nothing begins anew before all ranks are accounted for (R26)."""


class Targets(Struct, frozen=True):
    """What the user wants now. Fields that are None stay as they are."""

    replicas: int | None = None
    settings: RoundSettings | None = None
    stop: bool = False


PeerMessage = Announce | Gathered | Start | Part | AskState | State | WeightsHash
RankMessage = (
    Register | Figures | Prepared | Refused | Started | Stopped | Saved | Complain | Leaving | Fatal
)
AgentMessage = AgentHello | PodBeat | RankStarted | RankGone | RankDead | AgentDone
ToRank = Prepare | Commit | CommitChange | Release | Dismiss | Ask
ToAgent = KillRank | DrainPod | Closing | Shutdown

ATTEMPT_STRIDE = 1000
"""Rank attempt = pod attempt x ATTEMPT_STRIDE + restarts inside the pod."""


def pod_of(member: MemberId) -> tuple[int, int]:
    """(slot, attempt) of the pod that a rank process belongs to."""
    return member.slot, member.attempt // ATTEMPT_STRIDE
