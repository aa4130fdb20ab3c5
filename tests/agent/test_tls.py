"""TLS of the control channel as an agent uses it: it trusts only its own job's certificate."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from paceline.control.tls import pinned
from paceline.control.voice import PodVoice
from paceline.core.agent.relay import Relay
from paceline.core.messages import AgentHello
from paceline_api.errors import PacelineError
from paceline_operator.cluster.tls import pair_of
from paceline_operator.core.keys import job_keys


def certificate_of(uid: str, folder: Path) -> tuple[Path, Path]:
    pair = pair_of(job_keys(bytes(32), uid))
    crt, key = folder / f"{uid}.crt", folder / f"{uid}.key"
    crt.write_text(pair.certificate)
    key.write_text(pair.private_key)
    return crt, key


@asynccontextmanager
async def coordinator(uid: str, folder: Path) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Serve a coordinator; yield its address and an event that the first message sets."""
    received = asyncio.Event()

    async def greet(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        received.set()
        await socket.receive()
        return socket

    app = web.Application()
    app.add_routes([web.get("/v1/agents", greet)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate_of(uid, folder))
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}", received
    finally:
        await runner.cleanup()


async def tells(uid: str, trusted: str, folder: Path) -> bool:
    """Return True if an agent that trusts one coordinator sends a message to that of `uid`."""
    tls = pinned(certificate_of(trusted, folder)[0])
    hello = AgentHello(0, 1, "here", "", (), ())
    async with coordinator(uid, folder) as (url, received):
        agent = PodVoice(
            (url,),
            lambda: "token",
            Relay(0, 1),
            hello=lambda _: hello,
            carriers=lambda: (),
            obey=lambda _: None,
            tell=lambda *_: None,
            tls=tls,
        )
        running = asyncio.create_task(agent.run())
        try:
            async with asyncio.timeout(60 if uid == trusted else 1):
                await received.wait()
        except TimeoutError:
            return False
        finally:
            running.cancel()
            await asyncio.wait([running])
            await asyncio.sleep(0.05)  # until the loop has closed the connections
        return True


def test_an_agent_reaches_its_own_coordinator(tmp_path: Path) -> None:
    assert asyncio.run(tells("mine", "mine", tmp_path))


@pytest.mark.long
def test_an_agent_sends_nothing_to_another_coordinator(tmp_path: Path) -> None:
    assert not asyncio.run(tells("other", "mine", tmp_path))


def test_the_error_names_a_certificate_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"PACELINE_TLS_CERT names .*missing") as refused:
        pinned(tmp_path / "missing")
    assert "Secret" in refused.value.hint
    (tmp_path / "empty").touch()
    with pytest.raises(PacelineError, match="no certificate"):
        pinned(tmp_path / "empty")


def test_a_run_on_one_machine_needs_no_certificate() -> None:
    assert pinned(None) is None
