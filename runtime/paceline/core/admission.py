"""Which connections an HTTP server accepts, so that no caller can use up the places of the others.

A caller is a stranger until it has shown who it is. Strangers of one address have a share of all
places. When every place is taken, the stranger that has waited longest at the address with the most
strangers makes room for a caller from an address with fewer. So a flood displaces itself, and a
caller from another address gets in at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """The number of connections that a server keeps."""

    connections: int
    """All of them, those of known callers included."""
    of_one_address: int
    """Strangers of one address."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a caller that arrives."""

    admitted: bool
    displaced: int | None = None
    """The caller whose connection must be closed first. It has been released already."""


class Admission:
    """Counts open connections. A caller is any number that its owner uses once."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._address_of: dict[int, str] = {}
        self._strangers: dict[str, dict[int, None]] = {}
        """By address, in the order in which they arrived."""

    @property
    def open(self) -> int:
        """Return the number of connections that are open."""
        return len(self._address_of)

    def admit(self, caller: int, address: str) -> Verdict:
        """Decide about a connection that has just arrived; if admitted, it is open from now on.

        Args:
            caller: A number that no other connection has had.
            address: Where it comes from, as the kernel says.
        """
        own = len(self._strangers.get(address, ()))
        if own >= self._bounds.of_one_address:
            return Verdict(admitted=False)
        displaced = None
        if self.open >= self._bounds.connections:
            largest = max(self._strangers.values(), key=len, default={})
            if len(largest) <= own:
                return Verdict(admitted=False)
            displaced = next(iter(largest))
            self.release(displaced)
        self._address_of[caller] = address
        self._strangers.setdefault(address, {})[caller] = None
        return Verdict(admitted=True, displaced=displaced)

    def know(self, caller: int) -> None:
        """Take a caller out of the strangers: it has shown who it is, and is never displaced."""
        if caller in self._address_of:
            self._forget_stranger(caller)

    def release(self, caller: int) -> None:
        """Free the place of a connection that has ended. A second call changes nothing."""
        if caller in self._address_of:
            self._forget_stranger(caller)
            del self._address_of[caller]

    def _forget_stranger(self, caller: int) -> None:
        address = self._address_of[caller]
        strangers = self._strangers.get(address, {})
        strangers.pop(caller, None)
        if not strangers:
            self._strangers.pop(address, None)
