"""Errors that both loops raise when a sum in shared memory fails."""

from __future__ import annotations

from paceline_api.times import NS_PER_S

from paceline.transport.base import Abort, PeerLost, TransportAborted, TransportError
from paceline.transport.rendezvous import LAST_WORDS_NS


def left(rank: int, abort: Abort) -> TransportError:
    """Return the error for a rank that gave up, most often for a reason that this rank gets too."""
    return _lost(rank, abort, f"rank {rank} has given the reduction up")


def gone_elsewhere(rank: int, abort: Abort) -> TransportError:
    """Return the error for a rank on another machine that has died or given up."""
    return _lost(rank, abort, f"rank {rank}, on another machine, has gone")


def _lost(rank: int, abort: Abort, why: str) -> TransportError:
    """Wait a moment for the abort flag. Return TransportAborted if it goes up, else PeerLost."""
    if abort.wait(LAST_WORDS_NS / NS_PER_S):
        return TransportAborted("abandoned in a reduction")
    return PeerLost(why, rank)


def different(rank: int, nbytes: int, own: int) -> TransportError:
    """Return the error for a rank whose buffer has another size or type."""
    return TransportError(
        f"rank {rank} sums a buffer of {nbytes} bytes and this rank one of {own}, or of another "
        "type; hint: start every rank with the same script, model and versions"
    )
