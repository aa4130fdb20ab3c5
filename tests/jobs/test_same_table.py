"""The table of a job is the same on a laptop and in a cluster.

The coordinator's status goes through the operator, the TrainingJob and its pods, and must give the
same text as for a local run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.cli.table import line, table
from paceline.core.status import Fact
from paceline.jobs.core.from_cluster import job_status
from paceline_api.ids import GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.status import LogStatus, MembershipChange, RankPhase, RankStatus, Status, place_of
from paceline_api.types.enums import Mode, Network
from paceline_operator.core.reconcile import reconcile
from rich.console import Console

from testing.fake_cluster.observations import NOW, RUNNING, job_of, read, training

PROCS = 2
SLOTS = 3
GENERATION = GenerationId(1, "c", 4)
phases = st.sampled_from(
    [RankPhase.STARTING, RankPhase.JOINING, RankPhase.STANDBY, RankPhase.ACTIVE, RankPhase.BENCHED]
)
microseconds = st.integers(1, 10**9)


@dataclass(frozen=True)
class Speed:
    rounds_per_s_now: float
    left_s: float | None


def rank(place: int, state: RankPhase, restarts: int, step_us: int, lag_us: int) -> RankStatus:
    slot, local = divmod(place, PROCS)
    facts = {str(Fact.STEP_S): step_us / 1e6, str(Fact.LAG_S): lag_us / 1e6}
    member = MemberId(slot, local, 1000 + restarts)
    return RankStatus(member, state, rank=place, pid=place + 7, version=restarts, facts=facts)


ranks = st.tuples(
    *(
        st.builds(rank, st.just(n), phases, st.integers(0, 3), microseconds, microseconds)
        for n in range(SLOTS * PROCS)
    )
)


def pod(slot: int) -> dict[str, Any]:
    labels = {
        "paceline.dev/role": "worker",
        "paceline.dev/slot": str(slot),
        "paceline.dev/attempt": "1",
    }
    meta = {"name": f"digits-{slot}-1", "labels": labels}
    return {"metadata": meta, "spec": {"nodeName": "node"}, "status": {"phase": "Running"}}


def text(shown: Any) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as caught:
        console.print(shown)
    return caught.get()


@pytest.mark.long
@given(ranks, st.integers(0, 100), st.integers(1, 10**6), st.integers(0, 9999), st.integers(0, 1))
def test_the_table_of_a_cluster_job_equals_that_of_a_local_run(
    rows: tuple[RankStatus, ...], percent: int, round_us: int, left_s: int, pipeline: int
) -> None:
    shares = {str(one.member): (one.pid * 11 % 101) / 100 for one in rows}
    log = LogStatus(
        progress=percent / 100, left_s=float(left_s), round_s=round_us / 1e6, shares=shares
    )
    here = Status(
        "digits",
        "coordinator-uid",
        replicas=SLOTS,
        procs=PROCS,
        version=9,
        ranks=rows,
        log=log,
        generation=GENERATION,
        changes=(MembershipChange(GENERATION, "First", "", 1, 0, 0.0, 0.0),),
        settings=msgspec.to_builtins(RoundSettings(mode=Mode.QUORUM, pipeline=pipeline)),
        transport="mpi",
        carrier=Network.TCP,
    )
    observed = replace(training(SLOTS), coordinator=read(here))
    collective = {"mode": "Quorum", "pipeline": pipeline}
    job = job_of(RUNNING, replicas=SLOTS, procsPerReplica=PROCS, collective=collective)
    written = reconcile(job, observed, NOW).status
    assert written is not None
    body = {
        "metadata": {"name": "digits"},
        "spec": {"replicas": SLOTS, "procsPerReplica": PROCS},
        "status": dict(written) | {"conditions": []},
    }
    status = job_status(body, [pod(slot) for slot in range(SLOTS)], NOW)
    there = status.detail
    assert there is not None
    speed = Speed(1e6 / round_us if written["readyReplicas"] else 0.0, float(left_s))
    assert text(table(there, status)) == text(table(here, speed))
    assert line(there, status) == line(here, speed)
    assert [place_of(one.member, PROCS) for one in there.ranks] == list(range(SLOTS * PROCS))
