"""One rank of a rehearsal: the real state machine and sockets, two numbers in place of tensors.

`RehearsedRank` is to `paceline.worker.comm_thread` what the simulation's rank is. It carries out
the effects in the same order, on a thread of its own that waits in the kernel, and decides nothing.
The script runs on the same thread: a pause for each batch.
"""

from __future__ import annotations

import os
import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, assert_never

import msgspec
from paceline.clock import now_ns
from paceline.core import wire
from paceline.core.messages import (
    Commit,
    CommitChange,
    Dismiss,
    Doing,
    Endpoints,
    Heartbeat,
    LogPart,
    PeerMessage,
    Prepare,
    RankMessage,
    Release,
    Start,
    StateTransfer,
    ToRank,
)
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.rank_leases import RankLeases
from paceline.core.protocol.records import DataPlan, Go
from paceline.core.protocol.snapshot import Totals
from paceline.core.rank import events as ev
from paceline.core.rank.machine import Rank
from paceline.worker.metrics.heartbeat import HeartbeatFacts
from paceline.worker.peer_sockets import Bytes, PeerSockets
from paceline_api.ids import GenerationId, MemberId
from paceline_api.times import NS_PER_MS, NS_PER_S

from benchmarks.rehearsal.meters import Account, Meter, RankRound
from benchmarks.rehearsal.sums import NONE, LocalSums, Numbers, Seat, add
from testing.rank_memory import MemoryEffect, RankMemory

BATCH: Final = 4
PLAN: Final = DataPlan(samples=BATCH * 10**8, batch=BATCH, epochs=1, seed=1)
"""Data plan with more samples than any rehearsal processes, so that the operator's stop ends the
job."""
IDLE_MS: Final = 1_000
END_S: Final = 0.01
"""Time that the script works after the last round."""


class Link(Protocol):
    """Connection of a rank to the coordinator."""

    def send(self, message: RankMessage) -> None:
        """Send a message to the coordinator; any thread may call this."""


@dataclass(frozen=True)
class Surroundings:
    """Settings and objects that all ranks of a process share."""

    sockets: Path
    sums: LocalSums
    step_s: Callable[[MemberId], float]
    """Function that returns how long the next batch of a rank takes."""


