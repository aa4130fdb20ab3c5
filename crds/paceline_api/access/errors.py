"""What can be wrong with the way to an API server: each says in one sentence what to do."""

from __future__ import annotations

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError, printable


class AccessError(PacelineError):
    """There is no way to the API server as long as nobody mends something."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(printable(message), hint=printable(hint), exit_code=EXIT_BAD_INPUT)


class KubeconfigError(AccessError):
    """There is none, or what it says is unusable."""


class ContextError(AccessError):
    """The context that was asked for, or what it names, is in no kubeconfig."""


class PluginError(AccessError):
    """The program that knows who the user is, is missing or has failed."""


class CertificateError(AccessError):
    """An authority or a client certificate is unusable."""


class RefusedError(AccessError):
    """The API server does not accept who we say we are (401), also not after a renewal."""
