"""A whole job of one rank in memory: the smallest honest implementation of `Session`.

It deals leases, applies rounds with the real gradients and the real committed state, and keeps the
ledger, all in the main thread. To show the effects that a job of many ranks has on this one, it can
take leases away as if another rank had got them. It can also leave gradients in GRAD as if no round
could take them yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.core.anatomy.samples import StepPhase
from paceline.core.faults import parse_faults
from paceline.core.messages import DealtBatch, ScriptError
from paceline.core.protocol.pending import BufferName
from paceline.core.protocol.progress import Progress
from paceline.core.protocol.records import DataPlan, LoggedMetric
from paceline.core.protocol.sampling import samples_of, total_leases
from paceline.train import context
from paceline.worker.session import StepResult
from paceline.worker.state.committed import Committed
from paceline.worker.state.flat import plain_zeros
from paceline.worker.state.gradients import Gradients
from paceline_api.types.enums import Wire
from torch._C._distributed_c10d import HashStore


class LoneSession:
    """Rank 0 of 1.

    Attributes:
        announce_every: only each n-th step is announced; until then gradients wait in GRAD.
        revoke: (version, held leases) -> the leases that another rank gets now.
    """

    rank = 0
    size = 1
    place = 0
    is_publisher = True
    segment_bytes: int | None = None
    zeros = staticmethod(plain_zeros)
    wire = Wire.FLOAT32
    is_replay = False
    stopped_by_another = False
    under_way = False
    shards = 1
    shard = 0
    store = HashStore

    def __init__(
        self,
        *,
        announce_every: int = 1,
        revoke: Callable[[int, list[int]], list[int]] | None = None,
        scheduler_steps: int = 1,
        stop_at: int | None = None,
    ) -> None:
        self.announce_every = announce_every
        self.revoke = revoke
        self.scheduler_steps = scheduler_steps
        self.stop_at = stop_at
        self.phases: list[StepPhase] = []
        self.version = 0
        self.progress = Progress()
        self.stopped = False
        self.released = False
        self.plan = DataPlan()
        self.lookahead = 0
        self.pool: deque[int] = deque()
        self.held: list[int] = []
        self.pulled: list[int] = []
        self.waiting: list[int] = []
        self.waiting_samples = 0
        self.steps = 0
        self.working_on: DealtBatch | None = None
        self.applied: list[int] = []
        self.applied_samples = 0
        self.dropped: list[int] = []
        self.foreign = 0
        self.elsewhere: list[int] = []
        self.metrics: list[LoggedMetric] = []
        self.resting = False
        self.parked_idle = 0

    def begin(
        self, gradients: Gradients, committed: Committed, plan: DataPlan, lookahead: int
    ) -> None:
        """Bind gradients and weights and deal the first leases."""
        self.gradients, self.committed, self.plan = gradients, committed, plan
        self.lookahead = lookahead
        self.pool.extend(range(total_leases(plan)))
        committed.copy_to_model()
        self._deal()

    def failed(self, why: str, error: ScriptError | None) -> None:
        """Ignore the script's error; there is no agent to report it to."""

    def step(
        self,
        *,
        leases: tuple[int, ...],
        samples: int,
        unit: int,
        metrics: tuple[LoggedMetric, ...],
        usable: bool = True,
        foreign: bool = False,
    ) -> StepResult:
        """Count a step; apply a round, or drop the gradient if it is unusable."""
        assert not self.stopped
        assert unit == self.gradients.unit
        finite = usable and self.gradients.finite(BufferName.GRAD)
        self.steps += 1
        self.metrics.extend(metrics)
        mine = [lease for lease in leases if lease in self.held]
        for lease in mine:
            self._forget(lease)
        self.foreign += foreign
        if foreign or not finite or len(mine) < len(leases):
            self.gradients.zero(BufferName.GRAD)
            self.dropped += mine + self.waiting
            self.waiting, self.waiting_samples = [], 0
        else:
            self.waiting += mine
            self.waiting_samples += samples
            if self.steps % self.announce_every == 0:
                self._round(unit)
        self._after_record()
        return StepResult(self.version, fresh=True, stopped=self.stopped)

    def pull(self) -> int | None:
        """Return the next held lease that was not pulled, or None."""
        for lease in self.held:
            if lease not in self.pulled:
                self.pulled.append(lease)
                return lease
        return None

    def wait_lease(self) -> bool:
        """Apply what waits, then return False if the job is stopped."""
        unfinished = [lease for lease in self.pulled if lease in self.held]
        assert not unfinished, f"waits for a lease while {unfinished} are unfinished"
        self.parked_idle += 1
        if self.waiting:
            self._round(self.gradients.unit)
        self._after_record()
        return not self.stopped

    def holds(self, lease: int) -> bool:
        """Return True if this rank holds the lease."""
        return lease in self.held

    def skip(self, lease: int, samples: int) -> None:
        """Drop a lease that the script skips."""
        assert samples == samples_of(self.plan, lease)
        if lease in self.held:
            self._forget(lease)
            self.dropped.append(lease)
            self._after_record()

    def works_on(self, batch: DealtBatch | None) -> None:
        """Record the batch that the script has received."""
        self.working_on = batch

    def flush(self) -> None:
        """Return at once: there is no pipeline."""

    def rest(self) -> None:
        """Give all leases back for an evaluation."""
        self.resting = True
        self.pool.extendleft(reversed(self.held))
        self.held.clear()
        self.pulled.clear()

    def resume(self) -> None:
        """End an evaluation and deal leases."""
        self.resting = False
        self._deal()

    def finish(self, *, stop: bool = False) -> None:
        """Release the rank with the final weights in the model; `stop` ends the job."""
        self.stopped = self.stopped or stop
        self.committed.copy_to_model()
        self.released = True

    def enters(self, phase: StepPhase) -> None:
        """Record a phase of the script."""
        self.phases.append(phase)

    def computing(self, leases: tuple[int, ...], samples: int, unit: int) -> None:
        """Ignore the announcement: no other rank could begin a round."""

    def lose(self, lease: int) -> None:
        """Let another rank get the lease and apply it."""
        self._forget(lease)
        self.elsewhere.append(lease)

    def ledger(self) -> list[int]:
        """Return all leases that were applied, dropped or lost, in order."""
        return sorted(self.applied + self.dropped + self.elsewhere)

    def _round(self, unit: int) -> None:
        gradients, committed = self.gradients, self.committed
        gradients.swap()
        gradients.load_results(BufferName.LATE)
        committed.accumulate(gradients.result, first=True)
        divisor = self.waiting_samples / unit
        committed.apply(divisor, step=True, scheduler_steps=self.scheduler_steps)
        gradients.zero(BufferName.LATE)
        committed.copy_to_model()
        self.applied += self.waiting
        self.applied_samples += self.waiting_samples
        self.waiting, self.waiting_samples = [], 0
        self.version += 1

    def _after_record(self) -> None:
        if self.revoke is not None:
            for lease in self.revoke(self.version, list(self.held)):
                self.lose(lease)
        self._deal()
        self.progress = Progress(self.version, 0, self.applied_samples)
        over = self.plan.samples > 0 and not self.pool and not self.held and not self.waiting
        over = over or 0 < self.plan.steps <= self.version
        self.stopped = over or (self.stop_at is not None and self.version >= self.stop_at)

    def _deal(self) -> None:
        while self.pool and not self.resting and len(self.held) < self.lookahead:
            self.held.append(self.pool.popleft())

    def _forget(self, lease: int) -> None:
        self.held.remove(lease)
        if lease in self.pulled:
            self.pulled.remove(lease)


def started(session: LoneSession, faults: str = "") -> LoneSession:
    """Install a session as `pl.init()` would, and return it."""
    context.install(context.Context(session, parse_faults(faults)))
    return session
