"""A login that lasts: renewed before it expires, and once more where it is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kubernetes.client import ApiClient, Configuration
from kubernetes.client.rest import RESTClientObject
from urllib3 import HTTPHeaderDict

from paceline_api.access.errors import AccessError, RefusedError
from paceline_api.access.login import Login, log_in

EARLY_S: Final = 60.0
"""So long before its end a login is renewed; one that lasts for less than four times as long, after
three quarters of its time."""
PAUSE_S: Final = 5.0
"""Between two renewals, so that one that is of no use does not start a plugin for each request."""
CONNECTIONS: Final = 512
"""Kept open at a time, for the next request; the logs of a job are one for each pod."""


class Access:
    """One way to one API server; safe to share among threads and event loops.

    A request takes `login`, sends its headers, and says `refresh(login)` where it was refused.
    """

    def __init__(
        self, load: Callable[[], Login], *, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises AccessError, and what else `load` does."""
        self._load, self._clock = load, clock
        self._lock = threading.Lock()
        self._begun = threading.Lock()
        """Held by who renews beside the requests."""
        self._login, self._loaded_s = load(), clock()

    @property
    def login(self) -> Login:
        """The present one. Never waits: one that is about to expire is renewed beside it."""
        if self._clock() >= self._due_s() and self._begun.acquire(blocking=False):
            threading.Thread(target=self._renew_beside, name="login", daemon=True).start()
        return self._login

    @property
    def server(self) -> str:
        return self._login.server

    @property
    def namespace(self) -> str:
        """Where to look when nobody names one."""
        return self._login.namespace

    def refresh(self, refused: Login | None = None) -> bool:
        """Log in again, unless somebody else has done so since `refused` was taken, or has just
        tried; may take as long as an exec plugin. True: `login` is a newer one than `refused`.
        Raises AccessError; the present login stays then."""
        with self._lock:
            if refused is not None:
                if self._login is not refused:
                    return True
                if self._clock() - self._loaded_s < PAUSE_S:
                    return False
            try:
                self._login = self._load()
            finally:
                self._loaded_s = self._clock()
            return True

    def refused(self) -> RefusedError:
        """What to tell a user whose login is refused for good."""
        return RefusedError(
            f"the API server {self.server} does not accept the login of {self._login.source} (401)",
            hint="log in again, or correct the kubeconfig; `kubectl auth whoami` shows the same",
        )

    def client(self) -> ApiClient:
        """Of the package `kubernetes`, with this login, its renewals and its impersonation."""
        return _Client(self)

    def _due_s(self) -> float:
        expires_s = self._login.expires_s
        if expires_s is None:
            return float("inf")
        early_s = min(EARLY_S, max(0.0, (expires_s - self._loaded_s) / 4))
        return max(expires_s - early_s, self._loaded_s + PAUSE_S)

    def _renew_beside(self) -> None:
        try:
            self.refresh(self._login)
        except AccessError:
            pass  # the login still holds; whoever is refused asks again, and is told
        finally:
            self._begun.release()


def access(kubeconfig: Path | None = None, context: str | None = None) -> Access:
    """As `log_in`, for as long as it is needed. Raises AccessError."""
    return Access(lambda: log_in(kubeconfig, context))


class _Client(ApiClient):
    def __init__(self, access: Access) -> None:
        self._access, self._used = access, access.login
        super().__init__(_configuration(self._used))
        self._trust()

    def call_api(
        self,
        method: str,
        url: str,
        header_params: Any = None,
        *words: Any,
        **more: Any,
    ) -> Any:
        used = self._take()
        found = super().call_api(method, url, _with(header_params, used), *words, **more)
        if found.status == 401 and self._access.refresh(used):
            found.response.release_conn()
            used = self._take()
            found = super().call_api(method, url, _with(header_params, used), *words, **more)
        return found

    def _take(self) -> Login:
        login = self._access.login
        if login.tls is not self._used.tls:
            self.rest_client.close()
            self.rest_client = RESTClientObject(_configuration(login))
            self._used = login
            self._trust()
        return login

    def _trust(self) -> None:
        """Given as a whole, no key has to lie in a file for as long as the program runs."""
        self.rest_client.pool_manager.connection_pool_kw["ssl_context"] = self._used.tls


def _configuration(login: Login) -> Configuration:
    found = Configuration()
    found.host, found.proxy, found.no_proxy = login.server, login.proxy, ""
    found.tls_server_name = login.server_name
    # Who asks decides whether to ask again; urllib3 would tell the user's terminal of each attempt,
    # and of more than 10 connections at a time.
    found.retries, found.connection_pool_maxsize = 0, CONNECTIONS
    found.verify_ssl = login.tls is None or bool(login.tls.verify_mode)
    return found


def _with(headers: Any, login: Login) -> HTTPHeaderDict:
    found = HTTPHeaderDict(headers or {})
    for name, value in login.headers():
        found.add(name, value)
    return found
