"""The data channel that a job uses: several candidates, the fastest one per size class.

At open the ranks first agree on the table of measured times: its sums are reduced over the group,
so that a joiner, who contributes nothing, has the same table as all others and chooses alike.
A group whose class of size (2, 3-4, 5-8 ... ranks) nobody has measured yet measures every candidate
for a few milliseconds. Transports that win nothing are not wired again.

Who reaches the memory of the gradients goes before who does not. If nobody does, it goes through
host memory, so that no choice is a dead end: a job on GPUs trains over mpi and gloo, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import ClassVar, Final

import torch

from paceline.clock import NS_PER_S, now_ns
from paceline.core.collectives.select import (
    CLASS_BYTES,
    CLASS_NAMES,
    Choice,
    Method,
    choose_all,
    size_class,
)
from paceline.transport.base import HOST, Abort, Group, Peer, Transport, TransportError
from paceline.transport.staging import Staging

log = logging.getLogger("paceline.rank")

CALLS_MEASURED: Final = 5
"""The median of so many calls after one to warm up: a few milliseconds per size class."""

Row = dict[str, list[float]]


class SelectedTransport(Transport):
    """Wires, measures and chooses between transports; the first one carries the agreement."""

    name: ClassVar[str] = "selected"

    def __init__(self, transports: Sequence[Transport], left_out: Mapping[str, str]) -> None:
        assert transports, left_out
        self._transports = {transport.name: transport for transport in transports}
        self._left_out = dict(left_out)
        methods = [Method(t.name, algorithm) for t in transports for algorithm in t.algorithms]
        self._candidates = {method.candidate: method for method in methods}
        self._devices: Collection[torch.device] = (HOST,)
        self._unfit: dict[str, str] = {}
        """By transport: why it is of no use to the present group."""
        self._staging = Staging()
        self._staged = ""
        """Which memory goes through the host's; empty if none has."""
        self._measured: dict[int, Row] = {}
        """By class of group size: what this rank knows of the group's table."""
        self._own: dict[int, Row] = {}
        """The same as this rank alone has measured it."""
        self._kind = 0
        self._choices: tuple[Choice, ...] = ()
        self._only = ""
        """The one candidate, where the present group has no other; else empty."""
        self._group: Group | None = None

    @property
    def address(self) -> str:
        return ";".join(f"{name}={t.address}" for name, t in sorted(self._transports.items()))

    def begin(self, devices: Collection[torch.device]) -> None:
        for name, transport in list(self._transports.items()):
            try:
                transport.begin(devices)
            except TransportError as error:
                if len(self._transports) == 1:
                    raise
                self._left_out[name] = str(error)
                self._transports.pop(name).shutdown()
        self._devices = devices

    def moves(self, device: torch.device) -> bool:
        return any(t.moves(device) or t.moves(HOST) for t in self._transports.values())

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        self.close()
        end_ns = now_ns() + int(timeout_s * NS_PER_S)
        addresses = [_split(peer.address) for peer in group.peers]
        usable = self._usable(addresses)

        def wire(name: str) -> None:
            peers = tuple(
                Peer(peer.name, known[name])
                for peer, known in zip(group.peers, addresses, strict=True)
            )
            left_s = (end_ns - now_ns()) / NS_PER_S
            self._transports[name].open(replace(group, peers=peers), abort, max(left_s, 0.0))

        try:
            wire(usable[0])
            self._group = group
            self._agree(group, usable, wire, abort)
        except BaseException:
            self.close()
            raise

    def _usable(self, addresses: Sequence[Mapping[str, str]]) -> list[str]:
        """What this group can use, alike on all ranks: a transport that reaches only the memory of
        some device is in the address of a rank only if all its parameters are there."""
        common = [name for name in self._transports if all(name in known for known in addresses)]
        reasons = {n: self._transports[n].unfit([known[n] for known in addresses]) for n in common}
        self._unfit = {name: why for name, why in reasons.items() if why}
        usable = [name for name in common if not reasons[name]]
        if not usable:
            told = [f"rank {r} has {', '.join(known)}" for r, known in enumerate(addresses)]
            told += self._unfit.values()
            raise TransportError(
                f"the ranks of this job have no data channel in common: {'; '.join(told)}"
            )
        reach = [n for n in usable if all(self._transports[n].moves(d) for d in self._devices)]
        return reach or usable

    def _agree(
        self, group: Group, usable: list[str], wire: Callable[[str], None], abort: Abort
    ) -> None:
        """Every rank leaves with the same table, hence with the same choices."""
        candidates = [n for n, method in self._candidates.items() if method.transport in usable]
        self._kind = kind = (group.size - 1).bit_length()
        self._only = candidates[0] if len(candidates) == 1 else ""
        if self._only or group.size == 1:
            table: Row = {name: [0.0] * len(CLASS_BYTES) for name in candidates}
            wired = usable[:1]
        else:
            table = self._mean(self._measured.get(kind, {}), candidates, abort)
            wired = usable[:1]
            if not any(any(row) for row in table.values()):
                for name in usable[1:]:
                    wire(name)
                wired = usable
                self._own[kind] = self._measure(candidates, abort)
                table = self._mean(self._own[kind], candidates, abort)
            self._measured[kind] = table
        self._choices = choose_all(table)
        wanted = {method.transport for method in self.methods()}
        for name in usable:
            if name in wanted and name not in wired:
                wire(name)

    def _measure(self, candidates: list[str], abort: Abort) -> Row:
        rows: Row = {}
        for name in candidates:
            rows[name] = []
            for payload_bytes in CLASS_BYTES:
                buffer = torch.zeros(payload_bytes // 4)
                taken = []
                for _ in range(1 + CALLS_MEASURED):
                    start_ns = now_ns()
                    self._reduce(name, [buffer], abort)
                    taken.append((now_ns() - start_ns) / NS_PER_S)
                rows[name].append(median(taken[1:]))
        return rows

    def _mean(self, rows: Row, candidates: list[str], abort: Abort) -> Row:
        """The mean of each cell over the ranks that have measured it; same bits everywhere."""
        width = len(CLASS_BYTES)
        own = [rows[name] if name in rows else [0.0] * width for name in candidates]
        cells = torch.tensor(own, dtype=torch.float64).flatten()
        both = torch.cat([cells, (cells > 0).double()])
        self._reduce(candidates[0], [both], abort)
        total, count = both.chunk(2)
        mean = (total / count.clamp(min=1)).view(len(candidates), width).tolist()
        return dict(zip(candidates, mean, strict=True))

    def allreduce(
        self,
        buffers: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,  # noqa: ARG002
    ) -> None:
        assert self._group is not None, "allreduce outside a group"
        index = size_class(sum(buffer.nbytes for buffer in buffers))
        self._reduce(self._choices[index].candidate, buffers, abort)

    def _reduce(self, candidate: str, buffers: Sequence[torch.Tensor], abort: Abort) -> None:
        method = self._candidates[candidate]
        transport = self._transports[method.transport]

        def by(reached: Sequence[torch.Tensor]) -> None:
            transport.allreduce(reached, abort, method.algorithm)

        foreign = {str(b.device) for b in buffers if not transport.moves(b.device)}
        if not foreign:
            by(buffers)
            return
        if not self._staged:
            self._staged = ", ".join(sorted(foreign))
            log.warning(
                "%s does not reach the memory of %s: gradients go through host memory, which is "
                "slow; nccl needs a GPU for each rank, with all of its parameters on it",
                transport.name,
                self._staged,
            )
        self._staging.reduce(by, buffers)

    def close(self) -> None:
        self._group = None
        for transport in self._transports.values():
            transport.close()

    def shutdown(self) -> None:
        self.close()
        for transport in self._transports.values():
            transport.shutdown()

    def methods(self) -> tuple[Method, ...]:
        return tuple(self._candidates[choice.candidate] for choice in self._choices)

    def reasons(self) -> tuple[str, ...]:
        found = tuple(choice.why for choice in self._choices)
        if self._only:
            found = (f"{self._only} is the only candidate",)
        elif all(device.type == HOST.type for device in self._devices):
            return found  # nobody misses what needs a GPU
        left_out = self._left_out | self._unfit
        return (*found, *(f"{name} is left out: {why}" for name, why in left_out.items()))

    def regrets_s(self) -> tuple[float, ...]:
        own = self._own.get(self._kind, {})
        return tuple(
            choice.regret({name: row[index] for name, row in own.items()})
            for index, choice in enumerate(self._choices)
        )

    def describe(self) -> dict[str, str]:
        facts = {f"left out.{name}": why for name, why in (self._left_out | self._unfit).items()}
        if self._staged:
            facts["through host memory"] = self._staged
        regrets_s = self.regrets_s()
        for label, choice, regret_s in zip(CLASS_NAMES, self._choices, regrets_s, strict=False):
            facts[f"choice.{label}"] = choice.why
            facts[f"regret_us.{label}"] = f"{regret_s * 1e6:.0f}"
        for name, transport in self._transports.items():
            facts |= {f"{name}.{key}": value for key, value in transport.describe().items()}
        return facts


def _split(address: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in address.split(";") if part)
    return {name: where for name, _, where in pairs}
