"""The transport of a job: all ranks choose alike, joiners included, and say what they chose."""

from __future__ import annotations

import pytest
from paceline.core.collectives.select import CLASS_NAMES
from paceline.transport.base import TransportError
from paceline.transport.factory import make_transport
from transport.harness import Crew, ProcessPool, Rank
from transport.rank_body import Payload

pytestmark = pytest.mark.processes


def choices(crew: Crew, members: list[Rank]) -> list[list[str]]:
    outcomes = crew.all(members, "describe", crew.kind)
    return [[o.value[f"choice.{name}"] for name in CLASS_NAMES] for o in outcomes]


def test_a_joiner_gets_the_table_that_the_others_measured(pool: ProcessPool) -> None:
    """Three and four ranks are one class of group sizes: the fourth takes over what three know."""
    ranks = pool.take(4)
    crew = Crew("auto", list(ranks))
    crew.open(crew.ranks[:3])
    three = choices(crew, crew.ranks[:3])
    assert three[0] == three[1] == three[2]
    assert all("mpi:" in why and "gloo" in why for why in three[0])
    assert crew.all(crew.ranks[:1], "reasons", crew.kind)[0].value == three[0]
    crew.open(crew.ranks)
    four = choices(crew, crew.ranks)
    assert four == [three[0]] * 4
    for index, rank in enumerate(ranks):
        rank.start("allreduce", "auto", index, Payload(1, (10, 100_000), calls=3))
    assert len({tuple(rank.result().value) for rank in ranks}) == 1
    assert "regret_us.64KiB" in ranks[0].call("describe", "auto").value
    crew.all(crew.ranks, "close", "auto")
    pool.give_back(ranks)


def test_a_forced_backend_is_the_only_candidate() -> None:
    forced = make_transport("gloo", local=True)
    assert forced.address.startswith("gloo=127.0.0.1:")
    assert ";" not in forced.address
    forced.shutdown()


def test_auto_says_what_it_left_out_and_why() -> None:
    """Outside mpiexec there is no MPI; gloo remains."""
    transport = make_transport("auto", local=True)
    assert transport.address.startswith("gloo=")
    assert "mpiexec -n 1" in transport.describe()["left out.mpi"]
    transport.shutdown()


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(TransportError, match=r"spec.collective.backend: 'smoke'.*auto, gloo, mpi"):
        make_transport("smoke", local=True)
