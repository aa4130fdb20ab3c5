"""The data channel of a script that works alone: a group of one needs no links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from paceline.transport.base import Abort, Group, PeerLost, Transport


class NoTransport(Transport):
    name: ClassVar[str] = "none"

    @property
    def address(self) -> str:
        return ""

    def open(self, group: Group, abort: Abort, timeout_s: float) -> None:  # noqa: ARG002
        if group.size > 1:
            raise PeerLost("a script without a job has no peers")

    def allreduce(self, buffers: Sequence[torch.Tensor], abort: Abort, algorithm: str) -> None:
        """The sum over one rank is what is there."""

    def close(self) -> None:
        """Nothing is open."""

    def shutdown(self) -> None:
        """Nothing to give back."""

    def describe(self) -> dict[str, str]:
        return {"transport": self.name}
