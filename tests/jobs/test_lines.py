"""Log lines of many replicas are parsed, merged, and put in order of time while they arrive."""

from __future__ import annotations

import heapq
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.jobs.core.lines import Shuffle, in_order, merged, parse_line
from paceline.jobs.interface import LogLine
from paceline_api.times import NS_PER_S


def line(source: str, wall_ns: int, text: str = "") -> LogLine:
    return LogLine(wall_ns, source, "", None, text)


def parsed(raw: str, procs: int = 1) -> LogLine:
    entry = parse_line(raw, source="job-0-1", procs=procs)
    assert entry is not None
    return entry


def test_a_kubelet_log_line_is_parsed_with_nanosecond_time() -> None:
    entry = parsed("2026-11-23T06:30:01.000000042Z [rank 3.1#2] loss 0.5", procs=2)
    assert (entry.rank, entry.member, entry.text) == (7, "3.1#2", "loss 0.5")
    at = datetime(2026, 11, 23, 6, 30, 1, tzinfo=UTC).timestamp()
    assert entry.wall_ns == round(at) * NS_PER_S + 42


def test_a_line_of_a_shard_belongs_to_its_group() -> None:
    entry = parsed("2026-11-23T06:30:01Z [rank 3.1.2#2] loss 0.5", procs=2)
    assert (entry.rank, entry.member, entry.text) == (7, "3.1#2", "loss 0.5")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("2026-11-23T06:30:01Z", ""),
        ("2026-11-23T06:30:01Z ", ""),
        ("2026-11-23T07:30:01.5+01:00 INFO agent starts", "INFO agent starts"),
        ("2026-11-23T06:30:01Z [rank x] not one", "[rank x] not one"),
    ],
)
def test_a_line_without_a_rank_prefix_has_no_rank(raw: str, text: str) -> None:
    entry = parsed(raw)
    assert (entry.rank, entry.member, entry.text) == (None, "", text)
    assert entry.wall_ns // NS_PER_S == parsed("2026-11-23T06:30:01Z").wall_ns // NS_PER_S


@pytest.mark.parametrize("raw", ["", "half of a line", "2026-11-23 06:30:01 text"])
def test_text_without_a_timestamp_is_not_a_line(raw: str) -> None:
    assert parse_line(raw, source="job-0-1", procs=1) is None


@given(st.text(st.characters(blacklist_characters="\n"), max_size=40), st.integers(0, 9), st.data())
def test_parse_line_preserves_text_and_rank(text: str, slot: int, data: st.DataObject) -> None:
    local = data.draw(st.integers(0, 3))
    raw = f"2026-11-23T06:30:01.123456789Z [rank {slot}.{local}#0] {text}"
    entry = parsed(raw, procs=4)
    assert entry.text == text
    assert entry.rank == slot * 4 + local


replicas = st.lists(st.lists(st.integers(0, 50), max_size=12), max_size=5)


@given(replicas)
def test_merged_sorts_by_time_and_keeps_each_replicas_order(times: list[list[int]]) -> None:
    lines = [
        [line(str(source), at, str(n)) for n, at in enumerate(own)]
        for source, own in enumerate(times)
    ]
    result = list(merged(lines))
    assert [one.wall_ns for one in result] == sorted(one.wall_ns for one in result)
    for source, own in enumerate(lines):
        texts = [one.text for one in result if one.source == str(source)]
        assert texts == [one.text for one in own]


def test_a_clock_set_back_does_not_reorder_lines() -> None:
    assert [one.wall_ns for one in in_order([line("a", 5), line("a", 3), line("a", 9)])] == [
        5,
        5,
        9,
    ]


HOLD_NS = 10


@pytest.mark.long
@given(replicas, st.data())
def test_the_shuffle_loses_and_swaps_no_lines_of_a_replica(
    times: list[list[int]], data: st.DataObject
) -> None:
    """Each line comes exactly once, in its replica's order, and is held no longer than promised.

    This holds for any delays.
    """
    shuffle, now_ns, ready = Shuffle(hold_ns=HOLD_NS), 0, []
    queues = {str(n): list(enumerate(own)) for n, own in enumerate(times)}
    added_ns: dict[tuple[str, str], int] = {}
    for source in queues:
        shuffle.opened(source)
    while any(queues.values()):
        source = data.draw(st.sampled_from([s for s, left in queues.items() if left]))
        number, at = queues[source].pop(0)
        now_ns += data.draw(st.integers(0, 2 * HOLD_NS))
        ready += shuffle.ready(now_ns)
        shuffle.add(line(source, at, str(number)), now_ns)
        added_ns[source, str(number)] = now_ns
        if not queues[source]:
            shuffle.closed(source)
        ready += shuffle.ready(now_ns)
        keys = {(one.source, one.text) for one in ready}
        late = [key for key in added_ns if key not in keys]
        # A line that is held longer waits for a line that arrived within the last HOLD_NS.
        if (next_ns := shuffle.next_ns()) is not None:
            assert next_ns > now_ns
        else:
            assert not late
    ready += shuffle.ready(now_ns + HOLD_NS)
    assert shuffle.next_ns() is None
    for number, own in enumerate(times):
        texts = [one.text for one in ready if one.source == str(number)]
        assert texts == [str(n) for n in range(len(own))]


@pytest.mark.long
@given(replicas, st.data())
def test_lines_delayed_less_than_the_hold_come_in_order_of_time(
    times: list[list[int]], data: st.DataObject
) -> None:
    """The oracle is a sort of all lines of all replicas."""
    sources = {str(n): sorted(own) for n, own in enumerate(times)}
    arrivals: list[Any] = []
    for source, own in sources.items():
        came = 0
        for at in own:
            # The line is delayed by less than the hold, and arrives after the line before it.
            came = max(came, at + data.draw(st.integers(0, HOLD_NS - 1)))
            came = min(came, at + HOLD_NS - 1) if came - at >= HOLD_NS else came
            heapq.heappush(arrivals, (came, len(arrivals), source, at))
    shuffle, ready = Shuffle(hold_ns=HOLD_NS), []
    for source in sources:
        shuffle.opened(source)
    while arrivals:
        came, _, source, at = heapq.heappop(arrivals)
        while (next_ns := shuffle.next_ns()) is not None and next_ns < came:
            ready += shuffle.ready(next_ns)
        shuffle.add(line(source, at), came)
        ready += shuffle.ready(came)
    ready += shuffle.ready(10**9)
    assert [one.wall_ns for one in ready] == sorted(at for own in sources.values() for at in own)
