"""A group of ranks that is one member of the job: the lead and its followers (R50 to R54).

Each rank of a group holds a shard of the model. It runs the state machine of the member, and has
the committed state and the data channel of its shard. Only the lead, shard 0, receives from peers,
coordinator and timer. It passes every event on in one order, so all ranks of the group are in the
same state, and each carries out the effects on its own tensors. Events that begin on each rank,
such as a step of the script or the end of a reduction, go to the lead, which makes one event of
them (`core.rank.agreement`).

The messages within a group are in `core.rank.within`. They travel over lines: pairs of packet
sockets (`control.packets`) that the agent has made between two processes of the same script in one
pod.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from paceline_api.ids import NO_GENERATION, GenerationId

from paceline.clock import now_ns
from paceline.control import packets
from paceline.core.messages import Fatal, LogPart, Prepare, StateTransfer
from paceline.core.rank import events as ev
from paceline.core.rank.agreement import (
    SCRIPT,
    Agreement,
    GroupDisagreesError,
    ScriptEvent,
    Writing,
    outcome_of,
)
from paceline.core.rank.within import (
    Came,
    FromLead,
    FromScript,
    Greeting,
    Interrupt,
    Key,
    Mail,
    Message,
    Ordered,
    Square,
    Total,
    Welcome,
    Wrote,
    pack,
    unpack,
)
from paceline.core.wire import WireError
from paceline.errors import UsageError
from paceline.refusals import RefusalReason
from paceline.worker.comm_thread import ROUND, CommThread, Within
from paceline.worker.peer_sockets import MESSAGE_BYTES_MAX, ReceivedMessage

log = logging.getLogger("paceline.rank")

GREETING_S: Final = 300.0
"""Timeout from `init()` of one rank of a group to that of the others, which import the same script,
in seconds."""
ANSWER_S: Final = 3600.0
"""Timeout for a rank of the group to reach what the others have reached, such as the sum of its
shard, in seconds. The coordinator, if there is one, detects ranks that are alive but stuck much
earlier (R35)."""
MAIL_MAX: Final = 16
"""Upper bound on the parts and states that one shard keeps while the others do not have theirs. A
generation sends one part and one state to a joiner, and another state if the first came too
late."""
Answer = Came | Square
T = TypeVar("T")


class Line:
    """One end of a line. Any thread may call `tell` and `send`; only one may call `read`."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # not for the script's own subprocesses
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._lock = threading.Lock()

    def tell(self, message: Message) -> None:
        """Send a message; it is lost if the other rank is dead."""
        self.send(pack(message))

    def send(self, data: bytes) -> None:
        """Send a packed message; what a dead rank does not read is lost, and the group ends."""
        with self._lock:
            try:
                packets.send(self._socket, data)
            except OSError:
                log.debug("a rank of this group does not read any more")

    def read(self) -> Message | None:
        """Block until the next message.

        Returns:
            The message; None at the end of the other rank, or if the bytes are not a message.
        """
        try:
            data = packets.receive(self._socket, MESSAGE_BYTES_MAX)
            return None if data is None else unpack(data)
        except OSError:
            return None
        except WireError as error:
            log.error("a rank of this group said what is not a message: %s", error)
            return None

    def first(self, kind: type[T], who: str) -> T:
        """Return the first message of the other rank, within GREETING_S.

        Args:
            kind: The type that the message must have.
            who: Name of the other rank, for the error.

        Returns:
            The message.

        Raises:
            UsageError: The rank has ended, or has not called `init()` in time.
        """
        message = self.read() if select.select([self._socket], [], [], GREETING_S)[0] else None
        if not isinstance(message, kind):
            raise UsageError(
                f"{who} of this group has ended, or not called init() in {GREETING_S:.0f} s",
                hint="all ranks of a group run the same script; see its own log",
            )
        return message


