"""Metrics over TLS with a token: the API server decides who may read, and asking is bounded."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
import pytest
from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.scrapers import (
    ACCESS_REVIEWS,
    ASKED,
    REMEMBERED_MAX,
    REMEMBERED_S,
    TOKEN_BYTES_MAX,
    TOKEN_REVIEWS,
    Scrapers,
)
from paceline_operator.cluster.tls import metrics_context
from paceline_operator.health import Guarded, serving

from tests.operator.test_health import Desk


class Server:
    """A server that knows `good`, whose owner may read, and `poor`, whose owner may not."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.away = False
        self.now_s = 1000.0
        self.scrapers = Scrapers(self.create, lambda: self.now_s)

    async def create(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append(path)
        if self.away:
            raise ApiError(0, "Unreachable", "away")
        if path == TOKEN_REVIEWS:
            name = {"good": "prometheus", "poor": "pod"}.get(body["spec"]["token"])
            if name is None:
                return {"status": {"authenticated": False}}
            return {"status": {"authenticated": True, "user": {"username": name}}}
        assert path == ACCESS_REVIEWS
        assert body["spec"]["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        return {"status": {"allowed": body["spec"]["user"] == "prometheus"}}

    def verdict(self, header: str) -> HTTPStatus:
        return asyncio.run(self.scrapers.verdict(header))


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer good", HTTPStatus.OK),
        ("bearer good", HTTPStatus.OK),
        ("Bearer poor", HTTPStatus.FORBIDDEN),
        ("Bearer unknown", HTTPStatus.UNAUTHORIZED),
        ("Bearer half \ud800 of a pair", HTTPStatus.UNAUTHORIZED),
        ("Bearer " + "x" * (TOKEN_BYTES_MAX + 1), HTTPStatus.UNAUTHORIZED),
        ("Bearer ", HTTPStatus.UNAUTHORIZED),
        ("Basic good", HTTPStatus.UNAUTHORIZED),
        ("", HTTPStatus.UNAUTHORIZED),
    ],
)
def test_the_api_server_decides_about_a_token(header: str, status: HTTPStatus) -> None:
    assert Server().verdict(header) == status


def test_a_verdict_is_cached_for_a_minute() -> None:
    server = Server()
    for _ in range(50):
        assert server.verdict("Bearer good") == HTTPStatus.OK
        assert server.verdict("Bearer poor") == HTTPStatus.FORBIDDEN
    assert len(server.asked) == 4
    server.now_s += REMEMBERED_S + 1
    assert server.verdict("Bearer good") == HTTPStatus.OK
    assert len(server.asked) == 6


@pytest.mark.long
def test_unknown_tokens_are_rate_limited_and_known_ones_are_served() -> None:
    server = Server()
    assert server.verdict("Bearer good") == HTTPStatus.OK
    verdicts = [server.verdict(f"Bearer {number}") for number in range(1000)]
    assert verdicts.count(HTTPStatus.TOO_MANY_REQUESTS) >= 1000 - ASKED.burst
    assert len(server.asked) <= ASKED.burst + 2
    assert server.verdict("Bearer good") == HTTPStatus.OK
    server.now_s += 30
    assert server.verdict("Bearer poor") == HTTPStatus.FORBIDDEN, "its turn comes again"


def test_the_cache_of_verdicts_is_bounded() -> None:
    server = Server()
    for number in range(2 * REMEMBERED_MAX):
        server.now_s += 1 / ASKED.per_s
        server.verdict(f"Bearer {number}")
    assert len(server.scrapers._known) == REMEMBERED_MAX


def test_no_verdict_is_given_or_cached_while_the_api_server_is_away() -> None:
    server = Server()
    server.away = True
    assert server.verdict("Bearer good") == HTTPStatus.SERVICE_UNAVAILABLE
    server.away = False
    assert server.verdict("Bearer good") == HTTPStatus.OK


def test_guarded_metrics_are_not_served_on_the_plain_port() -> None:
    async def scenario() -> None:
        server = Server()
        guarded = Guarded("127.0.0.1", 0, metrics_context(), server.scrapers)
        anybody = ssl.create_default_context()
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        async with (
            serving(Desk().health, "127.0.0.1", 0, guarded) as (plain, tls),
            aiohttp.ClientSession() as http,
        ):
            async with http.get(f"http://127.0.0.1:{plain.addresses[0][1]}/metrics") as answer:
                assert answer.status == 404
            async with http.get(f"http://127.0.0.1:{plain.addresses[0][1]}/healthz") as answer:
                assert answer.status == 200
            at = f"https://127.0.0.1:{tls.addresses[0][1]}"
            for token, status in (("", 401), ("poor", 403), ("good", 200)):
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                async with http.get(f"{at}/metrics", ssl=anybody, headers=headers) as answer:
                    assert answer.status == status
                    assert ("paceline_operator" in await answer.text()) is (status == 200)
            async with http.get(f"{at}/healthz", ssl=anybody) as answer:
                assert answer.status == 404

    asyncio.run(scenario())


def test_without_a_guard_metrics_are_on_the_plain_port() -> None:
    async def scenario() -> None:
        async with (
            serving(Desk().health, "127.0.0.1", 0) as (plain,),
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{plain.addresses[0][1]}/metrics") as answer,
        ):
            assert answer.status == 200

    asyncio.run(scenario())
