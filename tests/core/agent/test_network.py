"""Verdicts about which network carries the data channel, from recorded readings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paceline.core.agent.network import (
    ENOUGH_BYTES,
    REDUCTIONS_MIN,
    Connections,
    Judge,
    PodReading,
    RankReading,
    nccl_connections,
    worst,
)
from paceline_api.ids import MemberId
from paceline_api.types.enums import Network

A, B = MemberId(0, 0, 0), MemberId(0, 1, 0)
MIB = 1 << 20
NEW = RankReading(
    device_open=True, generation=(1.0, 1.0), alone=False, reduced={"mpi": 0.0}, reductions=0.0
)


def after(
    rank: RankReading, mib: float, reductions: int = 4, transport: str = "mpi"
) -> RankReading:
    """Return the reading of `rank` after its channel has reduced `mib` MiB more."""
    before = rank.reduced.get(transport, 0.0)
    reduced = {**rank.reduced, transport: before + mib * MIB}
    return replace(rank, reduced=reduced, reductions=rank.reductions + reductions)


def pod(sent_mib: float, *ranks: RankReading, beside_mib: float | None = None) -> PodReading:
    """Build a pod's reading; `beside_mib` was sent by interfaces, None if it cannot be read."""
    beside = None if beside_mib is None else int(beside_mib * MIB)
    ports = {"mlx5_0/1": int(sent_mib * MIB)}
    return PodReading(ports, beside, dict(zip((A, B), ranks, strict=False)))


def judged(first: PodReading, *later: PodReading) -> Network:
    judge = Judge()
    for reading in (first, *later):
        judge.look(reading)
    return judge.verdicts[A]


def twice(first: PodReading, last: PodReading) -> Network:
    """Judge the same window twice, because a single window that looks like TCP is not trusted."""
    rank, ports = last.ranks[A], dict(last.ports)
    more = replace(
        rank,
        reduced={k: 2 * v - first.ranks[A].reduced.get(k, 0) for k, v in rank.reduced.items()},
        reductions=2 * rank.reductions - first.ranks[A].reductions,
    )
    grown = {port: 2 * octets - first.ports.get(port, octets) for port, octets in ports.items()}
    beside = last.interfaces
    if beside is not None and first.interfaces is not None:
        beside = 2 * beside - first.interfaces
    once = judged(first, last)
    verdict = judged(first, last, PodReading(grown, beside, {A: more}))
    assert once in (verdict, Network.UNKNOWN)
    return verdict


def test_rdma_is_inferred_if_ports_sent_at_least_half_of_the_payload() -> None:
    assert judged(pod(0, NEW), pod(8, after(NEW, 8))) is Network.RDMA
    assert judged(pod(0, NEW), pod(4, after(NEW, 8))) is Network.RDMA


def test_tcp_is_inferred_after_two_windows_below_half_of_the_payload() -> None:
    assert judged(pod(0, NEW), pod(3.9, after(NEW, 8))) is Network.UNKNOWN, "not of one window"
    assert twice(pod(0, NEW), pod(3.9, after(NEW, 8))) is Network.TCP
    assert twice(pod(100, NEW), pod(100, after(NEW, 8))) is Network.TCP


def test_one_window_of_other_traffic_does_not_count_as_the_data_channel() -> None:
    """The state for a joiner goes over TCP.

    Pods that share an adapter have no port counters.
    """

    def reading(beside_mib: int, rank: RankReading) -> PodReading:
        return PodReading({}, beside_mib * MIB, {A: rank})

    one, two = after(NEW, 8), after(after(NEW, 8), 8)
    assert judged(reading(0, NEW), reading(800, one)) is Network.UNKNOWN
    assert judged(reading(0, NEW), reading(800, one), reading(801, two)) is Network.RDMA
    three = after(two, 8)
    later = reading(801, two), reading(1600, three)
    assert judged(reading(0, NEW), reading(800, one), *later) is Network.RDMA
    changed = replace(two, generation=(1.0, 2.0))
    again = reading(1600, changed), reading(2400, after(changed, 8))
    assert judged(reading(0, NEW), reading(800, one), *again) is Network.UNKNOWN, "another group"


