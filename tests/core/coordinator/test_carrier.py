"""The network that carries a job's gradients, as the coordinator derives it from its agents."""

from __future__ import annotations

from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core.protocol.records import Gen
from paceline_api.ids import MemberId
from paceline_api.status import Status
from paceline_api.types.enums import Network

from testing.makers import GEN_1, PLAN

A, B, C = MemberId(0, 0, 0), MemberId(1, 0, 0), MemberId(1, 1, 0)


class Desk:
    """A coordinator with a committed generation of these members and an agent for each pod."""

    def __init__(self, *members: MemberId) -> None:
        self._now = 0
        self._members = members
        config = coord.Config("job", len(members))
        self._coordinator = coord.Coordinator(config, uid="a", now_ns=0)
        gen = Gen(GEN_1, members, members, members, 0, plan=PLAN)
        self._coordinator.state.commit = m.Commit(gen, members[0], (), members[0], (), ())
        for slot in {who.slot for who in members}:
            living = tuple(who for who in members if who.slot == slot)
            self._post(m.AgentHello(slot, 0, "host", "", living, ()))

    def _post(self, message: m.AgentMessage) -> None:
        self._now += 1
        self._coordinator.handle(self._now, coord.FromAgent(message))

    def report(self, *carriers: tuple[MemberId, Network]) -> Network | None:
        """Let all agents send two heartbeats with these networks, and return that of the job."""
        for slot in sorted({who.slot for who in self._members}) * 2:
            own = tuple((who, network) for who, network in carriers if who.slot == slot)
            self._post(m.PodBeat(slot, 0, carriers=own))
        return self.status.carrier

    @property
    def status(self) -> Status:
        return self._coordinator.status(self._now)


def test_the_network_of_a_job_is_the_worst_of_its_members() -> None:
    desk = Desk(A, B, C)
    assert desk.report() is Network.UNKNOWN
    assert desk.report((A, Network.RDMA), (B, Network.RDMA)) is Network.UNKNOWN
    known = (A, Network.RDMA), (B, Network.GPUDIRECT)
    assert desk.report(*known, (C, Network.GPUDIRECT)) is Network.RDMA
    assert [r.carrier for r in desk.status.ranks] == ["RDMA", "GPUDirect", "GPUDirect"]
    assert desk.report(*known) is Network.UNKNOWN, "what an agent no longer knows is not kept"
    assert desk.report(*known, (C, Network.TCP)) is Network.TCP
    assert desk.report((C, Network.TCP)) is Network.TCP


def test_a_job_within_one_pod_has_no_network() -> None:
    desk = Desk(B, C)
    assert desk.report((B, Network.TCP), (C, Network.TCP)) is Network.UNKNOWN


def test_the_history_contains_each_change_of_the_network_once() -> None:
    desk = Desk(A, B)
    for network in (Network.RDMA, Network.UNKNOWN, Network.RDMA, Network.TCP, Network.RDMA):
        desk.report((A, Network.RDMA), (B, network))
    lines = [h for h in desk.status.history if h.reason == "Carrier"]
    assert [line.facts["carrier"] for line in lines] == ["RDMA", "TCP", "RDMA"]
    assert lines[0].message == "RDMA carries the gradients between replicas"