class GroupRendezvous:
    """Rendezvous of the ranks of a group when their scripts connect; main thread only."""

    def __init__(self, shard: int, fds: Sequence[int]) -> None:
        self.shard, self.lines = shard, [Line(fd) for fd in fds]
        self.listener: socket.socket | None = None
        self.addresses: list[str] = []
        """Addresses of the other ranks' sockets, in shard order."""

    def lead(self, *, pid: int, host: str, address: str, data: str) -> Welcome:
        """Meet all other ranks of the group, as its lead.

        Args:
            pid: Process id of this rank.
            host: Host of this rank.
            address: Address of its peer sockets.
            data: Address of its data channel.

        Returns:
            The identity of the member, which all ranks of the group use.
        """
        port = 0
        if self.lines:
            self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
            port = self.listener.getsockname()[1]
        welcome = Welcome(pid, host, address, data, port)
        for shard, line in enumerate(self.lines, 1):
            self.addresses.append(line.first(Greeting, f"rank {shard}").address)
        for line in self.lines:
            line.tell(welcome)
        return welcome

    def follow(self, address: str) -> Welcome:
        """Send the lead this rank's address, and return the member's identity from the lead."""
        self.lines[0].tell(Greeting(address))
        return self.lines[0].first(Welcome, "rank 0")


@dataclass(frozen=True, slots=True)
class _Received(Within):
    """A message that arrived over a line; `message` is None at the end of the other rank."""

    shard: int
    message: Message | None


def _key(message: LogPart | StateTransfer) -> Key:
    if isinstance(message, StateTransfer):
        return "state", message.generation, message.log.version
    return "part", message.generation, len(message.records)


class PendingMail:
    """Parts and states that arrived for one shard, and perhaps not yet for all of its group.

    A peer's message decides its key, and a state is as large as the model. So it drops
    what can no longer be of use, and never keeps more than MAIL_MAX messages.
    """

    def __init__(self) -> None:
        self._mail: dict[Key, ReceivedMessage] = {}
        self._taken: Key = "state", NO_GENERATION, 0
        """Key of the newest state that was taken out."""

    def __contains__(self, key: Key) -> bool:
        return key in self._mail

    def __len__(self) -> int:
        return len(self._mail)

    def is_wanted(self, key: Key, oldest: GenerationId) -> bool:
        """Return False for mail older than the generation `oldest`, or than a taken state."""
        return key[1] >= oldest and not (key[0] == "state" and key < self._taken)

    def is_full(self, key: Key) -> bool:
        """Return True if there is no place for this message."""
        return key not in self._mail and len(self._mail) >= MAIL_MAX

    def put(self, key: Key, mail: ReceivedMessage) -> None:
        """Keep a message, in place of an older one with the same key."""
        self._mail[key] = mail

    def take(self, key: Key, oldest: GenerationId) -> ReceivedMessage:
        """Remove and return a message, and drop the messages that are no longer wanted."""
        mail = self._mail.pop(key)
        if key[0] == "state":
            self._taken = max(self._taken, key)
        self.drop_unwanted(oldest)
        return mail

    def drop_unwanted(self, oldest: GenerationId) -> None:
        """Drop mail older than the generation `oldest`, or than a taken state."""
        self._mail = {k: mail for k, mail in self._mail.items() if self.is_wanted(k, oldest)}


class _ShardThread(CommThread):
    """The communication thread of one shard."""

    _mail: PendingMail

    def _keep(self, key: Key, mail: ReceivedMessage) -> bool:
        """Keep a message until all shards have theirs; return False if it was dropped instead."""
        if not self._mail.is_wanted(key, self.machine.state.promise):
            return False
        if self._mail.is_full(key):
            self._peers.refuse(RefusalReason.TOO_MANY)
            return False
        self._mail.put(key, mail)
        return True