def test_rdma_is_inferred_if_neither_ports_nor_interfaces_sent_the_payload() -> None:
    """An adapter passes data to a pod of its own node without counting it at a port.

    An interface does not count it either, but over TCP it would.
    """
    first, last = pod(0, NEW, beside_mib=0), after(NEW, 8)
    assert judged(first, pod(0, last, beside_mib=3.9)) is Network.RDMA
    assert twice(first, pod(0, last, beside_mib=4)) is Network.TCP
    assert judged(first, pod(4, last, beside_mib=800)) is Network.RDMA, "a checkpoint went out"
    closed = replace(NEW, device_open=False)
    later = pod(0, after(closed, 8), beside_mib=0)
    assert judged(pod(0, closed, beside_mib=0), later) is Network.TCP


def test_without_port_counters_the_interfaces_decide() -> None:
    def reading(beside_mib: int, rank: RankReading) -> PodReading:
        return PodReading({}, beside_mib * MIB, {A: rank})

    assert judged(reading(0, NEW), reading(0, after(NEW, 8))) is Network.RDMA
    assert twice(reading(0, NEW), reading(8, after(NEW, 8))) is Network.TCP


def test_port_traffic_is_ignored_if_the_rank_has_no_open_device() -> None:
    closed = replace(NEW, device_open=False)
    assert judged(pod(0, closed), pod(800, after(closed, 8))) is Network.TCP


def test_gloo_counts_as_tcp_if_it_reduced_most_bytes() -> None:
    mixed = after(after(NEW, 3), 5, transport="gloo")
    assert judged(pod(0, NEW), pod(8, mixed)) is Network.TCP
    assert judged(pod(0, NEW), pod(8, after(after(NEW, 5), 3, transport="gloo"))) is Network.RDMA


def test_shared_memory_needs_no_network_and_hierarchical_counts_as_mpi() -> None:
    assert judged(pod(0, NEW), pod(0, after(NEW, 800, transport="shm"))) is Network.UNKNOWN
    assert judged(pod(0, NEW), pod(8, after(NEW, 8, transport="hier:mpi"))) is Network.RDMA


@pytest.mark.parametrize(
    ("mib", "reductions"),
    [(ENOUGH_BYTES / MIB / 2, 100), (800.0, REDUCTIONS_MIN - 1)],
    ids=["too few bytes", "the one in flight at the beginning may be most of it"],
)
def test_the_network_is_unknown_until_enough_bytes_and_reductions_passed(
    mib: float, reductions: int
) -> None:
    some = after(NEW, mib, reductions)
    assert judged(pod(0, NEW), pod(800, some)) is Network.UNKNOWN
    assert judged(pod(0, NEW), pod(0, some)) is Network.UNKNOWN
    more = after(some, mib, reductions)
    assert judged(pod(0, NEW), pod(800, some), pod(1600, more)) is Network.RDMA


def test_the_network_is_unknown_without_device_state_or_counters() -> None:
    hidden = replace(NEW, device_open=None)
    assert judged(pod(0, hidden), pod(8, after(hidden, 8))) is Network.UNKNOWN
    unseen = PodReading({}, None, {A: NEW}), PodReading({}, None, {A: after(NEW, 8)})
    assert judged(*unseen) is Network.UNKNOWN


def test_a_new_or_reset_port_counter_counts_as_no_traffic() -> None:
    last = PodReading({"mlx5_0/1": 0, "mlx5_1/1": 800 * MIB}, None, {A: after(NEW, 8)})
    more = PodReading(last.ports, None, {A: after(after(NEW, 8), 8)})
    assert judged(pod(8, NEW), last, more) is Network.TCP


def test_each_window_is_judged_on_its_own() -> None:
    one = after(NEW, 8)
    two = after(one, 8)
    three = after(two, 8)
    four = after(three, 8)
    readings = [pod(0, NEW), pod(80, one), pod(80, two), pod(80, three), pod(90, four)]
    assert judged(*readings[:2]) is Network.RDMA
    assert judged(*readings[:3]) is Network.RDMA
    assert judged(*readings[:4]) is Network.TCP
    assert judged(*readings) is Network.RDMA


