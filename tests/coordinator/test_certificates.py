"""Client certificates: the coordinator accepts only those of the job's own authority."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from paceline.control.tls import pinned
from paceline_operator.cluster.tls import Certificates, Pair, certificates_of
from paceline_operator.core.keys import job_keys

from tests.coordinator.test_process import START_S, coordinator, environment

pytestmark = pytest.mark.processes

AGENT_TOKEN, OPERATOR_TOKEN = "of-ranks", "secret"
"""The same tokens as in tests.coordinator.test_process.environment."""


@pytest.fixture(scope="module")
def mine() -> Certificates:
    return certificates_of(job_keys(bytes(32), "mine"))


@contextmanager
def serving(folder: Path, made: Certificates) -> Iterator[str]:
    """Run a coordinator with the certificates that the operator mounts, and yield its URL."""
    texts = {
        "tls.crt": made.server.certificate,
        "tls.key": made.server.private_key,
        "callers.crt": made.callers,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        env = environment(
            folder,
            PACELINE_LISTEN_FD=str(listener.fileno()),
            PACELINE_TLS_CERT=str(folder / "tls.crt"),
            PACELINE_TLS_KEY=str(folder / "tls.key"),
            PACELINE_TLS_CALLERS=str(folder / "callers.crt"),
        )
        with coordinator(env, listener.fileno()):
            yield f"https://127.0.0.1:{listener.getsockname()[1]}"


def showing(folder: Path, made: Certificates, own: Pair | None) -> ssl.SSLContext:
    crt, key = folder / "own.crt", folder / "own.key"
    if own is not None:
        crt.write_text(own.certificate)
        key.write_text(own.private_key)
    (folder / "server.crt").write_text(made.server.certificate)
    context = pinned(folder / "server.crt", (crt, key) if own is not None else None)
    assert context is not None
    return context


async def status_of(url: str, tls: ssl.SSLContext, path: str, token: str) -> int:
    """Return the HTTP status of the answer; 101 for a web socket that was opened."""
    headers = {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=START_S)
    connector = aiohttp.TCPConnector(ssl=tls)
    async with aiohttp.ClientSession(
        url, timeout=timeout, headers=headers, connector=connector
    ) as http:
        try:
            return await _status_of(http, path)
        finally:
            # Otherwise the transport of a refused connection outlives the event loop.
            await connector.close(abort_ssl=True)
            await asyncio.sleep(0.01)


async def _status_of(http: aiohttp.ClientSession, path: str) -> int:
    if path == "/v1/agents":
        try:
            async with http.ws_connect(path):
                return 101
        except aiohttp.WSServerHandshakeError as error:
            return error.status
    async with http.get(path) as response:
        return response.status


@pytest.mark.parametrize(
    ("role", "path", "token", "status"),
    [
        ("operator", "/v1/status", OPERATOR_TOKEN, 200),
        ("operator", "/metrics", OPERATOR_TOKEN, 200),
        ("agent", "/v1/agents", AGENT_TOKEN, 101),
        # Both are needed, so a stolen certificate or token alone is useless.
        ("operator", "/v1/status", "wrong", 401),
        ("agent", "/v1/agents", "wrong", 401),
        ("", "/v1/status", OPERATOR_TOKEN, 401),
        ("", "/metrics", OPERATOR_TOKEN, 401),
        ("", "/v1/agents", AGENT_TOKEN, 401),
        # A certificate is valid for its own role only, as a token is.
        ("agent", "/v1/status", OPERATOR_TOKEN, 401),
        ("operator", "/v1/agents", AGENT_TOKEN, 401),
        # The kubelet has neither.
        ("", "/healthz", "", 200),
    ],
)
def test_a_caller_needs_the_certificate_and_the_token_of_its_role(
    tmp_path: Path, mine: Certificates, role: str, path: str, token: str, status: int
) -> None:
    own: Pair | None = getattr(mine, role) if role else None
    with serving(tmp_path, mine) as url:
        tls = showing(tmp_path, mine, own)
        assert asyncio.run(status_of(url, tls, path, token)) == status


@pytest.mark.parametrize("role", ["agent", "operator", "server"])
def test_a_certificate_of_another_job_fails_the_handshake(
    tmp_path: Path, mine: Certificates, role: str
) -> None:
    other: Pair = getattr(certificates_of(job_keys(bytes(32), "another")), role)
    with serving(tmp_path, mine) as url:
        tls = showing(tmp_path, mine, other)
        for path in ("/healthz", "/v1/status", "/v1/agents"):
            with pytest.raises((aiohttp.ClientError, OSError)):
                asyncio.run(status_of(url, tls, path, OPERATOR_TOKEN))


def test_an_empty_file_of_authorities_is_reported(tmp_path: Path, mine: Certificates) -> None:
    (tmp_path / "tls.crt").write_text(mine.server.certificate)
    (tmp_path / "tls.key").write_text(mine.server.private_key)
    (tmp_path / "callers.crt").touch()
    tls = {
        "PACELINE_TLS_CERT": str(tmp_path / "tls.crt"),
        "PACELINE_TLS_KEY": str(tmp_path / "tls.key"),
        "PACELINE_TLS_CALLERS": str(tmp_path / "callers.crt"),
    }
    with coordinator(environment(tmp_path, **tls)) as process:
        _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == 2
    assert "PACELINE_TLS_CALLERS names no certificate" in stderr
    assert "Traceback" not in stderr
