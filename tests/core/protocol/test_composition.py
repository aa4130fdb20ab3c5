"""A GO that names ordinary ranks by a bit means the same as one that lists all shares."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.core import messages as m
from paceline.core import wire
from paceline.core.protocol.bits import (
    OFFSET_MAX_US,
    chosen,
    pack_bits,
    pack_offsets,
    rounded,
    unpack_offsets,
)
from paceline.core.protocol.composition import compact, is_usual
from paceline.core.protocol.deal import DealError
from paceline.core.protocol.log import Log, LogError
from paceline.core.protocol.records import (
    AnnounceKind,
    Benched,
    DataPlan,
    Drop,
    DropReason,
    Go,
    LoggedMetric,
    Share,
)
from paceline.core.protocol.sampling import total_leases
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode, Pacing

from testing.examples import examples
from testing.makers import fresh, go, idle, make_log, member, members

CI = settings(max_examples=examples(120), derandomize=True, deadline=None, database=None)
PLANS = [
    DataPlan(samples=102, batch=4, epochs=2, seed=1),
    DataPlan(samples=102, batch=4, epochs=2, seed=1, drop_last=True),
    DataPlan(samples=40, batch=4, accumulate=2, epochs=9, seed=1),
    DataPlan(steps=9),
    DataPlan(),
]


# ---- sets and times ------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=70))
def test_a_set_of_ranks_survives_packing_into_bits(flags: list[bool]) -> None:
    everybody = members(*range(len(flags)))
    bits = pack_bits(bytearray(flags))
    assert chosen(bits, everybody) == tuple(m for m, x in zip(everybody, flags, strict=True) if x)


def test_a_bit_without_a_rank_is_rejected() -> None:
    for bits in (b"\x08", b"\x01\x00"):
        with pytest.raises(ValueError, match="names some of 3"):
            chosen(bits, members(0, 1, 2))


@given(st.lists(st.integers(0, OFFSET_MAX_US), max_size=20))
def test_packed_offsets_keep_their_order_and_are_nearly_exact(offsets_us: list[int]) -> None:
    back = unpack_offsets(pack_offsets(offsets_us))
    assert sorted(back) == unpack_offsets(pack_offsets(sorted(offsets_us)))
    for us, unpacked in zip(offsets_us, back, strict=True):
        assert us * (1 - 1 / 2048) <= unpacked <= us
        assert us >= 4096 or unpacked == us
        assert rounded(unpacked) == unpacked
    assert rounded(OFFSET_MAX_US + 10**9) == OFFSET_MAX_US


# ---- both forms are equivalent -------------------------------------------------------------------


def draw_share(data: st.DataObject, log: Log, slot: int) -> Share | None:
    """Draw the share of a rank in a round; usual ones are the most likely."""
    held, seq = log.held(member(slot)), log.upto.get(member(slot), 0) + 1
    kind = data.draw(st.sampled_from(["fresh"] * 6 + ["quiet", "rests", "late", "drops", ""]))
    if kind in ("fresh", "late") and (held or not log.plan.samples):
        if held:
            share = fresh(log, slot, seq)
        else:
            samples = data.draw(st.sampled_from([1, 1, 3]))
            share = Share(member(slot), seq, 1, log.version, True, False, samples, samples)
        metrics = (LoggedMetric("loss", 2.0, 4.0),) if data.draw(st.booleans()) else ()
        share = replace(share, metrics=metrics, offset_us=data.draw(st.integers(0, 9000)))
        return share if kind == "fresh" else replace(share, fresh=False, base=log.version)
    if kind == "drops" and held:
        drop = Drop(DropReason.SKIPPED, 4, held[:1])
        return idle(slot, drops=(drop,))
    if kind in ("quiet", "rests"):
        standing = member(slot) in log.resting, member(slot) in log.done
        resting = standing[0] if kind == "quiet" else not standing[0]
        facts = {"oldest": log.version, "unit": 1, "resting": resting, "done": standing[1]}
        return replace(idle(slot, **facts), upto=seq - 1, offset_us=slot)
    return None


def shortened(log: Log, record: Go) -> Go:
    """Return the GO in the compact form that a starter writes."""
    usual, listed, figures = {}, [], dict[str, tuple[float, float]]()
    for share in record.listed:
        kind = AnnounceKind.ARRIVE if share.fresh else AnnounceKind.IDLE
        if is_usual(log, kind, replace(share, offset_us=0)):
            usual[share.member] = kind, share.offset_us
            for x in share.metrics:
                total, weight = figures.get(x.name, (0.0, 0.0))
                figures[x.name] = total + x.total, weight + x.weight
        else:
            listed.append(replace(share, offset_us=rounded(share.offset_us)))
    metrics = tuple(LoggedMetric(name, *pair) for name, pair in figures.items())
    return compact(log, replace(record, listed=tuple(listed), metrics=metrics), usual)


@CI
@given(
    st.integers(1, 9),
    st.sampled_from(PLANS),
    st.sampled_from([Mode.SOLO, Mode.FULL, Mode.SHADOW]),
    st.sampled_from([Pacing.ROUND, Pacing.SAMPLES]),
    st.data(),
)
def test_the_compact_and_the_full_form_of_a_round_are_equivalent(
    ranks: int, plan: DataPlan, mode: Mode, pacing: Pacing, data: st.DataObject
) -> None:
    rules = RoundSettings(mode=mode, pacing=pacing)
    plain, short = (make_log(ranks, rules, plan) for _ in range(2))
    while not plain.stopped and plain.version < 12:
        shares = [s for slot in range(ranks) if (s := draw_share(data, plain, slot)) is not None]
        shares = [replace(s, offset_us=rounded(s.offset_us)) for s in shares]
        shares = [s for s in shares if s.member in plain.active]
        benched: tuple[Benched, ...] = ()
        if len(plain.active) > 1 and not data.draw(st.integers(0, 9)):
            out = plain.active[-1]
            benched = (Benched(out, plain.held(out)),)
            shares = [s for s in shares if s.member != out]
        record = go(plain, *shares, benched=benched)
        brief = shortened(short, record)
        made = short.read(brief)
        assert [replace(s, metrics=()) for s in made.shares] == [
            replace(s, metrics=()) for s in shares
        ]
        for slot in range(ranks):
            own = made.share_of(member(slot))
            assert own == next((s for s in made.shares if s.member == member(slot)), None)
        assert short.weigh(brief) == plain.weigh(record)
        assert short.stops_with(brief) == plain.stops_with(record)
        plain.append(record)
        short.append(brief)
        one, two = (replace(x.snapshot(), digest="", offsets_us=()) for x in (plain, short))
        assert one == two
        assert sorted(plain.offsets_us) == sorted(short.offsets_us)
        assert plain.ledger.samples == plain.ledger.total().applied == short.ledger.samples


def test_the_last_appended_round_can_be_read_beside_the_next_one() -> None:
    """A rank may join the next round before it has applied the round it has appended."""
    log = make_log(3)
    last = go(log, fresh(log, 0), fresh(log, 1))
    made, weighing = log.read(last), log.weigh(last)
    log.append(last)
    following = go(log, fresh(log, 2))
    assert log.read(following).share_of(member(2)) is not None
    assert log.read(last) is made
    assert log.weigh(last) is weighing


def test_a_go_that_does_not_fit_the_log_is_rejected() -> None:
    log = make_log(3)
    usual = dict.fromkeys(log.active, (AnnounceKind.ARRIVE, 0))
    record = compact(log, go(log), usual)
    with pytest.raises(LogError, match="2 times for 3 ranks"):
        log.read(replace(record, offsets=record.offsets[2:]))
    log.deal.held[member(1)].clear()
    with pytest.raises(DealError, match=r"no lease is held by \['1.0#0'\]"):
        log.read(record)


@pytest.mark.parametrize("plan", PLANS[:3])
def test_a_share_of_any_whole_lease_is_usual(plan: DataPlan) -> None:
    """The last lease of an epoch is included.

    That one is smaller, or whole if the remainder is dropped.
    """
    log = make_log(1, plan=plan)
    for lease in range(total_leases(plan)):
        log.deal.held[member(0)] = [lease]
        assert is_usual(log, AnnounceKind.ARRIVE, fresh(log, 0)), lease


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [64, 256, 1024])
def test_a_usual_go_is_small(ranks: int) -> None:
    """A GO of 1,024 ranks has 4 kB; with all shares listed it had 117 kB."""
    plan = DataPlan(samples=40 * ranks, batch=4, epochs=1, seed=1)
    log = make_log(ranks, plan=plan)
    usual = {m: (AnnounceKind.ARRIVE, 977 * n) for n, m in enumerate(log.active)}
    record = compact(log, go(log, wait_us=10**6, round_us=10**6), usual)
    onward = log.active[:32]
    assert len(wire.pack_peer(m.Start(record, onward))) <= 700 + 3 * ranks
    one = m.Announce(log.id, log.version, AnnounceKind.ARRIVE, fresh(log, 0))
    assert len(wire.pack_peer(one)) <= 200
