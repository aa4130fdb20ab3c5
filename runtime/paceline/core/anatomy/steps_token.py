"""The token with which an agent lets somebody read the last steps of its ranks (C18).

It is derived from the token of the job's ranks and tells nothing about that one, because an agent
serves plain HTTP: whoever overhears it can read steps and do nothing else. It has a header of its
own, because an API server takes `Authorization` for itself and does not pass it on.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

STEPS_HEADER: Final = "X-Paceline-Steps-Token"
WRONG_TOKEN: Final = "WrongStepsToken"
"""The reason in an agent's refusal, which tells it apart from one of the API server."""


def steps_token(token: str) -> str:
    """Return the token for /steps of a job.

    Args:
        token: The token of the job's ranks and agents.
    """
    return hmac.new(token.encode(), b"paceline steps v1", hashlib.sha256).hexdigest()
