"""Parameters of the job that a history is about, and of its machines and links."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.tree import TREE_ABOVE
from paceline_api.rounds import RoundSettings

MS = 10**6


@dataclass
class World:
    """All parameters of a history except its seed; times are in milliseconds."""

    replicas: int = 3
    procs: int = 1
    settings: RoundSettings = field(default_factory=RoundSettings)
    leases: int = 24
    """Leases of one epoch; 0 means that the script feeds itself for `steps` steps."""
    steps: int = 10
    quota: int = 0
    """Limit on the steps of a job without leases (`DataPlan.steps`); 0 means none."""
    batch: int = 4
    uneven: bool = False
    """True if the last lease of an epoch is smaller."""
    epochs: int = 1
    accumulate: int = 1
    lookahead: int = 2
    step_ms: tuple[float, float] = (5, 20)
    slow: dict[int, float] = field(default_factory=dict)
    """Slot -> factor of its step time."""
    nan: float = 0.0
    skip: float = 0.0
    rest: float = 0.0
    """`nan`, `skip`, `rest`: shares of the batches that are poisoned, that are skipped, and after
    which the rank evaluates."""
    segments: int = 1
    """Number of segments of the gradients; rounds with several of them may be streamed."""
    discard: float = 0.0
    rewrite: float = 0.0
    misjudge: float = 0.0
    """`discard`, `rewrite`, `misjudge`: shares of the batches that are dropped in the middle of
    backward(); of which a segment is written again after it was handed over; and (in a script
    that feeds itself) whose step() reports another number of samples than COMING did."""
    late: float = 0.0
    late_ms: float = 300.0
    """Length of the pause in backward() that hits a share `late` of the batches."""
    stop: float = 0.0
    """Share of the batches after which the script ends the job."""
    tree_above: int = TREE_ABOVE
    """Number of members above which GO goes by way of relays."""
    delay_ms: tuple[float, float] = (0.05, 3.0)
    stream_ms: float = 80.0
    """Upper bound on the time that a joiner's state takes in addition to a message."""
    save_every: int = 0
    """Rounds between two checkpoints; 0 means none."""
    disk_ms: float = 30.0
    """Upper bound on the time of one order to the disk."""
    disk_full: float = 0.0
    """Share of the orders to the disk that fail."""
    settle_ms: int = 300
    freeze_ms: int = 400
    stabilization_ms: int = 0
    pause_ms: float = 0.0
    """Interval between a coordinator's looks at all ranks (R42)."""
    max_skipped: int = 0
    """Number of batches that the job gives up, before it ends, when the script fails with them
    (R56)."""
    allowed: tuple[int, ...] = ()
    """Numbers of replicas that may train; empty means any."""
    after_ms: float = 0.0
    """Longest time that a script works on after its release. Faults after the release need it to be
    positive; then a run is over only when its coordinator has reported the outcome."""
    until_ms: int = 60_000
    """Upper bound on the length of the history (I8)."""

    @property
    def plan(self) -> DataPlan:
        """Data plan that the ranks register."""
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