def test_no_verdict_is_given_within_one_pod_or_across_a_membership_change() -> None:
    """Bytes reduced while a rank was alone must not count as bytes that RDMA did not carry."""
    alone = replace(NEW, alone=True)
    assert judged(pod(0, alone), pod(0, after(alone, 80))) is Network.UNKNOWN
    grown = replace(after(alone, 80), alone=False, generation=(1.0, 2.0))
    assert judged(pod(0, alone), pod(0, grown)) is Network.UNKNOWN
    assert judged(pod(0, alone), pod(0, grown), pod(8, after(grown, 8))) is Network.RDMA
    changed = replace(after(NEW, 8), generation=(1.0, 2.0))
    assert judged(pod(0, NEW), pod(0, changed)) is Network.UNKNOWN


def test_a_verdict_survives_a_membership_change_until_the_next_verdict() -> None:
    one = after(NEW, 8)
    changed = replace(one, generation=(2.0, 1.0))
    assert judged(pod(0, NEW), pod(8, one), pod(8, changed)) is Network.RDMA
    alone = replace(one, alone=True)
    assert judged(pod(0, NEW), pod(8, one), pod(8, alone)) is Network.UNKNOWN


def test_gpudirect_requires_that_all_connections_of_the_pod_use_it() -> None:
    def verdict(one: Connections, other: Connections, sent_mib: float = 8) -> Network:
        first = replace(NEW, reduced={}, connections=one), replace(NEW, connections=other)
        last = [after(rank, 8, transport="nccl") for rank in first]
        then = [after(rank, 8, transport="nccl") for rank in last]
        return judged(pod(0, *first), pod(sent_mib, *last), pod(2 * sent_mib, *then))

    assert verdict(Connections(8, 0), Connections(2, 0)) is Network.GPUDIRECT
    assert verdict(Connections(8, 0), Connections()) is Network.GPUDIRECT, "its peer is in the pod"
    assert verdict(Connections(8, 0), Connections(0, 1)) is Network.RDMA
    assert verdict(Connections(), Connections()) is Network.RDMA
    assert verdict(Connections(8, 0), Connections(), sent_mib=0) is Network.TCP


def test_nccl_connections_are_counted_from_log_lines() -> None:
    """The lines have the forms that NCCL 2.4 to 2.27 write."""
    direct = [
        "node-0:70:81 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA",
        "node-0:70:81 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/IBext_v8/3/GDRDMA",
        "node-0:70:81 [1] NCCL INFO Channel 01 : 2[c7000] -> 0[8700] [receive] via NET/IB/5/GDRDMA",
        "node-0:70:81 [1] NCCL INFO Ring 00 : 0 -> 1 [send] via NET/IB/0/GDRDMA",
        "n:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA",
        "n:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [send] via NET/IB/1(4)/GDRDMA(PCI)/Shared",
    ]
    other = [
        "node-0:70:81 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
        "node-0:70:81 [0] NCCL INFO Channel 06/0 : 36[4] -> 20[4] [send] via NET/IBext_v8/3",
        "node-0:70:81 [0] NCCL INFO Channel 06/0 : 36[4] -> 20[4] [send] via NET/IB/3/Shared",
    ]
    neither = [
        "node-0:70:81 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
        "node-0:70:81 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>",
        "node-0:70:81 [0] NCCL INFO GPU Direct RDMA Enabled for GPU 0 / HCA 0 (distance 3 <= 4)",
        "node-0:70:81 [0] NCCL INFO Connected all rings",
        "",
    ]
    assert nccl_connections(direct) == Connections(len(direct), 0)
    assert nccl_connections(other) == Connections(0, len(other))
    assert nccl_connections(neither) == Connections()


def test_worst_returns_the_worst_network_of_the_ranks() -> None:
    tcp, rdma, direct, unknown = Network.TCP, Network.RDMA, Network.GPUDIRECT, Network.UNKNOWN
    assert worst([direct, rdma]) is rdma
    assert worst([direct, direct]) is direct
    assert worst([rdma, unknown]) is unknown
    assert worst([rdma, unknown, tcp]) is tcp
    assert worst([]) is unknown
