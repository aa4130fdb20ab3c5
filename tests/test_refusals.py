"""Refusals are counted, and a flood of them logs one line per minute and entry point."""

from __future__ import annotations

from paceline.refusals import (
    CALLER_CHARACTERS_MAX,
    LINE_EVERY_NS,
    Entry,
    RefusalReason,
    Refusals,
)
from paceline_api.times import NS_PER_S

START_NS = 5 * NS_PER_S


def test_the_first_refusal_of_an_entry_point_is_logged_at_once() -> None:
    line = Refusals().refuse(Entry.RENDEZVOUS, RefusalReason.OTHER_USER, "uid 7, pid 9", START_NS)
    assert line == "rendezvous: refused a message of uid 7, pid 9: other_user"


def test_a_flood_of_refusals_is_logged_once_per_minute_with_its_count() -> None:
    refusals = Refusals()
    lines = [
        line
        for at in range(100_000)
        if (
            line := refusals.refuse(
                Entry.PEERS, RefusalReason.MALFORMED, "x", START_NS + at * 1_200_000
            )
        )
    ]
    assert len(lines) == 2  # a flood of 120 s: one line at once, one after the first minute
    assert f"{50_000} refused since" in lines[1]
    assert refusals.counts() == {(Entry.PEERS, RefusalReason.MALFORMED): 100_000}


def test_log_lines_are_limited_per_entry_point_and_not_per_reason() -> None:
    refusals = Refusals()
    assert refusals.refuse(Entry.PEERS, RefusalReason.MALFORMED, "x", START_NS)
    assert not refusals.refuse(Entry.PEERS, RefusalReason.TOO_LARGE, "x", START_NS)
    assert refusals.refuse(Entry.COORDINATOR, RefusalReason.TOO_LARGE, "x", START_NS)
    later = refusals.refuse(Entry.PEERS, RefusalReason.MALFORMED, "x", START_NS + LINE_EVERY_NS)
    assert later is not None
    assert "2 refused" in later


def test_the_caller_in_a_log_line_is_escaped_and_truncated() -> None:
    caller = "\x1b]52;c;AAAA\x07\n\u202e" + "a" * 10_000
    line = Refusals().refuse(Entry.COORDINATOR, RefusalReason.MALFORMED, caller, START_NS)
    assert line is not None
    assert line.isprintable()
    assert line.isascii()
    assert len(line) < 10 * CALLER_CHARACTERS_MAX
