"""The leases that a rank holds by its log, and which of them its loader has drawn (D1).

The communication thread reports what is held, and the loader draws. The engine calls both under its
lock.
"""

from __future__ import annotations


class RankLeases:
    """Leases of this rank between its state machine and its loader. It has no lock of its own."""

    def __init__(self) -> None:
        self.held: tuple[int, ...] = ()
        """Leases that are held and not worked off, as the state machine of the rank reports them.
        """
        self._drawn: set[int] = set()

    def hold(self, leases: tuple[int, ...]) -> None:
        """Replace the held leases. One that was given back may be dealt again, and drawn again."""
        self.held = leases
        self._drawn.intersection_update(leases)

    def draw(self) -> int | None:
        """Return the next lease that was not drawn yet, and mark it as drawn; None without one."""
        lease = next((x for x in self.held if x not in self._drawn), None)
        if lease is not None:
            self._drawn.add(lease)
        return lease

    def skip(self, lease: int) -> None:
        """Remove a lease whose batch the script has skipped."""
        self.held = tuple(x for x in self.held if x != lease)

    def wait(self) -> bool:
        """Return True if the loader has to wait for a lease.

        The loader calls this only when everything that it has drawn is finished. A lease that was
        drawn and is still held must then be worked off again: its gradient was discarded, for
        instance because the rank was benched. Such leases can be drawn again after this call.

        Returns:
            True if no held lease is left to draw.
        """
        if any(x not in self._drawn for x in self.held):
            return False
        self._drawn.clear()
        return True
