"""State of a rank: log, promise, generation, its own contributions, its main thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from paceline_api.ids import NO_GENERATION, GenerationId, MemberId
from paceline_api.types.enums import Pacing

from paceline.core.messages import (
    Announce,
    Commit,
    Endpoints,
    Fatal,
    Gathered,
    PeerMessage,
    Register,
    StateTransfer,
)
from paceline.core.protocol.arrivals import Arrivals
from paceline.core.protocol.log import Log
from paceline.core.protocol.pending import BufferOp, Pending
from paceline.core.protocol.records import Go, Operation, Request, Share
from paceline.core.protocol.rows import rows_of
from paceline.core.protocol.tree import TREE_ABOVE, Grid
from paceline.core.rank.events import (
    Begin,
    ChangeBuffers,
    CheckpointFound,
    Effect,
    Exit,
    ToCoordinator,
    ToPeer,
)
from paceline.core.rank.gather import Collector
from paceline.core.rank.streaming import Streaming

EARLY_MAX: Final = 4096
"""Upper bound on the messages that are kept of a generation that this rank has not started (R4)."""
QUEUE_MAX: Final = 8
"""Upper bound on the sums that a joiner keeps until the donor's state is here; it doubles each time
that it is exceeded (R15, D15)."""


NOTHING: Final = -1
"""Value of `waits_for` and `under_way` for no round."""


class Main(StrEnum):
    """State of the user's thread."""

    SCRIPT = "script"
    """The script has not begun: it imports, or builds the model."""
    RUN = "run"
    """The script computes a batch."""
    PARKED = "parked"
    """The script waits for the engine in step(), begin() or another call."""
    WANT = "want"
    """The loader waits for a lease."""
    REST = "rest"
    """The script evaluates."""
    DONE = "done"
    """The script's loop has ended, and it waits for the release."""


class CheckpointStage(StrEnum):
    """Progress of the checkpoint under way; there is at most one (D15)."""

    NONE = "none"
    WRITING = "writing"
    WRITTEN = "written"
    """The checkpoint waits until its version may leave the group (R19)."""
    PUBLISHING = "publishing"


@dataclass(slots=True)
class Saving:
    """Checkpoints that this rank makes (`rank.saving`)."""

    every: int = 0
    """Number of rounds between two checkpoints; 0 if the job has none."""
    stage: CheckpointStage = CheckpointStage.NONE
    version: int = 0
    """Version of the checkpoint under way."""
    void: bool = False
    """True if the committed state was replaced during the write, so that the checkpoint is thrown
    away."""
    considered: int = 0
    """Last version for which it is decided whether to save it."""
    final: bool = False
    """True if the version of the stop round was handed to the writer."""
    exit_by_ns: int | None = None
    """Time at which a released rank ends at the latest; before that, once its last checkpoint is
    published. None before the release."""
    published: int | None = None
    """Last version that was published; None without one."""
    written: int = 0
    """Number of checkpoints that were published."""
    skipped: int = 0
    """Number of checkpoints that were skipped because the one before was not published yet."""
    failed: int = 0
    """Number of checkpoints that could not be written or published."""


@dataclass(slots=True)
class Facts:
    """Counters for status and metrics; no decision reads them."""

    jumps: int = 0
    """Number of times that the main thread went on without its gradient applied in its round."""
    steps: int = 0
    """Number of steps of the script."""


