"""Forecasts are monotonic where they must be, and reproduce measured values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from paceline.core.forecast.arrivals import arrival_s, late_s, thinned
from paceline.core.forecast.efficiency import efficiency, epochs, noise_scale
from paceline.core.forecast.fitting import fit_two
from paceline.core.forecast.link import LinkModel, MeasuredSum
from paceline.core.forecast.model import FittedModel, Setting, check

from tests.core.forecast.rows import ideal

seconds = st.floats(1e-3, 1.0)
times = st.lists(st.lists(seconds, min_size=1, max_size=4), min_size=1, max_size=4)
sizes = st.integers(1, 8)


@st.composite
def models(draw: st.DrawFn) -> FittedModel:
    return FittedModel(
        per_sample_s=draw(st.floats(1e-4, 1e-1)),
        sharing_s=draw(st.floats(0, 1e-2)),
        shape=tuple(map(tuple, draw(times))),
        link=LinkModel(draw(st.floats(0, 1e-2)), draw(st.floats(0, 1e-6))),
        payload_bytes=draw(st.floats(1, 1e8)),
        pieces=draw(st.integers(1, 8)),
        update_s=draw(st.floats(0, 1e-2)),
        speedups={1: 1.0, 2: draw(st.floats(1.0, 2.0))},
        noise_scale=draw(st.none() | st.floats(1, 1e5)),
    )


@st.composite
def settings(draw: st.DrawFn, model: int = 1) -> Setting:
    members = draw(sizes)
    quorum = draw(st.integers(1, members))
    return Setting(members, quorum, draw(st.floats(1, 256)), model)


def at_least(a: float, b: float) -> bool:
    return a >= b * (1 - 1e-9)


# ---- properties ------------------------------------------------------------------------------


@pytest.mark.long
@given(model=models(), setting=settings(), factor=st.floats(1, 10))
def test_a_slower_link_never_makes_a_forecast_faster(
    model: FittedModel, setting: Setting, factor: float
) -> None:
    link = LinkModel(model.link.alpha_s * factor, model.link.beta_s_per_byte * factor)
    quick, slow = model.forecast(setting), replace(model, link=link).forecast(setting)
    assert at_least(slow.step_s, quick.step_s)
    assert at_least(quick.gradients_per_s, slow.gradients_per_s)


@pytest.mark.long
@given(model=models(), setting=settings())
def test_full_mode_is_never_faster_than_a_quorum(model: FittedModel, setting: Setting) -> None:
    full, quorum = model.forecast(replace(setting, quorum=setting.members)), model.forecast(setting)
    assert at_least(full.step_s, quorum.step_s)
    assert at_least(quorum.gradients_per_s, full.gradients_per_s)
    assert at_least(setting.members / quorum.step_s, quorum.gradients_per_s), "none out of nothing"


@pytest.mark.long
@given(model=models(), batch=st.floats(1, 256))
def test_the_forecast_for_one_member_ignores_the_link(model: FittedModel, batch: float) -> None:
    forecast = model.forecast(Setting(1, 1, batch))
    dear = replace(model, link=LinkModel(1.0, 1.0)).forecast(Setting(1, 1, batch))
    assert forecast.step_s == dear.step_s
    assert forecast.gradients_per_s == pytest.approx(1 / forecast.step_s)


@pytest.mark.long
@given(model=models(), setting=settings())
def test_the_gain_of_groups_of_one_is_1(model: FittedModel, setting: Setting) -> None:
    assert model.gain(setting.members, 1, setting.batch) == pytest.approx(1.0)


@pytest.mark.long
@given(model=models(), setting=settings(), other=st.floats(1, 1e5))
def test_goodput_never_exceeds_the_applied_samples(
    model: FittedModel, setting: Setting, other: float
) -> None:
    forecast = model.forecast(setting)
    assert 0 < forecast.efficiency <= 1
    assert forecast.goodput <= forecast.gradients_per_s * setting.batch * (1 + 1e-9)
    assert forecast.cost == pytest.approx(1000 * setting.ranks / forecast.goodput)
    low, high = sorted((other, model.noise_scale or other))
    assert efficiency(100, low) <= efficiency(100, high) <= efficiency(100, None) == 1


@given(measured=times, members=sizes, data=st.data())
def test_arrival_times_increase_with_the_quorum(
    measured: list[list[float]], members: int, data: st.DataObject
) -> None:
    quorum = data.draw(st.integers(1, members))
    first, this, last = (arrival_s(measured, members, q) for q in (1, quorum, members))
    assert at_least(this, first)
    assert at_least(last, this)
    known = [x for each in measured for x in each]
    assert min(known) * (1 - 1e-9) <= first
    assert last <= max(known) * (1 + 1e-9)
    assert all(x >= 0 for x in late_s(measured, members, this))


@given(st.lists(seconds, min_size=1, max_size=64))
def test_thinning_keeps_the_mean(each: list[float]) -> None:
    few = thinned(each)
    assert len(few) <= 16
    assert sum(few) / len(few) == pytest.approx(sum(each) / len(each))


@given(a=st.floats(0, 1e-2), b=st.floats(1e-12, 1e-6), segment=st.integers(1, 1 << 26))
def test_link_fit_recovers_alpha_and_beta(a: float, b: float, segment: int) -> None:
    truth = LinkModel(a, b)
    known = [(p, s) for p in (2, 4, 8) for s in (segment, 4 * segment)]
    fitted = LinkModel.fit(MeasuredSum(p, s, truth.seconds(p, s)) for p, s in known)
    assert fitted.seconds(16, segment) == pytest.approx(truth.seconds(16, segment), rel=0.01)


@given(square=st.floats(0.01, 100), scale=st.floats(2, 1e4), batch=st.integers(1, 512))
def test_noise_scale_is_recovered_from_two_batch_sizes(
    square: float, scale: float, batch: int
) -> None:
    def of(size: int) -> float:  # E|g|² = |G|² + tr(cov)/B
        return square * (1 + scale / size)

    assume(scale / batch > 1e-3)
    estimate = noise_scale(
        batch=batch, square=of(batch), larger=2 * batch, larger_square=of(2 * batch)
    )
    assert estimate == pytest.approx(scale, rel=1e-4)


# ---- known values ----------------------------------------------------------------------------


def test_the_share_of_slow_members_is_kept_at_other_sizes() -> None:
    measured = [[0.1], [0.1], [0.1], [0.4]]
    assert arrival_s(measured, 4, 4) == pytest.approx(0.4)
    assert arrival_s(measured, 4, 3) == pytest.approx(0.1)
    assert arrival_s(measured, 8, 7) == pytest.approx(0.4)
    assert arrival_s(measured, 8, 6) == pytest.approx(0.1)


def test_arrival_of_two_dice_is_the_known_expectation() -> None:
    dice = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
    assert arrival_s(dice, 2, 2) == pytest.approx(161 / 36)
    assert arrival_s(dice, 2, 1) == pytest.approx(91 / 36)


def test_the_noise_scale_is_unknown_without_a_signal() -> None:
    assert noise_scale(batch=8, square=4.0, larger=16, larger_square=2.0) is None


def test_fit_two_handles_degenerate_points() -> None:
    assert fit_two([]) == (0.0, 0.0)
    assert fit_two([(1.0, 2.0, 4.0)]) == (0.0, 2.0)
    assert fit_two([(1.0, 1.0, 3.0), (2.0, 1.0, 2.0)])[0] == 0.0, "a slope below zero is none"


def test_ideal_rows_are_predicted_from_the_other_rows() -> None:
    rows = [ideal(p) for p in (1, 2, 4, 8)] + [ideal(2, model=2), ideal(4, model=2)]
    for each in check(rows):
        assert abs(each.error) < 1e-6, each
    assert FittedModel.fit(rows).speedups == pytest.approx({1: 1.0, 2: 1.6})


def test_rows_of_groups_alone_predict_replicas_if_a_speedup_is_given() -> None:
    rows = [ideal(p, model=2) for p in (2, 4)]
    with pytest.raises(KeyError):
        FittedModel.fit(rows).forecast(Setting(2, 2, 32))
    plain = ideal(4)
    assert FittedModel.fit(rows, {2: 1.6}).forecast(plain.setting).step_s == pytest.approx(
        plain.step_s
    )


def test_the_crossover_to_groups_depends_on_the_noise_scale() -> None:
    rows = [ideal(p) for p in (1, 2, 4)] + [ideal(2, model=2)]
    model = replace(FittedModel.fit(rows), sharing_s=0.0, link=LinkModel(0.0, 0.0), update_s=0.0)
    assert replace(model, noise_scale=1e9).crossover(2, 32, groups_max=64) is None
    crossover = replace(model, noise_scale=256.0).crossover(2, 32, groups_max=64)
    # 1.6 / 2 x (1 + 2 x)/(1 + x) with x = groups x 32 / 256 is above 1 from x = 1/3 on.
    assert crossover is not None
    assert crossover.groups == 4
    assert crossover.gain == pytest.approx(1.6 / 2 * (1 + 1.0) / (1 + 0.5))


@given(samples=st.floats(1, 1e6), scale=st.floats(1, 1e6))
def test_twice_the_batch_never_needs_more_than_twice_the_epochs(
    samples: float, scale: float
) -> None:
    """At twice the epochs, twice as many replicas gain nothing."""
    assert 1 < epochs(2 * samples, scale) / epochs(samples, scale) < 2
