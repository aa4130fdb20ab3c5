"""Limits of an HTTP server of Paceline: who may connect, for how long, and what is refused.

aiohttp parses requests. It has no bound on connections, on the time for a TLS handshake or on the
time for the first header, and it logs a traceback for each malformed request. This front accepts
the sockets itself, so all of that is bounded before a byte is parsed. Each refusal is counted, and
a flood of them makes one line of log per minute (`paceline.refusals`).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import itertools
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import LineTooLong
from paceline_api.errors import printable
from paceline_api.times import NS_PER_S

from paceline.clock import now_ns
from paceline.core.admission import Admission, Bounds
from paceline.limits import LISTEN_BACKLOG
from paceline.refusals import Entry, RefusalReason, Refusals

log = logging.getLogger("paceline.http")

HANDSHAKE_S: Final = 30.0
"""Timeout for a TLS handshake. A whole job may connect at once, and one thread serves it."""
HEADER_S: Final = 20.0
"""Timeout for the header of a request. It begins with the connection, or with the answer before it.
It is longer than the 15 s for which the operator leaves a connection idle."""
UNREAD_S: Final = 30.0
"""Time after which a caller that is not known yet, and reads nothing of its answer, is cut off."""
BODY_S: Final = 10.0
"""Timeout for the body of a request, once its header was accepted."""
LINE_BYTES_MAX: Final = 4 * 1024
"""Maximum size of the request line and of one header, in bytes. A token of a service account takes
1.5 KiB."""
HEADERS_MAX: Final = 48
"""Maximum number of headers of one request. A request through the API server has about 12."""
ACCEPTED_AT_ONCE: Final = 64
"""Number of connections taken from the backlog before other work of the event loop has its turn."""
ACCEPT_RETRY_S: Final = 1.0
"""Pause of accepting after this process has run out of files or memory."""
DETAIL_CHARACTERS_MAX: Final = 200
"""Maximum length of the description of a refusal in a log line."""
TRACEBACK_EVERY_NS: Final = 60 * NS_PER_S
"""Minimum interval between two tracebacks of a handler that failed."""
REASON_OF_STATUS: Final = {
    400: RefusalReason.MALFORMED,
    401: RefusalReason.UNAUTHENTICATED,
    403: RefusalReason.UNAUTHENTICATED,
    408: RefusalReason.TOO_SLOW,
    413: RefusalReason.TOO_LARGE,
}
"""Reason under which a response with this status counts as a refusal."""
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """Front of one application. It lives on the event loop that calls `start`."""

    def __init__(
        self,
        app: web.Application,
        entry: Entry,
        bounds: Callable[[], Bounds],
        refusals: Refusals,
        *,
        shutdown_s: float = 1.0,
    ) -> None:
        """Put this front before `app`, which must not have been started.

        Args:
            app: Handlers and middlewares. `caller_of` gives them the caller of a request.
            entry: Name of the server in counts and log lines.
            bounds: Returns the maximum numbers of connections at present.
            refusals: Counter of its refusals.
            shutdown_s: How long `stop` waits for requests that are being answered.
        """
        app.middlewares.insert(0, self._watch)
        self.entry, self._refusals = entry, refusals
        self._admission = Admission(bounds)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_RequestLog(self),
            shutdown_timeout=shutdown_s,
            keepalive_timeout=2 * HEADER_S,  # `Caller` cuts off earlier than aiohttp's own timer
            lingering_time=1.0,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
            max_headers=HEADERS_MAX,
            auto_decompress=False,  # a compressed body would only serve to fill the memory
        )
        self._listener: socket.socket | None = None
        self._tls: ssl.SSLContext | None = None
        self._numbers = itertools.count()
        self._callers: dict[int, Caller] = {}
        self._by_protocol: dict[object, Caller] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._resume: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serve the connections of a listening socket.

        Args:
            listener: The socket, which this front owns from now on.
            tls: TLS settings; None for plain HTTP.
        """
        await self._runner.setup()
        listener.setblocking(False)
        listener.listen(LISTEN_BACKLOG)
        self._listener, self._tls = listener, tls
        asyncio.get_running_loop().add_reader(listener.fileno(), self._take)

    async def stop(self) -> None:
        """Close the listening socket, let requests end, then close all connections."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        if self._resume is not None:
            self._resume.cancel()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        await self._runner.cleanup()

    def refuse(self, reason: RefusalReason, address: str, detail: str = "") -> None:
        """Count a refusal, and log it if a line is due.

        Args:
            reason: Reason of the refusal.
            address: Address of the caller.
            detail: Description of the fault. It may hold bytes of the caller; they are escaped.
        """
        line = self._refusals.refuse(self.entry, reason, address, now_ns())
        if line is not None:
            shown = printable(detail[:DETAIL_CHARACTERS_MAX])
            log.warning("%s%s", line, f" ({shown})" if shown else "")

    # ---- connections ----------------------------------------------------------------------

    def _take(self) -> None:
        """Accept waiting connections, a bounded number at a time.

        Raises:
            OSError: Accepting failed for another reason than a lack of files or memory.
        """
        if self._listener is None:
            return
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._pause(error)
                return
            connection.setblocking(False)
            self._admit(connection, _address(peer))

    def _pause(self, error: OSError) -> None:
        assert self._listener is not None
        loop, number = asyncio.get_running_loop(), self._listener.fileno()
        self.refuse(RefusalReason.TOO_MANY, "anybody", error.strerror or str(error))
        loop.remove_reader(number)
        self._resume = loop.call_later(ACCEPT_RETRY_S, loop.add_reader, number, self._take)

    def _admit(self, connection: socket.socket, address: str) -> None:
        number = next(self._numbers)
        verdict = self._admission.admit(number, address)
        if verdict.displaced is not None:
            displaced = self._callers[verdict.displaced]
            self.refuse(RefusalReason.TOO_MANY, displaced.address)
            displaced.cut_off()
        if not verdict.admitted:
            self.refuse(RefusalReason.TOO_MANY, address)
            connection.close()
            return
        assert self._runner.server is not None
        caller = Caller(self, number, address, self._runner.server())
        self._callers[number] = caller
        self._by_protocol[caller.protocol] = caller
        caller.opening = asyncio.get_running_loop().create_task(self._open(connection, caller))
        self._opening.add(caller.opening)
        caller.opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, caller: Caller) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: caller,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S if self._tls is not None else None,
            )
        except ssl.SSLError as error:
            self.refuse(_reason_of(error), caller.address, str(error))
        except ConnectionAbortedError as error:  # asyncio raises this for a handshake timeout
            self.refuse(RefusalReason.TOO_SLOW, caller.address, str(error))
        except OSError:
            pass  # the caller has gone
        finally:
            if not caller.connected:
                connection.close()
                self.release(caller)

    def know(self, caller: Caller) -> None:
        """Note that a caller has shown who it is, so that it is never displaced by another."""
        self._admission.know(caller.number)

    def release(self, caller: Caller) -> None:
        """Free the place of a connection that has ended."""
        self._admission.release(caller.number)
        self._callers.pop(caller.number, None)
        self._by_protocol.pop(caller.protocol, None)

    # ---- requests -------------------------------------------------------------------------

    @web.middleware
    async def _watch(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Tell the caller's timers about the request, and count refused ones.

        Args:
            request: The request, whose header is complete.
            handler: The next middleware, or the handler.

        Returns:
            The handler's response; status 408 if the connection has ended meanwhile.

        Raises:
            HTTPException: The handler refused the request by raising it.
        """
        caller = self._by_protocol.get(request.protocol)
        if caller is None:  # the connection has ended, so the answer would not be read
            return web.Response(status=408)
        request[_CALLER] = caller
        caller.request_began()
        try:
            response = await handler(request)
        except web.HTTPException as error:
            self._count(error.status, caller)
            raise
        finally:
            caller.request_ended()
        self._count(response.status, caller)
        return response

    def _count(self, status: int, caller: Caller) -> None:
        if status in REASON_OF_STATUS:
            self.refuse(REASON_OF_STATUS[status], caller.address)


