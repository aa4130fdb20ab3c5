"""The grammar of --inject, and the errors for invalid texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.faults import (
    EXAMPLES,
    INSIDE_A_RANK,
    LOAD_EXAMPLES,
    At,
    Fault,
    FaultError,
    FaultKind,
    check_ranks,
    format_faults,
    parse_faults,
)
from paceline.core.loads import LOADS, Load

places = st.integers(0, 5000)
times_ns = st.integers(0, 10**12)
ats = st.one_of(
    st.builds(lambda n: At(round=n), st.integers(0, 10**6)),
    st.builds(lambda n: At(after_ns=n), times_ns),
)
shares = st.floats(0, 1, exclude_min=True)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Draw a valid load: its deviation is small enough for its mean and limits."""
    least, above, room = (draw(st.integers(10**5, 10**10)) for _ in range(3))
    sd = max(1, round(draw(st.floats(0.01, 0.5)) * min(above, room) / 3))
    return Load(least + above, sd, least, least + above + room)


faults = st.one_of(
    st.builds(
        lambda rank, ns, p: Fault(FaultKind.SLOW, rank=rank, delay_ns=ns, probability=p),
        st.none() | places,
        times_ns,
        shares,
    ),
    st.builds(
        lambda rank, load, scale, seed: Fault(
            FaultKind.SLOW, rank=rank, load=load, scale=scale, seed=seed
        ),
        st.none() | places,
        loads() | st.sampled_from(list(LOADS.values())),
        st.floats(0.001, 1000),
        st.integers(0, 10**6),
    ),
    st.builds(
        lambda least, more: Fault(FaultKind.SHIFT, least_ns=least, most_ns=least + more),
        times_ns,
        times_ns,
    ),
    st.builds(
        lambda rank, f: Fault(FaultKind.SLOW_FACTOR, rank=rank, factor=f),
        places,
        st.floats(1, 1e6),
    ),
    st.builds(
        lambda rank, n: Fault(FaultKind.NAN, rank=rank, at=At(round=n)), places, st.integers(0, 99)
    ),
    st.builds(
        lambda kind, rank, at: Fault(kind, rank=rank, at=at),
        st.sampled_from([FaultKind.KILL, FaultKind.SIGTERM]),
        places,
        ats,
    ),
    st.builds(
        lambda rank, at, ns: Fault(FaultKind.FREEZE, rank=rank, at=at, duration_ns=ns),
        places,
        ats,
        times_ns,
    ),
    st.builds(lambda at, n: Fault(FaultKind.JOIN, at=at, count=n), ats, st.integers(1, 1000)),
    st.builds(lambda at: Fault(FaultKind.COORDINATOR_KILL, at=at), ats),
)


@pytest.mark.long
@given(st.lists(faults))
def test_parse_faults_inverts_format_faults(given_faults: list[Fault]) -> None:
    assert parse_faults(format_faults(given_faults)) == given_faults


def test_every_kind_has_an_example_that_parses() -> None:
    assert set(EXAMPLES) == set(FaultKind)
    for kind, text in EXAMPLES.items():
        (fault,) = parse_faults(text)
        assert fault.kind is kind
    for text in LOAD_EXAMPLES.values():
        (fault,) = parse_faults(text)
        assert fault.load is not None


