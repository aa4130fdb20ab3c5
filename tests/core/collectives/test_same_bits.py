"""All ranks agree on the sizes at which their bits differ (R23)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.collectives.same_bits import PROBE_BYTES, PROBE_NAMES, differing, vote

INTEGERS = st.integers(-(2**63), 2**63 - 1)
DIGESTS = st.lists(INTEGERS, min_size=len(PROBE_BYTES), max_size=len(PROBE_BYTES))


def greatest(ranks: list[list[int]]) -> list[int]:
    return [max(entries) for entries in zip(*map(vote, ranks), strict=True)]


@pytest.mark.long
@given(st.lists(DIGESTS, min_size=1, max_size=5))
def test_differing_returns_exactly_the_sizes_at_which_a_digest_differs(
    ranks: list[list[int]],
) -> None:
    want = tuple(
        name
        for name, digests in zip(PROBE_NAMES, zip(*ranks, strict=True), strict=True)
        if len(set(digests)) > 1
    )
    assert differing(greatest(ranks)) == want


@given(DIGESTS, st.integers(1, 5))
def test_equal_digests_do_not_differ_and_votes_fit_in_64_bits(digests: list[int], n: int) -> None:
    assert differing(greatest([digests] * n)) == ()
    assert all(-(2**63) <= entry < 2**63 for entry in vote(digests))
