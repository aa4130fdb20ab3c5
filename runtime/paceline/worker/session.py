"""What the main thread asks of the communication thread: the only door between the two.

Every call is made by the user's (main) thread. The communication thread answers; while a call
blocks, the main thread is *parked*, and only then may the model's weights and the gradient buffers
change under it. The order between the two threads' device streams (D5) is kept behind this door and
nowhere else: what the main thread has queued is complete before it is announced, and what it queues
after a call sees the weights that the call has brought. No call waits without the engine watching
over it: a generation change, a stop or a dismissal wakes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from paceline_api.types.enums import Wire
from torch._C._distributed_c10d import Store

from paceline.core.anatomy.samples import Phase
from paceline.core.messages import DealtBatch, ScriptError
from paceline.core.protocol.progress import Progress
from paceline.core.protocol.records import DataPlan, LoggedMetric
from paceline.core.rank import events as ev
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step when the main thread goes on."""

    version: int
    """Of the weights that the model now holds."""
    fresh: bool
    """The gradient was applied in its own round."""
    stopped: bool
    """The stop round is committed: nothing that follows has an effect."""


class MainThread(Protocol):
    """What the communication thread does to the parked main thread."""

    def resumed(self, resume: ev.Resume) -> None: ...
    def held(self, leases: tuple[int, ...]) -> None: ...
    def exited(self, end: ev.Exit) -> None: ...
    def broken(self, error: BaseException) -> None: ...


class Session(Protocol):
    """The rank's part in the job, as the training API needs it."""

    def begin(
        self, gradients: Gradients, committed: Committed, plan: DataPlan, lookahead: int
    ) -> None:
        """Register as ready; blocks until this rank is a member with state and the model holds the
        committed weights. Called once, at the first `epochs()` or `step()`."""

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
        """Announce the gradient in GRAD; returns when the next batch may start: with a pipeline
        when the gradient before this one is applied, or late (R36). One that is not finite, not
        usable, or foreign, is dropped and counted.

        `unit`: the gradient buffer holds sum(per-sample gradients) / unit. When it returns, the
        gradient views are zero (or hold what could not be announced yet) and the model holds the
        newest committed weights."""

    def enters(self, phase: Phase) -> None:
        """The loop goes on with this part of a step; for figures only."""

    def works_on(self, batch: DealtBatch | None) -> None:
        """Note which batch is loaded or computed from now on, so that the end of this process can
        be told with its samples (R55); None between two batches. One store, no wait."""

    def computing(self, leases: tuple[int, ...], samples: int, unit: int) -> None:
        """The batch that completes these leases is computed next, and `step` will say the same of
        it: what backward() has ready may be reduced before it has ended (R28)."""

    def pull(self) -> int | None:
        """The next lease that this rank holds and has not pulled; None if there is none now."""

    def wait_lease(self) -> bool:
        """Announce IDLE and block until `pull` has something (True) or the job is over (False).
        Only when nothing pulled is unfinished (D1)."""

    def holds(self, lease: int) -> bool:
        """False once the log gives the lease to somebody else, or it was applied or dropped."""

    def skip(self, lease: int, samples: int) -> None:
        """The user's loop took this batch and made no step of it: dropped, and counted (D1)."""

    @property
    def under_way(self) -> bool:
        """With a pipeline: a gradient of this rank was announced when the model's weights were
        renewed last, and is not in them."""

    def flush(self) -> None:
        """With a pipeline: returns when no gradient of this rank is under way any more. Refreshes
        the model's weights (R36)."""

    def rest(self) -> None:
        """Give back all leases that are not pending and count as IDLE (`pl.evaluating`)."""

    def resume(self) -> None:
        """End of `rest`; leases come with the next round. Refreshes the model's weights."""

    def finish(self, *, stop: bool = False) -> None:
        """Copy the final weights into the model; blocks until RELEASE, or raises DismissedError.

        `stop`: the job ends here, on all ranks, with the round that carries this rank's word."""

    def failed(self, why: str, error: ScriptError | None) -> None:
        """Report that the script ends because of a mistake, for the agent to pass on.

        Args:
            why: What happened, for people.
            error: The exception, if another rank that meets it would fail in the same way (R55).
        """

    @property
    def rank(self) -> int:
        """Index in the current generation; may change (D12). Before the first one: `place`."""

    @property
    def size(self) -> int:
        """Members of the current generation; before the first one, the ranks that are wanted."""

    @property
    def place(self) -> int:
        """Slot x processes + process: the name of this rank that never changes."""

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the model together; 1: each holds all of it."""

    @property
    def shard(self) -> int:
        """Which of them this is: its place in the group."""

    def store(self) -> Store:
        """Where they meet for a process group of torch's. Once."""

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """New memory for sums, where the data channel reaches it best."""

    @property
    def segment_bytes(self) -> int | None:
        """How large a segment of the gradients may be (`collective.segmentBytes`); None: by the
        device."""

    @property
    def wire(self) -> Wire:
        """What float32 sums travel as (`collective.wire`)."""

    @property
    def version(self) -> int:
        """Of the weights in the model."""

    @property
    def progress(self) -> Progress:
        """Of the job, with the weights in the model."""

    @property
    def stopped(self) -> bool: ...

    @property
    def stopped_by_another(self) -> bool:
        """The script of another rank has ended the job, and publishes."""

    @property
    def is_replay(self) -> bool:
        """Plays a recorded run: where it ends is what the record says."""

    @property
    def is_publisher(self) -> bool:
        """True on exactly one rank (`Log.publisher`); before training on rank 0 of the first start,
        so never on two."""
