"""The sums of a data channel can be computed again in one process, bit for bit (I15)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from paceline.core.collectives.schedules import ALGORITHMS
from paceline.transport.replayed_sums import SumAgain

from tests.layers import exhaustive_except
from tests.transport.harness import Crew, ProcessPool, ProcessRank
from tests.transport.rank_body import Payload, digest

METHODS = ["gloo", "shm", *(f"mpi:{name}" for name in ALGORITHMS)]
LEVELS = ["hier:gloo", *(f"hier:mpi:{name}" for name in ALGORITHMS)]
IN_MAKE_TEST = ["shm", "hier:mpi:ring"]
NUMELS = (1, 7, 1000, 100_001, 1_300_007)
"""Buffer sizes; the last one has slices that are cut into several pieces."""


def machine_of(rank: ProcessRank) -> int:
    """Return the machine that `rank_main` assigns to this rank."""
    return int(rank.name[1:]) % 2


@pytest.mark.processes
@pytest.mark.parametrize("method", exhaustive_except(IN_MAKE_TEST, [*METHODS, *LEVELS]))
def test_the_sums_of_a_group_can_be_reproduced_in_one_process(
    pool: ProcessPool, method: str
) -> None:
    """Sum arbitrary floats.

    With two levels, three ranks are on one machine and two on another; then one is on each, and
    then all are on one.
    """
    ranks = pool.take(5)
    while len({machine_of(rank) for rank in ranks}) == 1:
        ranks += pool.take(1)
    crew, again = Crew(method, list(ranks)), SumAgain()
    together = max(([r for r in ranks if machine_of(r) == m] for m in range(2)), key=len)
    apart = [next(r for r in ranks if machine_of(r) == m) for m in range(2)]
    for count, members in ((2, ranks), (2, apart), (1, together)):
        crew.open(members)
        machines: Sequence[int] = members[0].call("machines", method).value
        assert len(set(machines)) == (count if method in LEVELS else 0)
        for dtype in ("float32", "float64"):
            payload = Payload(5, NUMELS, dtype, exact=False, in_place=True)
            for index, rank in enumerate(members):
                rank.start("allreduce", method, index, payload)
            outcomes = [rank.result() for rank in members]
            parts = [payload.parts(index) for index in range(len(members))]
            columns = zip(*parts, strict=True)
            wanted = digest([again.sum(method, column, machines) for column in columns])
            assert [outcome.value for outcome in outcomes] == [[wanted]] * len(members), outcomes
    crew.all(crew.ranks, "close", method)
    pool.give_back(ranks)


def test_two_level_sums_without_machines_are_an_error() -> None:
    with pytest.raises(ValueError, match="of 2 ranks the journals place 0 on a machine"):
        SumAgain().sum("hier:mpi:ring", Payload(1, (5, 5)).parts(0))
