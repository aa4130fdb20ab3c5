"""Sets of members encoded as rows (R44)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from paceline.core.protocol.rows import members_of, rows_of
from paceline_api.ids import MemberId

members = st.builds(MemberId, st.integers(0, 12), st.integers(0, 3), st.sampled_from([0, 1, 1000]))


@given(st.sets(members))
def test_members_of_inverts_rows_of(chosen: set[MemberId]) -> None:
    in_order = tuple(sorted(chosen))
    assert members_of(rows_of(in_order)) == in_order


def test_consecutive_equal_pods_form_one_row() -> None:
    pods = [MemberId(slot, local, 0) for slot in range(128) for local in range(8)]
    assert len(rows_of(pods)) == 1
    restarted = [m._replace(attempt=1000) if m.slot == 7 else m for m in pods]
    assert len(rows_of(restarted)) == 3
