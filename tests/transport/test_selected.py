"""The selected transport: all ranks, joiners included, make the same choice and report it."""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from paceline.core.collectives.conduct import Conduct
from paceline.core.collectives.select import CLASS_NAMES, NATIVE, size_class
from paceline.limits import LimitError
from paceline.transport.base import Abort, Group, Peer, Transport, TransportError
from paceline.transport.factory import make_transport
from paceline.transport.selected import SelectedTransport
from paceline_api.types.enums import Wire

from testing.memory_transport import Hub
from tests.layers import exhaustive_except
from tests.transport.harness import (
    BROKEN,
    BrokenFirst,
    BrokenSecond,
    Crew,
    FarTransport,
    FirstTransport,
    Hubs,
    ProcessPool,
    Rank,
    SecondTransport,
    in_memory,
)
from tests.transport.rank_body import LARGEST_BYTES, Payload

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
MEASURED = size_class(LARGEST_BYTES) + 1


def choices(crew: Crew, members: list[Rank]) -> list[list[str]]:
    outcomes = crew.all(members, "describe", crew.kind)
    return [[o.value[f"choice.{name}"] for name in CLASS_NAMES] for o in outcomes]


def test_a_joiner_gets_the_measurements_of_the_others(pool: ProcessPool) -> None:
    """Open groups of three and four ranks of one machine.

    Any three ranks are the same topology; four are another one.
    """
    ranks = pool.take(4)
    crew = Crew("auto", list(ranks))
    a, b, c, d = crew.ranks
    crew.peers(crew.ranks)
    crew.all(crew.ranks, "forget", crew.kind)  # measurements of other tests
    crew.open([a, b, c])
    three = choices(crew, [a, b, c])
    assert three[0] == three[1] == three[2]
    assert all("mpi:" in why and "gloo" in why for why in three[0][:1])
    assert a.call("reasons", crew.kind).value == three[0][:MEASURED]
    crew.open([a, b, d])
    assert choices(crew, [a, b, d]) == [three[0]] * 3
    crew.open(crew.ranks)
    four = choices(crew, crew.ranks)
    assert four == [four[0]] * 4
    assert four[0] != three[0]
    for index, rank in enumerate(ranks):
        rank.start("allreduce", "auto", index, Payload(1, (10, 100_000), calls=3))
    assert len({tuple(rank.result().value) for rank in ranks}) == 1
    assert "regret_us.64KiB" in ranks[0].call("describe", "auto").value
    crew.open([b, c, d])  # only two of these know the measurements of three
    assert choices(crew, [b, c, d]) == [three[0]] * 3
    crew.all([b, c, d], "close", "auto")
    pool.give_back(ranks)


def test_size_classes_are_measured_up_to_the_largest_segment() -> None:
    for largest, measured in ((1000, 1), (100 << 10, 2), (5 << 20, 4)):
        hubs = Hubs()
        ranks = [in_memory("both", hubs, f"t{index}") for index in range(2)]
        for rank in ranks:
            rank.begin([CPU], largest)
        assert open_all(ranks, 1) == [None] * 2
        assert len(set(ranks[0].reasons())) == measured
        assert ranks[0].reasons() == ranks[1].reasons()
        description = ranks[0].describe()
        assert description["choice.64MiB"] == description[f"choice.{CLASS_NAMES[measured - 1]}"]


def test_the_wire_and_staging_of_the_chosen_transport_are_reported() -> None:
    hub = Hubs().one
    ranks = [
        SelectedTransport([FarTransport(hub, f"t{i}")], {}, wire=Wire.BFLOAT16) for i in (0, 1)
    ]
    for rank in ranks:
        rank.begin([CPU])
    assert open_all(ranks, 1) == [None] * 2
    for rank in ranks:
        assert rank.conducts() == (Conduct("sim", Wire.BFLOAT16, by_host=True),)


@pytest.mark.parametrize("broken", exhaustive_except(["gloo"], ["mpi", "gloo"]))
def test_a_transport_that_one_rank_cannot_connect_is_left_out_by_all(
    pool: ProcessPool, broken: str
) -> None:
    """Include joiners; the transport is used again when that rank has left."""
    ranks = pool.take(4)
    crew = Crew("auto", list(ranks), open_s=5.0)
    crew.peers(crew.ranks)
    crew.all(crew.ranks, "forget", "auto")  # otherwise a slow candidate is not connected at all
    a, b, c, d = crew.ranks
    assert not b.call("break", "auto", broken).error
    for members in ([a, b, c], [a, b, c, d]):
        crew.open(members)
        descriptions = [rank.call("describe", "auto").value for rank in members]
        assert all("could not wire it" in facts[f"left out.{broken}"] for facts in descriptions)
        assert f"{broken} does not work here" in descriptions[1][f"left out.{broken}"]
        chosen = choices(crew, members)
        assert all(why == chosen[0] for why in chosen)
        assert not any(why.startswith(broken) for why in chosen[0])
        for index, rank in enumerate(members):
            rank.start("allreduce", "auto", index, Payload(1, (10, 100_000), calls=2))
        assert len({tuple(rank.result().value) for rank in members}) == 1
    crew.open([a, c, d])
    assert f"left out.{broken}" not in a.call("describe", "auto").value
    crew.all([a, c, d], "shutdown", "auto")
    b.call("shutdown", "auto")
    pool.give_back(ranks)


