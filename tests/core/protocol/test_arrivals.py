"""The starter's counters agree with all announcements together, after each announcement."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core.protocol.arrivals import Arrival, Arrivals
from paceline.core.protocol.composition import ordinary_share
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, DataPlan, Share
from paceline.core.protocol.trigger import decide
from paceline_api.ids import MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import MaxAgePolicy, Mode

from testing.examples import examples
from testing.makers import fresh, go, idle, make_log, member
from tests.core.protocol import plain_trigger

CI = settings(max_examples=examples(300), derandomize=True, deadline=None, database=None)
PENDING, ARRIVE, IDLE, READY = (
    AnnounceKind.PENDING,
    AnnounceKind.ARRIVE,
    AnnounceKind.IDLE,
    AnnounceKind.READY,
)

rules = st.builds(
    RoundSettings,
    mode=st.sampled_from(Mode),
    quorum=st.integers(0, 6),
    quorum_percent=st.sampled_from([0, 50]),
    random_initiator=st.booleans(),
    deadline_ns=st.sampled_from([0, 7]),
    grace_ns=st.sampled_from([0, 4, 9]),
    max_age=st.sampled_from([0, 1, 2]),
    late=st.sampled_from(MaxAgePolicy),
    bench_after_ns=st.sampled_from([3, 20, 100]),
    full_every=st.sampled_from([0, 2]),
    pipeline=st.sampled_from([0, 1]),
)


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Draw a log some rounds old, with some ranks left behind and some resting."""
    log = make_log(draw(st.integers(1, 6)), draw(rules), DataPlan())
    for seq in range(1, draw(st.integers(1, 4))):
        shares: list[Share] = []
        for slot in range(len(log.active)):
            match draw(st.sampled_from(["fresh", "idle", "late", "nothing"])):
                case "fresh":
                    shares.append(_fresh(log, slot, seq))
                case "idle":
                    shares.append(idle(slot, resting=draw(st.booleans())))
                case "late":
                    shares.append(replace(_fresh(log, slot, seq), fresh=False, base=log.version))
        log.append(go(log, *shares))
        if log.stopped:
            break
    return log


def _fresh(log: Log, slot: int, seq: int) -> Share:
    return Share(member(slot), seq, 1, oldest=log.version, fresh=True, samples=1, unit=1)


words = st.tuples(
    st.integers(0, 7),
    st.sampled_from([PENDING, ARRIVE, ARRIVE, ARRIVE, IDLE, IDLE]),
    st.integers(0, 12),
    st.builds(
        lambda **facts: facts,
        count=st.integers(0, 1),
        returned=st.sampled_from([(), (1,)]),
        resting=st.booleans(),
        done=st.booleans(),
        base=st.integers(0, 4),
    ),
)


@CI
@given(logs(), st.lists(words, max_size=14), st.integers(0, 5), st.booleans(), st.data())
def test_the_incremental_table_decides_as_the_plain_trigger(
    log: Log,
    announcements: list[tuple[int, AnnounceKind, int, dict[str, Any]]],
    opened_ns: int,
    has_request: bool,
    data: st.DataObject,
) -> None:
    table, arrivals = Arrivals(log, opened_ns), dict[MemberId, Arrival]()
    now_ns = opened_ns
    for slot, kind, pause_ns, facts in announcements:
        now_ns += pause_ns
        who = member(slot)
        if who not in log.active:
            kind = READY
        share = Share(who, upto=1, **facts)
        # An announcement forwarded by another rank may have arrived there a little earlier.
        at_ns = max(0, now_ns - data.draw(st.sampled_from([0, 0, 3])))
        before = arrivals.get(who)
        usual = ordinary_share(log, who)
        if kind is ARRIVE and usual is not None and data.draw(st.booleans()):
            share = usual
            table.hear_ordinary((who,), (at_ns,))
        else:
            table.hear(kind, at_ns, share)
        if before is None or kind is not PENDING or before.kind is PENDING:
            arrivals[who] = Arrival(kind, max(at_ns, before.at_ns if before else 0), share)
        for at in (now_ns, now_ns + 5, now_ns + 200):
            facts_now: dict[str, Any] = {"now_ns": at, "has_request": has_request}
            wanted = plain_trigger.decide(log, arrivals, opened_ns=opened_ns, **facts_now)
            assert decide(table, **facts_now) == wanted


def test_a_late_pending_does_not_undo_an_arrive() -> None:
    """The PENDING was forwarded by another rank and overtaken by the ARRIVE sent after it."""
    log = make_log(2)
    table = Arrivals(log, 0)
    table.hear(ARRIVE, 5, fresh(log, 0))
    table.hear(PENDING, 6, replace(fresh(log, 0), fresh=False))
    assert table.last[member(0)].kind is ARRIVE
    assert (len(table.fresh), table.here) == (1, 1)
