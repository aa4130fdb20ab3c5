"""Names of processes and of generations, with the order that the protocol relies on (R1, D12)."""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class MemberId(NamedTuple):
    """Name of one rank process for its whole life; a restarted process is a new member (A10, D12).

    The order (slot, local, attempt) is the rank order of a generation and the order of dealing.
    """

    slot: int
    """Replica (pod) of the job."""
    local: int
    """Process within the replica, 0 <= local < procsPerReplica."""
    attempt: int
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
    found = _MEMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"not a member: {text[:40]!r}")
    slot, local, attempt = map(int, found.groups())
    return MemberId(slot, local, attempt)


_MEMBER: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,5})#([0-9]{1,15})")


class GenerationId(NamedTuple):
    """Identity of a membership, or of a proposal for one; compared as a whole, in order (R1)."""

    incarnation: int
    """Incarnation of the coordinator: the highest one in any registration, plus 1."""
    coordinator: str
    """Uid of the coordinator's process or pod. It breaks the tie between two coordinators of one
    incarnation."""
    counter: int
    """Number that grows with every PREPARE of that coordinator."""

    @property
    def short(self) -> str:
        """The id for people, without the tie-break, which means nothing within one job."""
        return f"{self.incarnation}.{self.counter}"

    def __str__(self) -> str:
        return f"{self.short}@{self.coordinator}"


NO_GENERATION = GenerationId(0, "", 0)
"""Generation below every real one: the promise of a rank that never joined."""
