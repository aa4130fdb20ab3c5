"""Figures of a rehearsal beside their limits, and the check of the ledger at its end (I1)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise
from math import ceil, sqrt
from statistics import median

from paceline_api.ids import GenerationId
from paceline_api.times import NS_PER_MS, NS_PER_S

from benchmarks.rehearsal.meters import Account, RoundSummary
from benchmarks.rehearsal.scenario import Played, Stretch
from benchmarks.rehearsal.watch import MIB

KB = 1000


def table(played: Played) -> list[tuple[str, str, str]]:
    """Return the figures as rows of name, measured value, and limit at 1,024 ranks."""
    rounds, beats = played.stretches["rounds"], played.stretches["heartbeats"]
    inside = _inside(played, rounds)
    starters = [r.starter_ns / NS_PER_MS for r in inside if r.starter_ns]
    sockets = [r.starter_sent_ns / NS_PER_MS for r in inside if r.starter_ns]
    received = [r.starter_heard for r in inside if r.starter_ns]
    others = [ns / NS_PER_MS for r in inside for ns in r.others_ns]
    shown = [r.figures_ns / NS_PER_MS for r in inside]
    latency = [(r.last_go_ns - r.last_fresh_ns) / NS_PER_MS for r in inside if r.last_fresh_ns]
    start_s = (played.summary.last_active_ns - played.summary.last_registered_ns) / NS_PER_S
    repaired = max(change.parts for change in played.summary.changes.values())
    stood = [s for _, s in standstills(played)]
    return [
        ("starter, CPU of a round until GO is sent", f"{_mid(starters)} ms", "5 ms"),
        ("  of it in sockets, with connections at first use", f"{_mid(sockets)} ms", ""),
        ("  messages that it hears", f"{median(received):.0f} (most {max(received)})", ""),
        ("other ranks, CPU of a round", f"{_mid(others)} ms", "2 ms"),
        ("figures for status and metrics, busiest rank", f"{_mid(shown)} ms", ""),
        ("GO on the wire", f"{max(r.go_bytes for r in inside) / KB:.1f} kB", "4 kB"),
        (
            "last needed announcement until GO on all ranks",
            f"{_mid(latency)} ms",
            "the machine's, see below",
        ),
        ("coordinator, only heartbeats and status", f"{beats.coordinator_cores:.2f} cores", "0.25"),
        ("coordinator, rounds as well", f"{rounds.coordinator_cores:.2f} cores", "0.25"),
        ("coordinator, memory", f"{played.memory / MIB:.0f} MiB", "300 MiB"),
        ("into the coordinator, only heartbeats", f"{_rate(beats.received_per_s)}", "100 kB/s"),
        ("into the coordinator, rounds as well", f"{_rate(rounds.received_per_s)}", "100 kB/s"),
        ("out of the coordinator, rounds as well", f"{_rate(rounds.sent_per_s)}", ""),
        (
            "connections of the coordinator",
            f"{beats.end.traffic.connections}",
            f"{played.pods} pods and the operator",
        ),
        (
            "most peers that a rank speaks to",
            f"{played.summary.contacts_max}",
            f"about {ceil(2 * sqrt(played.ranks))}",
        ),
        (
            "rounds stand still at a change, longest",
            f"{max(stood, default=0.0):.2f} s",
            "1 s simulated",
        ),
        ("members that one rank repairs at a change, most", f"{repaired}", ""),
        ("last registration until everybody is active", f"{start_s:.1f} s", "10 s"),
        *(
            (f"until everybody was active again: {what}", f"{seconds:.1f} s", "")
            for what, seconds in played.took_s.items()
        ),
        *changes(played),
    ]


def changes(played: Played) -> Iterable[tuple[str, str, str]]:
    """Yield a row for each change of the membership, as the coordinator saw it."""
    gaps = dict(standstills(played))
    for change in played.changes:
        cpu = played.summary.changes.get(change.generation)
        parts = [f"agreed {change.agree_s:.2f} s", f"started {change.start_s or 0:.2f} s"]
        if (gap_s := gaps.get(change.generation)) is not None:
            parts.append(f"rounds stood {gap_s:.2f} s")
        if cpu:
            parts.append(f"CPU of a rank {_mid([x / NS_PER_MS for x in cpu.cpu_ns])} ms")
        yield f"change: {change.reason}, {change.members} members", ", ".join(parts), ""


def bound_by(played: Played) -> str:
    """Return the text about the figures that the machine limits, and not the protocol."""
    rounds = played.stretches["rounds"]
    inside = _inside(played, rounds)
    each_s = rounds.seconds / max(1, rounds.last_round - rounds.first_round)
    work_s = median(sum(r.others_ns) + r.starter_ns for r in inside) / NS_PER_S
    cores = os.cpu_count() or 1
    rest_s = rounds.players_cores * each_s - work_s
    return (
        f"{played.ranks} ranks share {cores} cores here. A round took {each_s:.2f} s; its protocol "
        f"needs {work_s:.2f} s of processor time on all ranks together, all else of the ranks "
        f"(sockets, interpreter) {rest_s:.2f} s. So how long a round, a change and a start take is "
        "the machine's figure, as is the latency of GO"
    )


def standstills(played: Played) -> list[tuple[GenerationId, float]]:
    """Return for each new generation how long rounds stood still.

    This is the time from the last commit before it to the first commit in it.

    Returns:
        Pairs of generation and seconds.
    """
    rounds = [r for _, r in sorted(played.summary.rounds.items()) if r.last_applied_ns]
    return [
        (after.generation, (after.first_applied_ns - before.last_applied_ns) / NS_PER_S)
        for before, after in pairwise(rounds)
        if after.generation is not None and after.generation != before.generation
    ]


def broken_promises(played: Played) -> list[str]:
    """Return which promises were broken; empty if none (I1, I5).

    Every sample must be accounted for, and all ranks must finish with the same log and weights.

    Returns:
        One line per broken promise.
    """
    accounts = played.summary.accounts
    finished = [x for x in accounts if x.finished]
    wrong = [_describe(x) for x in finished if _unaccounted(x)]
    if len(finished) != played.ranks:
        wrong.append(f"{len(finished)} of {played.ranks} ranks finished")
    for what, values in (
        ("logs", {(x.digest, x.version) for x in finished}),
        ("weights", {x.weights for x in finished}),
    ):
        if len(values) != 1:
            wrong.append(f"the ranks end with {len(values)} different {what}: {sorted(values)[:3]}")
    if wrong:
        return wrong
    whole = finished[0]
    if whole.weights[0] != whole.all_applied:
        wrong.append(f"{whole.weights[0]} samples in the weights, {whole.all_applied} in the log")
    if lost_with_the_dead(accounts) < 0:
        wrong.append(f"{-lost_with_the_dead(accounts)} samples more than the departed ever made")
    return wrong


def ledger(played: Played) -> str:
    """Return the ledger of all samples as one line."""
    accounts = played.summary.accounts
    finished = [x for x in accounts if x.finished]
    whole = finished[0]
    return (
        f"Ledger: {sum(x.produced for x in accounts)} samples produced by {len(accounts)} ranks ="
        f" {whole.all_applied} applied + {sum(x.pending for x in finished)} pending"
        f" + {whole.all_dropped} dropped + {sum(x.lost for x in finished)} lost by the living"
        f" + {lost_with_the_dead(accounts)} lost with {len(accounts) - len(finished)} departed;"
        f" version {whole.version}, digest {whole.digest} on all {len(finished)}"
    )


def lost_with_the_dead(accounts: list[Account]) -> int:
    """Return the samples that departed ranks had produced but not delivered."""
    departed = [x for x in accounts if not x.finished]
    counted = next(x.departed for x in accounts if x.finished)
    return sum(x.produced for x in departed) - counted


def _unaccounted(x: Account) -> int:
    return x.produced - x.applied - x.dropped - x.pending - x.lost


def _describe(x: Account) -> str:
    return f"I1: {_unaccounted(x)} samples of rank {x.member} are nowhere: {x}"


def _inside(played: Played, stretch: Stretch) -> list[RoundSummary]:
    """Return the rounds of the stretch, without its ends."""
    numbers = range(stretch.first_round, stretch.last_round)
    return [played.summary.rounds[n] for n in numbers if n in played.summary.rounds]


def _mid(values: list[float]) -> str:
    """Return the median and the 99th percentile as text.

    Higher values are due to the machine's scheduler.

    Returns:
        Text; `?` without values.
    """
    if not values:
        return "?"
    high = sorted(values)[int(0.99 * len(values))]
    return f"{median(values):.2f} (99 %: {high:.2f})"


def _rate(per_s: float) -> str:
    return f"{per_s / KB:.1f} kB/s"
