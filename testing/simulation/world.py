"""What kind of job a history is about, and how its machines and links behave."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.tree import TREE_ABOVE
from paceline_api.rounds import RoundSettings

MS = 10**6


@dataclass
class World:
    """Everything that a history is drawn from beside its seed. Times in milliseconds."""

    replicas: int = 3
    procs: int = 1
    settings: RoundSettings = field(default_factory=RoundSettings)
    leases: int = 24
    """Of one epoch; 0 = the script feeds itself for `steps` steps."""
    steps: int = 10
    quota: int = 0
    """Without leases: the job counts the steps, up to so many (`DataPlan.steps`)."""
    batch: int = 4
    uneven: bool = False
    """The last lease of an epoch is smaller."""
    epochs: int = 1
    accumulate: int = 1
    lookahead: int = 2
    step_ms: tuple[float, float] = (5, 20)
    slow: dict[int, float] = field(default_factory=dict)
    """Factor by slot."""
    nan: float = 0.0
    skip: float = 0.0
    rest: float = 0.0
    """Shares of the batches that are poisoned, skipped, or after which the rank evaluates."""
    segments: int = 1
    """Of the gradients; with several of them rounds may be streamed."""
    discard: float = 0.0
    rewrite: float = 0.0
    misjudge: float = 0.0
    """Shares of the batches that are dropped in the middle of backward(), of which a segment is
    written once more after it was handed over, or (of a script that feeds itself) of which step()
    says other samples than COMING did."""
    late: float = 0.0
    late_ms: float = 300.0
    """Share of the batches in the middle of whose backward() the script stops for so long."""
    stop: float = 0.0
    """Share of the batches after which the script ends the job."""
    tree_above: int = TREE_ABOVE
    """Members above which GO goes by way of relays."""
    delay_ms: tuple[float, float] = (0.05, 3.0)
    stream_ms: float = 80.0
    """At most for a joiner's state."""
    save_every: int = 0
    """Rounds between two checkpoints; 0 = none."""
    disk_ms: float = 30.0
    """At most for one order to the disk."""
    disk_full: float = 0.0
    """Share of the orders that fail."""
    settle_ms: int = 300
    freeze_ms: int = 400
    stabilization_ms: int = 0
    pause_ms: float = 0.0
    """From one look of a coordinator at all ranks to its next (R42)."""
    max_skipped: int = 0
    """Batches that the job gives up rather than end when the script fails with them (R56)."""
    allowed: tuple[int, ...] = ()
    """Numbers of replicas that may train; empty: any."""
    after_ms: float = 0.0
    """Longest time that a script still works after its release. Only then is there time for faults
    after the release, and a run is over when its coordinator has said how the job ended."""
    until_ms: int = 60_000
    """I8: bound of the whole history."""

    @property
    def plan(self) -> DataPlan:
        if not self.leases:
            return DataPlan(steps=self.quota)
        size = self.batch * self.accumulate
        samples = self.leases * size - (size // 2 if self.uneven else 0)
        return DataPlan(
            samples=samples,
            batch=self.batch,
            accumulate=self.accumulate,
            epochs=self.epochs,
            seed=1,
        )
