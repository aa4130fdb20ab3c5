"""Renewal of a login: before it expires, once for concurrent refusals, and rate-limited."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from paceline_api.access.access import EARLY_S, PAUSE_S, Access
from paceline_api.access.errors import PluginError
from paceline_api.access.login import Login


class Desk:
    """A source of logins that numbers them and can be made to fail."""

    def __init__(self, server: str = "http://x", life_s: float | None = None) -> None:
        self.now_s, self.count, self.fails = 1000.0, 0, False
        self.server, self.life_s = server, life_s
        self.asked = threading.Semaphore(0)

    def load(self) -> Login:
        self.asked.release()
        if self.fails:
            raise PluginError("no", hint="yes")
        self.count += 1
        expires_s = self.now_s + self.life_s if self.life_s else None
        return Login(self.server, authorization=f"Bearer {self.count}", expires_s=expires_s)

    def access(self) -> Access:
        access = Access(self.load, clock=lambda: self.now_s)
        assert self.asked.acquire(timeout=0)
        return access


def until_idle(access: Access) -> None:
    """Wait until the renewal thread has ended."""
    assert access._begun.acquire(timeout=10)
    access._begun.release()


@pytest.mark.parametrize(("life_s", "early_s"), [(3600.0, EARLY_S), (40.0, 10.0)])
def test_a_login_is_renewed_in_the_background_before_it_expires(
    life_s: float, early_s: float
) -> None:
    desk = Desk(life_s=life_s)
    access = desk.access()
    desk.now_s += life_s - early_s - 1
    assert access.login.authorization == "Bearer 1"
    assert not desk.asked.acquire(timeout=0.05)
    desk.now_s += 1
    _ = access.login  # nobody waits for it
    assert desk.asked.acquire(timeout=10)
    until_idle(access)
    assert access.login.authorization == "Bearer 2"


def test_a_failed_renewal_keeps_the_login_and_is_retried_later() -> None:
    desk = Desk(life_s=40.0)
    access = desk.access()
    desk.now_s += 30
    desk.fails = True
    _ = access.login
    assert desk.asked.acquire(timeout=10)
    until_idle(access)
    assert access.login.authorization == "Bearer 1"
    assert not desk.asked.acquire(timeout=0.05), "not at once"
    desk.fails = False
    desk.now_s += 9
    _ = access.login
    assert desk.asked.acquire(timeout=10)
    until_idle(access)
    assert access.login.authorization == "Bearer 2"


def test_threads_refused_at_the_same_time_share_one_renewal() -> None:
    desk = Desk()
    access = desk.access()
    desk.now_s += PAUSE_S
    used = access.login
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(access.refresh(used))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8
    assert desk.count == 2


def test_renewals_after_refusals_are_rate_limited() -> None:
    desk = Desk()
    access = desk.access()
    assert not access.refresh(access.login)
    desk.now_s += PAUSE_S
    desk.fails = True
    with pytest.raises(PluginError):
        access.refresh(access.login)
    assert not access.refresh(access.login)
    desk.fails = False
    assert access.refresh(), "who asks without a reason gets one"


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """Serve an API that accepts only the second login, and record the headers that it receives."""
    received: list[Any] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(
                (self.headers["Authorization"], self.headers.get_all("Impersonate-Group"))
            )
            known = self.headers["Authorization"] == "Bearer 2"
            body = b'{"major": "1", "minor": "34"}' if known else b"{}"
            self.send_response(200 if known else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}", received
    served.shutdown()
    thread.join()
    served.server_close()


@pytest.mark.long
def test_the_kubernetes_client_uses_the_renewed_login(server: tuple[str, list[Any]]) -> None:
    url, received = server
    desk = Desk(url)

    def load() -> Login:
        groups = tuple(("Impersonate-Group", group) for group in ("a", "b"))
        login = desk.load()
        return Login(url, authorization=login.authorization, impersonation=groups)

    access = Access(load, clock=lambda: desk.now_s)
    desk.now_s += PAUSE_S
    with access.client() as client:
        response = client.call_api("GET", f"{url}/version")
        assert response.status == 200
        response.read()
    assert received == [("Bearer 1", ["a", "b"]), ("Bearer 2", ["a", "b"])]
