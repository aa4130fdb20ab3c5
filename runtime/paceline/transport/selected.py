"""The data channel that a job uses: several transports, and the fastest one per size class.

At open the ranks first agree on the table of measured times. The sums of the table are reduced over
the group, so a joiner, which contributes nothing, has the same table as all others and makes the
same choice. A topology (the number of ranks, and which of them share a machine) that nobody has
measured yet is measured: every candidate, with payloads up to the model's largest segment.
Transports that win no size class are not wired again.

If one rank cannot wire a transport, all ranks leave it out. The vote on that travels over the first
transport that everybody has wired. The transport is tried again when a peer with which it could not
be wired has left.

Transports that reach the memory of the gradients go before those that do not. If none does,
gradients go through host memory, so every choice works: a job on GPUs can train over mpi and gloo.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import ClassVar, Final

import torch
from paceline_api.times import NS_PER_S
from paceline_api.types.enums import Wire

from paceline.clock import now_ns
from paceline.core import demand
from paceline.core.collectives.conduct import Conduct
from paceline.core.collectives.select import (
    CLASS_BYTES,
    CLASS_NAMES,
    Choice,
    Method,
    calls_to_measure,
    choose_all,
    choose_reproducible,
    classes_up_to,
    size_class,
    topology,
)
from paceline.limits import LimitError, ensure_callers, ensure_files
from paceline.transport.base import (
    HOST,
    Abort,
    Group,
    Peer,
    PeerLost,
    Transport,
    TransportAborted,
    TransportError,
)
from paceline.transport.staging import Staging, cut, cut_alike

log = logging.getLogger("paceline.rank")

TOPOLOGIES: Final = 16
"""Number of topologies whose measurements a rank keeps: a job that grows and shrinks returns to
them."""
MACHINE: Final = "machine"
"""Key in a rank's address for the machine that it runs on."""
MEMORY: Final = "memory"
"""Key in a rank's address, present if the rank has gradients on a device."""
ORDER: Final = "order"
"""Key in a rank's address, present if each run of the job must add in the same order."""

Row = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class _Failure:
    """The failure of this rank to wire a transport."""

    error: TransportError
    peers: frozenset[str]
    """Names of peers. The transport is not tried again while all of them are in the group."""


class _Opening:
    """One group while it forms: what this rank has wired, and what all ranks leave out."""

    def __init__(
        self, group: Group, addresses: Sequence[Mapping[str, str]], abort: Abort, timeout_s: float
    ) -> None:
        self.group, self.abort = group, abort
        self.failed: dict[str, _Failure] = {}
        self.dropped: dict[str, str] = {}
        """Reason why nobody uses a transport, by its name."""
        self.wired: set[str] = set()
        self._addresses = addresses
        self._end_ns = now_ns() + int(timeout_s * NS_PER_S)

    def wire(self, transport: Transport, *, last: bool) -> bool:
        """Open a transport for this group, and return True if this rank is inside it now.

        Ranks that wait for a rank that cannot come notice only by the timeout. So half of the time
        left is kept for the other transports, unless this is the last one.

        Args:
            transport: The transport to open.
            last: True if no other transport is left to try.

        Returns:
            False if the transport could not be wired; the failure is recorded.

        Raises:
            TransportAborted: The abort flag was raised.
        """
        name = transport.name
        left_s = max((self._end_ns - now_ns()) / NS_PER_S, 0.0)
        peers = tuple(
            Peer(peer.name, known[name])
            for peer, known in zip(self.group.peers, self._addresses, strict=True)
        )
        group = replace(self.group, peers=peers)
        try:
            transport.open(group, self.abort, left_s if last else left_s / 2)
        except TransportAborted:
            raise
        except TransportError as error:
            self.fail(transport, error)
            return False
        self.wired.add(name)
        return True

    def fail(self, transport: Transport, error: TransportError) -> None:
        """Record the failure and leave the transport, so that nobody waits for this rank there."""
        transport.close()
        self.wired.discard(transport.name)
        names = [peer.name for peer in self.group.peers]
        # The peer that timed out may itself be waiting for another one, so suspect all of them.
        peers = names if isinstance(error, PeerLost) else [names[self.group.rank]]
        self.failed[transport.name] = _Failure(error, frozenset(peers))

    def nothing_left(self) -> TransportError:
        """Return the error that says why no transport could be wired."""
        errors = {name: failure.error for name, failure in self.failed.items()}
        if len(errors) == 1:
            return next(iter(errors.values()))
        message = "no data channel can be wired: " + "; ".join(
            f"{n}: {e}" for n, e in errors.items()
        )
        lost = [error for error in errors.values() if isinstance(error, PeerLost)]
        if not lost:
            return TransportError(message)
        return PeerLost(message, next((e.rank for e in lost if e.rank is not None), None))


