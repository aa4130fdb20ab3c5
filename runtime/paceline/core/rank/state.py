"""What a rank knows: log, promise, generation, its own contributions, its main thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from paceline_api.types.enums import Pacing

from paceline.core.messages import (
    Announce,
    Commit,
    Endpoints,
    Fatal,
    Gathered,
    PeerMessage,
    Register,
    State,
)
from paceline.core.protocol.arrivals import Arrivals
from paceline.core.protocol.ids import NO_GENERATION, GenerationId, MemberId
from paceline.core.protocol.log import Log
from paceline.core.protocol.pending import BufferOp, Pending
from paceline.core.protocol.records import Go, Request, Share
from paceline.core.protocol.rows import rows_of
from paceline.core.protocol.tree import TREE_ABOVE, Grid
from paceline.core.rank.events import (
    Begin,
    ChangeBuffers,
    Effect,
    Exit,
    Found,
    ToCoordinator,
    ToPeer,
)
from paceline.core.rank.gather import Collector
from paceline.core.rank.streaming import Streaming

EARLY_MAX: Final = 4096
"""Messages kept of a generation that this rank has not started (R4)."""
QUEUE_MAX: Final = 8
"""Reduced sums that a joiner keeps while the donor's state is under way (R15, D15)."""


NOTHING: Final = -1


class Main(StrEnum):
    """What the user's thread is doing."""

    SCRIPT = "script"
    """Has not begun: importing, building the model."""
    RUN = "run"
    """Computing a batch."""
    PARKED = "parked"
    """In step() or begin(): waits for the engine."""
    WANT = "want"
    """In the loader: waits for a lease."""
    REST = "rest"
    """Evaluating."""
    DONE = "done"
    """Its loop has ended; waits for the release."""


class Stage(StrEnum):
    """How far the checkpoint under way has come; there is at most one (D15)."""

    NONE = "none"
    WRITING = "writing"
    WRITTEN = "written"
    """Waits until its version may leave the group (R19)."""
    PUBLISHING = "publishing"


@dataclass(slots=True)
class Saving:
    """Checkpoints as this rank makes them (`rank.saving`)."""

    every: int = 0
    """Rounds between two; 0 = the job has none."""
    stage: Stage = Stage.NONE
    version: int = 0
    """Of the one under way."""
    void: bool = False
    """The committed state was replaced while it was written: it is thrown away."""
    considered: int = 0
    """The last version of which it is decided whether it is saved."""
    final: bool = False
    """The stop round's version was handed to the writer."""
    exit_by_ns: int | None = None
    """Released: ends once the final checkpoint is published, or at this time at the latest."""
    published: int | None = None
    written: int = 0
    skipped: int = 0
    """Were due while the one before was not published yet."""
    failed: int = 0


