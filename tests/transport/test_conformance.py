"""One suite for every data channel, including the in-memory one of the simulation.

Each test checks a promise of `paceline.transport.base`. Data are functions of (seed, rank), so sums
are checked by the digest of their bits without moving them to the test.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from paceline.core.collectives.select import HIERARCHICAL
from paceline.transport.shm.hier import ADDRESSES
from paceline.transport.shm.rendezvous import place_of

from tests.layers import exhaustive_except, exhaustive_unless
from tests.transport.harness import FAILED, Crew, Hubs, ProcessPool, ProcessRank, Rank, ThreadRank
from tests.transport.rank_body import ROUNDED, Outcome, Payload, digest

ALGORITHMS = ["ring", "recursive_doubling", "halving_doubling"]
MPI = [*(f"mpi:{name}" for name in ALGORITHMS), "mpi-mixed:ring"]
AS_BFLOAT16 = [*(f"mpi{ROUNDED}:{name}" for name in ALGORITHMS), f"mpi-mixed{ROUNDED}:ring"]
LEVELS = [*(f"hier:mpi:{name}" for name in ALGORITHMS), f"hier:mpi{ROUNDED}:ring", "hier:gloo"]
"""Two levels, with every other rank on another machine."""
SHARED = ["shm", "shm-mixed", *LEVELS]
"""Shared memory; in the second kind, every other rank has no compiler."""
REAL = ["gloo", *MPI, *AS_BFLOAT16, *SHARED, "auto"]
IN_MEMORY = [
    "sim",
    "staged",
    f"sim{ROUNDED}",
    f"staged{ROUNDED}",
    "without-first",
    "without-second",
]
"""Transports in memory; in the last two, one of two candidates is left out by one rank."""
ON_GPUS = ["nccl"]
KINDS = [*IN_MEMORY, *REAL, *ON_GPUS]
IN_MAKE_TEST = [
    *(*IN_MEMORY, *ON_GPUS, "gloo", "shm"),
    *("mpi:ring", f"mpi{ROUNDED}:recursive_doubling", "hier:mpi:halving_doubling"),
]
"""Each transport, each algorithm and both precisions once. Exhaustive are ranks without a compiler
(`mixed`), gloo between machines, and `auto`, which takes one of the others (`test_selected`)."""
RANKS = 5
INTO_IT_S = 0.05
"""The time between the start of a call and a fault, so that data are in flight. No test depends on
the exact moment."""
SMALL = (0, 1, 7, 70_001)

pytestmark = pytest.mark.processes


@pytest.fixture(params=exhaustive_except(IN_MAKE_TEST, KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def crew(kind: str, pool: ProcessPool, request: pytest.FixtureRequest) -> Iterator[Crew]:
    if kind in IN_MEMORY:
        hubs = Hubs()
        threads = [ThreadRank(hubs, f"t{index}") for index in range(RANKS)]
        # A joiner does not know yet that a transport is left out, and waits for it for half the
        # time.
        yield Crew(kind, list(threads), open_s=3.0 if kind == "without-first" else 10.0)
        for thread in threads:
            thread.end()
        return
    if kind in ON_GPUS and torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs a GPU for each of {RANKS} ranks, {torch.cuda.device_count()} are here")
    taken = pool.take(RANKS)
    crew = Crew(kind, list(taken))
    for place, rank in enumerate(taken):
        rank.call("use", f"cuda:{place}" if kind in ON_GPUS else "cpu")
    yield crew
    if request.node.stash.get(FAILED, False):
        for rank in taken:
            rank.kill()
        return
    alive = [rank for rank in taken if rank.connection is not None]
    # The next test may give a rank another GPU, which requires a new transport.
    crew.all(list(alive), "shutdown" if kind in ON_GPUS else "close", kind)
    crew.all(list(alive), "clear_abort")
    crew.all(list(alive), "use", "cpu")
    pool.give_back(alive)


def exact_sum(payload: Payload, size: int, call: int = 0) -> str:
    """Return the digest that every rank must report when the sum is the same in any order."""
    parts = [payload.parts(rank, call) for rank in range(size)]
    return digest(
        [torch.stack(column).sum(0).to(column[0].dtype) for column in zip(*parts, strict=True)]
    )


def reduce(crew: Crew, members: Sequence[Rank], payload: Payload) -> list[Outcome]:
    for index, rank in enumerate(members):
        rank.start("allreduce", crew.kind, index, payload)
    return [rank.result() for rank in members]


def check_sum(crew: Crew, members: Sequence[Rank], payload: Payload) -> None:
    outcomes = reduce(crew, members, payload)
    want = [exact_sum(payload, len(members), call) for call in range(payload.calls)]
    for outcome in outcomes:
        assert not outcome.error, outcome
        assert outcome.value == want


def abort(crew: Crew, members: Sequence[Rank]) -> None:
    for rank in members:
        rank.raise_abort()


def wait_inside(*ranks: Rank, call: int = 1) -> None:
    """Wait until these ranks are in a reduction, the `call`th of a payload that `tells`."""
    for rank in ranks:
        rank.wait_entered(call)
    time.sleep(INTO_IT_S)


def linked(crew: Crew) -> list[Rank]:
    """Return the ranks, starting with the first rank of each machine.

    Those sum the same slice, so that one learns of the death of the other while it still waits for
    those of its own machine.
    """
    if not crew.kind.startswith(HIERARCHICAL):
        return crew.ranks
    machines: dict[str, list[Rank]] = {}
    for rank, (_, address) in zip(crew.ranks, crew.peers(crew.ranks), strict=True):
        machines.setdefault(place_of(address.partition(ADDRESSES)[0]), []).append(rank)
    return [rank for row in zip_longest(*machines.values()) for rank in row if rank is not None]


@pytest.mark.parametrize("size", exhaustive_except([1, 3], [1, 2, 3, 5]))
def test_sums_are_exact(crew: Crew, size: int) -> None:
    members = crew.ranks[:size]
    crew.open(members)
    check_sum(crew, members, Payload(1, (0, 1, 7, 1 << 20), calls=2))
    for seed, dtype in enumerate(["float64", "int64", "int32", "bfloat16", "float16"], start=2):
        check_sum(crew, members, Payload(seed, SMALL, dtype))


@pytest.mark.parametrize("size", exhaustive_except([2, 5], [2, 3, 5]))
def test_all_ranks_get_the_same_bits(crew: Crew, size: int) -> None:
    """Sum arbitrary floats, whose sum depends on the order of additions (R23)."""
    members = crew.ranks[:size]
    crew.open(members)
    for dtype in ["float32", "float64", "bfloat16"]:
        for numels in [(1, 7, 1000), (300_001,)]:
            outcomes = reduce(crew, members, Payload(3, numels, dtype, exact=False))
            assert {outcome.error for outcome in outcomes} == {""}, outcomes
            assert len({outcome.value[0] for outcome in outcomes}) == 1, (dtype, numels)


SEGMENTS = (262_160, 5_008, 262_160, 16, 100_000)
"""Elements of each segment, including its flag."""


def test_segments_reduced_one_by_one_have_the_bits_of_one_call(crew: Crew) -> None:
    """Reduce in several ways: streaming a round must change no bit (R27)."""
    members = crew.ranks[:3]
    crew.open(members)
    digests = set()
    ways: list[dict[str, Any]] = [{}, {"one_by_one": True}, {"in_turn": True}, {}]
    for how in ways:
        payload = Payload(9, SEGMENTS, exact=False, **how)
        outcomes = reduce(crew, members, payload)
        assert {outcome.error for outcome in outcomes} == {""}, outcomes
        digests |= {outcome.value[0] for outcome in outcomes}
    assert len(digests) == 1


@pytest.mark.parametrize(("end", "reached"), [("killed", 3), ("aborted", 1)])
def test_a_round_can_end_inside_any_segment(crew: Crew, end: str, reached: int) -> None:
    """Keep one rank in its backward pass, so that the others wait for its segment."""
    a, victim, late = linked(crew)[:3]
    group = [a, victim, late]
    crew.open(group)
    for index, rank in enumerate(group):
        numels = SEGMENTS if rank is not late else SEGMENTS[:reached]
        payload = Payload(10, numels, one_by_one=True, in_place=end == "killed", tells=True)
        rank.start("allreduce", crew.kind, index, payload)
    assert not late.result().error
    wait_inside(a, victim, call=reached + 1)
    if end == "killed":
        victim.kill()
        assert a.result().error == "PeerLost"
        group.remove(victim)
    else:
        abort(crew, [a, victim])
        assert {a.result().error, victim.result().error} == {"TransportAborted"}
        crew.all([a, victim], "clear_abort")
    crew.open(group)
    check_sum(crew, group, Payload(11, SEGMENTS, one_by_one=True))


def test_sums_are_exact_as_groups_grow_and_shrink(crew: Crew) -> None:
    a, b, c, d, e = crew.ranks
    for seed, members in enumerate(
        [[a, b], [a, b, c], [c, a, d, b, e], [e, b], [b], [a, b, c, d], [a, b]]
    ):
        crew.open(members)
        check_sum(crew, members, Payload(seed, (5, 4096)))


def test_an_absent_peer_at_open_blocks_nobody(crew: Crew) -> None:
    a, b, absent = crew.ranks[:3]
    crew.start_open([a, b, absent], only=[a, b], tells=True)
    wait_inside(a, b)
    abort(crew, [a, b])
    outcomes = [a.result(), b.result()]
    # With two levels, a rank may have no link to the absent one and finish at once.
    through = {""} if crew.kind.startswith(HIERARCHICAL) else set()
    # The rank that is aborted second may have lost the first one before.
    errors = {outcome.error for outcome in outcomes}
    may_be = {"TransportAborted", "PeerLost"} | through
    assert {"TransportAborted"} <= errors <= may_be, outcomes
    crew.all([a, b], "clear_abort")

    crew.start_open([a, b, absent], only=[a, b], timeout_s=0.5)
    outcomes = [a.result(), b.result()]
    # One is enough: a rank whose own links are connected may be inside already.
    assert {"PeerLost"} <= {outcome.error for outcome in outcomes} <= {"PeerLost", ""}, outcomes

    crew.open([a, b])
    check_sum(crew, [a, b], Payload(1, (100,)))


def test_a_peer_killed_inside_a_reduction_is_reported_as_lost(crew: Crew) -> None:
    """Keep the third rank away, so that nobody can finish and the victim is certainly inside."""
    a, victim, c, d = linked(crew)[:4]
    group = [a, victim, c, d]
    crew.open(group)
    payload = Payload(1, (300_000,), tells=True)
    a.start("allreduce", crew.kind, 0, payload)
    victim.start("allreduce", crew.kind, 1, payload)
    wait_inside(a, victim)
    victim.kill()
    if crew.kind.startswith("mpi") and crew.kind.endswith("doubling"):
        # Its partners are 0 and 3; 3 is not inside and 0 learns from the connection.
        assert (outcome := a.result()).lost_rank == 1, outcome
    else:
        assert (outcome := a.result()).error == "PeerLost", outcome
    rest = [a, c, d]
    crew.open(rest)
    check_sum(crew, rest, Payload(2, (7, 300_000), calls=3))


def test_a_peer_killed_during_many_reductions_fails_the_others(crew: Crew) -> None:
    a, b, victim = crew.ranks[:3]
    crew.open([a, b, victim])
    for index, rank in enumerate([a, b, victim]):
        payload = Payload(5, (1 << 20,), calls=400, in_place=True, tells=True)
        rank.start("allreduce", crew.kind, index, payload)
    wait_inside(victim, call=8)
    victim.kill()
    first = a.result()
    crew.all([a], "close", crew.kind)  # as the engine does; wakes ranks without a link to it
    second = b.result()
    for outcome in [first, second]:
        assert outcome.error in ("PeerLost", "TransportAborted"), outcome
    crew.open([a, b])
    check_sum(crew, [a, b], Payload(6, (1 << 18,), calls=3))


def test_a_stopped_peer_is_left_out_and_can_return(crew: Crew) -> None:
    a, stopped, c = crew.ranks[:3]
    group = [a, stopped, c]
    crew.open(group)
    check_sum(crew, group, Payload(1, (1000,)))
    if isinstance(stopped, ProcessRank):
        stopped.stop()
    for index, rank in enumerate(group):
        if rank is not stopped:
            payload = Payload(2, (1 << 20, 9), in_place=True, tells=True)
            rank.start("allreduce", crew.kind, index, payload)
    wait_inside(a, c)
    abort(crew, [a, c])
    for outcome in [a.result(), c.result()]:
        assert outcome.error == "TransportAborted", outcome
    crew.all([a, c], "clear_abort")

    crew.open([a, c])
    check_sum(crew, [a, c], Payload(3, (1 << 18,), calls=3, in_place=True))

    # Its links still hold old messages, and the memory of the others has changed since. None of
    # that may match what is sent now.
    if isinstance(stopped, ProcessRank):
        stopped.go_on()
    for seed in range(3):
        crew.open(group)
        check_sum(crew, group, Payload(4 + seed, (1 << 18, 3), calls=2, in_place=True))


def test_an_abandoned_generation_leaves_nothing_behind(crew: Crew) -> None:
    """Let another rank be missing each time, after the others have sent (I13)."""
    members = crew.ranks[:3]
    for seed in range(6):
        crew.open(members)
        missing = members[seed % 3]
        there = [rank for rank in members if rank is not missing]
        for rank in there:
            index = members.index(rank)
            payload = Payload(100 + seed, (20_000 + seed,), in_place=seed < 3, tells=True)
            rank.start("allreduce", crew.kind, index, payload)
        wait_inside(*there)
        abort(crew, there)
        assert {rank.result().error for rank in there} <= {"TransportAborted", "PeerLost"}
        crew.all(there, "clear_abort")
        crew.open(members)
        check_sum(crew, members, Payload(seed, (20_000,), calls=2, in_place=seed < 3))


def test_nothing_spins_while_idle(crew: Crew) -> None:
    crew.open(crew.ranks)
    check_sum(crew, crew.ranks, Payload(1, (1 << 18,)))
    outcomes = crew.all(crew.ranks, "idle_cpu", 0.5)
    assert all(outcome.value < 0.02 for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    "kind", exhaustive_unless(lambda kind: kind in IN_MAKE_TEST, REAL), indirect=True
)
def test_ports_are_local_and_released(crew: Crew) -> None:
    a, b = crew.ranks[:2]
    crew.open([a, b])
    _, address = crew.peers([a])[0]
    parts = [part.rpartition("=")[2] for part in address.replace("|", ";").split(";")]
    ports = [part.rpartition(":") for part in parts if ":" in part and "/" not in part]
    names = [part.rpartition("/")[2] for part in parts if "/" in part]
    assert ports or names
    assert {host for host, _, _ in ports} <= {"127.0.0.1"}
    assert all(name in Path("/proc/net/unix").read_text() for name in names)
    crew.all([a, b], "shutdown", crew.kind)
    for host, _, port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=1)
    assert not any(name in Path("/proc/net/unix").read_text() for name in names)


def test_nccl_without_a_gpu_is_refused_with_a_hint(pool: ProcessPool) -> None:
    """Check the refusal on a machine without a GPU; on GPUs the whole suite runs instead."""
    from paceline.transport.base import TransportError
    from paceline.transport.torch.nccl import NcclTransport

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(TransportError, match=r"nccl needs a GPU.*hint: .*request"):
        NcclTransport(host="127.0.0.1", local=False)
    with pytest.raises(TransportError, match=r"hint: .*or use backend: auto"):
        NcclTransport(host="127.0.0.1", local=True)  # requests of the template are ignored there
