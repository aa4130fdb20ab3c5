"""The limit of requests to the API server: those above it wait in order, which is counted."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web
from paceline_api.access.access import Access
from paceline_api.access.login import Login
from paceline_operator import options
from paceline_operator.cluster.kube import Kube
from paceline_operator.core.shares import Rate
from paceline_operator.metrics import OperatorMetrics


async def answered(rate: Rate | None, requests: int) -> tuple[list[str], float, float]:
    """Send requests at once; return the order of arrival, the seconds, and the counted waits."""
    paths: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.get("/{number}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    login = Login(f"http://127.0.0.1:{runner.addresses[0][1]}")
    metrics = OperatorMetrics()
    try:
        async with Kube(Access(lambda: login), metrics, rate) as kube:
            begun = time.monotonic()
            await asyncio.gather(*(kube.request("GET", f"/{n}") for n in range(requests)))
            took_s = time.monotonic() - begun
    finally:
        await runner.cleanup()
    waited = metrics.registry.get_sample_value("paceline_operator_throttled_seconds_total")
    return paths, took_s, waited or 0.0


@pytest.mark.long
def test_requests_above_the_limit_wait_in_order_and_the_wait_is_counted() -> None:
    paths, took_s, waited_s = asyncio.run(answered(Rate(per_s=20.0, burst=2.0), 8))
    assert took_s >= 6 / 20.0, "six of eight wait for a twentieth of a second each"
    # All at once they would wait for 1/20, 2/20, ... 6/20 s; on a busy machine they come later.
    assert 0.0 < waited_s <= sum(n / 20.0 for n in range(1, 7)) + 1e-9
    assert paths[2:] == [f"/{n}" for n in range(2, 8)]


def test_without_a_limit_no_request_waits() -> None:
    paths, _, waited_s = asyncio.run(answered(None, 50))
    assert (len(paths), waited_s) == (50, 0.0)


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ([], None),
        (["--api-qps=50"], Rate(50.0, 100.0)),
        (["--api-qps=50", "--api-burst=7"], Rate(50.0, 7.0)),
        (["--api-qps=0.2"], Rate(0.2, 1.0)),
    ],
)
def test_the_limit_is_taken_from_the_command_line(words: list[str], rate: Rate | None) -> None:
    assert options.parse(words).api_rate == rate


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--api-qps=-1"], "--api-qps"),
        (["--api-qps=nan"], "--api-qps"),
        (["--api-qps=inf"], "--api-qps"),
        (["--api-burst=5"], "--api-burst"),
        (["--api-burst=-5", "--api-qps=5"], "--api-burst"),
        (["--metrics-certificate=/x"], "--secure-metrics"),
    ],
)
def test_a_wrong_limit_is_refused_by_name(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.parse(words)
    assert named in capsys.readouterr().err
