"""What both loops say when a sum in shared memory cannot be made."""

from __future__ import annotations

from paceline.clock import NS_PER_S
from paceline.transport.base import Abort, PeerLost, TransportAborted, TransportError
from paceline.transport.rendezvous import LAST_WORDS_NS


def left(rank: int, abort: Abort) -> TransportError:
    """A rank has given up; most often for a reason that this one is about to hear, too."""
    return _lost(rank, abort, f"rank {rank} has given the reduction up")


def gone_elsewhere(rank: int, abort: Abort) -> TransportError:
    """A rank on another machine has died, or has given up likewise."""
    return _lost(rank, abort, f"rank {rank}, on another machine, has gone")


def _lost(rank: int, abort: Abort, why: str) -> TransportError:
    if abort.wait(LAST_WORDS_NS / NS_PER_S):
        return TransportAborted("abandoned in a reduction")
    return PeerLost(why, rank)


def different(rank: int, nbytes: int, own: int) -> TransportError:
    return TransportError(
        f"rank {rank} sums a buffer of {nbytes} bytes and this rank one of {own}, or of another "
        "type; hint: start every rank with the same script, model and versions"
    )