class SelectedTransport(Transport):
    """Wires, measures and chooses between transports. The first one wired carries the agreement."""

    name: ClassVar[str] = "selected"

    def __init__(
        self,
        transports: Sequence[Transport],
        left_out: Mapping[str, str],
        machine: str = "",
        *,
        wire: Wire = Wire.FLOAT32,
        reproducible: bool = False,
    ) -> None:
        """Combine the transports of one rank.

        Args:
            transports: Transports that work on this rank; not empty.
            left_out: Why the others do not work, by name.
            machine: Text that is equal on ranks of the same machine. Empty if unknown.
            wire: Type in which most buffers travel.
            reproducible: True if each run must have the same bits, so that no choice depends on a
                measurement.
        """
        assert transports, left_out
        self._machine, self._wire, self._reproducible = machine, wire, reproducible
        self._transports = {transport.name: transport for transport in transports}
        self._left_out = dict(left_out)
        methods = [Method(t.name, algorithm) for t in transports for algorithm in t.algorithms]
        self._candidates = {method.candidate: method for method in methods}
        self._devices: Collection[torch.device] = (HOST,)
        self._unfit: dict[str, str] = {}
        """Reason why the present group cannot use a transport, by its name."""
        self._dropped: dict[str, str] = {}
        """Text about the ranks of the present group that could not wire a transport, by its name.
        """
        self._failures: dict[str, _Failure] = {}
        """Last failure of this rank to wire a transport, by its name, in this group or an earlier
        one."""
        self._staging = Staging()
        self._staged = ""
        """Devices whose memory goes through host memory, as text. Empty if there are none."""
        self._cuts = False
        """True if some rank of the group has gradients on a device, so buffers for transports of
        host memory are cut into pieces."""
        self._classes = len(CLASS_BYTES)
        """Number of size classes that the buffers of this job need."""
        self._measured: dict[tuple[int, ...], Row] = {}
        """The group's table for each topology, as far as this rank knows it."""
        self._own: dict[tuple[int, ...], Row] = {}
        """The times that this rank measured itself, for each topology."""
        self._topology: tuple[int, ...] = ()
        self._choices: tuple[Choice, ...] = ()
        self._only = ""
        """The candidate for buffers of all sizes if there is only one, else empty."""
        self._fixed = False
        """True if nothing is measured in the present group."""
        self._group: Group | None = None
        self._room_for = 0
        """Number of ranks of the largest group so far."""

    @property
    def address(self) -> str:
        """The addresses of all transports by name, and facts that make all ranks choose alike."""
        places = {name: t.address for name, t in self._transports.items()}
        if self._machine:
            places[MACHINE] = self._machine
        if any(device.type != HOST.type for device in self._devices):
            places[MEMORY] = "device"
        if self._reproducible:
            places[ORDER] = "fixed"
        return ";".join(f"{name}={where}" for name, where in sorted(places.items()))

    def begin(
        self, devices: Collection[torch.device], largest_bytes: int = CLASS_BYTES[-1]
    ) -> None:
        """Begin each transport, and leave out those that cannot serve these devices.

        Args:
            devices: Devices of the parameters.
            largest_bytes: Size in bytes of the largest usual buffer. It bounds the size classes to
                measure.

        Raises:
            TransportError: The only transport cannot serve them.
        """
        for name, transport in list(self._transports.items()):
            try:
                transport.begin(devices, largest_bytes)
            except TransportError as error:
                if len(self._transports) == 1:
                    raise
                self._left_out[name] = str(error)
                self._transports.pop(name).shutdown()
        self._devices = devices
        self._classes = classes_up_to(largest_bytes)

    def moves(self, device: torch.device) -> bool:
        """Return True if a transport reaches this memory, directly or through host memory."""
        return any(t.moves(device) or t.moves(HOST) for t in self._transports.values())

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer in memory of the first transport that sums in place, if there is one.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            device: Where the buffer lies.

        Returns:
            A tensor of shape (numel,).
        """
        own = (transport for transport in self._transports.values() if transport.sums_in_place)
        transport = next(own, None)
        if transport is None:
            return super().zeros(numel, dtype, device)
        return transport.zeros(numel, dtype, device)

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:
        """Wire the group, agree on the table of times and choose a candidate per size class."""
        self.close()
        self._make_room(group.size)
        addresses = [_split(peer.address) for peer in group.peers]
        self._topology = topology([known.pop(MACHINE, "") for known in addresses])
        memories = [known.pop(MEMORY, "") for known in addresses]
        orders = [known.pop(ORDER, "") for known in addresses]
        self._cuts, self._fixed = any(memories), any(orders)
        tiers = self._usable(addresses)
        opening = _Opening(group, addresses, abort, timeout_s)
        try:
            self._group = group
            self._agree(opening, tiers)
        except BaseException:
            self.close()
            raise
        self._remember(opening)

    def _make_room(self, size: int) -> None:
        """Raise the limits of this process for a larger group, since a job may grow.

        Args:
            size: Number of ranks of the group.

        Raises:
            TransportError: The machine does not allow so many ranks.
        """
        if size <= self._room_for:
            return
        try:
            make_room(size, self._transports)
        except LimitError as error:
            raise TransportError(f"{error.message}; hint: {error.hint}") from error
        self._room_for = size

    def _usable(self, addresses: Sequence[Mapping[str, str]]) -> list[list[str]]:
        """Return the transports that this group can use, in two tiers.

        All ranks get the same answer. The first tier reaches the memory of the gradients, the
        second goes through host memory. A transport that reaches only the memory of some device is
        in a rank's address only if all its parameters are there.

        Args:
            addresses: Addresses by transport, for each rank.

        Returns:
            One or two lists of names, none of them empty.

        Raises:
            TransportError: The ranks have no transport in common.
        """
        common = [name for name in self._transports if all(name in known for known in addresses)]
        reasons = {n: self._transports[n].unfit([known[n] for known in addresses]) for n in common}
        self._unfit = {name: why for name, why in reasons.items() if why}
        for name in sorted(self._transports.keys() - set(common)):
            rank = next(rank for rank, known in enumerate(addresses) if name not in known)
            self._unfit[name] = f"rank {rank} cannot use {name}; its own log says why"
        usable = [name for name in common if not reasons[name]]
        if not usable:
            missing = [f"rank {r} has {', '.join(known)}" for r, known in enumerate(addresses)]
            missing += self._unfit.values()
            raise TransportError(
                f"the ranks of this job have no data channel in common: {'; '.join(missing)}"
            )
        reach = [n for n in usable if all(self._transports[n].moves(d) for d in self._devices)]
        tiers = [reach, [name for name in usable if name not in reach]]
        return [tier for tier in tiers if tier]

    def _agree(self, opening: _Opening, tiers: list[list[str]]) -> None:
        """Wire, measure and vote until every rank has the same table, and so the same choices."""
        carrier, table = self._first_wired(opening, [name for tier in tiers for name in tier])
        usable = next(tier for tier in tiers if any(n not in opening.dropped for n in tier))
        while True:
            usable = [name for name in usable if name not in opening.dropped]
            candidates = self._candidates_of(usable)
            table = {name: table[name] for name in candidates}
            if self._fixed:
                self._choices = choose_reproducible(candidates, self._topology)
                candidates = list({choice.candidate: 0 for choice in self._choices})
            else:
                self._choices = choose_all(table)
            self._only = candidates[0] if len(candidates) == 1 else ""
            alone = bool(self._only) or opening.group.size == 1
            known = self._fixed or alone or all(map(any, table.values()))
            wanted = {method.transport for method in self.methods()} if known else set(usable)
            fresh = [name for name in usable if name in wanted and name not in opening.wired]
            if fresh:
                for name in fresh:
                    opening.wire(self._transports[name], last=False)
                self._vote(opening, carrier, fresh, {})
            elif known:
                break
            else:
                table = self._measure(opening, carrier, candidates)
        _keep(self._measured, self._topology, self._measured.get(self._topology, {}) | table)

    def _first_wired(self, opening: _Opening, names: list[str]) -> tuple[str, Row]:
        """Return the first transport that all ranks have wired, and the table agreed over it.

        The vote cannot end on any rank before all ranks have begun it. So if one rank could not
        wire a transport, it fails on all of them: they see it close or time out, and go on to the
        next one. It raises TransportError if no transport can be wired.

        Args:
            opening: The group that forms.
            names: Transports to try, in this order.

        Returns:
            Name of the transport, and the table.

        Raises:
            TransportAborted: The abort flag was raised.
        """
        members = {peer.name for peer in opening.group.peers}
        old = {n: f for n, f in self._failures.items() if f.peers <= members}
        for index, name in enumerate(names):
            transport, last = self._transports[name], index == len(names) - 1
            if name in old and not last:
                opening.failed[name] = old[name]
            elif opening.wire(transport, last=last):
                opening.failed |= {n: old[n] for n in names[index + 1 :] if n in old}
                rows = self._measured.get(self._topology, {})
                try:
                    return name, self._vote(opening, name, names, rows, self._candidates_of(names))
                except TransportAborted:
                    raise
                except TransportError as error:
                    opening.fail(transport, error)
        raise opening.nothing_left()

    def _candidates_of(self, names: Collection[str]) -> list[str]:
        return [n for n, method in self._candidates.items() if method.transport in names]

    def _vote(
        self,
        opening: _Opening,
        carrier: str,
        names: Sequence[str],
        rows: Row,
        candidates: Sequence[str] = (),
    ) -> Row:
        """Drop the transports that some rank could not wire, and average table cells.

        The result has the same bits on all ranks.

        Args:
            opening: The group that forms.
            carrier: Transport over which the vote travels.
            names: Transports to vote on.
            rows: Times that this rank knows, by candidate. 0 means not measured.
            candidates: Candidates whose cells are averaged.

        Returns:
            By candidate: the mean of each cell over the ranks that have measured it.
        """
        width = max(map(len, rows.values()), default=self._classes)
        cells = [cell for name in candidates for cell in rows.get(name, [0.0] * width)]
        without = [float(name in opening.failed) for name in names]
        summed = self._sum(
            carrier,
            [*cells, *map(float, map(bool, cells)), *without]
            + [vote * opening.group.rank for vote in without],
            opening.abort,
        )
        means = [next(summed) for _ in cells]
        means = [total / max(next(summed), 1.0) for total in means]
        voters = [int(next(summed)) for _ in names]
        for name, count, ranks_sum in zip(names, voters, summed, strict=True):
            if count:
                own = opening.failed.get(name)
                opening.dropped[name] = _why_dropped(count, int(ranks_sum), own)
                opening.wired.discard(name)
                self._transports[name].close()
        return {n: means[i * width : (i + 1) * width] for i, n in enumerate(candidates)}

    def _sum(self, carrier: str, figures: Sequence[float], abort: Abort) -> Iterator[float]:
        """Return an iterator over the sums of the figures over the ranks, in float64."""
        if self._group is None or self._group.size == 1:
            return iter(figures)
        transport = self._transports[carrier]
        buffer = torch.tensor(figures, dtype=torch.float64, device=self._device_for(transport))
        transport.allreduce([buffer], abort, transport.algorithms[0])
        return iter(buffer.tolist())

    def _device_for(self, transport: Transport) -> torch.device:
        return next((d for d in (HOST, *self._devices) if transport.moves(d)), HOST)

    def _remember(self, opening: _Opening) -> None:
        self._failures |= opening.failed
        for name, why in opening.dropped.items():
            if name not in self._dropped:
                log.warning("the data channel goes on without %s: %s", name, why)
        self._dropped = opening.dropped

    def _measure(self, opening: _Opening, carrier: str, candidates: list[str]) -> Row:
        """Measure the candidates class by class and return the table.

        After each class the ranks agree on the times. From these follows which candidates are
        measured in the next class, and how often.

        Args:
            opening: The group that forms.
            carrier: Transport over which the times travel.
            candidates: Candidates to measure.

        Returns:
            By candidate: mean seconds for each size class. 0 means not measured.
        """
        own: Row = {name: [] for name in candidates}
        table: Row = {name: [] for name in candidates}
        for index in range(self._classes):
            todo = calls_to_measure(table, index)
            if not any(todo.values()):
                break
            for name, calls in todo.items():
                own[name].append(self._time(name, index, calls, opening.abort))
            means = self._vote(
                opening, carrier, [], {name: row[-1:] for name, row in own.items()}, candidates
            )
            for name, mean in means.items():
                table[name] += mean
        for row in (*own.values(), *table.values()):
            row += [0.0] * (
                self._classes - len(row)
            )  # classes that were not measured, as in a joiner's table
        _keep(self._own, self._topology, own)
        return table

    def _time(self, candidate: str, index: int, calls: int, abort: Abort) -> float:
        """Return the median seconds of `calls` reductions.

        If there are several, one more warms up.
        """
        taken = []
        numel = CLASS_BYTES[index] // 4 if calls else 0
        buffer = self.zeros(numel, torch.float32, HOST)  # in the same memory as gradients
        residuals = [torch.zeros_like(buffer)] if self._wire is Wire.BFLOAT16 else []
        for _ in range(calls + (calls > 1)):
            start_ns = now_ns()
            self._reduce(candidate, [buffer], abort, residuals)
            taken.append((now_ns() - start_ns) / NS_PER_S)
        return median(taken[-calls:]) if calls else 0.0

    def allreduce(
        self,
        buffers: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,  # noqa: ARG002
    ) -> None:
        """Sum the buffers with the candidate chosen for their total size."""
        self._reduce(self._chosen_for(buffers), buffers, abort)

    def allreduce_in_turn(
        self,
        buffers: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,
        summed: Callable[[], None],
    ) -> None:
        """Hand all buffers to the only transport, or reduce them one after the other."""
        if self._only:
            method = self._candidates[self._only]
            transport = self._transports[method.transport]
            if self._takes_whole(transport, buffers):
                transport.allreduce_in_turn(buffers, abort, method.algorithm, summed)
                return
        super().allreduce_in_turn(buffers, abort, algorithm, summed)

    def _takes_whole(self, transport: Transport, buffers: Sequence[torch.Tensor]) -> bool:
        """Return True if the transport takes the buffers where they lie, without cutting them."""
        cut_here = self._cuts and transport.moves(HOST)
        return not cut_here and all(transport.moves(buffer.device) for buffer in buffers)

    def allreduce_rounded(
        self,
        buffers: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],
        abort: Abort,
        algorithm: str,  # noqa: ARG002
    ) -> None:
        """Sum the buffers as bfloat16 with the candidate chosen for their total size."""
        self._reduce(self._chosen_for(buffers), buffers, abort, residuals)

    def _chosen_for(self, buffers: Sequence[torch.Tensor]) -> str:
        assert self._group is not None, "allreduce outside a group"
        return self._choices[size_class(sum(buffer.nbytes for buffer in buffers))].candidate

    def _reduce(
        self,
        candidate: str,
        buffers: Sequence[torch.Tensor],
        abort: Abort,
        residuals: Sequence[torch.Tensor] = (),
    ) -> None:
        method = self._candidates[candidate]
        transport = self._transports[method.transport]

        def by(piece: Sequence[torch.Tensor]) -> None:
            if residuals:
                half = len(piece) // 2
                transport.allreduce_rounded(piece[:half], piece[half:], abort, method.algorithm)
            else:
                transport.allreduce(piece, abort, method.algorithm)

        pieces: Iterable[Sequence[torch.Tensor]] = ([*buffers, *residuals],)
        if self._cuts and transport.moves(HOST):
            pairs = zip(buffers, residuals, strict=False)
            rounded = (piece for pair in pairs for piece in cut_alike(pair))
            pieces = rounded if residuals else cut(buffers)
        foreign = {str(b.device) for b in buffers if not transport.moves(b.device)}
        if not foreign:
            for piece in pieces:
                by(piece)
            return
        if not self._staged:
            self._staged = ", ".join(sorted(foreign))
            log.warning(
                "%s does not reach the memory of %s: gradients go through host memory, which is "
                "slow; nccl needs a GPU for each rank, with all of its parameters on it",
                transport.name,
                self._staged,
            )
        self._staging.reduce(by, pieces, abort)

    def close(self) -> None:
        """Leave the group in all transports."""
        self._group = None
        for transport in self._transports.values():
            transport.close()

    def shutdown(self) -> None:
        """Shut all transports down."""
        self.close()
        for transport in self._transports.values():
            transport.shutdown()

    def methods(self) -> tuple[Method, ...]:
        """Return the chosen method for each size class."""
        return tuple(self._candidates[choice.candidate] for choice in self._choices)

    def machines(self) -> tuple[int, ...]:
        """Return the machines of the first transport with two levels, or an empty tuple."""
        return next(filter(None, (t.machines() for t in self._transports.values())), ())

    def conducts(self) -> tuple[Conduct, ...]:
        """Return how each chosen transport sums, sorted by name."""
        chosen = sorted({method.transport for method in self.methods()})
        return tuple(
            replace(
                conduct,
                wire=conduct.wire and self._wire,
                by_host=not all(self._transports[name].moves(d) for d in self._devices),
            )
            for name in chosen
            for conduct in self._transports[name].conducts()
        )

    def reasons(self) -> tuple[str, ...]:
        """Return why each size class uses its candidate, then why other transports are left out."""
        reasons = tuple(choice.why for choice in self._choices[: self._classes])
        left_out = self._left_out | self._unfit
        if self._only and not self._fixed:
            reasons = (f"{self._only} is the only candidate",)
        elif all(device.type == HOST.type for device in self._devices):
            left_out = {}  # without a GPU this is no news
        left_out |= self._dropped
        return (*reasons, *(f"{name} is left out: {why}" for name, why in left_out.items()))

    def regrets_s(self) -> tuple[float, ...]:
        """Return the seconds that this rank loses by the choice, from its own measurements."""
        own = self._own.get(self._topology, {})
        return tuple(
            choice.regret({name: row[index] for name, row in own.items() if index < len(row)})
            for index, choice in enumerate(self._choices)
        )

    def describe(self) -> dict[str, str]:
        """Return the choices, regrets, transports left out, and the facts of each transport."""
        left_out = self._left_out | self._unfit | self._dropped
        facts = {f"left out.{name}": why for name, why in left_out.items()}
        facts["wire"] = self._wire
        if self._staged:
            facts["through host memory"] = self._staged
        regrets_s = self.regrets_s()
        for label, choice, regret_s in zip(CLASS_NAMES, self._choices, regrets_s, strict=False):
            facts[f"choice.{label}"] = choice.why
            facts[f"regret_us.{label}"] = f"{regret_s * 1e6:.0f}"
        for name, transport in self._transports.items():
            facts |= {f"{name}.{key}": value for key, value in transport.describe().items()}
        return facts


def make_room(ranks: int, transports: Collection[str]) -> None:
    """Ensure that a rank among so many may open enough files and let enough callers wait.

    It raises LimitError if the machine does not allow it.

    Args:
        ranks: Number of ranks in the group.
        transports: Names of the transports in use.
    """
    ensure_files("a rank", demand.rank_files(ranks, transports))
    ensure_callers("a rank", ranks - 1)


def _keep(known: dict[tuple[int, ...], Row], key: tuple[int, ...], row: Row) -> None:
    known.pop(key, None)
    known[key] = row
    for old in list(known)[:-TOPOLOGIES]:
        del known[old]


def _why_dropped(voters: int, ranks_sum: int, own: _Failure | None) -> str:
    who = f"rank {ranks_sum}" if voters == 1 else f"{voters} ranks"
    return f"{who} could not wire it" + (f"; here: {own.error}" if own else "")


def _split(address: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in address.split(";") if part)
    return {name: where for name, _, where in pairs}
