"""Observes what carries the data channel of the pod's ranks, for `core.agent.network` to judge.

Nothing runs inside the ranks. The agent reads the open files of their processes and the counters of
interfaces from /proc, the counters of RDMA ports from /sys, the bytes that the channel has reduced
from the records of the ranks, and NCCL's log if the job requires GPUDirect. One observation takes
half a millisecond for each rank.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from paceline_api.ids import MemberId
from paceline_api.types.enums import Network

from paceline.core.agent.network import (
    Connections,
    Judge,
    PodReading,
    RankReading,
    nccl_connections,
)
from paceline.telemetry.collector import PodRecords, Values

log = logging.getLogger("paceline.agent")

SOON_S: Final = 2.0
"""Seconds between two observations while a verdict is missing."""
LOOK_S: Final = 10.0
DEVICES: Final = "/dev/infiniband/uverbs"
WORD_OCTETS: Final = 4
"""Unit of port_xmit_data, in octets."""
LOG_MAX: Final = 1 << 20
"""Octets of NCCL's log that one observation reads."""
NCCL_NAMES: Final = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


def sent_octets(sys: Path) -> dict[str, int]:
    """Return the octets sent by each port of the RDMA subsystem.

    An EFA counts its own traffic in `hw_counters`, in octets. The others count words of 4 octets.

    Args:
        sys: The mount point of sysfs.

    Returns:
        Octets by port, such as `mlx5_0/1`. Ports without counters are left out.
    """
    by_port: dict[str, int] = {}
    for port in sorted((sys / "class/infiniband").glob("*/ports/*")):
        for name, unit in (("hw_counters/tx_bytes", 1), ("counters/port_xmit_data", WORD_OCTETS)):
            try:
                octets = int((port / name).read_text()) * unit
            except (OSError, ValueError):
                continue  # not every driver has every counter
            by_port[f"{port.parent.parent.name}/{port.name}"] = octets
            break
    return by_port


def interface_octets(proc: Path) -> int | None:
    """Return the octets sent by all interfaces of this network namespace except loopback.

    Args:
        proc: The mount point of procfs.

    Returns:
        Octets, or None if the counters cannot be read.
    """
    try:
        lines = (proc / "net/dev").read_text().splitlines()[2:]
    except OSError:
        return None
    rows = [line.partition(":") for line in lines]
    return sum(int(row.split()[8]) for name, _, row in rows if name.strip() != "lo")


def holds_device(proc: Path, pid: int) -> bool | None:
    """Return whether a process or one of its descendants holds an RDMA device open.

    The rank's own process may be a shell with Python below it.

    Args:
        proc: The mount point of procfs.
        pid: Pid of the rank.

    Returns:
        True or False, or None if the files of one of them cannot be read and no device was found.
    """
    hidden = False
    waiting = [str(pid)]
    while waiting:
        process = f"{proc}/{waiting.pop()}"  # str, not Path: a rank may open thousands of files
        try:
            for name in os.listdir(f"{process}/fd"):  # noqa: PTH208
                if _points_to(f"{process}/fd/{name}").startswith(DEVICES):
                    return True
            for task in os.listdir(f"{process}/task"):  # noqa: PTH208
                waiting += Path(f"{process}/task/{task}/children").read_text().split()
        except PermissionError:
            hidden = True
        except OSError:
            continue  # it has just ended
    return None if hidden else False


def _points_to(link: str) -> str:
    try:
        return os.readlink(link)  # noqa: PTH115
    except FileNotFoundError:
        return ""  # it was closed meanwhile


def nccl_log(run_dir: Path, member: MemberId) -> Path:
    """Return the path of a rank's NCCL log.

    NCCL appends a pid, since a rank may be several processes.
    """
    slot, local, attempt = member
    return run_dir / "logs" / f"nccl-{slot}.{local}-{attempt}"


def nccl_environment(run_dir: Path, member: MemberId) -> dict[str, str]:
    """Return the variables that make NCCL log how it connects. They replace the user's own."""
    values = ("INFO", "INIT,NET", f"{nccl_log(run_dir, member)}.%p")
    return dict(zip(NCCL_NAMES, values, strict=True))


