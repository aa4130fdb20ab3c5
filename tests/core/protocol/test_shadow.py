"""The report of mode Shadow, checked against the trigger table and an upper bound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core.protocol.arrivals import Arrival
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, DataPlan, Go, Share, Trigger
from paceline.core.protocol.shadow import PARTIAL, Hindsight
from paceline.core.protocol.trigger import decide
from paceline_api.ids import MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from testing.makers import go, make_log, member, table

US = 1000
FREE = DataPlan()
"""A plan that deals no samples, so shares need no leases."""
OFFSETS = st.lists(
    st.tuples(st.integers(0, 3000).map(lambda x: x * 10), st.booleans()), min_size=1, max_size=9
)
"""Pairs (microseconds of arrival, idle), one for each rank."""


def settings(**fields: Any) -> RoundSettings:
    return replace(
        RoundSettings(mode=Mode.SHADOW, quorum=3, grace_ns=0, deadline_ns=5_000 * US), **fields
    )


def round_of(log: Log, offsets: list[tuple[int, bool]]) -> Go:
    first = min(x for x, _ in offsets)
    shares = [
        Share(
            member(slot),
            upto=1,
            count=not idle,
            oldest=log.version,
            fresh=not idle,
            idle=idle,
            samples=not idle,
            unit=1,
            offset_us=x - first,
        )
        for slot, (x, idle) in enumerate(offsets)
    ]
    return go(log, *shares, trigger=Trigger.ALL)


def after_one(ranks: int, s: RoundSettings) -> Log:
    log = make_log(ranks, s, FREE)
    log.append(round_of(log, [(0, False)] * ranks))
    return log


def gained(log: Log, record: Go) -> dict[Mode, Hindsight]:
    before = log.shadow.modes
    log.append(record)
    return {
        mode: Hindsight(after.saved_us - before[mode].saved_us, after.late - before[mode].late)
        for mode, after in log.shadow.modes.items()
    }


def started_us(log: Log, record: Go, mode: Mode) -> int:
    """Return when the trigger table would have sent GO in a mode.

    It is asked at each arrival and at each wake-up time that it returns.
    """
    twin = Log.restore(replace(log.snapshot(), settings=replace(log.settings, mode=mode)))
    here: dict[MemberId, Arrival] = {}
    last = max(s.offset_us for s in record.listed if s.fresh or s.idle)
    wakes: set[int] = {s.offset_us * US for s in record.listed}
    while wakes:
        now_ns = min(wakes)
        wakes.discard(now_ns)
        for share in record.listed:
            if share.offset_us * US <= now_ns and share.member not in here:
                kind = AnnounceKind.IDLE if share.idle else AnnounceKind.ARRIVE
                here[share.member] = Arrival(kind, share.offset_us * US, share)
        decision = decide(table(twin, here), now_ns=now_ns, has_request=False)
        if decision.trigger is not None:
            return now_ns // US
        if decision.wake_ns is not None and decision.wake_ns <= last * US:
            wakes.add(decision.wake_ns)
    return last


@pytest.mark.long
@given(OFFSETS, st.integers(1, 9), st.integers(0, 800), st.integers(1, 3000))
def test_the_report_agrees_with_the_trigger_table(
    offsets: list[tuple[int, bool]], k: int, grace_us: int, deadline_us: int
) -> None:
    s = settings(quorum=k, grace_ns=grace_us * US, deadline_ns=deadline_us * US)
    log = after_one(len(offsets), s)
    record = round_of(log, offsets)
    fresh_us = [x.offset_us for x in record.listed if x.fresh]
    end_us = max(x.offset_us for x in record.listed)
    starts = {mode: started_us(log, record, mode) for mode in PARTIAL}
    for mode, gain in gained(log, record).items():
        start_us = starts[mode]
        assert gain.late == sum(x > start_us for x in fresh_us), mode
        assert gain.saved_us == sum(end_us - max(x, start_us) for x in fresh_us), mode


@pytest.mark.long
@given(OFFSETS, st.integers(1, 9), st.integers(0, 30_000))
def test_savings_are_bounded_by_the_time_from_the_kth_arrival_to_the_last(
    offsets: list[tuple[int, bool]], k: int, grace_us: int
) -> None:
    s = settings(quorum=k, grace_ns=grace_us * US)
    log = after_one(len(offsets), s)
    record = round_of(log, offsets)
    fresh_us = sorted(x.offset_us for x in record.listed if x.fresh)
    end_us = max(x.offset_us for x in record.listed)
    waited_us = log.shadow.waited_us
    gains = gained(log, record)
    waited_us = log.shadow.waited_us - waited_us
    kth = {Mode.QUORUM: min(k, len(offsets)), Mode.MAJORITY: len(offsets) // 2 + 1, Mode.SOLO: 1}
    for mode, n in kth.items():
        most = max(0, end_us - fresh_us[n - 1] - grace_us) if n <= len(fresh_us) else 0
        assert 0 <= gains[mode].saved_us <= min(waited_us, most * len(fresh_us))
        assert gains[mode].late <= max(0, len(fresh_us) - n)


def test_rounds_that_are_full_in_every_mode_save_no_time() -> None:
    log = make_log(4, settings(full_every=2), FREE)
    spread = [(0, False), (0, False), (0, False), (9_000, False)]
    for saved in (0, 27_000, 27_000, 54_000):
        log.append(round_of(log, spread))
        assert log.shadow.modes[Mode.QUORUM] == Hindsight(saved, saved // 27_000)
    assert (log.shadow.rounds, log.shadow.fresh, log.shadow.waited_us) == (4, 16, 4 * 27_000)


def test_mode_full_keeps_no_shadow_report() -> None:
    log = make_log(2, settings(mode=Mode.FULL), FREE)
    log.append(round_of(log, [(0, False), (100, False)]))
    assert log.shadow.rounds == 0


def test_a_restored_log_keeps_the_shadow_report() -> None:
    log = after_one(3, settings(quorum=2))
    log.append(round_of(log, [(0, False), (10, False), (500, False)]))
    assert log.shadow.modes[Mode.QUORUM] == Hindsight(2 * 490, 1)
    assert Log.restore(log.snapshot()).shadow == log.shadow
