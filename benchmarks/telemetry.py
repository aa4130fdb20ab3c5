"""Measure the cost of a step's metrics: both threads' writes of a step and its round. Bar: 20 us.

The calls are those that the engine makes. The time does not include reading a round and appending
it to the log. There are three cases: all ranks are fresh in each round; another rank is late in
each round; and another rank is late in each round and still late in the next one, so that waiting
is avoided in each. The last case is the worst.

The time is CPU time of the thread, so other processes do not count. They still make it longer where
they take the caches or the other half of a core; the tenth percentile is the least affected.
"""

from __future__ import annotations

import time
from statistics import fmean

from paceline.core.anatomy.samples import StepPhase
from paceline.core.collectives.select import Method
from paceline.core.messages import Endpoints
from paceline.core.protocol.composition import compact
from paceline.core.protocol.records import AnnounceKind, DataPlan, Gen, Go, Share, Trigger
from paceline.core.rank import events as ev
from paceline.core.rank.state import RankState
from paceline.telemetry.records import RankRecord
from paceline.worker.metrics.loop import LoopMetrics
from paceline.worker.metrics.rounds import RoundMetrics
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from benchmarks.harness import Report, benchmark, middle, share

BAR_US = 20.0
ROUNDS = 4000
STEP_NS = 20_000_000
STEP_PHASES = (StepPhase.LOADING, StepPhase.SCRIPT, StepPhase.FORWARD, StepPhase.BACKWARD)


def prepare(ranks: int) -> tuple[RankState, tuple[MemberId, ...]]:
    """Return the state of a rank whose first generation is in force, and all members."""
    members = tuple(MemberId(slot, 0, 0) for slot in range(ranks))
    rank = RankState(members[0], 1, "here", Endpoints("", ""))
    gen = Gen(
        id=GenerationId(1, "uid", 1),
        members=members,
        with_state=members,
        active=members,
        version=0,
        lookahead=tuple((m, 2) for m in members),
        plan=DataPlan(),
        settings=RoundSettings(mode=Mode.QUORUM, quorum=ranks - 1),
    )
    rank.log.append(gen)
    rank.promise, rank.started = gen.id, True
    return rank, members


def make_go(rank: RankState, members: tuple[MemberId, ...], late_ranks: int) -> Go:
    """Return the GO of the next round as its starter packs it.

    The late ranks are those whose turn came in the last `late_ranks` rounds, this one included; the
    turn goes to the next rank in each round.

    Returns:
        The compacted GO.
    """
    version = rank.log.version
    late = {members[(version - n) % len(members)] for n in range(late_ranks)}
    shares = tuple(
        Share(
            member=m,
            upto=version,
            count=1,
            oldest=version - (version > 0),
            samples=64,
            unit=64,
            offset_us=50 * m.slot,
        )
        for m in members
        if m in late
    )
    usual = {m: (AnnounceKind.ARRIVE, 50 * m.slot) for m in members if m not in late}
    go = Go(rank.log.id, version, Trigger.QUORUM, shares, wait_us=50 * len(members))
    return compact(rank.log, go, usual)


def measure(ranks: int, rounds: int, late_ranks: int) -> list[float]:
    """Return the microseconds of CPU time of each step over `rounds` rounds."""
    rank, members = prepare(ranks)
    record = RankRecord.create()
    metrics, loop = RoundMetrics(record, members[0]), LoopMetrics(record)
    step, method = ev.Step((), 64, 64), Method("mpi", "ring")
    metrics.opened((method,) * 3, (0.0,) * 3, ())
    loop.began(0)
    spent_us = []
    clock = time.thread_time_ns
    now = 0
    for _ in range(rounds):
        go = make_go(rank, members, late_ranks)
        made = rank.log.read(go)  # the rank's machine and its log read these in each round
        assert made.share_of(rank.me) is not None
        assert made.arrivals is not None
        now += STEP_NS
        before = clock()
        metrics.handled(rank, step, now)
        metrics.reducing(go, rank, now)
        metrics.carried(method, 4096, now, now + 1000)
        metrics.reduced(now)
        middle = clock()
        rank.log.append(go)
        after = clock()
        metrics.applied(go, rank, now, 1000)
        metrics.ring.sum_is_taken()
        metrics.copied(now, now + 1000)
        metrics.facts.resumed(now)
        metrics.facts.refresh(rank, now)
        for phase in STEP_PHASES:
            loop.entered(phase, now - 2000)
        loop.stepped(now - 1000, now, fresh=True, version=go.round + 1, samples=32)
        spent_us.append((clock() - after + middle - before) / 1000)
    record.close()
    return spent_us


@benchmark(
    "Cost of the metrics of a step",
    ("ranks late per round", "p10 us", "median us", "mean us", "p95 us"),
    {"--ranks": {"type": int, "default": 8}},
)
def run(out: Report) -> None:
    """Measure the three cases."""
    for late_ranks in range(3):
        us = measure(out.given.ranks, 50 if out.smoke else ROUNDS, late_ranks)
        out.rows.append((late_ranks, share(us, 0.1), middle(us), fmean(us), share(us, 0.95)))
        out.at_most(f"{late_ranks} ranks late: median us", middle(us), BAR_US)
