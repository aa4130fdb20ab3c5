"""Names of processes and of generations, with the order that the protocol relies on (R1, D12)."""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class MemberId(NamedTuple):
    """One rank process, for its whole life. A restarted process is a new member (A10, D12).

    The order (slot, local, attempt) is the rank order of a generation and the order of dealing.
    """

    slot: int
    """Replica (pod) of the job."""
    local: int
    """Process within the replica, 0 <= local < procsPerReplica."""
    attempt: int
    """Counts the starts of this place; grows with every restart and every replacement."""

    def __str__(self) -> str:
        return f"{self.slot}.{self.local}#{self.attempt}"


def parse_member(text: str) -> MemberId:
    """Inverse of `str(member)`. Raises ValueError for anything else."""
    found = _MEMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"not a member: {text[:40]!r}")
    slot, local, attempt = map(int, found.groups())
    return MemberId(slot, local, attempt)


_MEMBER: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,5})#([0-9]{1,15})")


class GenerationId(NamedTuple):
    """Identity of a membership, or of a proposal for one; compared as a whole, in order (R1)."""

    incarnation: int
    """Of the coordinator: the highest one found in any registration + 1."""
    coordinator: str
    """Tie-break between two coordinators of one incarnation: uid of its process or pod."""
    counter: int
    """Grows with every PREPARE of that coordinator."""

    @property
    def short(self) -> str:
        """As people read it: within one job the tie-break tells nothing."""
        return f"{self.incarnation}.{self.counter}"

    def __str__(self) -> str:
        return f"{self.short}@{self.coordinator}"


NO_GENERATION = GenerationId(0, "", 0)
"""Below every real id: what a rank that never joined has promised."""
