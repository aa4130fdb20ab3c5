"""The token with which an agent lets a caller read the last steps of its ranks (C18).

It is derived from the token of the job's ranks and reveals nothing about that token, because an
agent serves plain HTTP: an eavesdropper can read steps and do nothing else. It has a header of its
own, because a Kubernetes API server consumes `Authorization` itself and does not forward it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

STEPS_HEADER: Final = "X-Paceline-Steps-Token"
"""HTTP header that carries the token."""
WRONG_TOKEN: Final = "WrongStepsToken"
"""Reason in an agent's refusal. It distinguishes the refusal from one of the API server."""


def steps_token(token: str) -> str:
    """Return the token for /steps of a job.

    Args:
        token: The token of the job's ranks and agents.

    Returns:
        The derived token, as hexadecimal digits.
    """
    return hmac.new(token.encode(), b"paceline steps v1", hashlib.sha256).hexdigest()
