"""Who passes GO on to whom, so that no rank has to send it to thousands (docs/protocol.md).

Up to `TREE_ABOVE` members the starter sends to all of them. Above, it sends to about the square
root of them, the relays, and each relay passes it on to its part: two hops, for any number. Relays
are active ranks, others in each round, as the starter is. A GO that a relay never passed on is lost
like one that was on its way to a dead rank: the reduction cannot be complete without its members,
the change that repairs the death or the freeze of the relay begins the round anew (R7, R8).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Final

from paceline.core.protocol.ids import MemberId

TREE_ABOVE: Final = 64
"""Members of a generation to which one rank sends directly."""


def fan_out(
    members: Sequence[MemberId],
    active: Sequence[MemberId],
    starter: MemberId,
    round_: int,
    tree_above: int = TREE_ABOVE,
) -> dict[MemberId, tuple[MemberId, ...]]:
    """To whom the starter sends GO, each with those to whom that one passes it on."""
    others = [m for m in members if m != starter]
    if len(members) <= tree_above:
        return dict.fromkeys(others, ())
    relays = [m for m in active if m != starter]
    turn = round_ % len(relays) if relays else 0
    # With r relays nobody sends to more than about r: r + r x r >= others.
    wanted = isqrt(len(others) - 1) + 1 if others else 0
    passive = sorted(set(others).difference(relays))
    chosen = [*relays[turn:], *relays[:turn], *passive][:wanted]
    leaves = sorted(set(others).difference(chosen))
    return {relay: tuple(leaves[n :: len(chosen)]) for n, relay in enumerate(chosen)}
