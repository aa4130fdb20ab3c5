"""A rank's line to the coordinator, which runs through its agent (R43).

The line has a thread of its own, so a rank that computes stays reachable. Orders go to the
communication thread. Orders that end what it may be blocked in (PREPARE, RELEASE, DISMISS) raise
the abort flag first. The agent announces each new connection that it has. The rank then sends
Register first, and the state machine repeats whatever may have been lost (`Connected`). Between
rank and agent heartbeats are sent every fifth of a second; the agent sends the coordinator only
what it needs.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
from paceline_api.times import NS_PER_MS, NS_PER_S

from paceline.clock import now_ns
from paceline.control import packets
from paceline.core import wire
from paceline.core.messages import (
    BeatEvery,
    Heartbeat,
    Introduce,
    RankEnvelope,
    RankFigures,
    RankMessage,
    Register,
    ToRank,
)

log = logging.getLogger("paceline.rank")

BEAT_NS: Final = NS_PER_S // 5
"""Interval between two heartbeats to the agent, in nanoseconds."""
OUTBOX_MAX: Final = 256
"""Upper bound on the number of unsent messages. An agent that leaves more of them unread is frozen;
the rank then drops them and introduces itself anew."""
CLOSE_S: Final = 5.0
"""Upper bound on how long `close` takes, in seconds."""


class CoordinatorLine:
    """The rank's end of the line, with the thread that serves it (`ControlChannel`).

    Takes over the descriptor. The callbacks decide what is sent and what is done about an order.
    """

    def __init__(
        self,
        fd: int,
        *,
        register: Callable[[], Register],
        heartbeat: Callable[[], Heartbeat],
        figures: Callable[[], RankFigures],
        obey: Callable[[ToRank], None],
        connected: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Take over the descriptor; the thread begins with `start`.

        All callbacks are called on the line's own thread.

        Args:
            fd: One end of a pair of packet sockets; the agent has the other one.
            register: Returns this rank's registration.
            heartbeat: Returns the next heartbeat.
            figures: Returns the figures for `status`.
            obey: Takes an order of the coordinator.
            connected: Called when the agent has a new connection to the coordinator.
            failed: Takes the exception that ended the thread; not called when the agent has ended.
        """
        os.set_inheritable(fd, False)  # not for the script's own subprocesses
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._register, self._heartbeat, self._figures = register, heartbeat, figures
        self._obey, self._connected, self._failed = obey, connected, failed
        self._news: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        """Guards `_news`, `_outbox` and `_connection`, which other threads read and change."""
        self._outbox: deque[RankMessage] = deque()
        """Unsent messages, for the connection with number `_connection` only."""
        self._connection = 0
        """Number of the agent's connection, as the agent reported it; 0 if it has none."""
        self._registered: Register | None = None
        """The registration that was sent last on this connection, or None."""
        self._figures_ns = BEAT_NS
        self._beat_due_ns = self._figures_due_ns = 0
        self._complaint = ""
        self._closing_ns: int | None = None
        """Deadline after which a line that is being closed drops its unsent messages, or None."""
        self._thread = threading.Thread(target=self._run, name="paceline-link", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, message: RankMessage) -> None:
        """Queue a message for the coordinator. Any thread may call this; it never blocks.

        The message is lost if the agent has no connection. Nothing is missing then, because the
        next connection begins with Register and the state machine repeats what matters.
        """
        with self._lock:
            if not self._connection:
                return
            self._outbox.append(message)
        self._wake()

    def close(self) -> None:
        """Send what is queued and end the thread; drop the rest after CLOSE_S."""
        if self._thread.is_alive():
            self._closing_ns = now_ns() + int(CLOSE_S * NS_PER_S)
            self._wake()
            self._thread.join(CLOSE_S)

    def _wake(self) -> None:
        with self._lock:
            if self._news is not None:
                os.eventfd_write(self._news, 1)

    # ---- the line's own thread ------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            log.exception("the line to the coordinator has failed")
            self._failed(error)
        finally:
            self._socket.close()
            with self._lock:
                assert self._news is not None
                os.close(self._news)
                self._news = None

    def _turn(self) -> bool:
        """Write, wait, read and send heartbeats once.

        Returns:
            False at the end: the agent has ended, or everything is sent and the line is being
            closed.
        """
        all_said = self._write()
        if self._closing_ns is not None and (all_said or now_ns() >= self._closing_ns):
            return False
        self._wait(all_said)
        while True:
            try:
                data = packets.receive(self._socket)
            except BlockingIOError:
                break
            if data is None:
                return False
            self._take(data)
        if self._connection and now_ns() >= self._beat_due_ns and self._write():
            self._beat()
        return True

    def _wait(self, all_said: bool) -> None:
        """Wait for a packet, a message to send, space in the socket, or the next deadline."""
        assert self._news is not None
        poll = select.poll()
        poll.register(self._news, select.POLLIN)
        poll.register(self._socket, select.POLLIN | (0 if all_said else select.POLLOUT))
        due_ns = [self._beat_due_ns] if self._connection else []
        due_ns += [self._closing_ns] if self._closing_ns is not None else []
        left_ns = max(0, min(due_ns) - now_ns()) if due_ns else None
        if any(fd == self._news for fd, _ in poll.poll(left_ns and -(-left_ns // NS_PER_MS))):
            os.eventfd_read(self._news)

    def _take(self, data: bytes) -> None:
        try:
            order = wire.message_to_rank(data)
        except wire.WireError as error:
            log.warning("the coordinator sent something that is not a message: %s", error)
            return
        try:
            match order:
                case Introduce(connection=connection):
                    self._introduce(connection)
                case BeatEvery(ms=ms, figures=figures):
                    self._figures_ns = max(BEAT_NS, ms * figures * NS_PER_MS)
                case _:
                    self._obey(order)
        except Exception as error:
            # Whatever failed: a rank that registers again is sent all that it has to know.
            self._complain(f"{type(order).__name__} could not be followed: {error!r}", error)
            self._registered = None
            self.send(self._register())

    def _introduce(self, connection: int) -> None:
        """Begin a connection with Register and drop what was queued for the one before.

        The state machine sends the dropped messages again when it handles `connected`.
        """
        register = self._register()
        with self._lock:
            self._connection, self._registered = connection, None
            self._outbox.clear()
            self._outbox.append(register)
        self._beat_due_ns = self._figures_due_ns = 0
        self._connected()

    def _write(self) -> bool:
        """Send the queued messages; return True if none is left."""
        if len(self._outbox) > OUTBOX_MAX:
            self._introduce(self._connection)
        while self._outbox:  # other threads only append
            message = self._outbox[0]
            known = isinstance(message, Register) and message == self._registered
            if not known and not self._say(message):
                return False
            self._outbox.popleft()
        return True

    def _say(self, message: RankMessage | Heartbeat) -> bool:
        """Send a message; return False if the socket has no space for it."""
        try:
            packets.send(self._socket, msgspec.json.encode(RankEnvelope(self._connection, message)))
        except BlockingIOError:
            return False
        except OSError:
            return True  # the agent has ended, which the next read reports
        if isinstance(message, Register):
            self._registered = message
        return True

    def _beat(self) -> None:
        now = now_ns()
        self._beat_due_ns = now + BEAT_NS
        self._say(self._heartbeat())
        if now >= self._figures_due_ns:
            self._figures_due_ns = now + self._figures_ns
            self._say(self._figures())

    def _complain(self, text: str, fault: Exception) -> None:
        """Log a problem, once as long as it stays the same."""
        if text != self._complaint:
            log.warning("%s", text, exc_info=fault)
            self._complaint = text
