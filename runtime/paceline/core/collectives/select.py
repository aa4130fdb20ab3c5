"""Which transport and algorithm moves a buffer of a given size: measured, agreed, explained.

A *candidate* is a transport with one of its algorithms, by name ("mpi:ring", "gloo"). Every rank
measures the seconds of one allreduce per candidate and *size class*; the means over the ranks, the
same everywhere, are the table. The choice is a function of the table alone: all choose alike. The
table holds for a *topology*: the number of ranks, and who of them share a machine.

Candidates add in different orders, so a measured choice may change the last bits from run to run.
Where each run has to have the same bits (mode Full), the choice is a function of the topology and
of the size alone (`choose_reproducible`), and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.collectives.schedules import HALVING_DOUBLING, RECURSIVE_DOUBLING, RING

CLASS_BYTES: Final = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
"""Payload that stands for each size class when it is measured."""
_CLASS_LIMITS: Final = (16 << 10, 256 << 10, 4 << 20, 32 << 20)
"""Between the classes: the geometric means of neighbouring payloads."""
CLASS_NAMES: Final = ("4KiB", "64KiB", "1MiB", "16MiB", "64MiB")
CALLS: Final = 5
"""So often a candidate is measured in a class, if there is time."""
BUDGET_S: Final = 0.1
"""For all candidates in one class, but each that may win is measured once."""
LONGEST_S: Final = 2.0
"""A class in which all that may win would take so long together is not measured. It would hold up
each change of the topology; where a link is that slow the bytes decide, in smaller classes too."""
NEAR: Final = 4.0
"""Who takes more than so many times the best is out of the larger classes. Measured: the most that
was made good was 3.4 times (gloo against mpi, four ranks), from 1 to 16 MiB."""
NATIVE: Final = "native"
"""The algorithm of a transport that chooses by itself, as a library with its own allreduce does."""

HIERARCHICAL: Final = "hier:"
"""Before the name of the transport that carries between machines what each has summed inside."""
PREFERENCE: Final = ("nccl", "shm", f"{HIERARCHICAL}mpi", "mpi", f"{HIERARCHICAL}gloo", "gloo")
"""Transports where the choice may not depend on a measurement: the first one that is usable. Which
are usable follows from the machines and from the memory of the gradients."""
LATENCY_CLASSES: Final = 2
"""Likewise: in so many size classes, from the smallest, few steps count more than few bytes."""

Seconds = Mapping[str, Sequence[float]]
"""By candidate: seconds of one allreduce in each size class; 0 = not measured."""


@dataclass(frozen=True, slots=True)
class Method:
    """What moves a buffer."""

    transport: str
    algorithm: str = NATIVE

    @property
    def candidate(self) -> str:
        """Its name, in tables, in journals and for people."""
        return self.transport + (f":{self.algorithm}" if self.algorithm != NATIVE else "")

    @classmethod
    def of(cls, candidate: str) -> Method:
        """Inverse of `candidate`."""
        levels = HIERARCHICAL if candidate.startswith(HIERARCHICAL) else ""
        transport, _, algorithm = candidate.removeprefix(levels).partition(":")
        return cls(levels + transport, algorithm or NATIVE)


@dataclass(frozen=True, slots=True)
class Choice:
    """What moves the buffers of one size class, and why."""

    candidate: str
    why: str

    def regret(self, row: Mapping[str, float]) -> float:
        """Seconds that one rank loses per reduction by going along with the choice.

        `row`: what that rank has measured itself at this size, by candidate. The choice is made
        from the means over all ranks, so that on one of them another may have been faster.
        """
        measured = [seconds for seconds in row.values() if seconds > 0]
        own = row.get(self.candidate, 0.0)
        return own - min(measured) if own > 0 else 0.0


def size_class(payload_bytes: int) -> int:
    """Index into CLASS_BYTES for a payload."""
    return sum(payload_bytes >= limit for limit in _CLASS_LIMITS)


def classes_up_to(largest_bytes: int) -> int:
    """How many classes, from the smallest, hold payloads up to the largest that there is."""
    return size_class(largest_bytes) + 1


def topology(machines: Sequence[str]) -> tuple[int, ...]:
    """Of ranks on these machines, in rank order: equal if as many ranks share machines alike."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(machine, len(numbers)) for machine in machines)


