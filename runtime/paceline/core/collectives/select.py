"""Choose the transport and algorithm that moves a buffer of a given size, and explain the choice.

A *candidate* is a transport with one of its algorithms, identified by name ("mpi:ring", "gloo").
Every rank measures the time of one allreduce for each candidate and *size class*. The means over
the ranks form the table, which is the same on all ranks. The choice is a function of the table
alone, so all ranks choose alike. The table is valid for one *topology*: the number of ranks, and
which of them share a machine.

Candidates add in different orders, so a measured choice may change the last bits from run to run.
If each run must have the same bits (mode Full), the choice is a function of the topology and the
size alone (`choose_reproducible`), and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.collectives.schedules import HALVING_DOUBLING, RECURSIVE_DOUBLING, RING

CLASS_BYTES: Final = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
"""Payload in bytes that represents each size class in a measurement."""
_CLASS_LIMITS: Final = (16 << 10, 256 << 10, 4 << 20, 32 << 20)
"""Limits between the size classes in bytes: the geometric means of neighboring payloads."""
CLASS_NAMES: Final = ("4KiB", "64KiB", "1MiB", "16MiB", "64MiB")
"""Names of the size classes, for labels and users."""
CALLS: Final = 5
"""Upper bound on the measurements of one candidate in one size class."""
BUDGET_S: Final = 0.1
"""Seconds for measuring all candidates in one size class. Each candidate that may win is measured
at least once."""
LONGEST_S: Final = 2.0
"""A size class is not measured if one call of each candidate that may win would take longer than
this in total, in seconds. It would delay each change of the topology. Where a link is that slow,
the bytes decide in smaller classes too."""
NEAR: Final = 4.0
"""A candidate that takes more than this factor times the best one is not measured in larger
classes. Measured: the slowest candidate that still won in a larger class took 3.4 times the best
(gloo against mpi, four ranks), from 1 to 16 MiB."""
NATIVE: Final = "native"
"""Algorithm of a transport that chooses by itself, such as a library with its own allreduce."""

HIERARCHICAL: Final = "hier:"
"""Prefix of a transport name: sums are computed inside each machine first, and this transport
carries them between machines."""
PREFERENCE: Final = ("nccl", "shm", f"{HIERARCHICAL}mpi", "mpi", f"{HIERARCHICAL}gloo", "gloo")
"""Order of transports if the choice must not depend on a measurement: the first usable one is
chosen. The machines and the memory of the gradients determine which ones are usable."""
LATENCY_CLASSES: Final = 2
"""Number of size classes, from the smallest, in which few steps matter more than few bytes. Used if
the choice must not depend on a measurement."""

Seconds = Mapping[str, Sequence[float]]
"""Measured table: for each candidate, the seconds of one allreduce in each size class; 0 = not
measured."""


@dataclass(frozen=True, slots=True)
class Method:
    """A transport and its algorithm."""

    transport: str
    algorithm: str = NATIVE

    @property
    def candidate(self) -> str:
        """Name of the method in tables, journals and messages to users."""
        return self.transport + (f":{self.algorithm}" if self.algorithm != NATIVE else "")

    @classmethod
    def of(cls, candidate: str) -> Method:
        """Parse the name of a candidate; the inverse of `candidate`."""
        levels = HIERARCHICAL if candidate.startswith(HIERARCHICAL) else ""
        transport, _, algorithm = candidate.removeprefix(levels).partition(":")
        return cls(levels + transport, algorithm or NATIVE)


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate for the buffers of one size class, and the reason."""

    candidate: str
    why: str
    """The reason with the measurements, for users."""

    def regret(self, row: Mapping[str, float]) -> float:
        """Return the seconds that one rank loses in each reduction by following the common choice.

        The choice is made from the means over all ranks, so another candidate may be faster on one
        of them.

        Args:
            row: What this rank measured itself at this size, by candidate; 0 = not measured.

        Returns:
            Seconds, at least 0. 0 if this rank did not measure the chosen candidate.
        """
        measured = [seconds for seconds in row.values() if seconds > 0]
        own = row.get(self.candidate, 0.0)
        return own - min(measured) if own > 0 else 0.0


def size_class(payload_bytes: int) -> int:
    """Return the index into CLASS_BYTES of a payload."""
    return sum(payload_bytes >= limit for limit in _CLASS_LIMITS)


def classes_up_to(largest_bytes: int) -> int:
    """Return the number of size classes, from the smallest, up to that of the largest payload."""
    return size_class(largest_bytes) + 1


def topology(machines: Sequence[str]) -> tuple[int, ...]:
    """Number the machines of the ranks, in rank order.

    The result is equal for groups whose ranks share machines alike.

    Args:
        machines: Name of the machine of each rank, in rank order.

    Returns:
        Number of the machine of each rank; machines are numbered in the order of their first ranks.
    """
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(machine, len(numbers)) for machine in machines)


def calls_to_measure(table: Seconds, index: int) -> dict[str, int]:
    """Return how often to measure each candidate in a size class, given the class before.

    Args:
        table: Means over all ranks so far. It must be the same on all ranks, so that they make the
            same calls.
        index: The size class.

    Returns:
        Number of calls by candidate; all 0 if measuring would take too long.
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
    """Choose the fastest candidate at one size; the name breaks ties, so all ranks choose alike.

    Args:
        seconds: Mean seconds of one allreduce by candidate, not empty; 0 = not measured.
        payload_bytes: The size, for the explanation.

    Returns:
        The choice. If nothing is measured, the first candidate by name.
    """
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
    """Return one choice for each size class.

    Classes above the measured ones use the choice of the largest measured class.

    Args:
        table: Means over all ranks, by candidate.

    Returns:
        The choices, in the order of CLASS_BYTES.
    """
    choices: list[Choice] = []
    for index, payload in enumerate(CLASS_BYTES):
        column = {name: row[index] for name, row in table.items() if index < len(row)}
        measured = any(column.values()) or not choices
        choices.append(choose(column, payload) if measured else choices[-1])
    return tuple(choices)


def choose_reproducible(candidates: Sequence[str], topology: Sequence[int]) -> tuple[Choice, ...]:
    """Return one choice for each size class that is the same in each run on this topology.

    Args:
        candidates: Candidates that the group can use; not empty.
        topology: The machine of each rank, as numbered by `topology()`.

    Returns:
        The choices, in the order of CLASS_BYTES.
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
    """Return the sort key of a transport: the preferred ones first, then by name."""
    known = transport in PREFERENCE
    return (PREFERENCE.index(transport) if known else len(PREFERENCE)), transport


def _algorithms(index: int, ranks: int) -> tuple[str, ...]:
    """Return the algorithms, best first: by steps for small buffers, else by bytes."""
    if index < LATENCY_CLASSES:
        return RECURSIVE_DOUBLING, HALVING_DOUBLING, RING
    if ranks & (ranks - 1):
        return RING, HALVING_DOUBLING, RECURSIVE_DOUBLING
    return HALVING_DOUBLING, RING, RECURSIVE_DOUBLING
