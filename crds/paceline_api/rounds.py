"""Settings of the rounds, in the form of the control channel and of the round log.

The coordinator writes them into the first generation, and the operator asks it to change them.
Every rank reads the settings in force from the log.
"""

from __future__ import annotations

from msgspec import Struct

from paceline_api.settings import CollectiveSettings
from paceline_api.types.enums import MaxAgePolicy, Mode, Normalisation, Overlap, Pacing


class RoundSettings(Struct, frozen=True):
    """Settings that say when rounds start and how gradients are weighted.

    They are in force from the log record that carries them (R2, R18).
    """

    mode: Mode = Mode.FULL
    quorum: int = 0
    """Ranks that a round needs, for Quorum and as the minimum of Deadline; 0 if `quorum_percent` is
    used."""
    quorum_percent: int = 0
    """Percentage of the active ranks that a round needs, rounded up; computed for each round."""
    random_initiator: bool = False
    """Majority as published for eager-SGD (PPoPP'20, section 4.2): one randomly drawn rank may
    start the round."""
    deadline_ns: int = 0
    """Time after the first arrival; 0 = auto: median + `deadline_factor` x MAD of recent arrivals.
    """
    deadline_factor: float = 3.0
    grace_ns: int = -1
    """Extra wait for ranks that arrive nearly together, once the condition holds; -1 uses
    `grace_share`."""
    grace_share: float = 0.05
    """Grace as a fraction of the median round."""
    warmup_rounds: int = 0
    full_every: int = 0
    """Every N-th round runs in Full; 0 = none."""
    max_age: int = 4
    """Age, in updates of the weights, up to which a late gradient counts in full; 0 = no limit."""
    late: MaxAgePolicy = MaxAgePolicy.DROP
    """Handling of a gradient that is older than `max_age` when it could be applied."""
    decay_factor: float = 0.5
    """Weight per update above `max_age` under `MaxAgePolicy.DECAY`."""
    normalisation: Normalisation = Normalisation.FIXED
    """Divisor of a round's sum: the nominal samples, the samples in it, or the ranks that
    contributed."""
    pacing: Pacing = Pacing.ROUND
    """Cadence of the optimizer: a step in every round, or each time the nominal samples are in.
    Auto chooses by the optimizer, when the first generation is formed."""
    bench_after_ns: int = 0
    """Silence after which a rank for which all others wait is benched (R13); 0 = max(60 s, 20 x
    median)."""
    buffers_every: int = 0
    """Rounds between two averages of the float buffers (BatchNorm), which are also averaged at the
    end (R24, D10); 0 = buffers stay local."""
    overlap: Overlap = Overlap.AUTO
    """Policy on streamed rounds, which are reduced while backward() still runs."""
    pipeline: int = 0
    """1: a rank computes its next batch while its gradient is reduced (R36)."""
    hash_every: int = 100
    """Rounds between two comparisons of the committed weights' hashes; 0 = never."""

    @property
    def is_synchronous(self) -> bool:
        """Return True if each round is one step of plain synchronous training."""
        return self.mode in (Mode.FULL, Mode.SHADOW)

    @classmethod
    def of(cls, collective: CollectiveSettings) -> RoundSettings:
        """Return the settings that a job's `spec.collective` asks for."""
        c = collective
        return cls(
            mode=c.mode,
            quorum=c.quorum_count or 0,
            quorum_percent=c.quorum_percent or 0,
            random_initiator=c.random_initiator,
            deadline_ns=c.deadline_ns or 0,
            deadline_factor=c.deadline_factor,
            grace_ns=-1 if c.grace_ns is None else c.grace_ns,
            grace_share=c.grace_share or 0.0,
            warmup_rounds=c.warmup_rounds,
            full_every=c.full_every,
            max_age=c.max_age,
            late=c.max_age_policy,
            decay_factor=c.decay_factor,
            normalisation=c.normalisation,
            pacing=c.pacing,
            bench_after_ns=c.bench_after_ns or 0,
            buffers_every=c.buffers_every,
            overlap=c.overlap,
            pipeline=c.pipeline,
            hash_every=c.hash_every,
        )
