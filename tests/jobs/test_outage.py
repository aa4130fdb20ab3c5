"""An unreachable API server is tolerated for a while, and reported once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from paceline.jobs.core.outage import BORNE_NS, REPORTED_AFTER_NS, Outage, OutageVerdict

pauses_ns = st.lists(st.integers(0, 2 * REPORTED_AFTER_NS), min_size=1, max_size=40)


@given(st.lists(pauses_ns, max_size=5))
def test_each_outage_is_reported_once_and_its_end_only_if_it_was_reported(
    outages: list[list[int]],
) -> None:
    outage, now_ns = Outage(), 0
    for pauses in outages:
        reports = 0
        begun_ns = now_ns
        for pause_ns in pauses:
            verdict = outage.missed(now_ns)
            assert outage.lasts
            reports += verdict is OutageVerdict.SAY_SO
            assert verdict is not OutageVerdict.GIVE_UP
            if now_ns - begun_ns >= REPORTED_AFTER_NS:
                assert reports == 1, "whoever reads is not left to guess"
            now_ns += pause_ns
        assert reports <= 1
        assert outage.answered() is (reports == 1)
        assert not outage.lasts
        assert not outage.answered()


def test_a_single_broken_connection_is_retried_silently() -> None:
    outage = Outage()
    assert outage.missed(5) is OutageVerdict.TRY_AGAIN
    assert not outage.answered()


def test_an_outage_past_the_limit_is_given_up() -> None:
    outage = Outage()
    outage.missed(0)
    assert outage.missed(BORNE_NS - 1) is OutageVerdict.SAY_SO
    assert outage.missed(BORNE_NS) is OutageVerdict.GIVE_UP
