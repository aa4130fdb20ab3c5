"""Who may come in, and when.

Whoever is ready may, within `elasticity.allowedSizes`; the first to be ready waits for others for
`elasticity.stabilizationSeconds`, so that those who come together cost one change. Nothing else
waits for that: a change that is made for another reason takes along who is ready.
"""

from __future__ import annotations

from paceline.core.coordinator.roster import KnownRank
from paceline.core.coordinator.state import CoordinatorState
from paceline.core.protocol.ids import MemberId


def waiting(c: CoordinatorState) -> list[KnownRank]:
    """Ready, and no member."""
    return [
        s
        for s in c.roster.present()
        if s.ready and s.member not in c.index and not s.leaving and not s.dismissed
    ]


def draining(c: CoordinatorState) -> set[MemberId]:
    """Ranks of replicas that drain: members until they ask to leave, and not counted in a size."""
    if not c.sizes.allowed:
        return set()
    return {x for pod in c.roster.pods.values() if pod.draining for x in pod.living}


def admitted(c: CoordinatorState) -> set[MemberId]:
    """Who would come in with a change now. `forming` judges by the reports in the same way."""
    outside = {s.member for s in waiting(c)} - draining(c)
    return c.sizes.join(_inside(c), outside) if c.gen is not None else outside


def stand_by(c: CoordinatorState) -> set[MemberId]:
    """Ready, but more than the largest allowed size that is reached."""
    if c.gen is None or not c.sizes.allowed:
        return set()
    return {s.member for s in waiting(c)} - admitted(c)


def due_ns(c: CoordinatorState, joiners: set[MemberId]) -> int:
    """When these are admitted if nothing changes the membership before."""
    assert c.gen is not None
    inside, ready = _inside(c), waiting(c)
    leaving = len(inside) < len(c.gen.members)
    if leaving or len(inside) + len(ready) >= c.wanted_ranks:
        return c.now_ns
    since = [s.ready_ns for s in ready if s.member in joiners]
    # With sizes, from when this one was reached: some may have stood by for long.
    return (max(since) if c.sizes.allowed else min(since)) + c.config.stabilization_ns


def _inside(c: CoordinatorState) -> set[MemberId]:
    """The members that stay."""
    assert c.gen is not None
    out = draining(c)
    seen = {x: c.roster.rank(x) for x in c.gen.members}
    return {x for x, s in seen.items() if s.present and not s.leaving and x not in out}
