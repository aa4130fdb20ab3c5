"""Encode a COMMIT as the difference to the one before, and decode it (R44).

If a membership of a thousand ranks loses one and gains one, each rank gets a few hundred bytes
instead of a hundred thousand.
"""

from __future__ import annotations

from msgspec import UNSET
from paceline_api.ids import MemberId

from paceline.core.messages import Commit, CommitChange, Endpoints, MemberChange
from paceline.core.protocol.log import LogError
from paceline.core.protocol.records import Gen
from paceline.core.protocol.rows import members_of, rows_of

_Facts = dict[MemberId, tuple[Endpoints, int | None]]


def difference(before: Commit, after: Commit) -> CommitChange | None:
    """Return the difference between two COMMIT messages.

    Args:
        before: The COMMIT that the receiver has.
        after: The new COMMIT.

    Returns:
        The difference; None if `after` starts a job or restores it, which needs the whole COMMIT.
    """
    gen = after.gen
    if after.restore is not None or gen.plan is not None or gen.settings is not None:
        return None
    old, new = _facts(before), _facts(after)
    return CommitChange(
        id=gen.id,
        base=before.gen.id,
        removed=rows_of(sorted(old.keys() - new.keys())),
        places=tuple(MemberChange(m, *new[m]) for m in sorted(new) if old.get(m) != new[m]),
        without_state=rows_of(sorted(set(gen.members).difference(gen.with_state))),
        passive=rows_of(sorted(set(gen.members).difference(gen.active))),
        version=gen.version,
        left_out=gen.left_out,
        holder=after.holder,
        behind=after.behind,
        donor=after.donor,
        skips=gen.skips or (),
        unwanted=gen.unwanted or 0,
    )


def changed(before: Commit | None, change: CommitChange) -> Commit:
    """Apply a difference to the COMMIT that it is based on; the inverse of `difference`.

    Args:
        before: The last COMMIT of this rank; None if it has none.
        change: The difference.

    Returns:
        The new COMMIT.

    Raises:
        LogError: `before` is not the COMMIT that the difference is based on.
    """
    if before is None or before.gen.id != change.base:
        has = before.gen.id if before else "none"
        raise LogError(f"COMMIT {change.id} is told against {change.base}; this rank has {has}")
    facts = _facts(before)
    for member in members_of(change.removed):
        del facts[member]
    facts |= {place.member: (place.endpoints, place.lookahead) for place in change.places}
    lookahead = {m: depth for m, (_, depth) in sorted(facts.items()) if depth is not None}
    members = tuple(lookahead)
    without_state, passive = set(members_of(change.without_state)), set(members_of(change.passive))
    gen = Gen(
        id=change.id,
        members=members,
        with_state=tuple(m for m in members if m not in without_state),
        active=tuple(m for m in members if m not in passive),
        version=change.version,
        left_out=change.left_out,
        lookahead=tuple(lookahead.items()),
        skips=change.skips or UNSET,
        unwanted=change.unwanted or UNSET,
    )
    return Commit(
        gen=gen,
        holder=change.holder,
        behind=change.behind,
        donor=change.donor,
        joiners=tuple(sorted(without_state)),
        endpoints=tuple((m, endpoints) for m, (endpoints, _) in sorted(facts.items())),
    )


def _facts(commit: Commit) -> _Facts:
    """Return the addresses and the number of leases of each member and of the holder."""
    lookahead = dict(commit.gen.lookahead)
    return {m: (endpoints, lookahead.get(m)) for m, endpoints in commit.endpoints}