class RehearsedRank(RankMemory[Numbers, Bytes]):
    """A rank on a thread of its own.

    The callback `on_exit` is called when the rank knows how it ends, and `ended` when its process
    would be reaped; both on the rank's thread.
    """

    def __init__(
        self,
        me: MemberId,
        around: Surroundings,
        *,
        on_exit: Callable[[RehearsedRank, ev.Exit], None],
        ended: Callable[[RehearsedRank], None],
    ) -> None:
        self.me = me
        self.meter = Meter()
        self.facts = HeartbeatFacts()
        self.link: Link | None = None
        self.exit: ev.Exit | None = None
        self.killed = False
        name = str(me).replace("#", "-")
        self._peers = PeerSockets(directory=around.sockets, name=name, host="", token="")
        where = Endpoints(self._peers.address, f"data-{me}")
        super().__init__(Rank(me, pid=os.getpid(), host="rehearsal", endpoints=where), NONE)
        self._around, self._on_exit, self._ended = around, on_exit, ended
        self._random = random.Random(str(me))
        # The communication thread.
        self._posted: deque[ev.Event] = deque()
        self._orders = _Orders()
        self._wake_ns: int | None = None
        self._work_since_ns = now_ns()
        self._heard_go: tuple[GenerationId, int] | None = None
        self._commit: Commit | None = None
        self._seat: Seat | None = None
        # The script.
        self._leases = RankLeases()
        self._next: tuple[int, Callable[[], None]] | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"rank-{me}", daemon=True)

    # ---- any thread -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the rank's thread."""
        self.post(ev.Begin("same", PLAN, 2, data=f"data-{self.me}"))
        self._thread.start()

    def post(self, event: ev.Event) -> None:
        """Queue an event and wake the thread; any thread may call this."""
        self._posted.append(event)
        self._peers.wake()

    def obey(self, order: ToRank) -> None:
        """Receive an order of the coordinator; any thread may call this.

        An order that interrupts ends the reduction in flight first.
        """
        if _Orders.interrupts(order):
            self._orders.arrived()
            self._leave_seat("an order came")
        self.post(order)

    def kill(self) -> None:
        """End the rank as SIGKILL would: it sends nothing more."""
        self.killed = True
        self._leave_seat("it was killed")
        self._peers.wake()

    def heartbeat(self) -> Heartbeat:
        """Return the rank's heartbeat."""
        return self.facts.heartbeat(self.machine.state, self._doing())

    def _doing(self) -> Doing:
        go = self.machine.state.reducing
        for_ms = (now_ns() - self._work_since_ns) // NS_PER_MS
        return Doing(for_ms, go.round if go is not None else -1)

    def _leave_seat(self, why: str) -> None:
        """End the reduction in flight, if there is one."""
        if (seat := self._seat) is not None:
            seat.fail(why)

    def account(self) -> Account:
        """Return the rank's final account; call it after the rank has ended."""
        rank = self.machine.state
        log, pending = rank.log, rank.pending
        mine, total = log.ledger.by_member.get(self.me, Totals()), log.ledger.total()
        gone = log.ledger.departed
        return Account(
            member=self.me,
            finished=self.exit is not None and self.exit.finished,
            digest=log.digest,
            version=log.version,
            produced=pending.produced,
            pending=sum(x.samples for x in pending.steps) + sum(x.samples for x in pending.drops),
            lost=pending.lost,
            applied=mine.applied,
            dropped=mine.dropped,
            all_applied=total.applied,
            all_dropped=total.dropped,
            departed=gone.applied + gone.dropped,
            weights=self.weights,
        )

    # ---- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over and not self.killed:
                self._turn()
        finally:
            self._peers.close()
            self._ended(self)

    def _turn(self) -> None:
        """Handle all events and messages that have arrived, then wait for more.

        The metrics are refreshed only when there is nothing else to do.
        """
        self._work_since_ns = now_ns()
        while self._posted and not self.killed:
            self._take(self._posted.popleft())
        while not self._posted and not self.killed and (mail := self._peers.read()) is not None:
            if isinstance(mail.message, LogPart):
                self.part = _numbers(mail.payload[0]) if mail.payload else None
            elif isinstance(mail.message, StateTransfer):
                self.staged[mail.message.generation] = mail.payload[0]
            self._take(mail.message)
        if self._posted or self.killed:
            return
        now = now_ns()
        if self._next is not None and now >= self._next[0]:
            (_, action), self._next = self._next, None
            action()
        elif self._wake_ns is not None and now >= self._wake_ns:
            self._wake_ns = None
            self._take(ev.Tick())
        else:
            meter = self.meter.round(self.machine.state.log.version)
            meter.collect_ns += self.meter.spent_ns()
            self.facts.refresh(self.machine.state, now)
            meter.figures_ns += self.meter.spent_ns()
            self._peers.wait(self._timeout_ms(now))

    def _timeout_ms(self, now: int) -> int:
        due = [x for x in (self._wake_ns, self._next[0] if self._next else None) if x is not None]
        left_ns = min(due, default=now + IDLE_MS * NS_PER_MS) - now
        return max(0, min(IDLE_MS, -(-left_ns // NS_PER_MS)))

    def _take(self, event: ev.Event) -> None:
        """Handle one event, carry out its effects, and handle the events that they cause."""
        if _Orders.interrupts(event):
            self._orders.taken()
        now = self._work_since_ns = now_ns()
        rank = self.machine.state
        version, collecting = rank.log.version, not rank.in_flight
        announced = rank.announced
        if isinstance(event, Start):
            self._heard_go = event.go.generation, event.go.round
        self.meter.sent_ns = 0
        effects = self.machine.handle(now, event)
        meter = self.meter.round(version)
        if rank.announced and not announced:
            meter.announced_ns = now
        blocking: list[ev.Blocking] = []
        follow: deque[ev.Event] = deque()
        for effect in effects:
            if isinstance(effect, ev.OpenChannel):
                self._meet(effect.commit)
            if isinstance(effect, ev.Blocking):
                blocking.append(effect)  # the other effects of this event go out first
            else:
                self._do(effect)
        if isinstance(event, Prepare | Commit | CommitChange | ev.ChannelOpened):
            self._meter_change(event)
        elif collecting:
            meter.heard += isinstance(event, PeerMessage)
            meter.collect_ns += self.meter.spent_ns()
            meter.sent_ns += self.meter.sent_ns
        else:
            meter.commit_ns += self.meter.spent_ns()
        go = rank.reducing
        if collecting and go is not None and self._heard_go != (go.generation, go.round):
            self._weigh_go(meter, effects)
        for wait in blocking:
            follow.append(self._block(wait))
        for event_after in follow:
            if not self.killed:
                self._take(event_after)

    def _meter_change(self, event: Prepare | Commit | CommitChange | ev.ChannelOpened) -> None:
        change = self.meter.change(self.machine.state.promise)
        change.cpu_ns += self.meter.spent_ns()
        if isinstance(event, Prepare):
            change.promised_ns = change.promised_ns or now_ns()
        elif isinstance(event, ev.ChannelOpened):
            change.started_ns = now_ns()

    def _weigh_go(self, meter: RankRound, effects: list[ev.Effect]) -> None:
        """Record the size of GO on the starter, which sends GO and receives none.

        The packing here is not charged to the starter: the product packs GO only once.
        """
        meter.started = True
        sent = (x.message for x in effects if isinstance(x, ev.ToPeer))
        if (start := next((x for x in sent if isinstance(x, Start)), None)) is not None:
            meter.go_bytes = len(wire.pack_peer(start))
        self.meter.spent_ns()

    # ---- effects --------------------------------------------------------------------------

    def _block(self, effect: ev.Blocking) -> ev.Event:
        match effect:
            case ev.Reduce():
                return self._sum(effect)
            case ev.OpenChannel():
                return self._open(effect)
            case ev.Restore():
                raise AssertionError("a rehearsal has no checkpoints")

    def _do(self, effect: ev.Prompt) -> None:
        if isinstance(effect, MemoryEffect):
            self.change_memory(effect)
            if isinstance(effect, ev.Apply) and effect.hash:
                value = zlib.crc32(msgspec.json.encode(self.weights))
                self._posted.append(ev.Hashed(self.machine.state.log.version, value))
            return
        match effect:
            case ev.ToPeer(member=member, message=message):
                self.meter.contact(member)
                begun_ns = time.thread_time_ns()
                self._peers.send(member, message)
                self.meter.sent_ns += time.thread_time_ns() - begun_ns
            case ev.ToCoordinator(message=message):
                self._say(message)
            case ev.CloseChannel():
                self._commit = None
            case ev.Resume():
                self._resume(effect)
            case ev.Held(leases=leases):
                self._leases.hold(leases)
            case ev.WakeAt(at_ns=at_ns):
                self._wake_ns = at_ns
            case ev.Exit():
                self.exit = effect
                self._on_exit(self, effect)
                self._later(END_S, self._end)
            case ev.GiveUp() | ev.RefusePeer() | ev.Save() | ev.Publish() | ev.Unsave():
                raise AssertionError(f"no streamed rounds, strangers or checkpoints here: {effect}")
            case _:
                assert_never(effect)

    def _say(self, message: RankMessage) -> None:
        if self.link is not None:
            self.link.send(message)

    def _meet(self, commit: Commit) -> None:
        """Take over the addresses of the members of a new generation."""
        for member, where in commit.endpoints:
            self._peers.know(member, where.trigger)
        self._peers.keep_only((*commit.gen.members, commit.holder))

    def _open(self, effect: ev.OpenChannel) -> ev.Event:
        commit = self._commit = effect.commit
        self.meter.contacts.intersection_update(commit.gen.members)
        return ev.ChannelOpened()

    def _sum(self, effect: ev.Reduce) -> ev.Event:
        """Join a reduction and block until it completes or fails."""
        assert self._commit is not None
        gen = self._commit.gen
        self.meter.round(effect.go.round).go_ns = now_ns()
        seat = self._seat = Seat(self.me, self.contribution(effect))
        if self._orders.outstanding or self.killed:
            seat.fail("an order came before")
        else:
            self._around.sums.join(seat, gen.id, effect.go.round, gen.members)
        answer = seat.wait()
        self.result = seat.result
        return answer

    # ---- memory ---------------------------------------------------------------------------

    def plus(self, one: Numbers, other: Numbers, factor: float) -> Numbers:
        """Return `one + factor * other`."""
        return add(one, other, factor)

    def send_part(self, to: MemberId, part: LogPart, result: Numbers | None) -> None:
        """Send records that a rank lacks, with the last sum if it needs it."""
        self.meter.change(part.generation).parts += 1
        self._peers.send_bulk(to, part, [] if result is None else [msgspec.json.encode(result)])

    def send_state(self, to: MemberId, state: StateTransfer, copied: Bytes) -> None:
        """Send a state to a rank."""
        self._peers.send_bulk(to, state, [copied])

    def copy(self) -> Bytes:
        """Return the committed state as it is sent."""
        return msgspec.json.encode((*self.weights, *self.accumulated))

    def load(self, copied: Bytes) -> None:
        """Replace the committed state by one that a donor sent."""
        state = _numbers(copied)
        half = len(state) // 2
        self.weights, self.accumulated = state[:half], state[half:]

    def step_optimizer(self, go: Go, weighing: Weighing) -> None:
        """Step the optimizer, and record the time of the round."""
        super().step_optimizer(go, weighing)
        self.facts.applied(go, self.machine.state, None)
        meter = self.meter.round(go.round)
        meter.applied_ns, meter.generation = now_ns(), go.generation

    # ---- the script -----------------------------------------------------------------------

    def _resume(self, effect: ev.Resume) -> None:
        now = now_ns()
        self.facts.resumed(now)
        self.meter.active_ns = self.meter.active_ns or now
        if effect.fresh:
            self.meter.round(effect.version - 1).fresh = True
        if effect.stopped:
            self._later(END_S, lambda: self._take(ev.Finish()))
        else:
            self._later(0.0, self._next_batch)  # after the other effects of this event

    def _next_batch(self) -> None:
        if self._leases.wait():
            self._take(ev.Want())
            return
        lease = self._leases.draw()
        assert lease is not None
        pause_s = self._around.step_s(self.me) * self._random.uniform(0.9, 1.1)
        self._later(pause_s, lambda: self._finish_batch(lease))

    def _finish_batch(self, lease: int) -> None:
        self.grad = add(self.grad, (1.0, float(lease)))
        self.facts.stepped(now_ns())
        self._take(ev.Step((lease,), BATCH, BATCH))

    def _end(self) -> None:
        self._over = True

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule the script's next action."""
        self._next = now_ns() + int(seconds * NS_PER_S), action


class _Orders:
    """Counts the orders that interrupt the thread and that it has not handled yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.outstanding = 0

    @staticmethod
    def interrupts(order: object) -> bool:
        """Return True if an order interrupts a reduction."""
        return isinstance(order, Prepare | Release | Dismiss)

    def arrived(self) -> None:
        """Count an order that has arrived."""
        with self._lock:
            self.outstanding += 1

    def taken(self) -> None:
        """Count an order that the thread now handles."""
        with self._lock:
            self.outstanding -= 1


def _numbers(data: Bytes) -> Numbers:
    return tuple(msgspec.json.decode(bytes(data), type=list[float]))