def calls_to_measure(table: Seconds, index: int) -> dict[str, int]:
    """How often each candidate is measured in the class `index`, by what the classes before took;
    none at all where that would take too long.

    `table` must be the same on all ranks, so that they make the same calls.
    """
    before = {name: row[index - 1] for name, row in table.items() if index and row[index - 1] > 0}
    if not before:
        return dict.fromkeys(table, CALLS)
    best = min(before.values())
    near = {name: taken for name, taken in before.items() if taken <= NEAR * best}
    growth = CLASS_BYTES[index] / CLASS_BYTES[index - 1]
    once_s = growth * sum(near.values())
    if once_s > LONGEST_S:
        return dict.fromkeys(table, 0)
    calls = max(1, min(CALLS, int(BUDGET_S / once_s)))
    return {name: calls if name in near else 0 for name in table}


def choose(seconds: Mapping[str, float], payload_bytes: int) -> Choice:
    """The fastest candidate at this size; the name breaks ties, alike on every rank."""
    assert seconds, "no candidate"
    measured = {name: taken for name, taken in seconds.items() if taken > 0}
    if not measured:
        first = min(seconds)
        why = "the only candidate" if len(seconds) == 1 else "nothing measured, first by name"
        return Choice(first, f"{first} at {payload_bytes} B: {why}")
    ranked = sorted(measured, key=lambda name: (measured[name], name))
    best, rest = ranked[0], ranked[1:]
    others = ", ".join(f"{name} {measured[name] * 1e6:.0f} us" for name in rest) or "none"
    why = f"{best} {measured[best] * 1e6:.0f} us at {payload_bytes} B; next: {others}"
    return Choice(best, why)


def choose_all(table: Seconds) -> tuple[Choice, ...]:
    """One choice per size class. Classes above the measured ones do as the largest of these."""
    choices: list[Choice] = []
    for index, payload in enumerate(CLASS_BYTES):
        column = {name: row[index] for name, row in table.items() if index < len(row)}
        measured = any(column.values()) or not choices
        choices.append(choose(column, payload) if measured else choices[-1])
    return tuple(choices)


def choose_reproducible(candidates: Sequence[str], topology: Sequence[int]) -> tuple[Choice, ...]:
    """Return one choice per size class that is the same in each run on this topology.

    Args:
        candidates: What the group can use; not empty.
        topology: The machine of each rank, as `topology` numbers them.
    """
    assert candidates, "no candidate"
    methods = [Method.of(name) for name in candidates]
    transport = min((method.transport for method in methods), key=_preference)
    own = [method for method in methods if method.transport == transport]
    between = set(topology) if transport.startswith(HIERARCHICAL) else topology
    choices = []
    for index, payload in enumerate(CLASS_BYTES):
        order = _algorithms(index, len(between))
        method = min(own, key=lambda m: order.index(m.algorithm) if m.algorithm in order else 0)
        only, fixed = "the only candidate", "not measured, so that each run has the same bits"
        why = f"{method.candidate} at {payload} B: {only if len(candidates) == 1 else fixed}"
        choices.append(Choice(method.candidate, why))
    return tuple(choices)


def _preference(transport: str) -> tuple[int, str]:
    known = transport in PREFERENCE
    return (PREFERENCE.index(transport) if known else len(PREFERENCE)), transport


def _algorithms(index: int, ranks: int) -> tuple[str, ...]:
    """The best first, by steps where buffers are small and else by bytes (`schedules`)."""
    if index < LATENCY_CLASSES:
        return RECURSIVE_DOUBLING, HALVING_DOUBLING, RING
    if ranks & (ranks - 1):
        return RING, HALVING_DOUBLING, RECURSIVE_DOUBLING
    return HALVING_DOUBLING, RING, RECURSIVE_DOUBLING
