"""A login that is renewed before it expires, and once more if the API server rejects it."""

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
"""Seconds before its expiry at which a login is renewed. A login that lasts for less than four
times as long is renewed after three quarters of its lifetime."""
PAUSE_S: Final = 5.0
"""Least seconds between two renewals, so that renewals without success do not start a plugin for
each request."""
CONNECTIONS: Final = 512
"""Upper bound on the idle connections that are kept for later requests. Following the logs of a job
takes one connection for each pod."""


class Access:
    """Access to one API server; threads and event loops may share it.

    A request takes `login` and sends its headers. If it is rejected, it calls `refresh(login)` and
    tries again.
    """

    def __init__(
        self, load: Callable[[], Login], *, clock: Callable[[], float] = time.time
    ) -> None:
        """Log in for the first time; errors of `load`, such as AccessError, are raised.

        Args:
            load: Logs in and returns the login.
            clock: Returns the Unix time in seconds.
        """
        self._load, self._clock = load, clock
        self._lock = threading.Lock()
        self._begun = threading.Lock()
        """Held by the thread that renews the login in the background."""
        self._login, self._loaded_s = load(), clock()

    @property
    def login(self) -> Login:
        """The current login, without waiting; it is renewed in the background before it expires."""
        if self._clock() >= self._due_s() and self._begun.acquire(blocking=False):
            threading.Thread(target=self._renew_beside, name="login", daemon=True).start()
        return self._login

    @property
    def server(self) -> str:
        """URL of the API server."""
        return self._login.server

    @property
    def namespace(self) -> str:
        """Namespace to use if the user names none."""
        return self._login.namespace

    def refresh(self, refused: Login | None = None) -> bool:
        """Log in again, unless that has just been done or tried.

        This call may take as long as an exec plugin. If it fails, an AccessError is raised and the
        current login is kept.

        Args:
            refused: The login that the server has rejected; None always logs in again.

        Returns:
            True if `login` is newer than `refused`; False if the last attempt was less than
            `PAUSE_S` ago.
        """
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
        """Return the error for a user whose login stays rejected after a renewal."""
        return RefusedError(
            f"the API server {self.server} does not accept the login of {self._login.source} (401)",
            hint="log in again, or correct the kubeconfig; `kubectl auth whoami` shows the same",
        )

    def client(self) -> ApiClient:
        """Return an ApiClient of `kubernetes` that uses this login and renews it."""
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
            pass  # the login is still valid; a rejected request calls refresh() and raises
        finally:
            self._begun.release()


def access(kubeconfig: Path | None = None, context: str | None = None) -> Access:
    """Return access with a login as of `log_in` that is renewed as long as it is used.

    The first login raises AccessError if it fails.

    Args:
        kubeconfig: Path of the kubeconfig; None takes that of kubectl.
        context: Context in the kubeconfig; None takes the current one.

    Returns:
        The access.
    """
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
        answer = super().call_api(method, url, _with(header_params, used), *words, **more)
        if answer.status == 401 and self._access.refresh(used):
            answer.response.release_conn()
            used = self._take()
            answer = super().call_api(method, url, _with(header_params, used), *words, **more)
        return answer

    def _take(self) -> Login:
        login = self._access.login
        if login.tls is not self._used.tls:
            self.rest_client.close()
            self.rest_client = RESTClientObject(_configuration(login))
            self._used = login
            self._trust()
        return login

    def _trust(self) -> None:
        """Use the login's TLS context, so that its private key need not stay in a file."""
        self.rest_client.pool_manager.connection_pool_kw["ssl_context"] = self._used.tls


def _configuration(login: Login) -> Configuration:
    configuration = Configuration()
    configuration.host, configuration.proxy, configuration.no_proxy = login.server, login.proxy, ""
    configuration.tls_server_name = login.server_name
    # Callers decide about retries. urllib3 would print a warning for each retry, and for more than
    # 10 connections at a time.
    configuration.retries, configuration.connection_pool_maxsize = 0, CONNECTIONS
    configuration.verify_ssl = login.tls is None or bool(login.tls.verify_mode)
    return configuration


def _with(headers: Any, login: Login) -> HTTPHeaderDict:
    merged = HTTPHeaderDict(headers or {})
    for name, value in login.headers():
        merged.add(name, value)
    return merged
