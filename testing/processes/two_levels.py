"""Hook for the script of a rank: ranks of one machine that count as being on two.

Each of their sums goes through two levels: shared memory inside a machine and another transport
between the machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.collectives.select import HIERARCHICAL
from paceline.transport import factory
from paceline.transport.selected import SelectedTransport, make_room
from paceline.transport.shm.hier import HierTransport
from paceline.transport.shm.memory import SharedMemory
from paceline.worker import engine
from paceline_api.types.enums import Wire


class OnlyTransport(HierTransport):
    """Two-level transport that is used for every group, even where it has no benefit."""

    def unfit(self, addresses: Sequence[str]) -> str:  # noqa: ARG002
        """Return "": no group is unfit."""
        return ""


def play(slot: int) -> None:
    """Put neighboring slots on different machines from now on; call it before `pl.init()`."""
    place = f"machine-{slot % 2}"

    def make_transport(
        backend: str, *, local: bool, ranks: int, wire: Wire, scratch: Path, reproducible: bool
    ) -> SelectedTransport:
        make_room(ranks, [HIERARCHICAL + backend])
        between = factory._make(backend, factory.LOOPBACK, local=local, wire=wire, scratch=scratch)
        levels = OnlyTransport(SharedMemory(), between, place=place)
        return SelectedTransport([levels], {}, place, wire=wire, reproducible=reproducible)

    setattr(engine, "make_transport", make_transport)  # noqa: B010
