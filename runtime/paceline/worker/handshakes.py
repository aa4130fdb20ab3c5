"""Which connections to a rank's zmq sockets ended before they were any peer's, from zmq's events.

zmq greets, checks the key or the user, and closes by itself whatever sends garbage, too large a
frame or a wrong key. It tells of it in events, which name a connection by its descriptor, but not
in the event that a handshake has succeeded. Handshakes of peers take milliseconds and strangers
linger, so a success is taken for that of the newest connection.
"""

from __future__ import annotations

from typing import Final

import zmq

from paceline.refusals import Reason

EVENTS: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)
WITHOUT_KEY: Final = (
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC,
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH,
)


class Handshakes:
    """The handshakes at one socket. Pure: events in, reasons out."""

    def __init__(self) -> None:
        self._begun: list[int] = []
        """Descriptors of connections whose handshake is under way, the newest last."""
        self._judged = False
        """The failure of the connection that is closed next is known already."""

    def happened(self, event: int, value: int) -> Reason | None:
        """Return why a connection was refused, if this event tells that one was.

        Args:
            event: One of `EVENTS`.
            value: A descriptor, or the error of a handshake.

        Returns:
            The reason, or None for all that peers do as well: they come, go, and are killed in
            the middle of a handshake.
        """
        match event:
            case zmq.EVENT_ACCEPT_FAILED:
                return Reason.OTHER_USER
            case zmq.EVENT_ACCEPTED:
                self._begun.append(value)
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if self._begun:
                    self._begun.pop()
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._judged = True
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._judged = True
                return Reason.UNAUTHENTICATED if value in WITHOUT_KEY else Reason.MALFORMED
            case zmq.EVENT_DISCONNECTED:
                judged, self._judged = self._judged, False
                if value in self._begun:
                    self._begun.remove(value)
                    return None if judged else Reason.MALFORMED
        return None