class Caller(asyncio.Protocol):
    """One connection: passes its events to aiohttp's protocol, and ends it when it is too slow."""

    def __init__(self, front: Front, number: int, address: str, protocol: asyncio.Protocol) -> None:
        self._front, self.number, self.address = front, number, address
        self.protocol = protocol
        self.opening: asyncio.Task[None] | None = None
        self.connected = False
        self._transport: asyncio.Transport | None = None
        self._known = False
        self._requests = 0
        """Number of requests being answered. aiohttp answers them one after the other."""
        self._began = True
        """True if a request has begun: bytes have come since the last one, or there was none."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def know(self) -> None:
        """Note that this caller has shown who it is. From now on it is never displaced."""
        if not self._known:
            self._known = True
            self._front.know(self)
            _cancel(self._unread_timer)

    def refuse(self, reason: RefusalReason, detail: str = "") -> None:
        """Count a refusal of something that this caller has sent."""
        self._front.refuse(reason, self.address, detail)

    def cut_off(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def request_began(self) -> None:
        """Stop the timer of the header, which is complete."""
        self._requests += 1
        self._began = False
        _cancel(self._header_timer)

    def request_ended(self) -> None:
        """Start the timer for the next request."""
        self._requests -= 1
        self._await_header()

    def _await_header(self) -> None:
        _cancel(self._header_timer)
        if self.connected:
            loop = asyncio.get_running_loop()
            self._header_timer = loop.call_later(HEADER_S, self._header_is_late)

    def _header_is_late(self) -> None:
        if self._began:  # else the connection is only idle
            self.refuse(RefusalReason.TOO_SLOW)
        self.cut_off()

    def _answer_is_unread(self) -> None:
        self.refuse(RefusalReason.TOO_SLOW)
        self.cut_off()

    # ---- events of the transport ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer of the first header, and pass the event to aiohttp's protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.connected = transport, True
        self._await_header()
        self.protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Note that a request has begun, and pass the bytes to aiohttp's protocol."""
        self._began = self._began or not self._requests
        self.protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass the event to aiohttp's protocol."""
        return self.protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and free the place, and pass the event to aiohttp's protocol."""
        self.connected = False
        _cancel(self._header_timer)
        _cancel(self._unread_timer)
        self._front.release(self)
        self.protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timer for an unread answer, unless the caller has shown who it is."""
        if not self._known:
            loop = asyncio.get_running_loop()
            self._unread_timer = loop.call_later(UNREAD_S, self._answer_is_unread)
        self.protocol.pause_writing()

    def resume_writing(self) -> None:
        """Stop the timer for an unread answer."""
        _cancel(self._unread_timer)
        self.protocol.resume_writing()


_CALLER: Final = web.RequestKey("caller", Caller)


def caller_of(request: web.Request) -> Caller:
    """Return the connection on which a request has come, for handlers behind a `Front`."""
    return request[_CALLER]


class _RequestLog(logging.Logger):
    """Logger of one aiohttp server. Malformed requests are counted instead of logged one by one."""

    def __init__(self, front: Front) -> None:
        super().__init__("paceline.http.requests", logging.DEBUG)
        self.parent = log
        self._front = front
        self._next_traceback_ns = 0

    def handle(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            args: Any = record.args
            large = isinstance(error, LineTooLong)
            self._front.refuse(
                RefusalReason.TOO_LARGE if large else RefusalReason.MALFORMED,
                str(args[0]) if args else "?",
            )
        elif error is None:
            if record.levelno > logging.DEBUG:
                super().handle(record)
        elif (now := now_ns()) >= self._next_traceback_ns:
            self._next_traceback_ns = now + TRACEBACK_EVERY_NS
            super().handle(record)


def _address(peer: Any) -> str:
    """Return the address that stands for one caller; for IPv6 the /64 network of one host."""
    if not isinstance(peer, tuple):
        return "unix"
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def _reason_of(error: ssl.SSLError) -> RefusalReason:
    unknown = isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE" in (
        error.reason or ""
    )
    return RefusalReason.UNAUTHENTICATED if unknown else RefusalReason.MALFORMED


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
