"""The data that an agent reads from /proc, /sys, the records and NCCL's log, with made-up trees."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from paceline.agent.launch import plan_rank
from paceline.agent.network import (
    NcclLog,
    NetworkWatch,
    holds_device,
    interface_octets,
    nccl_log,
    sent_octets,
)
from paceline.core.agent.network import Connections
from paceline.core.collectives.select import Method
from paceline.environment import AgentSettings
from paceline.telemetry.collector import PodRecords
from paceline.telemetry.records import RankRecord
from paceline_api.ids import MemberId
from paceline_api.jobfile import JobFile
from paceline_api.reading.load import parse_job
from paceline_api.resolve import resolve
from paceline_api.types.enums import Network

from testing.agent_harness import JOB

ME, PEER = MemberId(0, 0, 1000), MemberId(0, 1, 1000)
MIB = 1 << 20
GDRDMA = "n:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA\n"
SOCKET = "n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"


@dataclass
class Machine:
    """Directory trees in the form of /proc and /sys."""

    folder: Path
    children: dict[int, list[int]] = field(default_factory=dict)

    @property
    def proc(self) -> Path:
        return self.folder / "proc"

    @property
    def sys(self) -> Path:
        return self.folder / "sys"

    def process(self, pid: int, *files: str, children: tuple[int, ...] = ()) -> None:
        fds = self.proc / str(pid) / "fd"
        task = self.proc / str(pid) / "task" / str(pid)
        fds.mkdir(parents=True)
        task.mkdir(parents=True)
        for number, target in enumerate(("/dev/null", "socket:[1]", *files)):
            (fds / str(number)).symlink_to(target)
        (task / "children").write_text("".join(f"{child} " for child in children))

    def interfaces(self, **sent: int) -> None:
        """Write net/dev as the kernel prints it; loopback sends much and is not counted."""
        rows = [
            f"{name:>6}: 9 9 0 0 0 0 0 0 {octets} 9 0 0 0 0 0 0"
            for name, octets in {"lo": 99999, **sent}.items()
        ]
        titles = ["Inter-|   Receive  |  Transmit", " face |bytes packets|bytes packets"]
        (self.proc / "net").mkdir(parents=True, exist_ok=True)
        (self.proc / "net/dev").write_text("\n".join([*titles, *rows]) + "\n")

    def port(self, device: str, number: int, **counters: int | str) -> None:
        for name, value in counters.items():
            folder = self.sys / "class/infiniband" / device / "ports" / str(number)
            file = folder / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_sent_octets_are_read_from_all_infiniband_ports(machine: Machine) -> None:
    assert sent_octets(machine.sys) == {}
    machine.port("mlx5_0", 1, counters__port_xmit_data=250, counters__port_rcv_data=9)
    machine.port("mlx5_0", 2, counters__port_xmit_data=0)
    machine.port("rdmap0s6", 1, hw_counters__tx_bytes=77, hw_counters__rx_bytes=9)
    machine.port("odd_0", 1, counters__port_xmit_data="N/A (no PMA)")
    assert sent_octets(machine.sys) == {"mlx5_0/1": 1000, "mlx5_0/2": 0, "rdmap0s6/1": 77}


def test_sent_octets_of_interfaces_exclude_loopback(machine: Machine) -> None:
    assert interface_octets(machine.proc) is None
    machine.interfaces(eth0=500, net1=70)
    assert interface_octets(machine.proc) == 570
    real = interface_octets(Path("/proc"))
    assert real is not None
    assert real >= 0


def test_a_device_held_open_by_a_rank_or_its_children_is_found(machine: Machine) -> None:
    machine.process(10, "/dev/shm/x", "/dev/infiniband/rdma_cm")
    machine.process(20, children=(21, 22))
    machine.process(21)
    machine.process(22, "/dev/infiniband/uverbs0")
    machine.process(30, "/dev/infiniband/uverbs1")
    assert holds_device(machine.proc, 10) is False
    assert holds_device(machine.proc, 20) is True, "the rank is a shell with Python below it"
    assert holds_device(machine.proc, 30) is True
    assert holds_device(machine.proc, 99) is False, "it has just ended"


def test_a_rank_whose_files_cannot_be_listed_is_unknown(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse to list a rank's files, as for a rank of another user.

    The refusal is simulated because the tests may run as root, which can read all.
    """
    machine.process(10)
    listdir = os.listdir

    def refused(path: str) -> list[str]:
        if path.endswith("/10/fd"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    assert holds_device(machine.proc, 10) is None


@pytest.mark.processes
def test_real_processes_are_read_without_an_error() -> None:
    """Read the real /proc of a shell whose child runs."""
    script = f"{sys.executable} -c 'print(1, flush=True); input()' & wait"
    with subprocess.Popen(
        ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        assert holds_device(Path("/proc"), shell.pid) is False
        shell.kill()


def test_the_log_of_nccl_is_read_incrementally(tmp_path: Path) -> None:
    log = NcclLog(nccl_log(tmp_path, ME))
    assert log.look() == Connections()
    (tmp_path / "logs").mkdir()
    first, second = (tmp_path / "logs" / f"nccl-0.0-1000.{pid}" for pid in (70, 71))
    first.write_text("NCCL version 2.27.5\n" + GDRDMA + GDRDMA[:40])
    assert log.look() == Connections(1, 0)
    with first.open("a") as stream:
        stream.write(GDRDMA[40:])
    second.write_text(SOCKET)
    (tmp_path / "logs" / "nccl-0.1-1000.72").write_text(SOCKET)
    assert log.look() == Connections(2, 1)
    assert log.look() == Connections(2, 1)


def settings(folder: Path) -> AgentSettings:
    env = {"JOB": "j", "SLOT": "0", "ATTEMPT": "1", "PROCS": "2", "COORDINATOR": "http://c:1"}
    env |= {"TOKEN": "t", "RUN_DIR": str(folder), "SPEC": str(folder / "job.json"), "HOST": "h"}
    return AgentSettings.from_environment({f"PACELINE_{name}": text for name, text in env.items()})


@pytest.mark.parametrize(
    ("gpu_direct", "outside", "of_job", "wanted"),
    [
        (True, {}, (), {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}),
        (False, {}, (), {}),
        (
            True,
            {"NCCL_DEBUG": "WARN"},
            (("NCCL_DEBUG_FILE", "/x"),),
            {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"},
        ),
    ],
    ids=["asked for", "not required", "the pod and the job say otherwise"],
)
def test_nccl_logging_is_enabled_only_if_the_job_requires_gpudirect(
    tmp_path: Path,
    gpu_direct: bool,
    outside: Mapping[str, str],
    of_job: tuple[tuple[str, str], ...],
    wanted: Mapping[str, str],
) -> None:
    job = resolve(parse_job(JOB))
    spec = JobFile.of(job, command=["python"], env=of_job, gpu_direct=gpu_direct)
    plan = plan_rank(
        settings(tmp_path),
        spec,
        ME,
        outside=outside,
        mpiexec="",
        socket_name="s",
        key="k",
        agent_pid=1,
        sockets=tmp_path,
        temporary=tmp_path,
    )
    env = {name: text for name, text in plan.order.env.items() if name.startswith("NCCL")}
    if "NCCL_DEBUG" in wanted:
        wanted = {**wanted, "NCCL_DEBUG_FILE": str(tmp_path / "logs" / "nccl-0.0-1000.%p")}
    assert env == wanted


class Trainer:
    """Writes a rank's record like its communication thread."""

    def __init__(self, records: PodRecords, member: MemberId) -> None:
        self.record = RankRecord.open(os.dup(records.begin(member)))
        self.transfer_s = self.record.histogram("paceline_round_transfer_seconds")
        self.record.gauge("paceline_generation_number").set(1)
        self.record.gauge("paceline_incarnation_number").set(1)

    def rounds(self, mib: int, members: int, method: Method) -> None:
        self.record.gauge("paceline_world_size_ranks", ranks="members").set(members)
        labels = {"transport": method.transport, "algorithm": method.algorithm}
        moved = self.record.counter("paceline_payload_bytes_total", **labels)
        for _ in range(4):
            moved.add(mib / 4 * MIB)
            self.transfer_s.observe(0.001)


def test_the_metrics_page_shows_what_network_each_rank_uses(machine: Machine) -> None:
    """Let one rank use verbs and one TCP; then NCCL's log says that both use GPUDirect."""
    machine.process(10, "/dev/infiniband/uverbs0")
    machine.process(11)
    machine.port("mlx5_0", 1, counters__port_xmit_data=0)
    records = PodRecords(0, 2)
    ranks = Trainer(records, ME), Trainer(records, PEER)
    pids = {ME: 10, PEER: 11}
    watch = NetworkWatch(
        records,
        lambda: pids,
        lambda member: nccl_log(machine.folder, member),
        proc=machine.proc,
        sys=machine.sys,
    )
    records.carriers = lambda: watch.verdicts
    ring = Method("mpi", "ring")
    for rank in ranks:
        rank.rounds(8, 2, ring)
    asyncio.run(watch.look())
    for rank in ranks:
        rank.rounds(8, 2, ring)
    machine.port("mlx5_0", 1, counters__port_xmit_data=2 * MIB)
    asyncio.run(watch.look())
    assert set(watch.verdicts.values()) == {Network.UNKNOWN}, "both ranks are in this pod"
    assert b"paceline_transport_carrier_info{" not in records.page()
    for rank in ranks:
        rank.rounds(0, 4, ring)
    asyncio.run(watch.look())
    for rank in ranks:
        rank.rounds(8, 4, ring)
    machine.port("mlx5_0", 1, counters__port_xmit_data=4 * MIB)
    asyncio.run(watch.look())
    assert watch.verdicts == {ME: Network.RDMA, PEER: Network.TCP}
    page = records.page().decode()
    assert 'paceline_transport_carrier_info{carrier="RDMA",worker="0.0"} 1.0' in page
    assert 'paceline_transport_carrier_info{carrier="TCP",worker="0.1"} 1.0' in page

    (machine.proc / "11/fd/9").symlink_to("/dev/infiniband/uverbs0")
    (machine.folder / "logs").mkdir()
    (machine.folder / "logs/nccl-0.0-1000.10").write_text(GDRDMA)
    for rank in ranks:
        rank.rounds(8, 4, Method("nccl"))
    machine.port("mlx5_0", 1, counters__port_xmit_data=6 * MIB)
    asyncio.run(watch.look())
    assert set(watch.verdicts.values()) == {Network.GPUDIRECT}
    records.retire(PEER)
    del pids[PEER]
    asyncio.run(watch.look())
    assert watch.verdicts == {ME: Network.GPUDIRECT}
    for rank in ranks:
        rank.record.close()
    records.close()
