"""Two levels over a real network: two machines with a link between them, two ranks each."""

from __future__ import annotations

import pytest

from benchmarks import network
from tests.layers import exhaustive
from tests.transport.harness import Crew, ProcessPool, ProcessRank
from tests.transport.rank_body import Payload
from tests.transport.test_conformance import check_sum

NUMEL = 4 << 20
CALLS = 4
FRAMES = 1.1
"""The overhead of headers and acknowledgements over the bytes of the buffers."""

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]


@pytest.mark.parametrize("kind", ["hier:mpi:ring", exhaustive("hier:gloo")])
def test_each_byte_crosses_the_network_once_per_machine(pool: ProcessPool, kind: str) -> None:
    if lacking := network.missing():
        pytest.skip(f"needs {lacking}")
    with network.two_machines() as machines:
        ranks = [
            ProcessRank(pool, f"{place}{number}", machine.enter, machine.host)
            for number in range(2)
            for place, machine in zip("ab", machines, strict=True)
        ]
        try:
            pool.started(ranks)
            crew = Crew(kind, list(ranks))
            crew.open(crew.ranks)
            assert {rank.call("describe", kind).value["machines"] for rank in ranks} == {"2"}
            check_sum(crew, crew.ranks, Payload(1, (1, 7, 100_000)))
            before = [machine.sent_bytes() for machine in machines]
            check_sum(crew, crew.ranks, Payload(2, (NUMEL,), calls=CALLS))
            for machine, then in zip(machines, before, strict=True):
                assert machine.sent_bytes() - then < FRAMES * 4 * NUMEL * CALLS
            ranks[3].kill()
            crew.open(crew.ranks[:3])
            check_sum(crew, crew.ranks[:3], Payload(3, (100_000,)))
        finally:
            for rank in ranks:
                rank.kill()