@dataclass(slots=True)
class NcclLog:
    """The connections in the NCCL log of one rank, read bit by bit."""

    path: Path
    connections: Connections = field(default_factory=Connections)
    _read: dict[Path, int] = field(default_factory=dict)
    """Octets read so far of each file, up to the end of a line."""

    def look(self) -> Connections:
        """Read what is new in the log, and return all connections so far."""
        for file in sorted(self.path.parent.glob(f"{self.path.name}.*")):
            with file.open("rb") as stream:
                stream.seek(self._read.get(file, 0))
                text, newline, _ = stream.read(LOG_MAX).rpartition(b"\n")
            self._read[file] = self._read.get(file, 0) + len(text) + len(newline)
            self.connections += nccl_connections(text.decode(errors="replace").splitlines())
        return self.connections


@dataclass(frozen=True, slots=True)
class Outside:
    """One observation, without the records of the ranks."""

    ports: Mapping[str, int]
    interfaces: int | None
    devices: Mapping[MemberId, bool | None]
    connections: Mapping[MemberId, Connections]


class NetworkWatch:
    """Observes the ranks of the pod from time to time. `verdicts` holds the results."""

    def __init__(
        self,
        records: PodRecords,
        pids: Callable[[], Mapping[MemberId, int]],
        log_of: Callable[[MemberId], Path],
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
    ) -> None:
        self._records, self._pids, self._log_of = records, pids, log_of
        self._proc, self._sys = proc, sys
        self._judge = Judge()
        self._logs: dict[MemberId, NcclLog] = {}

    @property
    def verdicts(self) -> Mapping[MemberId, Network]:
        """The network that carries each rank's data channel, by member."""
        return self._judge.verdicts

    async def run(self) -> None:
        """Observe again and again until the task is canceled. Failures are logged."""
        while True:
            await asyncio.sleep(LOOK_S if self._judge.is_settled else SOON_S)
            try:
                await self.look()
            except (OSError, ValueError, IndexError) as error:
                log.warning("what carries the data channel cannot be looked into: %s", error)

    async def look(self) -> None:
        """Observe once. Files are read in a thread, since a hanging adapter answers late."""
        # A thread, since an adapter whose firmware hangs would block the event loop.
        outside = await asyncio.to_thread(self._outside, dict(self._pids()))
        before = dict(self.verdicts)
        self._judge.look(self._reading(outside))
        for member, network in self.verdicts.items():
            if network and network is not before.get(member):
                log.info("%s carries the data channel of rank %s", network, member)

    def _outside(self, pids: Mapping[MemberId, int]) -> Outside:
        """Read all files. The records are read afterwards."""
        self._logs = {member: self._log(member) for member in pids}
        return Outside(
            sent_octets(self._sys),
            interface_octets(self._proc),
            {member: holds_device(self._proc, pid) for member, pid in pids.items()},
            {member: log.look() for member, log in self._logs.items()},
        )

    def _reading(self, outside: Outside) -> PodReading:
        records = self._records.values()
        ranks = {
            member: self._rank(member, outside, records[member], len(records))
            for member in outside.devices
            if member in records
        }
        return PodReading(outside.ports, outside.interfaces, ranks)

    def _log(self, member: MemberId) -> NcclLog:
        return self._logs.get(member) or NcclLog(self._log_of(member))

    def _rank(self, member: MemberId, outside: Outside, values: Values, ranks: int) -> RankReading:
        def gauge(name: str, *labels: str) -> float:
            return values.get((name, labels), (0.0,))[0]

        reduced: dict[str, float] = {}
        for (name, labels), slots in values.items():
            if name == "paceline_payload_bytes_total":
                reduced[labels[0]] = reduced.get(labels[0], 0.0) + slots[0]
        transfers = values.get(("paceline_round_transfer_seconds", ()), (0.0,))
        numbers = ("paceline_incarnation_number", "paceline_generation_number")
        return RankReading(
            device_open=outside.devices[member],
            generation=tuple(map(gauge, numbers)),
            alone=gauge("paceline_world_size_ranks", "members") <= ranks,
            reduced=reduced,
            reductions=sum(transfers[:-1]),
            connections=outside.connections[member],
        )