@dataclass(slots=True)
class Facts:
    """Counters for status and metrics; no decision reads them."""

    jumps: int = 0
    steps: int = 0
    rounds_by_trigger: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class RankState:
    me: MemberId
    pid: int
    host: str
    endpoints: Endpoints
    tree_above: int = TREE_ABOVE
    """Members above which announcements and GO go by way of heads (R41)."""
    now_ns: int = 0

    log: Log = field(default_factory=Log)
    has_state: bool = False
    """The committed state belongs to `log`."""
    begun: Begin | None = None

    promise: GenerationId = NO_GENERATION
    commit: Commit | None = None
    """The COMMIT that this rank accepted last."""
    _group_of: tuple[MemberId, ...] = ()
    _group: frozenset[MemberId] = frozenset()
    is_member: bool = False
    """It names this rank."""
    needs_part: bool = False
    passive: bool = False
    """Member without state: joins reductions, queues sums, waits for the donor (R15)."""
    started: bool = False
    """The data channel of the generation stands."""
    fatal: Fatal | None = None
    """Why the job cannot go on, as this rank has found out first. Its agent may have no connection
    at that moment, so each new one begins with it."""
    channel_why: str = ""
    """Why it moves buffers as it does, for people."""
    broken: bool = False
    """The data channel has failed; a new generation repairs it."""
    stop_reported: bool = False
    leave_asked: bool = False
    released: tuple[GenerationId, int] | None = None
    ended: bool = False

    main: Main = Main.SCRIPT
    main_version: int = 0
    """Version of the weights in the model."""
    waits_for: int = -1
    """PARKED: the round that its gradient was made for; NOTHING if it waits for none."""
    under_way: int = -1
    """With a pipeline: the round whose fresh gradient lies in LATE, announced, while the main
    thread goes on (R36); NOTHING if there is none, or it has missed that round."""
    hands_on: bool = False
    """PARKED: in a step() that goes on when its gradient is under way."""
    draining: bool = False
    ended_early: bool = False
    """The script left its loop before the job was over."""
    stops: bool = False
    """The script has ended the job (`pl.stop`); a round has to carry that."""
    found: Found = Found(None)  # noqa: RUF009 - frozen
    saving: Saving = field(default_factory=Saving)
    pending: Pending = field(default_factory=Pending)
    stream: Streaming = field(default_factory=Streaming)
    shown_leases: tuple[int, ...] = ()

    announced_pending: bool = False
    announced: bool = False
    """The second announcement of this round is out (R11)."""
    share: Share | None = None
    """What was announced last in this round."""
    words: dict[int, list[tuple[int, Announce | Gathered]]] = field(default_factory=dict)
    """Announcements by round that were not looked at yet, with the time at which they came."""
    arrivals: Arrivals | None = None
    """The starter's, of the round in question."""
    collector: Collector | None = None
    """A head's, likewise."""
    gos: dict[int, Go] = field(default_factory=dict)
    reducing: Go | None = None
    arrived_state: State | None = None
    """Of the donor, until no reduction is under way (R15)."""
    round: int = 0
    """The next round that this rank joins."""
    opened_ns: int = 0
    """When that round began here."""
    before_ns: int = 0
    """How long the one before took."""
    queue: list[Go] = field(default_factory=list)
    queue_max: int = QUEUE_MAX
    serve: dict[MemberId, int] = field(default_factory=dict)
    """Joiners that wait for this donor's state, with the version they need at least."""
    request: Request | None = None
    hashes: dict[int, dict[MemberId, int]] = field(default_factory=dict)
    early: list[PeerMessage] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)

    _grid: Grid | None = None
    _grid_of: tuple[tuple[MemberId, ...], tuple[MemberId, ...]] = ((), ())
    """What `_grid` was made of; both stay the same for many rounds."""

    _roles_of: tuple[Grid | None, int, MemberId | None] = (None, 0, None)
    _roles_are: tuple[MemberId, MemberId | None] = (MemberId(0, 0, 0), None)

    effects: list[Effect] = field(default_factory=list)
    inbox: deque[PeerMessage] = field(default_factory=deque)
    """Messages to itself."""

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
        """The generation that this rank accepted last."""
        return self.commit.gen.id if self.commit else NO_GENERATION

    @property
    def frozen(self) -> bool:
        """Has promised a newer generation: nothing older is committed, joined or started (R3)."""
        return self.promise != self.gen_id

    @property
    def in_rounds(self) -> bool:
        """Member of a running generation; with state unless `passive`."""
        return (
            self.started
            and not self.frozen
            and not self.needs_part
            and not self.ended
            and self.is_member
        )

    @property
    def talks(self) -> bool:
        """May announce, start and commit rounds."""
        return self.in_rounds and not self.passive and not self.log.stopped

    @property
    def request_known(self) -> int:
        """Highest request number of its log, or of the log that it may go on with (R18)."""
        kept = self.found.checkpoint
        return max(self.log.request, kept.request if kept else 0)

    @property
    def in_flight(self) -> bool:
        """GO of the round in question is here and the round is not committed."""
        return self.reducing is not None or self.log.version in self.gos

    @property
    def is_active(self) -> bool:
        return self.me in self.log.places

    def holds(self, lease: int) -> bool:
        return lease in self.log.held(self.me)

    def owns(self, lease: int) -> bool:
        """The group's log gives it to this rank; an own log of an earlier life does not count."""
        return not self.passive and self.is_active and self.holds(lease)

    def may_apply(self, lease: int) -> bool:
        """It owns the lease, and has not dropped it: a step of it counts."""
        dropped = (x for drop in self.pending.drops for x in drop.leases)
        return self.owns(lease) and lease not in dropped

    def usable(self) -> tuple[int, ...]:
        """Leases to work on: held and not worked off."""
        if self.passive or not self.has_state or not self.is_active:
            return ()
        held = self.log.held(self.me)
        if not held:
            return ()
        done = self.pending.leases() | set(self.share.returned if self.share else ())
        return tuple(x for x in held if x not in done)

    def has_state_of(self, message: State) -> bool:
        """It needs this state no more: what it had to be passed on to has gone out (R45)."""
        return message.generation == self.gen_id and not self.frozen and not self.passive

    @property
    def wants_to_leave(self) -> bool:
        """Draining, and nothing of its own is left to apply, or to be said (R16)."""
        left = self.main is Main.RUN or self.stops or self.pending.unsaid
        return self.draining and self.pending.empty and not left

    @property
    def is_resting(self) -> bool:
        """Takes no new lease."""
        return self.draining or self.main in (Main.REST, Main.DONE)

    def registration(self) -> Register:
        """The facts that a coordinator needs first (R1, R5)."""
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
            checkpoint=self.found.checkpoint,
        )

    def end(self, *, finished: bool, why: str) -> None:
        self.ended = True
        self.emit(Exit(finished, why))

    @property
    def grid(self) -> Grid | None:
        """None: everybody talks to the starter."""
        log = self.log
        if len(log.members) <= self.tree_above:
            return None
        if self._grid is None or self._grid_of != (log.members, log.active):
            self._grid_of = log.members, log.active
            self._grid = Grid(log.members, log.places)
        return self._grid

    @property
    def starter(self) -> MemberId:
        """Of the round in question."""
        return self._roles()[0]

    @property
    def head(self) -> MemberId | None:
        """Likewise, of this rank's group; None if there is none."""
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
        self.effects.append(effect)

    def do(self, ops: list[BufferOp]) -> None:
        for op in ops:
            self.emit(ChangeBuffers(op))

    def fail(self, reason: str, message: str) -> None:
        """Tell the coordinator that the job cannot go on, now and on each new connection."""
        self.fatal = self.fatal or Fatal(self.me, reason, message)
        self.tell(self.fatal)

    def tell(self, message: object) -> None:
        self.emit(ToCoordinator(message))  # type: ignore[arg-type]

    def send(self, to: MemberId, message: PeerMessage) -> None:
        """To a peer; a message to itself takes no way round."""
        if to == self.me:
            self.inbox.append(message)
        else:
            self.emit(ToPeer(to, message))
