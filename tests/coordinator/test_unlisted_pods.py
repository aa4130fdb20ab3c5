"""A hello of a pod that no inventory lists waits, is refused in the end, and never joins."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from paceline.coordinator import server as module
from paceline.core.messages import Inventory
from paceline.refusals import Entry, RefusalReason
from paceline_api.ids import ATTEMPT_STRIDE, MemberId

from tests.coordinator.served import Served, greeting, served

OURS = MemberId(0, 0, 0)


def refused(at: Served, reason: RefusalReason = RefusalReason.UNKNOWN_PEER) -> int:
    return at.refusals.counts().get((Entry.COORDINATOR, reason), 0)


async def members(at: Served) -> set[MemberId]:
    return {rank.member for rank in (await at.status()).ranks}


async def until_known(at: Served, member: MemberId) -> None:
    """Wait until a member is in the status; the timeout of the test bounds the wait."""
    while member not in await members(at):  # noqa: ASYNC110 (the status is polled over HTTP)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (MemberId(7, 0, 0), RefusalReason.UNKNOWN_PEER),
        (MemberId(0, 0, ATTEMPT_STRIDE), RefusalReason.UNKNOWN_PEER),
        (MemberId(0, 0, 10**9), RefusalReason.UNKNOWN_PEER),
        (MemberId(-1, 0, 0), RefusalReason.MALFORMED),
    ],
)
def test_a_hello_of_an_unlisted_pod_is_refused(
    stranger: MemberId, reason: RefusalReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNLISTED_S", 0.2)

    async def run() -> None:
        async with served() as at:
            await at.post("/v1/inventory", Inventory(1, ((0, 0),)))
            before = refused(at, reason)
            line = await at.socket(greeting(stranger))
            while not line.closed:
                if (await line.receive()).type in (
                    aiohttp.WSMsgType.CLOSE,
                    aiohttp.WSMsgType.CLOSED,
                ):
                    break
            assert refused(at, reason) == before + 1
            await at.socket(greeting(OURS))
            await until_known(at, OURS)
            assert await members(at) == {OURS}

    asyncio.run(run())


def test_a_pod_newer_than_the_inventory_waits_for_the_next_inventory() -> None:
    newer = MemberId(1, 0, 3 * ATTEMPT_STRIDE)

    async def run() -> None:
        async with served() as at:
            await at.post("/v1/inventory", Inventory(1, ((0, 0),)))
            before = refused(at)
            await at.socket(greeting(newer))
            await at.socket(greeting(OURS))
            await until_known(at, OURS)
            assert await members(at) == {OURS}
            await at.post("/v1/inventory", Inventory(2, ((0, 0), (1, 3))))
            await until_known(at, newer)
            assert refused(at) == before

    asyncio.run(run())


def test_a_pod_that_was_listed_before_may_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of a living rank overrides an inventory (C4)."""
    monkeypatch.setattr(module, "UNLISTED_S", 0.0)

    async def run() -> None:
        async with served() as at:
            await at.post("/v1/inventory", Inventory(1, ((0, 0), (1, 0))))
            await at.post("/v1/inventory", Inventory(2, ((0, 0),)))
            await at.socket(greeting(MemberId(1, 0, 0)))
            await until_known(at, MemberId(1, 0, 0))

    asyncio.run(run())
