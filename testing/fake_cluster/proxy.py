"""A TCP proxy between an operator and its API server, which cuts or stalls connections.

`stall` is the silent death of a watch: the connection stands, and nothing comes through any more.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from testing.loop_end import close_connections, close_server


class Proxy:
    """TCP proxy on a free port of loopback, in a thread of its own."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._target = (target.hostname or "", target.port or 443)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._stalled: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self.opened = 0

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._end)
        self._thread.join(10)

    def kubeconfig(self, original: Path) -> Path:
        """Return a copy of a kubeconfig that reaches the server through this proxy."""
        config = yaml.safe_load(original.read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self.port}"
        path = original.with_name(f"{original.stem}-{self.port}.yaml")
        path.write_text(yaml.safe_dump(config))
        return path

    def cut(self) -> None:
        """Abort every open connection; new ones work."""
        self._call(self._cut)

    def stall(self) -> None:
        """Drop all data of the open connections from now on; new ones work."""
        self._call(lambda: self._stalled.update(self._writers))

    def _call(self, what: Callable[[], Any]) -> None:
        done = threading.Event()

        def run() -> None:
            what()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._stop = asyncio.Event()
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket)
        self._up.set()
        await self._stop.wait()
        await close_server(server)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await close_connections()

    def _end(self) -> None:
        self._stop.set()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.opened += 1
        there: asyncio.StreamWriter | None = None
        try:
            back, there = await asyncio.open_connection(*self._target)
            self._writers |= {writer, there}
            await asyncio.gather(self._pump(reader, there), self._pump(back, writer))
        except OSError:
            pass  # one side is gone, so both are
        finally:
            self._tasks.discard(task)
            for end in (writer, there):
                if end is not None:
                    self._writers.discard(end)
                    self._stalled.discard(end)
                    end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if writer not in self._stalled:
                writer.write(data)
                await writer.drain()
        if writer not in self._stalled:
            writer.close()
