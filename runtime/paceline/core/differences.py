"""A COMMIT as what changes against the one before (R44).

A membership of a thousand ranks that loses one and gains one is told in a few hundred bytes
instead of a hundred thousand, to each of them.
"""

from __future__ import annotations

from msgspec import UNSET

from paceline.core.messages import Commit, CommitChange, Endpoints, Place
from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.log import LogError
from paceline.core.protocol.records import Gen
from paceline.core.protocol.rows import members_of, rows_of

_Facts = dict[MemberId, tuple[Endpoints, int | None]]


def difference(before: Commit, after: Commit) -> CommitChange | None:
    """None if `after` is a beginning, which tells more than a membership."""
    gen = after.gen
    if after.restore is not None or gen.plan is not None or gen.settings is not None:
        return None
    old, new = _facts(before), _facts(after)
    return CommitChange(
        id=gen.id,
        base=before.gen.id,
        removed=rows_of(sorted(old.keys() - new.keys())),
        places=tuple(Place(m, *new[m]) for m in sorted(new) if old.get(m) != new[m]),
        without_state=rows_of(sorted(set(gen.members).difference(gen.with_state))),
        passive=rows_of(sorted(set(gen.members).difference(gen.active))),
        version=gen.version,
        left_out=gen.left_out,
        holder=after.holder,
        behind=after.behind,
        donor=after.donor,
        skips=gen.skips or (),
    )


def changed(before: Commit | None, change: CommitChange) -> Commit:
    """Inverse of `difference`. LogError if `before` is not the COMMIT that it is told against."""
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
    lookahead = dict(commit.gen.lookahead)
    return {m: (endpoints, lookahead.get(m)) for m, endpoints in commit.endpoints}
