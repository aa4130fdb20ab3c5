"""Recognizes connections to a rank's zmq sockets that ended before they belonged to a peer.

zmq does the greeting and checks the key or the user. It closes by itself any connection that sends
garbage, too large a frame or a wrong key. It reports this in events that name a connection by its
descriptor, except for the event of a successful handshake. Handshakes of peers take milliseconds,
and strangers linger, so a success is attributed to the newest connection.
"""

from __future__ import annotations

from typing import Final

import zmq

from paceline.refusals import RefusalReason

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
    """The handshakes at one socket. Pure: events in, reasons for refusals out."""

    def __init__(self) -> None:
        self._begun: list[int] = []
        """Descriptors of connections whose handshake is in progress, the newest last."""
        self._judged = False
        """True if the failure of the connection that is closed next was already returned."""

    def happened(self, event: int, value: int) -> RefusalReason | None:
        """Take an event and return why a connection was refused, if it reports a refusal.

        Args:
            event: One of `EVENTS`.
            value: The descriptor of the connection, or the error of a failed handshake.

        Returns:
            The reason for the refusal, or None for what honest peers do as well: they connect,
            disconnect, and may be killed in the middle of a handshake.
        """
        match event:
            case zmq.EVENT_ACCEPT_FAILED:
                return RefusalReason.OTHER_USER
            case zmq.EVENT_ACCEPTED:
                self._begun.append(value)
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if self._begun:
                    self._begun.pop()
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._judged = True
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._judged = True
                return (
                    RefusalReason.UNAUTHENTICATED
                    if value in WITHOUT_KEY
                    else RefusalReason.MALFORMED
                )
            case zmq.EVENT_DISCONNECTED:
                judged, self._judged = self._judged, False
                if value in self._begun:
                    self._begun.remove(value)
                    return None if judged else RefusalReason.MALFORMED
        return None