class LeadThread(_ShardThread):
    """The communication thread of shard 0, the lead.

    It sends every event, with its time, to the followers before it handles the event itself (R51).
    """

    def join_group(self, rendezvous: GroupRendezvous) -> None:
        """Take over the lines and start their readers. Main thread, before `start`."""
        self._lines = rendezvous.lines
        self._agreement = Agreement(len(self._lines) + 1, rendezvous.addresses)
        self._writing = Writing(len(self._lines) + 1)
        self._answers: list[SimpleQueue[Answer | None]] = [SimpleQueue() for _ in self._lines]
        self._mail = PendingMail()
        self._arrived: dict[Key, set[int]] = {}
        for shard, line in enumerate(self._lines, 1):
            threading.Thread(
                target=self._listen, args=(shard, line), name=f"paceline-shard-{shard}", daemon=True
            ).start()

    # ---- any thread -----------------------------------------------------------------------

    def _interrupt(self) -> None:
        super()._interrupt()
        self._tell(Interrupt())

    def _tell(self, message: FromLead) -> None:
        data = pack(message)
        for line in self._lines:
            line.send(data)

    def _listen(self, shard: int, line: Line) -> None:
        answers = self._answers[shard - 1]
        while (message := line.read()) is not None:
            if isinstance(message, Answer):
                answers.put(message)
            else:
                self.post(_Received(shard, message))
        answers.put(None)
        self.post(_Received(shard, None))

    # ---- the thread -----------------------------------------------------------------------

    def _take(self, event: ev.Event | Within) -> None:
        match event:
            case _Received(shard=shard, message=FromScript(event=called)):
                self._script_called(shard, called)
            case _Received(shard=shard, message=Mail(key=key)):
                if self._mail.is_wanted(key, self.machine.state.promise):
                    self._arrived.setdefault(key, set()).add(shard)
                    self._open_mail(key)
            case _Received(shard=shard, message=Wrote(event=written)):
                self._written(shard, written)
            case _Received():
                _end_with(f"rank {event.shard}", over=self.machine.state.ended)
            case ev.Written():
                self._written(0, event)
            case ev.Step():
                self._script_called(0, self._reducer.finish(event))
            case _ if isinstance(event, SCRIPT):
                self._script_called(0, event)
            case _:
                super()._take(event)

    def _script_called(self, shard: int, event: ScriptEvent) -> None:
        try:
            agreed = self._agreement.add(shard, event)
        except GroupDisagreesError as error:
            self._disagrees(error)
            return
        if agreed is not None:
            if not isinstance(agreed, ev.Step):
                self._catch_up()
            self._handle(agreed, now_ns())

    def _written(self, shard: int, event: ev.Written) -> None:
        if (written := self._writing.done(shard, event)) is not None:
            super()._take(written)

    def _handle(self, event: ev.Event, now: int) -> None:
        self._tell(Ordered(now, event))
        super()._handle(event, now)
        if isinstance(event, Prepare):
            self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        oldest = self.machine.state.promise
        self._mail.drop_unwanted(oldest)
        wanted = [key for key in self._arrived if self._mail.is_wanted(key, oldest)]
        self._arrived = {key: self._arrived[key] for key in wanted}

    def _agreed(self, outcomes: Sequence[ev.Event]) -> Sequence[ev.Event]:
        agreed: list[ev.Event] = []
        for own in outcomes:
            of_all = [own, *(self._answer(i, Came).event for i in range(len(self._lines)))]
            try:
                agreed.append(outcome_of(of_all))
            except GroupDisagreesError as error:
                self._disagrees(error)
        return agreed

    def _disagrees(self, error: GroupDisagreesError) -> None:
        """Report the disagreement to the coordinator, which ends the job.

        Like `RankState.fail`, it is kept in the state: if the agent has no connection now, each new
        one repeats it.
        """
        state = self.machine.state
        state.fatal = state.fatal or Fatal(state.me, "GroupDisagrees", str(error))
        self._say(state.fatal)

    def _answer(self, index: int, kind: type[T]) -> T:
        return _next(self._answers[index], kind, f"rank {index + 1}")

    def sum(self, value: float) -> float:
        """Return the sum of a number over the group, for `GroupSum`. Communication thread.

        All ranks of the group call this in the same order.

        Args:
            value: This rank's number.

        Returns:
            The sum, with the same bits on all ranks of the group.
        """
        others = [self._answer(i, Square).value for i in range(len(self._lines))]
        total = fsum([value, *others])
        self._tell(Total(total))
        return total

    def _receive(self, mail: ReceivedMessage) -> None:
        if not isinstance(mail.message, LogPart | StateTransfer):
            super()._receive(mail)
            return
        key = _key(mail.message)
        if self._keep(key, mail):
            self._open_mail(key)

    def _open_mail(self, key: Key) -> None:
        """Handle a part or state once it has arrived for all shards."""
        if key in self._mail and len(self._arrived.get(key, ())) == len(self._lines):
            taken = self._mail.take(key, self.machine.state.promise)
            del self._arrived[key]
            self._drop_unwanted()
            super()._receive(taken)