def test_a_failed_transport_is_left_out_once_and_not_awaited_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Break one transport on one rank, which used to fail the group for all."""
    hubs = Hubs()
    ranks = [in_memory("without-second", hubs, name) for name in ("t0", BROKEN, "t2")]
    with caplog.at_level(logging.WARNING, "paceline.rank"):
        for number in range(3):
            assert open_all(ranks, number) == [None] * 3
    messages = [m for m in caplog.messages if "goes on without second" in m]
    assert len(messages) == len(ranks)
    assert sum("second does not work here" in m for m in messages) >= 1
    assert {m.transport for rank in ranks for m in rank.methods()} == {"first"}


def test_open_fails_when_no_transport_is_left() -> None:
    hubs = Hubs()
    ranks: list[Transport] = [
        SelectedTransport([BrokenFirst(hubs.first, n), BrokenSecond(hubs.second, n)], {})
        for n in ("t0", "t1")
    ]
    for error in open_all(ranks, 1):
        assert isinstance(error, TransportError)
        assert "no data channel can be wired: first: first does not work here; second:" in str(
            error
        )


def open_all(ranks: Sequence[Transport], number: int) -> list[BaseException | None]:
    peers = tuple(Peer(f"t{i}", rank.address) for i, rank in enumerate(ranks))
    with ThreadPoolExecutor(len(ranks)) as threads:
        opened = [
            threads.submit(rank.open, Group(f"g{number}", number, peers, i), Abort(), 4.0)
            for i, rank in enumerate(ranks)
        ]
        return [future.exception() for future in opened]


def test_growing_beyond_the_limit_of_open_files_is_an_error_with_a_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the limit at the start, as an error of the rank, and later, of the channel."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(LimitError, match=r"a rank needs up to \d+ open files .* limit is 1024"):
        make_transport("gloo", local=True, ranks=400)
    transport = SelectedTransport([FirstTransport(Hubs().first, "t0")], {})
    peers = tuple(Peer(f"t{rank}", transport.address) for rank in range(400))
    with pytest.raises(TransportError, match=r"limit is 1024; hint: allow \d+ or more: ulimit -n"):
        transport.open(Group("g", 1, peers, 0), Abort(), 1.0)


class Queueing(FirstTransport):
    """A transport that takes segments in turn and records how many it is given."""

    def __init__(self, hub: Hub, own_name: str) -> None:
        super().__init__(hub, own_name)
        self.given: list[int] = []

    def allreduce_in_turn(
        self,
        buffers: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,
        summed: Callable[[], None],
    ) -> None:
        self.given.append(len(buffers))
        super().allreduce_in_turn(buffers, abort, algorithm, summed)


def test_only_a_single_candidate_gets_all_segments_together() -> None:
    reported: list[int] = []
    for far in (False, True):
        hubs = Hubs()
        queueing = Queueing(hubs.first, "t0")
        setattr(queueing, "moves", (lambda _: False) if far else (lambda _: True))  # noqa: B010
        others: list[Transport] = [SecondTransport(hubs.second, "t0")]
        for beside, want in ([], [] if far else [3]), (others, []):
            queueing.given.clear()
            rank = SelectedTransport([queueing, *beside], {})
            rank.begin([CPU])
            rank.open(Group("g", 1, (Peer("t0", rank.address),), 0), Abort(), 5.0)
            rank.allreduce_in_turn([torch.ones(3)] * 3, Abort(), NATIVE, lambda: reported.append(1))
            assert queueing.given == want
            rank.close()
    assert len(reported) == 4 * 3


@pytest.mark.parametrize("told_by", [("t0", "t1", "t2"), ("t1",)])
def test_reproducible_runs_choose_without_measuring(told_by: tuple[str, ...]) -> None:
    """Let all ranks or a single one require it, as in a job that was switched to Full meanwhile."""
    hubs = Hubs()
    ranks = [
        SelectedTransport(
            [SecondTransport(hubs.second, name), FirstTransport(hubs.first, name)],
            {},
            reproducible=name in told_by,
        )
        for name in ("t0", "t1", "t2")
    ]
    assert open_all(ranks, 1) == [None] * 3
    for rank in ranks:
        assert {m.transport for m in rank.methods()} == {"first"}
        assert rank.regrets_s() == (0.0,) * len(CLASS_NAMES), "nothing was measured"
        assert "not measured, so that each run has the same bits" in rank.reasons()[0]


def test_a_forced_backend_is_the_only_candidate() -> None:
    forced = make_transport("gloo", local=True)
    assert forced.address.startswith("gloo=127.0.0.1:")
    assert "mpi=" not in forced.address
    forced.shutdown()


def test_auto_reports_what_it_left_out_and_why() -> None:
    """Run outside mpiexec, where there is no MPI; gloo remains."""
    transport = make_transport("auto", local=True)
    with contextlib.ExitStack() as ends:
        ends.callback(transport.shutdown)
        assert transport.address.startswith("gloo=")
        assert "mpiexec -n 1" in transport.describe()["left out.mpi"]


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(TransportError, match=r"spec.collective.backend: 'smoke'.*auto, gloo, mpi"):
        make_transport("smoke", local=True)
