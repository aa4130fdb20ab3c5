"""COMMIT as the difference from the previous one (R44): the receiver gets the same record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace
from paceline.core import wire
from paceline.core.differences import changed, difference
from paceline.core.messages import Commit, CommitChange, Endpoints
from paceline.core.protocol.log import LogError
from paceline.core.protocol.records import DataPlan, Gen, LeftOut, pack_record
from paceline_api.ids import GenerationId, MemberId

members = st.builds(MemberId, st.integers(0, 6), st.integers(0, 1), st.sampled_from([0, 1]))


def commit_of(
    counter: int,
    chosen: set[MemberId],
    state: set[MemberId],
    active: set[MemberId],
    holder: MemberId,
    ports: dict[MemberId, int],
    skips: tuple[int, ...] = (),
    unwanted: int = 0,
) -> Commit:
    inside = tuple(sorted(chosen))
    with_state = tuple(m for m in inside if m in state) or inside[:1]
    gen = Gen(
        id=GenerationId(1, "c", counter),
        members=inside,
        with_state=with_state,
        active=tuple(m for m in inside if m in active) or inside[:1],
        version=counter,
        left_out=(LeftOut(MemberId(9, 0, 0), "dead"),),
        lookahead=tuple((m, 2 + m.local) for m in inside),
        skips=skips or UNSET,
        unwanted=unwanted or UNSET,
    )
    named = sorted({*inside, holder})
    return Commit(
        gen=gen,
        holder=holder,
        behind=((with_state[0], 3, "d"),),
        donor=with_state[0],
        joiners=tuple(m for m in inside if m not in with_state),
        endpoints=tuple((m, Endpoints(f"t{ports.get(m, 0)}", f"d{m}")) for m in named),
    )


commits = st.builds(
    commit_of,
    st.integers(1, 9),
    st.sets(members, min_size=1),
    st.sets(members),
    st.sets(members),
    members,
    st.dictionaries(members, st.integers(0, 1)),
    st.lists(st.integers(0, 9), max_size=2).map(tuple),
    st.integers(0, 2),
)


@pytest.mark.long
@given(commits, commits)
def test_the_previous_commit_plus_the_change_gives_the_commit(
    before: Commit, after: Commit
) -> None:
    change = difference(before, after)
    assert change is not None
    sent = wire.message_to_rank(wire.to_json(change))
    assert isinstance(sent, CommitChange)
    made = changed(before, sent)
    assert made == after
    assert pack_record(made.gen) == pack_record(after.gen), "the digests of logs are made of this"


@pytest.mark.long
@given(commits, commits)
def test_a_change_is_rejected_without_its_base(before: Commit, after: Commit) -> None:
    change = difference(before, after)
    assert change is not None
    other = replace(before, gen=replace(before.gen, id=GenerationId(2, "c", 1)))
    for wrong in (None, other):
        with pytest.raises(LogError, match="is told against"):
            changed(wrong, change)


def test_commits_of_these_tests_have_every_field_that_a_change_carries() -> None:
    """A field that no commit here has could be lost on the way to the ranks."""
    first = MemberId(0, 0, 0)
    gen = commit_of(1, {first}, set(), set(), first, {}, (3,), 1).gen
    assert {x for x in gen.__struct_fields__ if not getattr(gen, x)} == {"plan", "settings"}


def test_a_commit_with_a_plan_is_sent_in_full() -> None:
    first = commit_of(1, {MemberId(0, 0, 0)}, set(), set(), MemberId(0, 0, 0), {})
    assert difference(first, replace(first, gen=replace(first.gen, plan=DataPlan()))) is None


def test_the_change_for_one_death_does_not_grow_with_the_job() -> None:
    def change_bytes(pods: int) -> int:
        chosen = {MemberId(slot, local, 0) for slot in range(pods) for local in range(8)}
        dead = MemberId(pods // 2, 3, 0)
        before = commit_of(1, chosen, chosen, chosen, MemberId(0, 0, 0), {})
        left = chosen - {dead} | {dead._replace(attempt=1)}
        after = commit_of(2, left, chosen, chosen, MemberId(0, 0, 0), {})
        change = difference(before, after)
        assert change is not None
        return len(wire.to_json(change))

    assert change_bytes(128) <= change_bytes(16) + 64
    assert change_bytes(128) < 2048
