"""Decide which connections an HTTP server accepts, so that no caller can use up all of its places.

A caller is a stranger until it has authenticated. Strangers of one address may use a limited share
of the places. If every place is taken and a caller comes from an address with fewer strangers, the
stranger that has waited longest at the address with the most strangers is disconnected. So a flood
displaces itself, and a caller from another address gets in at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds on the connections that a server keeps."""

    connections: int
    """Connections in total, including those of authenticated callers."""
    of_one_address: int
    """Connections of strangers from one address."""


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """The decision about a new connection."""

    admitted: bool
    displaced: int | None = None
    """The caller whose connection must be closed first; it has been released already."""


class Admission:
    """The open connections of a server. Each caller is a number that is used once."""

    def __init__(self, bounds: Callable[[], Bounds]) -> None:
        """Keep to the bounds that this function returns, which may grow with a job."""
        self._bounds = bounds
        self._address_of: dict[int, str] = {}
        self._strangers: dict[str, dict[int, None]] = {}
        """Strangers by address, in the order in which they arrived."""

    @property
    def open(self) -> int:
        """Number of open connections."""
        return len(self._address_of)

    def admit(self, caller: int, address: str) -> AdmissionVerdict:
        """Decide about a connection that has just arrived; if it is admitted, it counts as open.

        Args:
            caller: A number that no other connection has had.
            address: Source address, as the kernel reports it.

        Returns:
            The decision. A displaced caller no longer counts as open; the caller of this method
            must close its connection.
        """
        bounds, own = self._bounds(), len(self._strangers.get(address, ()))
        if own >= bounds.of_one_address:
            return AdmissionVerdict(admitted=False)
        displaced = None
        if self.open >= bounds.connections:
            largest = max(self._strangers.values(), key=len, default={})
            if len(largest) <= own:
                return AdmissionVerdict(admitted=False)
            displaced = next(iter(largest))
            self.release(displaced)
        self._address_of[caller] = address
        self._strangers.setdefault(address, {})[caller] = None
        return AdmissionVerdict(admitted=True, displaced=displaced)

    def know(self, caller: int) -> None:
        """Record that a caller has authenticated: it is not a stranger and is never displaced."""
        if caller in self._address_of:
            self._forget_stranger(caller)

    def release(self, caller: int) -> None:
        """Free the place of a connection that has ended. A second call has no effect."""
        if caller in self._address_of:
            self._forget_stranger(caller)
            del self._address_of[caller]

    def _forget_stranger(self, caller: int) -> None:
        address = self._address_of[caller]
        strangers = self._strangers.get(address, {})
        strangers.pop(caller, None)
        if not strangers:
            self._strangers.pop(address, None)
