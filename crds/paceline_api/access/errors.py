"""Errors of the access to an API server; each one states in one sentence what to do."""

from __future__ import annotations

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError, printable


class AccessError(PacelineError):
    """Base class: the API server cannot be accessed until the user fixes something."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(printable(message), hint=printable(hint), exit_code=EXIT_BAD_INPUT)


class KubeconfigError(AccessError):
    """Raised when there is no kubeconfig or service account, or it is unusable."""


class ContextError(AccessError):
    """Raised when the kubeconfig lacks the context, or the cluster or user that it names."""


class PluginError(AccessError):
    """Raised when the exec plugin of the kubeconfig is missing or has failed."""


class CertificateError(AccessError):
    """Raised when a certificate authority or a client certificate is unusable."""


class RefusedError(AccessError):
    """Raised when the API server rejects the login (401), even after a renewal."""
