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


def gauges(found: RankAnatomy) -> Iterable[tuple[str, tuple[str, ...], float]]:
    """Yield the anatomy of one rank as gauges; nothing before its first step.

    Args:
        found: Means over the last steps of the rank.

    Yields:
        (metric, label values without the worker, value).
    """
    if not found.steps:
        return
    for part, part_s in found.parts.items():
        yield "paceline_anatomy_step_seconds", (part,), part_s
    sides: tuple[tuple[str, Mapping[str, float]], ...] = (
        ("exposed", found.exposed),
        ("hidden", found.hidden),
    )
    for overlap, by_class in sides:
        for name, class_s in by_class.items():
            yield "paceline_anatomy_reduction_seconds", (overlap, name), class_s
    worst = sorted(found.blocked_on, key=lambda peer: (-found.blocked_on[peer], peer))
    for peer in worst[:PEERS_MAX]:
        yield "paceline_anatomy_blocked_seconds", (peer,), found.blocked_on[peer]
    if found.gaps:
        yield "paceline_anatomy_gap_seconds", (), found.gap_s
    name = "paceline_anatomy_ideal_seconds"
    yield name, ("lateness",), found.if_nobody_were_late_s
    yield name, ("network",), found.if_the_network_were_free_s


def exemplars(rounds: Iterable[RoundSample]) -> Exemplars:
    """Return the last known round of each bucket of the wait histogram.

    Args:
        rounds: The last rounds of one rank, in order.

    Returns:
        The exemplars. A round without a fresh gradient of the rank has none.
    """
    found: Exemplars = {}
    for sample in rounds:
        if not sample.arrived_ns:
            continue
        name, wait_s = "paceline_round_wait_seconds", (sample.go_ns - sample.arrived_ns) / NS_PER_S
        bucket = bisect_left(BY_NAME[name].buckets, wait_s)
        labels = {"round": str(sample.round), "peer": sample.last}
        found.setdefault(name, {})[bucket] = Exemplar(labels, wait_s)
    return found
