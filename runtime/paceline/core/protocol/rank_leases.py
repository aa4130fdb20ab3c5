"""The leases that a rank holds by its log, and which of them its loader has drawn.

Shared by the communication thread, which says what is held, and the loader, which draws (D1).
"""

from __future__ import annotations


class RankLeases:
    def __init__(self) -> None:
        self.held: tuple[int, ...] = ()
        """Held and not worked off, as the rank's state machine says."""
        self._drawn: set[int] = set()

    def hold(self, leases: tuple[int, ...]) -> None:
        """What was given back may be dealt to this rank again."""
        self.held = leases
        self._drawn.intersection_update(leases)

    def draw(self) -> int | None:
        """The next one that was not drawn yet."""
        lease = next((x for x in self.held if x not in self._drawn), None)
        if lease is not None:
            self._drawn.add(lease)
        return lease

    def skip(self, lease: int) -> None:
        self.held = tuple(x for x in self.held if x != lease)

    def wait(self) -> bool:
        """Whether the loader has to wait. It asks only when all that it has drawn is finished: one
        that is held all the same is to be worked off again, since its gradient came to nothing, as
        that of a rank that was benched meanwhile."""
        if any(x not in self._drawn for x in self.held):
            return False
        self._drawn.clear()
        return True
