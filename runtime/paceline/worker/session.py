"""The interface through which the main thread talks to the communication thread.

There is no other one. The user's (main) thread makes the calls, and the communication thread
answers them. Only `failed` may be called by the script watch's thread too. While a call blocks, the
main thread is *parked*. The model's weights change only then, and so do the gradient buffers that
backward() adds to. This interface also keeps the order between the two threads' device streams
(D5): what the main thread has queued is complete before it is announced, and what it queues after a
call sees the weights that the call brought. The engine watches over every wait: it ends with an
error if a thread of the runtime fails or the job goes on without this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from paceline_api.types.enums import Wire
from torch._C._distributed_c10d import Store

from paceline.core.anatomy.samples import StepPhase
from paceline.core.messages import DealtBatch, ScriptError
from paceline.core.protocol.progress import Progress
from paceline.core.protocol.records import DataPlan, LoggedMetric
from paceline.core.rank import events as ev
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step, at the time when the main thread goes on."""

    version: int
    """Version of the weights that the model now holds."""
    fresh: bool
    """True if the gradient was applied in its own round."""
    stopped: bool
    """True if the stop round is committed, so nothing that follows has an effect."""


class MainThread(Protocol):
    """The calls with which the communication thread releases or ends the parked main thread.

    The link thread may also call `broken`.
    """

    def resumed(self, resume: ev.Resume) -> None:
        """Let the main thread go on; the model already holds the weights of `resume.version`."""

    def held(self, leases: tuple[int, ...]) -> None:
        """Replace the set of leases that this rank may work on."""

    def exited(self, end: ev.Exit) -> None:
        """Report that the rank's part in the job is over, in order or by dismissal."""

    def broken(self, error: BaseException) -> None:
        """Report that a thread of the runtime has failed; the main thread raises an error."""


class Session(Protocol):
    """A rank's part in the job, as the training API sees it.

    All methods are for the main thread, except `failed`. A call that blocks raises DismissedError
    if the job goes on without this rank, and RuntimeBrokenError if a thread of the runtime has
    failed.
    """

    def begin(
        self, gradients: Gradients, committed: Committed, plan: DataPlan, lookahead: int
    ) -> None:
        """Register as ready, and block until this rank may train.

        When it returns, this rank is a member with state, and the model holds the committed
        weights. Called once, at the first `epochs()` or `step()`.

        Args:
            gradients: Buffers for the gradients of the model. The communication thread owns them
                whenever the main thread is parked.
            committed: Weights and optimizer state. The communication thread owns them from now on.
            plan: How the data set is dealt; the same on all ranks.
            lookahead: Number of leases that this rank may hold, enough for what its loader reads
                ahead (D1).
        """

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
        """Announce the gradient in GRAD, and block until the next batch may start.

        With a pipeline this is as soon as the gradient before this one is applied or counted as
        late (R36). A gradient that is not finite, not usable or foreign is dropped and counted.

        When it returns, the gradient views are zero, or hold what could not be announced yet, and
        the model holds the newest committed weights.

        Args:
            leases: Leases that the gradient completes.
            samples: Number of samples in the gradient.
            unit: Divisor of the gradient buffer, which holds sum(per-sample gradients) / unit (D3).
            metrics: Values that the script has logged with this step.
            usable: False to drop the gradient, such as one that contains parts of several
                contributions.
            foreign: True if it was computed before this rank had the job's weights, which differed.

        Returns:
            The version of the weights, and whether the gradient was applied in its own round.
        """

    def enters(self, phase: StepPhase) -> None:
        """Note which part of a step the loop begins now; used for metrics only."""

    def works_on(self, batch: DealtBatch | None) -> None:
        """Note the batch that is loaded or computed from now on; None between two batches.

        The report of this process's end then names its samples (R55). Costs one store and no wait.
        """

    def computing(self, leases: tuple[int, ...], samples: int, unit: int) -> None:
        """Allow streaming of the batch that is computed next.

        Whatever backward() has ready may be reduced before backward() has ended (R28). `step` is
        expected to announce the batch with the same arguments. If it announces something else, a
        streamed round that contains the batch is void (R31).

        Args:
            leases: Leases that this batch completes.
            samples: Number of samples that `step` will announce.
            unit: Unit of the gradient that `step` will announce.
        """

    def pull(self) -> int | None:
        """Return the next lease that this rank holds and has not pulled; None without one."""

    def wait_lease(self) -> bool:
        """Announce IDLE, and block until there is a lease or the job is over.

        Call this only when every lease that was pulled is finished (D1).

        Returns:
            True if `pull` has a lease, False if the job is over.
        """

    def holds(self, lease: int) -> bool:
        """Return False once the log gave the lease to another rank, or applied or dropped it."""

    def skip(self, lease: int, samples: int) -> None:
        """Drop and count a batch that the loop took without making a step of it (D1)."""

    @property
    def under_way(self) -> bool:
        """Return True if a gradient of this rank is in flight, with a pipeline.

        It was announced when the model's weights were last refreshed, and is not in them.
        """

    def flush(self) -> None:
        """Block until no gradient of this rank is in flight any more, with a pipeline (R36).

        Also refreshes the model's weights. Does nothing without a pipeline.
        """

    def rest(self) -> None:
        """Give back all leases that are not pending and count as IDLE (`pl.evaluating`)."""

    def resume(self) -> None:
        """End `rest` and refresh the model's weights; leases come with the next round."""

    def finish(self, *, stop: bool = False) -> None:
        """Block until the coordinator releases the job, then copy the final weights into the model.

        Args:
            stop: True to end the job on all ranks, with the round that carries this rank's request.

        Raises:
            DismissedError: The job goes on without this rank.
        """

    def failed(self, why: str, error: ScriptError | None) -> None:
        """Report that the script ends because of a mistake; the agent passes the report on.

        Args:
            why: What happened, for people.
            error: The exception, if another rank that meets it would fail in the same way (R55).
        """

    @property
    def rank(self) -> int:
        """Index of this rank in the current generation.

        It may change with the generation (D12). Before the first one it is `place`.
        """

    @property
    def size(self) -> int:
        """Number of members in the current generation; before the first, the number requested."""

    @property
    def place(self) -> int:
        """Slot x processes + process: the number of this rank that never changes."""

    @property
    def shards(self) -> int:
        """Number of ranks that hold one copy of the model together; 1 if each holds all of it."""

    @property
    def shard(self) -> int:
        """Index of this rank among the ranks that hold one copy of the model together."""

    def store(self) -> Store:
        """Return the store in which a group's ranks meet for a torch process group. Call once."""

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new zeroed tensor for sums, in the memory that the transport prefers."""

    @property
    def segment_bytes(self) -> int | None:
        """Upper bound on a segment of the gradients, in bytes (`collective.segmentBytes`).

        None if the device decides.
        """

    @property
    def wire(self) -> Wire:
        """Data type in which float32 sums travel (`collective.wire`)."""

    @property
    def version(self) -> int:
        """Version of the weights in the model."""

    @property
    def progress(self) -> Progress:
        """Progress of the job at the version of the weights in the model."""

    @property
    def stopped(self) -> bool:
        """True once the stop round is committed or the rank's part in the job is over."""

    @property
    def stopped_by_another(self) -> bool:
        """Return True if the script of another rank has ended the job, and that rank publishes."""

    @property
    def is_replay(self) -> bool:
        """Return True if this session replays a recorded run, which ends where the record ends."""

    @property
    def is_publisher(self) -> bool:
        """True if this rank publishes the results; it is on exactly one rank (`Log.publisher`).

        Before training it is true on rank 0 of the first start only, so never on two ranks.
        """
