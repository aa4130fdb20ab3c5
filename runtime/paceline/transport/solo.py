"""The data channel of a script that runs without a job. A group of one rank needs no links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from paceline.transport.base import Abort, Group, PeerLost, Transport


class NoTransport(Transport):
    """A transport for groups of one rank."""

    name: ClassVar[str] = "none"

    @property
    def address(self) -> str:
        """An empty text, since nobody calls."""
        return ""

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:  # noqa: ARG002
        """Accept a group of one rank.

        Args:
            group: The group.
            abort: Unused.
            timeout_s: Unused.

        Raises:
            PeerLost: The group has more than one rank.
        """
        if group.size > 1:
            raise PeerLost("a script without a job has no peers")

    def allreduce(self, buffers: Sequence[torch.Tensor], abort: Abort, algorithm: str) -> None:
        """Do nothing: the sum over one rank is the buffer itself."""

    def close(self) -> None:
        """Do nothing, since nothing is open."""

    def shutdown(self) -> None:
        """Do nothing, since nothing was acquired."""

    def describe(self) -> dict[str, str]:
        """Return the name of the transport."""
        return {"transport": self.name}
