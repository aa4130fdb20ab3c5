"""Keeps MPICH from ending this process when a connection to a peer breaks.

`native/peer_errors.c` says why and how. It must be loaded before MPI starts.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Final

from paceline.transport.native import PEER_ERRORS, UnavailableError, load

log = logging.getLogger("paceline.rank")


class PeerErrors:
    """The errors of connections that MPICH has been kept from."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self.unwatched = "nothing watches them"
        """Why such an error ends this process. Empty if it does not."""

    def watch(self) -> None:
        """Load the library. It is of no use to an MPI that has been started already."""
        try:
            self._library = load(PEER_ERRORS, ctypes.RTLD_GLOBAL)
        except UnavailableError as error:
            self.unwatched = str(error)

    def check(self) -> None:
        """Warn if MPI, which has been started, does not use the library."""
        if self._library is not None:
            queues: int = self._library.paceline_queues()
            self.unwatched = (
                "" if queues else "MPI was started before, or has a libfabric of its own"
            )
        if self.unwatched:
            log.warning("a peer that dies may end this rank with it: %s", self.unwatched)

    @property
    def count(self) -> int:
        """Number of operations that a broken connection has ended."""
        return 0 if self._library is None else int(self._library.paceline_broken())


peer_errors: Final = PeerErrors()
"""That of this process, in which MPI starts once."""