class FollowerThread(_ShardThread):
    """The communication thread of any shard but the lead's.

    It handles the events that the lead sends, at the lead's times. It sends nothing to peers or to
    the coordinator, except for parts and states of its own shard.
    """

    def join_group(self, rendezvous: GroupRendezvous) -> None:
        """Take over the line to the lead and start its reader. Main thread, before `start`."""
        (self._lead,) = rendezvous.lines
        self._totals: SimpleQueue[Total | None] = SimpleQueue()
        self._mail = PendingMail()
        threading.Thread(target=self._listen, name="paceline-lead", daemon=True).start()

    def _listen(self) -> None:
        while (message := self._lead.read()) is not None:
            match message:
                case Interrupt():
                    self._interrupts.arrived()
                case Total():
                    self._totals.put(message)
                case _:
                    self.post(_Received(0, message))
        self._totals.put(None)
        self.post(_Received(0, None))

    # ---- the thread -----------------------------------------------------------------------

    def _take(self, event: ev.Event | Within) -> None:
        match event:
            case _Received(message=Ordered(now_ns=now, event=ordered)):
                self._obey(ordered, now)
            case _Received():
                _end_with("rank 0", over=self.machine.state.ended)
            case ev.Step():
                self._lead.tell(FromScript(self._reducer.finish(event)))
            case _ if isinstance(event, SCRIPT):
                self._lead.tell(FromScript(event))
            case ev.Written():
                self._lead.tell(Wrote(event))
            case _:
                log.debug("%s is the lead's to hear", type(event).__name__)

    def _obey(self, event: ev.Event, now: int) -> None:
        if isinstance(event, LogPart | StateTransfer):
            self._stage(self._mail.take(_key(event), self.machine.state.promise))
        if self._interrupts.interrupts(event):
            self._interrupts.taken()
        if not isinstance(event, (ev.Step, *ROUND)):
            self._catch_up()
        self._handle(event, now)
        self._unstage(event)
        if isinstance(event, Prepare):
            self._mail.drop_unwanted(self.machine.state.promise)

    def _agreed(self, outcomes: Sequence[ev.Event]) -> Sequence[ev.Event]:
        for event in outcomes:
            self._lead.tell(Came(event))
        return ()

    def _do(self, effect: ev.Prompt) -> ev.Event | None:
        if isinstance(effect, ev.ToPeer | ev.ToCoordinator | ev.WakeAt | ev.RefusePeer):
            return None  # only the lead does this
        return super()._do(effect)

    def sum(self, value: float) -> float:
        """Return the sum of a number over the group (see `LeadThread.sum`)."""
        self._lead.tell(Square(value))
        return _next(self._totals, Total, "rank 0").value

    def _receive(self, mail: ReceivedMessage) -> None:
        if isinstance(mail.message, LogPart | StateTransfer):
            key = _key(mail.message)
            if self._keep(key, mail):
                self._lead.tell(Mail(key))


def _next(answers: SimpleQueue[Any], kind: type[T], who: str) -> T:
    """Take the next answer of another rank of the group.

    If there is none, this process ends: at once if the other rank has ended, else after ANSWER_S.

    Args:
        answers: The rank's answers; a None stands for its end.
        kind: The type that the answer must have.
        who: Name of the rank, for the log.

    Returns:
        The answer.
    """
    try:
        answer = answers.get(timeout=ANSWER_S)
    except Empty:
        log.error("%s of this group has not answered for %g s", who, ANSWER_S)
        answer = None
    if answer is None:
        _end_with(who, over=False)
    assert isinstance(answer, kind), answer
    return answer


def _end_with(who: str, *, over: bool) -> None:
    """End this process unless the job is over: a group ends as one, and is started again (R50)."""
    if not over:
        log.error("%s of this group has ended, and this one ends with it", who)
        os._exit(1)
