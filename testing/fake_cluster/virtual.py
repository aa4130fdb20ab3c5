"""An event loop whose clock jumps to the next timer, and a network inside of it.

Programs that talk by asyncio run in it unchanged: `aiohttp` connects to `http://10.0.0.1:80`, and
whoever listens there in the same loop is at the other end. A message takes one millisecond, so that
what two ends do at once has an order, and always the same one.

The network can refuse, swallow or cut what goes to an address, which is all that a distant machine
can see of another one's misfortune.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

Address = tuple[str, int]
Result = TypeVar("Result")

LATENCY_S: Final = 0.001
TURN_S: Final = 1e-6
"""What a turn of the loop takes at least: whoever waits for a clock must see it move."""


class _Selector(selectors.DefaultSelector):
    """Never waits: what it would have waited for lies in the future of the virtual clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for somebody else"
            self.loop.now_s += max(TURN_S, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Threads have no virtual time, so whatever is sent to one is done at once."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.network = Network(self)

    def time(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        """So much time passes."""
        self.run_until_complete(asyncio.sleep(seconds))

    def until_done(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.run_until_complete(work)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        del executor
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # it belongs to whoever awaits
            done.set_exception(error)
        return done

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Signals are not of this world."""

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        await self.network.reach((address[0], address[1]))
        self.network.reached[sock.fileno()] = (address[0], address[1])

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], *_: Any, sock: socket.socket, **__: Any
    ) -> tuple[asyncio.Transport, Any]:
        address = self.network.reached.pop(sock.fileno())
        sock.close()
        return self.network.connect(address, protocol_factory())

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], host: str, port: int, **_: Any
    ) -> Listener:
        return self.network.listen((host, port), protocol_factory)


class Listener:
    """What `create_server` gives back, as far as anybody uses it."""

    sockets = ()

    def __init__(self, network: Network, address: Address) -> None:
        self._network, self._address = network, address

    def close(self) -> None:
        self._network.listeners.pop(self._address, None)

    async def wait_closed(self) -> None:
        return


class Network:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.listeners: dict[Address, Callable[[], Any]] = {}
        self.reached: dict[int, Address] = {}
        """Sockets that are connected and have no protocol yet, by number."""
        self._ends: dict[Address, list[End]] = {}
        self._swallowing: set[str] = set()
        """Hosts from and to which nothing comes through; whoever sends does not notice."""
        self._heard = asyncio.Event()
        self.opened = 0

    def listen(self, address: Address, factory: Callable[[], Any]) -> Listener:
        assert address not in self.listeners, f"{address} is in use"
        self.listeners[address] = factory
        return Listener(self, address)

    async def reach(self, address: Address) -> None:
        await asyncio.sleep(LATENCY_S)
        while address[0] in self._swallowing:
            self._heard.clear()
            await self._heard.wait()
        if address not in self.listeners:
            raise ConnectionRefusedError(111, f"nobody listens at {address}")

    def connect(self, address: Address, client: Any) -> tuple[asyncio.Transport, Any]:
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
        """Each connection to this host ends now; new ones work."""
        ends = self._of(host)
        for end in ends:
            end.abort()
        return len(ends)

    def swallow(self, host: str, swallows: bool) -> None:
        """Nothing comes through, or all that was held back."""
        (self._swallowing.add if swallows else self._swallowing.discard)(host)
        self._heard.set()
        for end in self._of(host):
            end.hold(swallows)

    def _of(self, host: str) -> list[End]:
        found = [end for address, ends in self._ends.items() if address[0] == host for end in ends]
        return [end for end in found if not end.is_closing()]


class End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, loop: VirtualLoop, protocol: Any) -> None:
        super().__init__()
        self._loop, self._protocol = loop, protocol
        self.peer: End
        self.held = False
        self._mail: list[bytes | None] = []
        """What has arrived and was not read yet, in order; None for the end."""
        self._wire: deque[bytes | None] = deque()
        """What is under way to the other end."""
        self._paused = self._closing = False

    # ---- what a protocol asks for -------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("10.0.0.254", 1) if name in ("peername", "sockname") else default

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no limit."""

    def can_write_eof(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return not self._paused

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._loop.call_soon(self._read)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self._send(bytes(data))

    def close(self) -> None:
        self._end(None)

    def abort(self) -> None:
        self._end(ConnectionResetError(104, "the connection was cut"))

    # ---- inside -------------------------------------------------------------------------------

    def _end(self, error: Exception | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.call_soon(self._protocol.connection_lost, error)
        self._send(None)

    def _send(self, data: bytes | None) -> None:
        """Timers of one moment have no order, what is sent has one."""
        self._wire.append(data)
        self._loop.call_later(LATENCY_S, self.peer._arrives, self._wire)

    def hold(self, held: bool) -> None:
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
