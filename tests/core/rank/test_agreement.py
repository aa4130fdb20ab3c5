"""The ranks of a group must agree, and act as one rank (R51, R52)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core.protocol.records import DataPlan, LoggedMetric
from paceline.core.rank import events as ev
from paceline.core.rank.agreement import Agreement, GroupDisagreesError, Writing, outcome_of

BEGIN = ev.Begin("front", DataPlan(), 2, data="here", segments=3)
STEP = ev.Step((4,), 8, 8)


def agreed(*events: Any) -> ev.Event | None:
    agreement = Agreement(len(events), [f"rank {i}" for i in range(1, len(events))])
    results = [agreement.add(i, e) for i, e in enumerate(events)]
    assert not any(results[:-1]), "before all have said it"
    return results[-1]


def test_a_group_begins_with_addresses_and_fingerprints_of_all_shards() -> None:
    end = replace(BEGIN, fingerprint="end", data="there", seed=5)
    begun = agreed(BEGIN, end)
    assert begun == replace(
        BEGIN, fingerprint="front|end", shards=(("rank 1", "there"),), segments=1
    )


def test_a_step_is_finite_only_if_all_shards_are_and_metrics_are_summed() -> None:
    logged = [LoggedMetric("loss", 3.0, 2.0), LoggedMetric("accuracy", 1.0, 1.0)]
    one = replace(STEP, metrics=(logged[0],))
    other = replace(STEP, finite=False, metrics=tuple(logged))
    assert agreed(one, other) == replace(
        STEP, finite=False, metrics=(logged[1], LoggedMetric("loss", 6.0, 4.0))
    )


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (STEP, ev.Want(), "rank 0 of the group says step and rank 1 want"),
        (STEP, replace(STEP, leases=(5,)), r"leases = \(4,\) and rank 1 \(5,\)"),
        (STEP, replace(STEP, samples=7), "samples = 8 and rank 1 7"),
        (ev.Skip(1, 8), ev.Skip(2, 8), "lease = 1"),
        (BEGIN, replace(BEGIN, lookahead=3), "lookahead = 2"),
        (replace(BEGIN, whole="a"), replace(BEGIN, whole="a"), "nothing is sharded"),
    ],
)
def test_the_error_names_the_difference_within_a_group(
    first: ev.Event, second: ev.Event, words: str
) -> None:
    with pytest.raises(GroupDisagreesError, match=words):
        agreed(first, second)


def test_shards_with_different_weights_form_a_group() -> None:
    assert agreed(replace(BEGIN, whole="a"), replace(BEGIN, whole="b")) is not None


@given(st.lists(st.integers(0, 2), max_size=40))
def test_events_of_shards_are_paired_in_order_whichever_is_ahead(turns: list[int]) -> None:
    agreement, counts, events = Agreement(3, ["a", "b"]), [0, 0, 0], []
    for shard in turns:
        event = agreement.add(shard, ev.Skip(counts[shard], 1))
        counts[shard] += 1
        if event is not None:
            events.append(event)
    assert events == [ev.Skip(lease, 1) for lease in range(min(counts))]


def test_a_failure_of_one_shard_is_the_outcome_of_the_group() -> None:
    aborted, lost = ev.ChannelFailed("told to", aborted=True), ev.ChannelFailed("peer lost")
    assert outcome_of([ev.Reduced(5), ev.Reduced(9)]) == ev.Reduced(9)
    assert outcome_of([ev.Reduced(5), aborted]) == aborted
    assert outcome_of([aborted, lost]) == lost


def test_the_hash_of_a_group_depends_on_all_its_shards_in_order() -> None:
    def of(*values: int) -> ev.Event:
        return outcome_of([ev.Hashed(7, value) for value in values])

    assert of(1, 2) == of(1, 2)
    assert len({str(of(1, 2)), str(of(2, 1)), str(of(1, 3))}) == 3


def test_a_checkpoint_is_written_once_all_its_parts_are() -> None:
    writing = Writing(2)
    assert writing.done(1, ev.Written(4)) is None
    assert writing.done(1, ev.Written(8, "no room")) is None
    assert writing.done(0, ev.Written(4)) == ev.Written(4)
    assert writing.done(0, ev.Written(8)) == ev.Written(8, "no room")


def test_a_checkpoint_that_one_shard_cannot_load_fails_for_the_group() -> None:
    problem = ev.NotRestored("shard-1 is damaged")
    assert outcome_of([ev.Hashed(7, 1), problem]) == problem


@pytest.mark.parametrize(
    ("theirs", "name"),
    [((("norm", 1), ("bias", 3)), "bias"), ((("norm", 1),), "bias"), ((("norm", 2),), "norm")],
)
def test_replicated_parameters_are_compared_within_the_group(
    theirs: tuple[tuple[str, int], ...], name: str
) -> None:
    mine = (("norm", 1), ("bias", 2))
    words = f"parameter {name}, which is not a shard, differs at version 4 .* rank 1"
    with pytest.raises(GroupDisagreesError, match=words):
        outcome_of([ev.Hashed(4, 7, mine), ev.Hashed(4, 8, theirs)])
    assert isinstance(outcome_of([ev.Hashed(4, 7, mine), ev.Hashed(4, 8, mine)]), ev.Hashed)
    group = Agreement(2, ["there"])
    group.add(0, replace(BEGIN, copies=mine))
    with pytest.raises(GroupDisagreesError, match=f"parameter {name}.* when training begins"):
        group.add(1, replace(BEGIN, copies=theirs))
