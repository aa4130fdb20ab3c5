"""Names of processes and of generations, with the order that the protocol relies on (R1, D12)."""

from __future__ import annotations

import re
from typing import Annotated, Final, NamedTuple

from msgspec import Meta

ATTEMPT_STRIDE: Final = 1000
"""Attempt of a rank = attempt of its pod x ATTEMPT_STRIDE + restarts inside the pod."""
PROCS_MAX: Final = 256
"""Ranks of one pod, at most."""
NUMBER_MAX: Final = 2**53
"""Largest number that every JSON reader represents exactly as a whole number."""

WholeNumber = Annotated[int, Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]
"""A whole number of a message; a decoder rejects one that a JSON reader could not represent."""


class MemberId(NamedTuple):
    """Name of one rank process for its whole life; a restarted process is a new member (A10, D12).

    The order (slot, local, attempt) is the rank order of a generation and the order of dealing. The
    bounds are those of the text that `parse_member` reads.
    """

    slot: Annotated[int, Meta(ge=0, lt=10**9)]
    """Replica (pod) of the job."""
    local: Annotated[int, Meta(ge=0, lt=10**5)]
    """Process within the replica, 0 <= local < procsPerReplica."""
    attempt: Annotated[int, Meta(ge=0, lt=10**15)]
    """Start number of this process: attempt of its pod x ATTEMPT_STRIDE + restarts inside the pod.
    It grows with every restart and every replacement."""

    def __str__(self) -> str:
        return f"{self.slot}.{self.local}#{self.attempt}"


def parse_member(text: str) -> MemberId:
    """Parse the text that `str(member)` gives.

    Args:
        text: Such as `3.0#1000`.

    Returns:
        The member.

    Raises:
        ValueError: If the text is not the name of a member.
    """
    match = _MEMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"not a member: {text[:40]!r}")
    slot, local, attempt = map(int, match.groups())
    return MemberId(slot, local, attempt)


_MEMBER: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,5})#([0-9]{1,15})")


class GenerationId(NamedTuple):
    """Identity of a membership, or of a proposal for one; compared as a whole, in order (R1)."""

    incarnation: WholeNumber
    """Incarnation of the coordinator: the highest one in any registration, plus 1."""
    coordinator: str
    """Uid of the coordinator's process or pod. It breaks the tie between two coordinators of one
    incarnation."""
    counter: WholeNumber
    """Number that grows with every PREPARE of that coordinator."""

    @property
    def short(self) -> str:
        """The id for people, without the tie-break, which means nothing within one job."""
        return f"{self.incarnation}.{self.counter}"

    def __str__(self) -> str:
        return f"{self.short}@{self.coordinator}"


NO_GENERATION = GenerationId(0, "", 0)
"""Generation below every real one: the promise of a rank that never joined."""


def pod_of(member: MemberId) -> tuple[int, int]:
    """Return (slot, attempt) of the pod that a rank process belongs to."""
    return member.slot, member.attempt // ATTEMPT_STRIDE
