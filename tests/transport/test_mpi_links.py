"""Links of MPI: predicted bits, peers that vanish while a link is made, links that are kept."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch
from paceline.core.collectives.schedules import ALGORITHMS, bounds, fold, schedule
from paceline.transport.base import Abort, Group, Peer
from paceline.transport.mpi.abandoned import EMPTIED_MAX
from paceline.transport.mpi.lanes import CUT_OFF, PIECE_BYTES, failed_call
from paceline.transport.mpi.links import Agreed, Offer, mpi_environment
from paceline.transport.rendezvous import Deadline, Rendezvous

from tests.layers import exhaustive_except
from tests.transport.harness import Crew, ProcessPool, ProcessRank
from tests.transport.rank_body import LINKS_ARE_WARM, Payload, digest

pytestmark = pytest.mark.processes
DEATHS, DEATHS_MAX = 4, 40
FILLED_S = 0.005
"""Time in which the buffers of a connection are filled."""


@pytest.fixture
def stranger() -> Iterator[Rendezvous]:
    """Make the test a peer that meets the others but never makes a link."""
    point = Rendezvous("127.0.0.1")
    yield point
    point.close()


def predicted(algorithm: str, payload: Payload, size: int) -> str:
    """Compute the expected bits of the schedule with the slow and obvious `fold`."""
    sums = []
    for parts in zip(*(payload.parts(rank) for rank in range(size)), strict=True):
        total = torch.empty_like(parts[0])
        length = PIECE_BYTES // total.element_size()
        for low in range(0, len(total), length):
            high = min(low + length, len(total))
            chunks = schedule(algorithm, size, 0).chunks
            at = [low + offset for offset in bounds(high - low, chunks)]
            for chunk in range(chunks):
                cut = slice(at[chunk], at[chunk + 1])
                total[cut] = fold(algorithm, [part[cut] for part in parts], chunk, torch.add)
        sums.append(total)
    return digest(sums)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", exhaustive_except([5], [2, 3, 5]))
@pytest.mark.parametrize("name", ["mpi", "mpi-mixed"])
def test_the_order_of_additions_is_that_of_the_schedule(
    pool: ProcessPool, name: str, algorithm: str, size: int
) -> None:
    """Check that the bits are known in advance, in C and in Python (R23, I10)."""
    kind = f"{name}:{algorithm}"
    ranks = pool.take(size)
    crew = Crew(kind, list(ranks))
    crew.open(crew.ranks)
    loops = [rank.call("describe", kind).value["loop"].partition(":")[0] for rank in ranks]
    assert set(loops) == ({"native"} if name == "mpi" else {"native", "python"})
    for dtype, numels in [("float32", (5, 700_003)), ("float64", (1, 9)), ("bfloat16", (40_000,))]:
        payload = Payload(11, numels, dtype, exact=False)
        for index, rank in enumerate(ranks):
            rank.start("allreduce", kind, index, payload)
        want = predicted(algorithm, payload, size)
        assert [rank.result().value for rank in ranks] == [[want]] * size
    crew.all(crew.ranks, "close", kind)
    pool.give_back(ranks)


def test_links_are_kept_across_generations(pool: ProcessPool) -> None:
    kind = "mpi:ring"
    ranks = pool.take(3)
    crew = Crew(kind, list(ranks))
    crew.open(crew.ranks)
    wired = [outcome.value["links.wired"] for outcome in crew.all(crew.ranks, "describe", kind)]
    for _ in range(5):
        crew.open(crew.ranks)
        crew.open(crew.ranks[:2])
    again = [outcome.value["links.wired"] for outcome in crew.all(crew.ranks, "describe", kind)]
    assert again == wired
    crew.all(crew.ranks, "close", kind)
    pool.give_back(ranks)


@pytest.mark.exhaustive
def test_dead_peers_do_not_leak_memory(pool: ProcessPool) -> None:
    """Kill many peers: messages that were in flight to a dead rank must not pile up."""
    kind, mib, deaths = "mpi:ring", 24, EMPTIED_MAX + 2
    survivor, *victims = pool.take(1 + deaths)
    crew = Crew(kind, [survivor, *victims])
    payload = Payload(1, (mib << 18,))
    resident = []
    try:
        for victim in victims:
            crew.open([survivor, victim])
            survivor.start("allreduce", kind, 0, payload)
            assert not survivor.has_answered(0.3), "nobody receives"
            victim.kill()
            assert (outcome := survivor.result()).error == "PeerLost", outcome
            survivor.call("close", kind)
            resident.append(survivor.call("resident_mib").value)
    finally:
        for victim in victims:
            if victim.connection is not None:
                victim.kill()
    assert max(resident[1:]) - resident[0] < mib, resident
    assert int(survivor.call("describe", kind).value["abandoned"]) <= EMPTIED_MAX
    pool.give_back([survivor])


@pytest.mark.parametrize("name", exhaustive_except(["mpi"], ["mpi", "mpi-mixed"]))
def test_deaths_in_a_message_end_no_survivor_and_make_no_sum_wrong(
    pool: ProcessPool, name: str
) -> None:
    """Kill a peer while the survivor reads nothing, so that messages are broken off.

    MPICH would call the connection's error fatal (`native/peer_errors.c`).
    """
    kind, moments = f"{name}:recursive_doubling", random.Random(5)
    [survivor] = pool.take(1)
    before = _broken(survivor, kind)
    deaths = 0
    while deaths < DEATHS or _broken(survivor, kind) == before:
        deaths += 1
        assert deaths < DEATHS_MAX, "no death has broken anything off"
        [victim] = pool.take(1)
        crew = Crew(kind, [survivor, victim])
        crew.open(crew.ranks)
        for index, rank in enumerate(crew.ranks):
            rank.start("allreduce_checked", kind, index, 2, 4 * PIECE_BYTES)
        survivor.wait_entered(LINKS_ARE_WARM)
        time.sleep(moments.uniform(0, 0.01))
        survivor.stop()
        time.sleep(FILLED_S)
        victim.kill()
        survivor.go_on()
        assert (outcome := survivor.result()).error == "PeerLost", outcome
        survivor.call("close", kind)
    pool.give_back([survivor])


def _broken(rank: ProcessRank, kind: str) -> int:
    return int(rank.call("describe", kind).value["links.broken"])


@pytest.mark.parametrize("name", ["mpi", "mpi-mixed"])
@pytest.mark.parametrize("long", [0, 1])
def test_a_message_that_lacks_data_ends_the_reduction(
    pool: ProcessPool, name: str, long: int
) -> None:
    """MPICH completes a receive without an error if its sender dies in the middle."""
    kind = f"{name}:recursive_doubling"
    ranks = pool.take(2)
    crew = Crew(kind, list(ranks))
    crew.open(crew.ranks)
    for index, rank in enumerate(ranks):
        rank.start("allreduce", kind, index, Payload(3, (1000 if index == long else 10,)))
    outcomes = [rank.result() for rank in ranks]
    assert [outcome.error for outcome in outcomes] == ["PeerLost"] * 2, outcomes
    assert outcomes[long].message == CUT_OFF.format(1 - long)
    crew.all(crew.ranks, "close", kind)
    pool.give_back(ranks)


@pytest.mark.exhaustive
def test_unreachable_peers_time_out_and_leave_mpi_usable(
    pool: ProcessPool, stranger: Rendezvous
) -> None:
    """Meet a peer that never connects and one that is dead.

    Neither may block a rank for long, and both leave MPI usable (docs/design/data-channel.md).
    """
    kind = "mpi:ring"
    acceptor, dialer, friend = ranks = pool.take(3)
    crew = Crew(kind, list(ranks))
    crew.open([dialer, friend])
    ((_, address),) = crew.peers([acceptor])
    own = ("stranger", stranger.address)
    deadline = Deadline(Abort(), 10.0)

    peers = (Peer(*own), Peer(acceptor.name, address))
    acceptor.start("open", kind, "never-connects", 100, [own, (acceptor.name, address)], 1, 1.5)
    answer, connection = stranger.dial(
        Group("never-connects", 100, peers, 0), 1, Offer(""), Agreed, deadline
    )
    outcome = acceptor.result()
    connection.close()
    assert outcome.error == "PeerLost", outcome
    assert outcome.seconds < 9
    acceptor.kill()  # its port is dead from now on

    ((_, address),) = crew.peers([dialer])
    peers = (Peer(dialer.name, address), Peer(*own))
    dialer.start("open", kind, "dead-port", 101, [(dialer.name, address), own], 0, 1.0)
    _, connection = stranger.answer(Group("dead-port", 101, peers, 1), 0, Offer, deadline)
    connection.send(answer)
    outcome = dialer.result()
    connection.close()
    assert outcome.error == "PeerLost", outcome
    assert outcome.seconds < 9

    # The abandoned Connect ends after a number of attempts, which takes longer on a busy machine.
    crew.open([dialer, friend], timeout_s=180.0)
    for index, rank in enumerate([dialer, friend]):
        rank.start("allreduce", kind, index, Payload(1, (100,)))
    assert [rank.result().error for rank in (dialer, friend)] == ["", ""]
    crew.all([dialer, friend], "close", kind)
    pool.give_back([dialer, friend])


def test_a_send_to_a_dead_rank_fails_at_once(pool: ProcessPool) -> None:
    """Send to a dead rank.

    MPICH would retry for 3 s or forever while holding its lock, so that the rank would look frozen.
    """
    kind = "mpi:recursive_doubling"
    ranks = pool.take(2)
    crew = Crew(kind, list(ranks))
    crew.open(crew.ranks)
    survivor, victim = ranks
    victim.kill()
    for _ in range(2):  # MPICH notices the lost connection during the first one
        survivor.start("allreduce", kind, 0, Payload(1, (100_000,)))
        outcome = survivor.result()
        assert outcome.error == "PeerLost", outcome
        assert outcome.seconds < 3.0
    crew.all([survivor], "close", kind)
    pool.give_back([survivor])


def test_the_environment_selects_loopback_for_local_runs_only() -> None:
    assert mpi_environment(True)["FI_TCP_IFACE"] == "lo"
    assert "FI_TCP_IFACE" not in mpi_environment(False)
    assert mpi_environment(False)["FI_PROVIDER"] == "tcp"


STACK = """Other MPI error, error stack:
internal_Wait(68405).........: MPI_Wait(request=0x7ffd, status=0x1) failed
MPIR_Wait(780)...............:
MPIDI_OFI_handle_cq_error(787): OFI poll failed (Input/output error)
"""


def test_a_failed_call_of_mpi_is_reported_in_one_line_with_its_cause() -> None:
    text = "a call of MPI failed: Other MPI error: OFI poll failed (Input/output error)"
    assert failed_call(STACK) == text
    assert failed_call("Invalid communicator") == "a call of MPI failed: Invalid communicator"
    assert failed_call("") == "a call of MPI failed: no reason given"