def test_documented_fault_texts_are_parsed() -> None:
    text = "slow:rank=2,ms=200,p=0.3; freeze:rank=1,at=round:20,for=3s ;join:at=time:5s,n=2"
    assert parse_faults(text) == [
        Fault(FaultKind.SLOW, rank=2, delay_ns=200_000_000, probability=0.3),
        Fault(FaultKind.FREEZE, rank=1, at=At(round=20), duration_ns=3 * 10**9),
        Fault(FaultKind.JOIN, at=At(after_ns=5 * 10**9), count=2),
    ]
    assert parse_faults("slow:rank=random,ms=5")[0].rank is None
    assert parse_faults("") == []
    drawn = "slow:dist=lognormal,mean=1235,sd=706,min=201,max=3410,scale=0.1"
    for text in (drawn, "slow:load=lstm,scale=0.1"):
        assert parse_faults(text) == [Fault(FaultKind.SLOW, load=LOADS["lstm"], scale=0.1)]
    assert parse_faults("slow:rank=2,load=cloud,seed=7") == [
        Fault(FaultKind.SLOW, rank=2, load=LOADS["cloud"], seed=7)
    ]
    assert parse_faults("shift:min=50,max=400") == [
        Fault(FaultKind.SHIFT, least_ns=50_000_000, most_ns=400_000_000)
    ]
    assert FaultKind.SLOW in INSIDE_A_RANK
    assert FaultKind.KILL not in INSIDE_A_RANK


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("kil:rank=1,at=round:5", 'there is no fault "kil"', "known: slow, "),
        ("kill:at=round:5", "rank is missing", "kill:rank=1,at=round:50"),
        ("kill:rank=1", "at is missing (round:N or time:5s)", "kill:rank=1,at=round:50"),
        ("kill:rank=one,at=round:5", 'rank is "one", not a rank, such as 1', "for example"),
        ("kill:rank=-1,at=round:5", 'rank is "-1"', "for example"),
        ("kill:rank=random,at=round:5", 'rank is "random"', "for example"),
        ("kill:rank=1,at=5", 'at is "5", not round:N or time:5s', "for example"),
        ("kill:rank=1,at=time:5", 'at is "time:5"', "for example"),
        ("nan:rank=1,at=time:5s", 'at is "time:5s", not round:N', "nan:rank=1,at=round:20"),
        ("slow:rank=1,ms", "ms is nothing, not milliseconds", "slow:rank=2,ms=200"),
        ("slow:rank=1,ms=inf", 'ms is "inf"', "slow:rank=2,ms=200"),
        ("slow:rank=1,ms=5,ms=6", '"ms" is given twice', "for example"),
        ("slow:rank=1,ms=5,p=1.5", 'p is "1.5"', "for example"),
        ("slow:rank=1,ms=5,q=1", 'slow knows no "q"', "it takes rank, ms, p"),
        ("slow:ms=5", "rank is missing (a rank, such as 1, or random)", "slow:rank=2,ms=200"),
        ("slow:load=gru", 'load is "gru", not lstm or transformer or cloud', "slow:load=lstm"),
        ("slow:load=lstm,scale=0", 'scale is "0", not a factor above 0', "scale=0.1"),
        ("slow:load=lstm,seed=-1", 'seed is "-1", not a whole number', "scale=0.1"),
        ("slow:load=lstm,ms=5", 'slow with load knows no "ms"', "it takes load, rank, scale"),
        ("slow:load=lstm,dist=lognormal", 'slow with dist knows no "load"', "it takes dist, mean"),
        ("slow:rank=random,load=lstm", 'rank is "random", not a rank, such as 1', "scale=0.1"),
        ("slow:dist=normal,mean=5", 'dist is "normal", not lognormal', "dist=lognormal,"),
        ("slow:dist=lognormal,mean=5,min=1,max=9", "sd is missing", "dist=lognormal,"),
        (
            "slow:dist=lognormal,mean=9,sd=1,min=1,max=9",
            "mean is not between min and max",
            "dist=lognormal,",
        ),
        ("slow:dist=lognormal,mean=5,sd=0,min=1,max=9", "sd is not above 0", "dist=lognormal,"),
        (
            "slow:dist=lognormal,mean=5,sd=3,min=1,max=9",
            "sd is too large: with this mean, min and max it is below 2.",
            "dist=lognormal,",
        ),
        ("shift:min=5", "max is missing", "shift:min=50,max=400"),
        ("shift:min=5,max=4", "min is more than max", "shift:min=50,max=400"),
        ("shift:rank=1,min=5,max=9", 'shift knows no "rank"', "it takes min, max"),
        ("slow-factor:rank=1,factor=0.5", 'factor is "0.5"', "factor=2"),
        ("join:at=round:5,n=0", 'n is "0"', "for example"),
    ],
)
def test_an_invalid_fault_text_is_explained_with_a_hint(text: str, problem: str, hint: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_faults(text)
    assert problem in caught.value.message
    assert text in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_fault_for_a_rank_that_does_not_exist_is_rejected() -> None:
    check_ranks(parse_faults("kill:rank=3,at=round:5"), ranks=4)
    with pytest.raises(FaultError, match="the job has 3 ranks"):
        check_ranks(parse_faults("kill:rank=3,at=round:5"), ranks=3)


def test_a_fault_is_due_at_its_round_or_time() -> None:
    assert At(round=5).reached(version=5, elapsed_ns=0)
    assert not At(round=5).reached(version=4, elapsed_ns=10**12)
    assert At(after_ns=10).reached(version=0, elapsed_ns=10)
    assert not At(after_ns=10).reached(version=99, elapsed_ns=9)
