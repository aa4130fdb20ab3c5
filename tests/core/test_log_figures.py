"""The names of the log's figures on the wire, and what is read from them."""

from __future__ import annotations

from paceline.core.log_figures import pack_log, unpack_figures
from paceline.core.status import Fact
from paceline_api.status import LogStatus, ShadowStatus

LOG = LogStatus(
    rounds={"quorum": 7},
    streamed=2,
    gradients=20,
    gradients_before=4,
    samples_left_out=26,
    samples_applied=640,
    samples_late=32,
    samples_dropped={"stale": 3},
    samples_redealt=5,
    samples_discounted=1.5,
    updates=6,
    operations={"call": 8},
    epochs_exact=2,
    epochs_short=1,
    progress=0.25,
    left_s=90.0,
    round_s=0.02,
    avoided_s=3.5,
    shares={"0.0#0": 0.5},
    shadow=ShadowStatus(rounds=3, fresh=9, waited_s=0.21, saved_s={"Solo": 0.1}, late={"Solo": 4}),
    metrics={"loss": 0.25},
    metrics_of_epoch={"loss": 0.5},
    metric_sums={"loss": (30.0, 60.0)},
)
FACTS = {
    "log.rounds.quorum": 7.0,
    "log.streamed": 2.0,
    "log.gradients": 20.0,
    "log.gradients_before": 4.0,
    "log.samples_left_out": 26.0,
    "log.samples_applied": 640.0,
    "log.samples_late": 32.0,
    "log.samples_dropped.stale": 3.0,
    "log.samples_redealt": 5.0,
    "log.samples_discounted": 1.5,
    "log.updates": 6.0,
    "log.operations.call": 8.0,
    "log.epochs_exact": 2.0,
    "log.epochs_short": 1.0,
    "log.progress": 0.25,
    "log.seconds_left": 90.0,
    "log.round_seconds": 0.02,
    "log.wait_avoided_seconds": 3.5,
    "log.share.0.0#0": 0.5,
    "log.shadow.rounds": 3.0,
    "log.shadow.fresh": 9.0,
    "log.shadow.waited_seconds": 0.21,
    "log.shadow.saved_seconds.Solo": 0.1,
    "log.shadow.late.Solo": 4.0,
    "log.metric.loss": 0.25,
    "log.metric_epoch.loss": 0.5,
    "log.metric_sum.loss": 30.0,
    "log.metric_weight.loss": 60.0,
}


def test_each_field_of_the_log_status_has_its_name_on_the_wire() -> None:
    """Renaming a field of LogStatus must not rename its figure: ranks of other releases send it."""
    assert pack_log(LOG) == FACTS


def test_the_figures_of_the_log_are_separated_from_the_ranks_own() -> None:
    own = {Fact.STEP_S: 1.0, Fact.CARRIED + "mpi": 5.0}
    assert unpack_figures(FACTS | own) == (own, LOG)
    assert unpack_figures(own) == (own, None)


def test_missing_figures_of_the_log_get_defaults_and_unknown_ones_are_ignored() -> None:
    _, log = unpack_figures({"log.gradients": 10.0, "log.of_a_later_release": 1.0})
    assert log == LogStatus(gradients=10)


def test_integers_stay_integers() -> None:
    _, log = unpack_figures(FACTS)
    assert log is not None
    assert log.shadow is not None
    assert [type(value) for value in (log.gradients, log.rounds["quorum"])] == [int, int]
    assert [type(value) for value in (log.shadow.late["Solo"], log.shares["0.0#0"])] == [int, float]
