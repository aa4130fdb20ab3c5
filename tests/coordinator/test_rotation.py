"""Rotation of the agents' token while the job trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from paceline.control import tokens
from paceline.control.tokens import Tokens, read_tokens
from paceline.control.voice import PodVoice
from paceline.core.agent.relay import Relay
from paceline.core.messages import PodBeat
from paceline.refusals import Entry, RefusalReason
from paceline_api.ids import MemberId
from paceline_operator.core.pods import children

from testing.fake_cluster.observations import job_of
from tests.coordinator.served import TOKEN, Served, greeting, hello, served, text
from tests.coordinator.test_server import until_closed

TIMEOUT_S = 60.0
NEW = "the-new-token-of-the-ranks"
RANKS = [MemberId(0, 0, 0), MemberId(1, 0, 0)]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


def put(file: Path, *lines: str) -> None:
    """Replace a file atomically, as the kubelet does."""
    draft = file.with_suffix(".new")
    draft.write_text("\n".join(lines) + "\n")
    draft.replace(file)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tokens, "LOOK_EVERY_NS", 0)
    return tmp_path / "tokens"


async def beat(of: aiohttp.ClientWebSocketResponse, slot: int) -> None:
    await of.send_str(text(PodBeat(slot, 0)))


async def is_refused(at: Served, token: str) -> bool:
    try:
        await (await at.bare_socket(token)).close()
    except aiohttp.WSServerHandshakeError as error:
        return error.status == 401
    return False


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  there is no event for it
        await asyncio.sleep(0.01)


def test_a_revoked_token_closes_its_connections_at_the_next_heartbeat_of_any_pod(
    file: Path,
) -> None:
    """Connections with the new token stay open, and the job continues to train."""

    async def go() -> None:
        async with served(tokens_file=file) as at:
            old = await at.socket(greeting(RANKS[0]))
            silent = await at.bare_socket()
            put(file, NEW, TOKEN)
            new = await at.socket(greeting(RANKS[1]), NEW)
            assert not await is_refused(at, TOKEN), "both count while they overlap"
            await beat(old, 0)
            put(file, NEW)
            await beat(new, 1)
            await until_closed(old)
            await until_closed(silent)
            assert await is_refused(at, TOKEN)
            assert not new.closed
            assert not await is_refused(at, NEW)
            assert (at.refusals.counts()[Entry.COORDINATOR, RefusalReason.UNAUTHENTICATED]) >= 2
            assert {rank.member for rank in (await at.status()).ranks} == set(RANKS)

    run(go())


def test_a_heartbeat_of_the_revoked_pod_itself_closes_its_connection(file: Path) -> None:
    async def go() -> None:
        async with served(tokens_file=file) as at:
            old = await at.socket(greeting(RANKS[0]))
            await at.status(after="0", timeout="5s")
            put(file, NEW)
            await beat(old, 0)
            await until_closed(old)

    run(go())


@pytest.mark.long
def test_an_agent_reconnects_with_the_new_token(file: Path, tmp_path: Path) -> None:
    """The kubelet may update the agent's token file later than the coordinator's."""
    mine = tmp_path / "of-the-agent"

    async def go() -> None:
        async with served(tokens_file=file) as at:
            own = Tokens(TOKEN, mine)
            agent = PodVoice(
                (at.url,),
                lambda: own.own,
                Relay(0, 0),
                hello=lambda _: hello(0),
                carriers=lambda: (),
                obey=lambda _: None,
                tell=lambda *_: None,
            )
            running = asyncio.create_task(agent.run())
            await until(lambda: agent.connections == 1)
            put(file, NEW)
            await until(lambda: not agent.connected)
            put(mine, NEW)
            await until(lambda: agent.connections == 2)
            running.cancel()
            await asyncio.wait([running])

    run(go())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n\n",
        b"short\n",
        b"a" * 257,
        b"with a space inside it\n",
        b"\xff" * 20,
        b"a-good-token-of-it\n\x1b[31m-a-token-of-color\n",
        b"a-token-of-sixteen\n" * 9,
        b"x" * 100_000,
        bytes(20),
    ],
)
def test_an_invalid_token_file_changes_nothing_and_is_not_logged(
    data: bytes, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError):
        read_tokens(data)
    own = Tokens(TOKEN, file)
    put(file, NEW, TOKEN)
    assert own.look()
    file.write_bytes(data)
    assert not own.look()
    assert own.accepted == (NEW, TOKEN)
    assert not own.look()
    assert caplog.text.count("are not used") == 1
    assert not {"token-of", "\x1b", "xxxx", "short"} & set(caplog.text.split())


def test_without_a_readable_token_file_the_initial_token_is_used(tmp_path: Path) -> None:
    """The initial token is valid again if the token file is removed."""
    own = Tokens(TOKEN, tmp_path / "missing")
    assert own.own == TOKEN
    put(tmp_path / "missing", NEW)
    assert own.own == NEW
    (tmp_path / "missing").unlink()
    assert own.own == TOKEN
    (tmp_path / "missing").mkdir()
    assert own.own == TOKEN


def test_pods_mount_the_token_secret_as_optional() -> None:
    job = job_of()
    for pod in (children.worker(job, 0, 0, key_id="k"), children.coordinator(job, 0, key_id="k")):
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "paceline-tokens")
        assert volume["secret"]["secretName"] == f"digits-{job.uid[:8]}-tokens"
        assert volume["secret"]["optional"] is True
        env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
        assert env["PACELINE_TOKENS_FILE"] == "/etc/paceline-tokens/tokens"
