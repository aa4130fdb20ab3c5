"""Settings that the coordinator keeps to alone, so that a change of them acts at once.

They are in the job file, for the coordinator's start, and the operator sends them as targets when
its user changes them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Struct

from paceline_api.settings import ResolvedJob, StragglerSettings


class MembershipSettings(Struct, frozen=True, kw_only=True):
    """When a job may start and grow, which ranks are slow, and what its coordinator tolerates."""

    min_replicas: int
    settle_ns: int
    stabilization_ns: int
    allowed_sizes: tuple[int, ...]
    max_skipped_batches: int
    checkpoint_required: bool
    straggler: StragglerSettings

    @classmethod
    def of(cls, job: ResolvedJob) -> MembershipSettings:
        """Return the settings that a job asks for."""
        return cls(
            min_replicas=job.min_replicas,
            settle_ns=job.elasticity.settle_ns,
            stabilization_ns=job.elasticity.stabilization_ns,
            allowed_sizes=job.elasticity.allowed_sizes,
            max_skipped_batches=job.max_skipped_batches,
            checkpoint_required=job.checkpoint is not None and job.checkpoint.required,
            straggler=job.straggler,
        )

    @property
    def id(self) -> str:
        """Digest of the values: eight hexadecimal digits."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:8]

    def fields(self) -> dict[str, Any]:
        """Return the values by name, not converted."""
        return {name: getattr(self, name) for name in self.__struct_fields__}
