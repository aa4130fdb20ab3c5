"""An event loop whose clock jumps to the next timer, with a network inside it.

Programs that use asyncio run in it unchanged: `aiohttp` connects to `http://10.0.0.1:80`, and the
listener at that address in the same loop is the other end. A message takes one millisecond, so
concurrent actions of two ends have an order, and always the same one. The network can refuse,
swallow or cut the traffic to an address. A remote machine cannot observe more than that of another
one's failure.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

Address = tuple[str, int]
Result = TypeVar("Result")

LATENCY_S: Final = 0.001
TURN_S: Final = 1e-6
"""Shortest time that a turn of the loop takes, so that code which polls a clock sees it move."""


class _Selector(selectors.DefaultSelector):
    """A selector that never waits: it moves the virtual clock to the end of the wait."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for somebody else"
            self.loop.now_s += max(TURN_S, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop on a virtual clock; work for threads runs at once, since threads have none."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.network = Network(self)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now_s

    def spend(self, seconds: float) -> None:
        """Run the loop for this virtual time."""
        self.run_until_complete(asyncio.sleep(seconds))

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call the function at once on this thread."""
        del executor
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # raised where the future is awaited
            done.set_exception(error)
        return done

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Ignore the request: the virtual loop has no signals."""

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Reach an address of the virtual network."""
        await self.network.reach((address[0], address[1]))
        self.network.reached[sock.fileno()] = (address[0], address[1])

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], *_: Any, sock: socket.socket, **__: Any
    ) -> tuple[asyncio.Transport, Any]:
        """Connect a protocol to the address that its socket has reached."""
        address = self.network.reached.pop(sock.fileno())
        sock.close()
        return self.network.connect(address, protocol_factory())

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], host: str, port: int, **_: Any
    ) -> Listener:
        """Listen at an address of the virtual network."""
        return self.network.listen((host, port), protocol_factory)


class Listener:
    """Result of `create_server`, with the methods that are used of it."""

    sockets = ()

    def __init__(self, network: Network, address: Address) -> None:
        self._network, self._address = network, address

    def close(self) -> None:
        """Stop listening; open connections remain."""
        self._network.listeners.pop(self._address, None)

    async def wait_closed(self) -> None:
        """Return at once."""
        return


class Network:
    """All listeners and connections of a loop, and the faults of the hosts."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.listeners: dict[Address, Callable[[], Any]] = {}
        self.reached: dict[int, Address] = {}
        """File descriptors of sockets that have connected and have no protocol yet."""
        self._ends: dict[Address, list[End]] = {}
        self._swallowing: set[str] = set()
        """Hosts whose traffic is held back in both directions; senders do not notice."""
        self._news = asyncio.Event()
        self.opened = 0

    def listen(self, address: Address, factory: Callable[[], Any]) -> Listener:
        """Let `factory` make the protocol of each connection to an address."""
        assert address not in self.listeners, f"{address} is in use"
        self.listeners[address] = factory
        return Listener(self, address)

    async def reach(self, address: Address) -> None:
        """Wait until an address can be reached; raise ConnectionRefusedError without a listener."""
        await asyncio.sleep(LATENCY_S)
        while address[0] in self._swallowing:
            self._news.clear()
            await self._news.wait()
        if address not in self.listeners:
            raise ConnectionRefusedError(111, f"nobody listens at {address}")

    def connect(self, address: Address, client: Any) -> tuple[asyncio.Transport, Any]:
        """Connect a client's protocol to the listener at an address."""
        if address not in self.listeners:
            raise ConnectionRefusedError(111, f"nobody listens at {address} any more")
        self.opened += 1
        server = self.listeners[address]()
        near, far = End(self._loop, client), End(self._loop, server)
        near.peer, far.peer = far, near
        ends = self._ends.setdefault(address, [])
        ends[:] = [end for end in ends if not end.is_closing()] + [near, far]
        near.held = far.held = address[0] in self._swallowing
        client.connection_made(near)
        server.connection_made(far)
        return near, client

    def cut(self, host: str) -> int:
        """Abort each connection to a host and return their number; new ones work."""
        ends = self._of(host)
        for end in ends:
            end.abort()
        return len(ends)

    def swallow(self, host: str, swallows: bool) -> None:
        """Hold back all traffic of a host, or deliver everything that was held back."""
        (self._swallowing.add if swallows else self._swallowing.discard)(host)
        self._news.set()
        for end in self._of(host):
            end.hold(swallows)

    def _of(self, host: str) -> list[End]:
        matching = [
            end for address, ends in self._ends.items() if address[0] == host for end in ends
        ]
        return [end for end in matching if not end.is_closing()]


class End(asyncio.Transport):
    """Transport at one end of a connection."""

    def __init__(self, loop: VirtualLoop, protocol: Any) -> None:
        super().__init__()
        self._loop, self._protocol = loop, protocol
        self.peer: End
        self.held = False
        self._mail: list[bytes | None] = []
        """Data that has arrived and was not read yet, in order; None marks the end."""
        self._wire: deque[bytes | None] = deque()
        """Data in flight to the other end."""
        self._paused = self._closing = False

    # ---- what a protocol asks for -------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a fixed address for both names of addresses."""
        return ("10.0.0.254", 1) if name in ("peername", "sockname") else default

    def set_protocol(self, protocol: Any) -> None:
        """Replace the protocol, as for an upgrade to a web socket."""
        self._protocol = protocol

    def get_protocol(self) -> Any:
        """Return the protocol."""
        return self._protocol

    def is_closing(self) -> bool:
        """Return True once the end is closed."""
        return self._closing

    def get_write_buffer_size(self) -> int:
        """Return 0: nothing is buffered."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignore the limits: writing never blocks."""

    def can_write_eof(self) -> bool:
        """Return False: ends are closed as a whole."""
        return False

    def is_reading(self) -> bool:
        """Return True unless reading is paused."""
        return not self._paused

    def pause_reading(self) -> None:
        """Keep arriving data until reading resumes."""
        self._paused = True

    def resume_reading(self) -> None:
        """Deliver the data that has arrived, in the loop's next turn."""
        self._paused = False
        self._loop.call_soon(self._read)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data to the other end."""
        if not self._closing:
            self._send(bytes(data))

    def close(self) -> None:
        """Close both ends."""
        self._end(None)

    def abort(self) -> None:
        """Close both ends; the protocol here receives ConnectionResetError."""
        self._end(ConnectionResetError(104, "the connection was cut"))

    # ---- inside -------------------------------------------------------------------------------

    def _end(self, error: Exception | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.call_soon(self._protocol.connection_lost, error)
        self._send(None)

    def _send(self, data: bytes | None) -> None:
        """Queue data for the other end; timers of the same moment have no order, the queue has."""
        self._wire.append(data)
        self._loop.call_later(LATENCY_S, self.peer._arrives, self._wire)

    def hold(self, held: bool) -> None:
        """Hold back arriving data, or deliver it again."""
        self.held = held
        self._loop.call_soon(self._read)

    def _arrives(self, wire: deque[bytes | None]) -> None:
        self._mail.append(wire.popleft())
        self._read()

    def _read(self) -> None:
        while self._mail and not self._paused and not self.held and not self._closing:
            data = self._mail.pop(0)
            if data is not None:
                self._protocol.data_received(data)
                continue
            self._protocol.eof_received()
            self.close()
