"""What both loops say when a sum in shared memory cannot be made."""

from __future__ import annotations

from paceline.transport.base import PeerLost, TransportError


def left(rank: int) -> PeerLost:
    return PeerLost(f"rank {rank} has given the reduction up", rank)


def different(rank: int, nbytes: int, own: int) -> TransportError:
    return TransportError(
        f"rank {rank} sums a buffer of {nbytes} bytes and this rank one of {own}, or of another "
        "type; hint: start every rank with the same script, model and versions"
    )
