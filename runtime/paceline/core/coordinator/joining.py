"""Admission of ready ranks: which ones, and when.

Every ready rank may join, within `elasticity.allowedSizes`. The first ready rank waits for others
for `elasticity.stabilizationSeconds`, so that ranks that come together cost one change. Nothing
else waits for that: a change for another reason admits all ranks that are ready.
"""

from __future__ import annotations

from paceline_api.ids import MemberId

from paceline.core.coordinator.roster import KnownRank
from paceline.core.coordinator.state import CoordinatorState


def waiting(c: CoordinatorState) -> list[KnownRank]:
    """Return the ranks that are ready and not members, in rank order."""
    return [
        s
        for s in c.roster.present()
        if s.ready and s.member not in c.index and not s.leaving and not s.dismissed
    ]


def draining(c: CoordinatorState) -> set[MemberId]:
    """Return the ranks of draining replicas, if only some sizes are allowed.

    They stay members until they ask to leave, and they do not count in a size.

    Args:
        c: The state.

    Returns:
        The living ranks of draining pods; empty if every size is allowed.
    """
    if not c.sizes.allowed:
        return set()
    return {x for pod in c.roster.pods.values() if pod.draining for x in pod.living}


def admitted(c: CoordinatorState) -> set[MemberId]:
    """Return the ranks that a change would admit now, by the rule that `forming` applies."""
    outside = {s.member for s in waiting(c)} - draining(c)
    return c.sizes.join(_inside(c), outside) if c.gen is not None else outside


def stand_by(c: CoordinatorState) -> set[MemberId]:
    """Return the ready ranks beyond the largest allowed size, or beyond those of a script."""
    if c.gen is None:
        return set()
    return {s.member for s in waiting(c)} - admitted(c)


def due_ns(c: CoordinatorState, joiners: set[MemberId]) -> int:
    """Return the time at which ranks are admitted if nothing changes the membership earlier.

    Args:
        c: The state, with a generation in force.
        joiners: The ranks to admit.

    Returns:
        Now if a member is leaving or all wanted ranks are ready; else the end of the stabilization
        time.
    """
    assert c.gen is not None
    inside, ready = _inside(c), waiting(c)
    leaving = len(inside) < len(c.gen.members)
    if leaving or len(inside) + len(ready) >= c.wanted_ranks:
        return c.now_ns
    since = [s.ready_ns for s in ready if s.member in joiners]
    # With allowed sizes the wait begins when the size is reached: ranks may stand by for long.
    return (max(since) if c.sizes.allowed else min(since)) + c.config.stabilization_ns


def _inside(c: CoordinatorState) -> set[MemberId]:
    """Return the members that stay in the next generation."""
    assert c.gen is not None
    out = draining(c)
    ranks = {x: c.roster.rank(x) for x in c.gen.members}
    return {x for x, s in ranks.items() if s.present and not s.leaving and x not in out}