@dataclass(slots=True)
class RankState:
    """State of a rank's machine. Only `machine.Rank.handle` and what it calls change it."""

    me: MemberId
    """Name of this rank."""
    pid: int
    host: str
    endpoints: Endpoints
    tree_above: int = TREE_ABOVE
    """Number of members above which announcements and GO go by way of heads (R41)."""
    now_ns: int = 0
    """Time of the event that is being handled."""

    log: Log = field(default_factory=Log)
    has_state: bool = False
    """True if the committed state belongs to `log`."""
    begun: Begin | None = None
    """The script's Begin; None before it."""

    promise: GenerationId = NO_GENERATION
    """Greatest generation that this rank has promised (R3)."""
    commit: Commit | None = None
    """COMMIT that this rank accepted last."""
    _group_of: tuple[MemberId, ...] = ()
    _group: frozenset[MemberId] = frozenset()
    is_member: bool = False
    """True if `commit` names this rank as a member."""
    needs_part: bool = False
    """True while this rank waits for the records that it lacks (R7)."""
    passive: bool = False
    """True for a member without state: it joins reductions, queues sums and waits for the donor
    (R15)."""
    follows: bool = False
    """True for a rank of a script that has the log but not the state: its script is on its way to
    where the others are (S3)."""
    started: bool = False
    """True if the data channel of the generation is open."""
    fatal: Fatal | None = None
    """Why the job cannot go on, if this rank was the first to find out. Its agent may have no
    connection at that moment, so each new connection begins with it."""
    channel_why: str = ""
    """Why the data channel moves buffers as it does, for people."""
    broken: bool = False
    """True if the data channel has failed; a new generation replaces it."""
    stop_reported: bool = False
    """True if this connection and generation has reported the stop round."""
    leave_asked: bool = False
    """True if this rank has asked to be dismissed, over this connection."""
    released: tuple[GenerationId, int] | None = None
    """Generation and version of the RELEASE that named this rank's log; None before."""
    ended: bool = False
    """True after Exit."""

    main: Main = Main.SCRIPT
    main_version: int = 0
    """Version of the weights in the model."""
    waits_for: int = -1
    """Round for which the gradient of the PARKED main thread was made; NOTHING if it waits for
    none."""
    under_way: int = -1
    """Round whose fresh gradient is announced and is in LATE while the main thread goes on, with a
    pipeline (R36). NOTHING if there is none, or it has missed that round."""
    needs: bool = False
    """True if the script that follows cannot go on without the state."""
    operation: Operation | None = None
    """Operation of the script in which the main thread is PARKED; None otherwise."""
    where: str = ""
    """File and line of the script at which it called this operation."""
    kind: tuple[int, tuple[tuple[str, int], ...]] | None = None
    """Kind of the last backward pass of the script; None before the first one."""
    hands_on: bool = False
    """True if the main thread is PARKED in a step() that goes on once its gradient is under way."""
    draining: bool = False
    """True if this rank is to leave the job."""
    ended_early: bool = False
    """True if the script left its loop before the job was over."""
    stops: bool = False
    """True if the script has ended the job (`pl.stop`); a round has to carry that."""
    outside: bool = False
    """True if the script has ended since it can never join the others (S10)."""
    on_disk: CheckpointFound = CheckpointFound(None)  # noqa: RUF009 - frozen
    """Newest checkpoint in the folder, as this rank has last looked."""
    saving: Saving = field(default_factory=Saving)
    pending: Pending = field(default_factory=Pending)
    stream: Streaming = field(default_factory=Streaming)
    shown_leases: tuple[int, ...] = ()
    """Leases in the last Held."""

    announced_pending: bool = False
    """True if PENDING was announced in this round."""
    announced: bool = False
    """True if the second announcement of this round was sent (R11)."""
    share: Share | None = None
    """Share that was announced last in this round."""
    words: dict[int, list[tuple[int, Announce | Gathered]]] = field(default_factory=dict)
    """Announcements that were not looked at yet, by round, with the time at which they arrived."""
    arrivals: Arrivals | None = None
    """Announcements for this round, on its starter."""
    collector: Collector | None = None
    """Announcements of the own group for this round, on the group's head."""
    gos: dict[int, Go] = field(default_factory=dict)
    """GO of this round and later ones, by round."""
    reducing: Go | None = None
    """GO of the reduction under way."""
    arrived_state: StateTransfer | None = None
    """State of the donor, kept until no reduction is under way (R15)."""
    round: int = 0
    """Next round that this rank joins."""
    opened_ns: int = 0
    """Time at which that round began here."""
    before_ns: int = 0
    """Duration of the round before it."""
    queue: list[Go] = field(default_factory=list)
    """GO of each round whose sum is queued; void rounds have none."""
    queue_max: int = QUEUE_MAX
    """Length of `queue` above which it is dropped and a newer state is requested."""
    serve: dict[MemberId, int] = field(default_factory=dict)
    """Joiners that wait for this donor's state, with the oldest version that each can use."""
    request: Request | None = None
    """Newest request of the coordinator."""
    hashes: dict[int, dict[MemberId, int]] = field(default_factory=dict)
    """Hashes of the weights that were received, by version and rank."""
    early: list[PeerMessage] = field(default_factory=list)
    """Messages of a generation that has not started here."""
    facts: Facts = field(default_factory=Facts)

    _grid: Grid | None = None
    _grid_of: tuple[tuple[MemberId, ...], tuple[MemberId, ...]] = ((), ())
    """Members and active ranks for which `_grid` was made. Both stay the same for many rounds."""

    _roles_of: tuple[Grid | None, int, MemberId | None] = (None, 0, None)
    _roles_are: tuple[MemberId, MemberId | None] = (MemberId(0, 0, 0), None)

    effects: list[Effect] = field(default_factory=list)
    """Effects of the event that is being handled."""
    inbox: deque[PeerMessage] = field(default_factory=deque)
    """Messages that this rank sends to itself."""

    # ---- reading --------------------------------------------------------------------------

    @property
    def group(self) -> frozenset[MemberId]:
        """Members of the generation that this rank accepted last."""
        members = self.commit.gen.members if self.commit else ()
        if members is not self._group_of:
            self._group_of, self._group = members, frozenset(members)
        return self._group

    @property
    def gen_id(self) -> GenerationId:
        """Id of the generation that this rank accepted last."""
        return self.commit.gen.id if self.commit else NO_GENERATION

    @property
    def frozen(self) -> bool:
        """Return True if a newer generation is promised, so that no older one goes on here (R3)."""
        return self.promise != self.gen_id

    @property
    def in_rounds(self) -> bool:
        """Return True if this rank is a member of a started generation, with state or `passive`."""
        return (
            self.started
            and not self.frozen
            and not self.needs_part
            and not self.ended
            and self.is_member
        )

    @property
    def talks(self) -> bool:
        """Return True if this rank may announce, start and commit rounds."""
        return self.in_rounds and not self.passive and not self.log.stopped

    @property
    def request_known(self) -> int:
        """Highest request number of its log, or of a checkpoint that it may go on from (R18)."""
        kept = self.on_disk.checkpoint
        return max(self.log.request, kept.request if kept else 0)

    @property
    def in_flight(self) -> bool:
        """Return True if GO of this round is here and the round is not committed."""
        return self.reducing is not None or self.log.version in self.gos

    @property
    def is_active(self) -> bool:
        """Return True if the log lists this rank as active."""
        return self.me in self.log.places

    @property
    def is_behind(self) -> bool:
        """Return True if the script has not taken the average of the job's last step (S17.3)."""
        behind = self.main_version < self.log.version and self.me in self.log.owing
        return behind and self.has_state and not self.passive

    def holds(self, lease: int) -> bool:
        """Return True if the log gives a lease to this rank."""
        return lease in self.log.held(self.me)

    def owns(self, lease: int) -> bool:
        """Return True if this rank is active and its log gives it a lease; a joiner owns none."""
        return not self.passive and self.is_active and self.holds(lease)

    def may_apply(self, lease: int) -> bool:
        """Return True if a step of this lease counts: this rank owns it and has not dropped it."""
        dropped = (x for drop in self.pending.drops for x in drop.leases)
        return self.owns(lease) and lease not in dropped

    def usable(self) -> tuple[int, ...]:
        """Return the leases to work on: held and not worked off."""
        if self.passive or not self.has_state or not self.is_active:
            return ()
        held = self.log.held(self.me)
        if not held:
            return ()
        done = self.pending.leases() | set(self.share.returned if self.share else ())
        return tuple(x for x in held if x not in done)

    def has_state_of(self, message: StateTransfer) -> bool:
        """Return True if this rank no longer needs the tensors of a state message (R45)."""
        known = message.generation == self.gen_id and not self.frozen
        return known and not self.passive and not self.follows

    @property
    def wants_to_leave(self) -> bool:
        """Return True if this rank drains and has nothing left to apply or to report (R16)."""
        left = self.main is Main.RUN or self.stops or self.pending.unsaid
        return self.draining and self.pending.empty and not left

    @property
    def is_resting(self) -> bool:
        """Return True if this rank takes no new lease."""
        return self.draining or self.main in (Main.REST, Main.DONE)

    def registration(self) -> Register:
        """Return the facts that a coordinator needs first (R1, R5)."""
        begun = self.begun
        return Register(
            member=self.me,
            pid=self.pid,
            host=self.host,
            endpoints=self.endpoints,
            promise=self.promise,
            last=self.log.id,
            version=self.log.version,
            has_state=self.has_state,
            ready=begun is not None,
            leaving=self.wants_to_leave,
            request=self.request_known,
            fingerprint=begun.fingerprint if begun else "",
            plan=begun.plan if begun else None,
            lookahead=begun.lookahead if begun else 2,
            pacing=begun.pacing if begun else Pacing.ROUND,
            seed=begun.seed if begun else None,
            members=rows_of(self.log.members),
            gen_active=rows_of(self.log.gen.active if self.log.gen else ()),
            released=self.released,
            checkpoint=self.on_disk.checkpoint,
        )

    def end(self, *, finished: bool, why: str) -> None:
        """End this rank's part in the job: request Exit, after which no event is handled."""
        self.ended = True
        self.emit(Exit(finished, why))

    @property
    def grid(self) -> Grid | None:
        """Groups for announcements and GO; None if all ranks exchange them with the starter."""
        log = self.log
        if len(log.members) <= self.tree_above:
            return None
        if self._grid is None or self._grid_of != (log.members, log.active):
            self._grid_of = log.members, log.active
            self._grid = Grid(log.members, log.places)
        return self._grid

    @property
    def starter(self) -> MemberId:
        """Rank that starts this round."""
        return self._roles()[0]

    @property
    def head(self) -> MemberId | None:
        """Head of this rank's group in this round; None without groups or an active rank."""
        return self._roles()[1]

    def _roles(self) -> tuple[MemberId, MemberId | None]:
        grid, version = self.grid, self.log.version
        if grid is None:
            return self.log.starter, None
        if self._roles_of != (grid, version, self.me):
            self._roles_of = grid, version, self.me
            starter = grid.starter(version)
            self._roles_are = starter, grid.head(grid.number[self.me], version)
        return self._roles_are

    # ---- emitting -------------------------------------------------------------------------

    def emit(self, effect: Effect) -> None:
        """Request an effect."""
        self.effects.append(effect)

    def do(self, ops: list[BufferOp]) -> None:
        """Request operations on the gradient buffers."""
        for op in ops:
            self.emit(ChangeBuffers(op))

    def fail(self, reason: str, message: str) -> None:
        """Report that the job cannot go on, now and over each new connection."""
        self.fatal = self.fatal or Fatal(self.me, reason, message)
        self.tell(self.fatal)

    def tell(self, message: object) -> None:
        """Send a message to the coordinator."""
        self.emit(ToCoordinator(message))  # type: ignore[arg-type]

    def send(self, to: MemberId, message: PeerMessage) -> None:
        """Send a message to a peer; one to this rank itself is handled after the present event."""
        if to == self.me:
            self.inbox.append(message)
        else:
            self.emit(ToPeer(to, message))
