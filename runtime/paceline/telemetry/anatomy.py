"""Gauges and exemplars that the agent computes from the samples of its ranks at each scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from paceline_api.times import NS_PER_S
from prometheus_client.samples import Exemplar

from paceline.core.anatomy.dissect import RankAnatomy
from paceline.core.anatomy.samples import RoundSample
from paceline.telemetry.catalog import BY_NAME, PEERS_MAX

Exemplars = dict[str, dict[int, Exemplar]]
"""Exemplars by histogram and by index of the bucket."""


def gauges(anatomy: RankAnatomy) -> Iterable[tuple[str, tuple[str, ...], float]]:
    """Yield the anatomy of one rank as gauges; nothing before its first step.

    Args:
        anatomy: Means over the last steps of the rank.

    Yields:
        (metric, label values without the worker, value).
    """
    if not anatomy.steps:
        return
    for part, part_s in anatomy.parts.items():
        yield "paceline_anatomy_step_seconds", (part,), part_s
    sides: tuple[tuple[str, Mapping[str, float]], ...] = (
        ("exposed", anatomy.exposed),
        ("hidden", anatomy.hidden),
    )
    for overlap, by_class in sides:
        for name, class_s in by_class.items():
            yield "paceline_anatomy_reduction_seconds", (overlap, name), class_s
    worst = sorted(anatomy.blocked_on, key=lambda peer: (-anatomy.blocked_on[peer], peer))
    for peer in worst[:PEERS_MAX]:
        yield "paceline_anatomy_blocked_seconds", (peer,), anatomy.blocked_on[peer]
    if anatomy.gaps:
        yield "paceline_anatomy_gap_seconds", (), anatomy.gap_s
    name = "paceline_anatomy_ideal_seconds"
    yield name, ("lateness",), anatomy.if_nobody_were_late_s
    yield name, ("network",), anatomy.if_the_network_were_free_s


def exemplars(rounds: Iterable[RoundSample]) -> Exemplars:
    """Return the last known round of each bucket of the wait histogram.

    Args:
        rounds: The last rounds of one rank, in order.

    Returns:
        The exemplars. A round without a fresh gradient of the rank has none.
    """
    by_gauge: Exemplars = {}
    for sample in rounds:
        if not sample.arrived_ns:
            continue
        name, wait_s = "paceline_round_wait_seconds", (sample.go_ns - sample.arrived_ns) / NS_PER_S
        bucket = bisect_left(BY_NAME[name].buckets, wait_s)
        labels = {"round": str(sample.round), "peer": sample.last}
        by_gauge.setdefault(name, {})[bucket] = Exemplar(labels, wait_s)
    return by_gauge
