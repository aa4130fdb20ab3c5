"""Reason why the operator gets no answer from a coordinator, worded so that a user can act.

Ranks and coordinator may still be well: they use the same port from other addresses and with other
credentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

TOLD_S: Final = 30.0
"""Seconds without an answer after which the user is informed."""


class UnreachableCause(StrEnum):
    """Kinds of failures of a request to a coordinator."""

    REFUSED = "Refused"
    TIMEOUT = "Timeout"
    TLS = "TLS"
    TOKEN = "Token"
    KEY = "Key"
    ANSWER = "Answer"
    SHARE = "Share"
    OTHER = "Other"


_LOST: Final = (
    "put the key back as another field of the Secret paceline-operator-key, or delete all pods of "
    "the job: it goes on from its checkpoint"
)
_KEY: Final = (
    "either something answers in its place, such as a mesh, or the Secret paceline-operator-key "
    "was made anew after the job: restore it, or make the job anew"
)
_ANSWER: Final = (
    "look at `kubectl logs` of its pod: `python3 -m paceline.coordinator` in the job's image has "
    "to be that of Paceline"
)
_SHARE: Final = (
    "look which jobs of the namespace answer so much; with more than a thousand large jobs, spread "
    "them over several namespaces"
)
_WORDS: Final = {
    UnreachableCause.REFUSED: ("the connection is refused", "look at `kubectl logs` of its pod"),
    UnreachableCause.TIMEOUT: (
        "no answer in time",
        "a NetworkPolicy or a mesh may keep the operator's pods from that port",
    ),
    UnreachableCause.TLS: ("its certificate is not the job's", _KEY),
    UnreachableCause.TOKEN: ("it does not accept the operator's token (401)", _KEY),
    UnreachableCause.KEY: ("its pods trust a key of the operator that is lost", _LOST),
    UnreachableCause.ANSWER: ("", _ANSWER),
    UnreachableCause.SHARE: ("", _SHARE),
    UnreachableCause.OTHER: ("", "look at `kubectl logs` of its pod"),
}


@dataclass(frozen=True, slots=True)
class Unheard:
    """Failure of the last request to the present coordinator."""

    cause: UnreachableCause
    address: str
    """Host and port to which the request was sent."""
    detail: str = ""
    """Error text of the HTTP library, or the reason why the answer was refused."""

    @property
    def why(self) -> str:
        """The failure in one line: address, cause and, if it helps, the detail."""
        text = _WORDS[self.cause][0]
        silent = (UnreachableCause.REFUSED, UnreachableCause.TIMEOUT, UnreachableCause.TOKEN)
        detail = self.detail if self.cause not in silent else ""
        return f"{self.address}: {': '.join(filter(None, [text, detail]))}"

    @property
    def was_refused(self) -> bool:
        """Return True if the coordinator has answered but the operator rejected the answer."""
        return self.cause in (UnreachableCause.ANSWER, UnreachableCause.SHARE)

    @property
    def remedy(self) -> str:
        """Advice for the user."""
        return _WORDS[self.cause][1]
