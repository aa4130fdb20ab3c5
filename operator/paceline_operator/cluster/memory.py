"""The operator's memory of one job between two decisions.

None of it is necessary: a new operator starts with an empty memory and reaches the same pods. It
saves requests, and keeps the last report of the coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline_api.status import Status
from paceline_api.types.fabric import FabricSpec

from paceline_operator.core.clocks import Clocks
from paceline_operator.core.observed import Missing, Observed, Pod, Sent, Warned
from paceline_operator.core.refusals import CreationRefusal
from paceline_operator.core.unheard import Unheard


@dataclass(slots=True)
class Memory:
    """The operator's memory of one job; fields as in `Observed`."""

    uid: str
    """Uid of the job. A job recreated under the same name gets a new memory."""
    coordinator: Status | None = None
    coordinator_heard_s: float = 0.0
    unheard: Unheard | None = None
    refusal: CreationRefusal | None = None
    budget_refusal: CreationRefusal | None = None
    missing: Missing | None = None
    checked: tuple[int, float] | None = None
    """Generation and time at which the API server was last asked before the first pod, and had
    nothing against the pods."""
    sent: Sent = field(default_factory=Sent)
    clocks: Clocks = field(default_factory=Clocks)
    warned: dict[str, Warned] = field(default_factory=dict)
    replaced: int = 0
    generation: int = 0
    """Generation of the job at the last decision."""
    errors: int = 0
    """Number of failed requests in a row that the job did not cause."""

    def observed(
        self,
        pods: tuple[Pod, ...],
        *,
        used: Mapping[int, int],
        nodes: Mapping[str, Any],
        fabrics: Mapping[str, FabricSpec],
        nodes_fresh: bool,
        pods_live_s: float | None,
        key_id: str,
        epoch: int,
    ) -> Observed:
        """Return this memory together with the facts that the watches show."""
        return Observed(
            pods=pods,
            coordinator=self.coordinator,
            coordinator_heard_s=self.coordinator_heard_s,
            unheard=self.unheard,
            nodes=nodes,
            fabrics=fabrics,
            nodes_fresh=nodes_fresh,
            pods_live_s=pods_live_s,
            refusal=self.refusal,
            budget_refusal=self.budget_refusal,
            missing=self.missing,
            sent=self.sent,
            clocks=self.clocks,
            used=used,
            warned=dict(self.warned),
            replaced=self.replaced,
            key_id=key_id,
            epoch=epoch,
        )

    def hear(self, status: Status, now_s: float) -> None:
        """Record a report of the coordinator."""
        self.coordinator, self.coordinator_heard_s, self.unheard = status, now_s, None

    def miss(self, unheard: Unheard, *, away: bool) -> None:
        """Record a failed request to the coordinator.

        Args:
            unheard: The failure.
            away: True if it has been silent long enough that its last report is out of date.
        """
        self.unheard = unheard
        if away:
            self.coordinator = None

    def note(self, **fields: Any) -> None:
        """Change fields of `sent`, given by their names."""
        self.sent = replace(self.sent, **fields)
