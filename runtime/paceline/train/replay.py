"""Session of `paceline replay`: plays all ranks of a recorded run inside one script (I15).

The script runs once, in one process. Each batch that it gets was computed by some rank of the run.
It computes the batch with the buffers of that rank and on the weights of the version that the rank
had. In between, the recorded rounds are made again. A script whose gradient depends on weights and
batch alone comes to the same weights, bit for bit. A script that draws random numbers of its own
(dropout, augmentation) does not, because each rank of the run drew its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch
from paceline_api.ids import MemberId
from paceline_api.jobfile import JOB_FILE, read_job_file
from paceline_api.types.enums import Wire
from torch._C._distributed_c10d import HashStore

from paceline import private_files
from paceline.core.anatomy.samples import StepPhase
from paceline.core.messages import DealtBatch, ScriptError
from paceline.core.protocol.pending import BufferName
from paceline.core.protocol.progress import Progress
from paceline.core.protocol.records import DataPlan, LoggedMetric
from paceline.core.replay import sequence as core
from paceline.errors import ReplayError
from paceline.transport.replayed_sums import SumAgain
from paceline.worker.journals import not_replayable, read_journals
from paceline.worker.session import StepResult
from paceline.worker.state.committed import Committed
from paceline.worker.state.flat import plain_zeros
from paceline.worker.state.gradients import GradientMemory, Gradients

NOBODY_GAVE: Final = "mpi:ring"
"""Method of the sum for a round without contributors: zeros have the same sum in any order."""


class ReplaySession:
    """`Session` of a replay, which needs no other thread: everything runs on the main thread."""

    rank = 0
    place = 0
    is_publisher = False
    """False, because a replay must not overwrite the files that the run has written."""
    is_replay = True
    stopped_by_another = False
    under_way = False
    shards = 1
    shard = 0
    store = HashStore

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        job = read_job_file(run_dir / JOB_FILE)
        self.segment_bytes, self.wire = job.segment_bytes, job.wire
        if self.wire is not Wire.FLOAT32:
            raise not_replayable(run_dir, self.wire)
        journals = read_journals(run_dir)
        try:
            self._score = core.compose(journals)
        except core.SequenceError as error:
            raise ReplayError(f"{run_dir}: {error}") from None
        self.size = self._score.ranks
        self.zeros = plain_zeros
        self.version = 0
        self.progress = Progress()
        self.stopped = False
        self._actions = deque(self._score.actions)
        steps = [a.step for a in self._score.actions if isinstance(a, core.Compute)]
        self._leases = deque(lease for step in steps for lease in step.leases)
        self._now: core.Compute | None = None
        self._memories: dict[MemberId, GradientMemory] = {}
        self._given: dict[MemberId, list[torch.Tensor]] = {}
        self._sums = SumAgain()
        self._counts = [0, 0]
        self._differs_at: int | None = None
        self._gradients: Gradients
        self._committed: Committed

    # ---- Session --------------------------------------------------------------------------

    def begin(
        self,
        gradients: Gradients,
        committed: Committed,
        plan: DataPlan,
        lookahead: int,  # noqa: ARG002
    ) -> None:
        """Check that script and run have the same data, and play up to the first batch.

        Raises:
            ReplayError: The data plan differs from that of the run, or the model is not on the CPU.
        """
        if plan != self._score.plan:
            raise ReplayError(
                f"the script has other data than in the run: {plan}, then {self._score.plan}",
                hint="run it with the arguments, files and environment of the run",
            )
        if any(device.type != "cpu" for device in gradients.devices):
            raise ReplayError("only models on the CPU can be replayed")
        self._gradients, self._committed = gradients, committed
        self._play()

    def step(
        self,
        *,
        leases: tuple[int, ...],
        samples: int,
        unit: int,
        metrics: tuple[LoggedMetric, ...],  # noqa: ARG002
        usable: bool = True,
        foreign: bool = False,  # noqa: ARG002
    ) -> StepResult:
        """Keep the gradient for its recorded round, and play up to the next batch.

        A gradient that was dropped in the run because it was not finite, and is finite now, counts
        as a difference: the run had an injected fault, or the script draws random numbers.

        Returns:
            The version of the weights that the model now holds, and whether the replay is over.

        Raises:
            ReplayError: Leases, samples or unit differ from those of the recorded step.
        """
        assert self._now is not None
        then = self._now.step
        if (leases, samples, unit) != (then.leases, then.samples, then.unit):
            raise ReplayError(
                f"the script makes a step of leases {leases}, {samples} samples / {unit}; in the "
                f"run it was {then.leases}, {then.samples} / {then.unit}"
            )
        finite = usable and self._gradients.finite(BufferName.GRAD)
        if finite and not then.finite:
            # The run dropped it: either a fault was injected, or the script draws random numbers.
            self._note_difference()
        self._keep()
        self._play()
        return StepResult(self.version, fresh=True, stopped=self.stopped)

    def pull(self) -> int | None:
        """Return the next lease in the order of the recorded steps; None after the last one."""
        return self._leases.popleft() if self._leases else None

    def wait_lease(self) -> bool:
        """Return False when the replay is over; it never blocks."""
        return not self.stopped

    def holds(self, lease: int) -> bool:
        """Return True if the lease belongs to the step that the script computes now."""
        return not self.stopped and self._now is not None and lease in self._now.step.leases

    def enters(self, phase: StepPhase) -> None:
        """Do nothing: the phases of a replay are not measured."""

    def computing(self, leases: tuple[int, ...], samples: int, unit: int) -> None:
        """Do nothing: a replay makes a round after all its steps, never during backward()."""

    def skip(self, lease: int, samples: int) -> None:  # noqa: ARG002
        """Refuse to skip a batch: the run has made a step of each batch that is played.

        Raises:
            ReplayError: Always.
        """
        raise ReplayError(f"the script skips a batch of lease {lease}; in the run it did not")

    def works_on(self, batch: DealtBatch | None) -> None:
        """Do nothing: a replay that fails shows its traceback on the terminal."""

    def failed(self, why: str, error: ScriptError | None) -> None:
        """Do nothing: no agent waits for the reason, and the terminal shows it."""

    def flush(self) -> None:
        """Do nothing: each batch is computed on the same weights as in the run."""

    def rest(self) -> None:
        """Do nothing: no other rank waits for this process."""

    def resume(self) -> None:
        """Do nothing: `rest` has given no leases back."""

    def finish(self, *, stop: bool = False) -> None:  # noqa: ARG002
        """Copy the final weights into the model and write the result to `replay.json`.

        Raises:
            ReplayError: The script left its loop before the recorded run was over.
        """
        if not self.stopped:
            raise ReplayError("the script left its loop before the run was over")
        self._committed.copy_to_model()
        result = core.ReplayResult(
            version=self.version,
            rounds=self._counts[0],
            contributions=self._counts[1],
            ranks=len(self._memories),
            recorded=self._score.end.state,
            replayed=self._committed.strong_hash(),
            differs_at=self._differs_at,
        )
        private_files.write(self._run_dir / core.RESULT, msgspec.json.encode(result))

    # ---- playing --------------------------------------------------------------------------

    def _play(self) -> None:
        """Carry out the recorded actions up to the next batch, or to the end of the run."""
        while self._actions:
            action = self._actions.popleft()
            match action:
                case core.Compute(member=member):
                    self._now = action
                    self._become(member)
                    self._committed.copy_to_model()
                    return
                case core.Operate(member=member, op=op):
                    self._become(member)
                    self._gradients.carry_out(op)
                    self._keep()
                case core.Forget(member=member):
                    self._memories[member] = self._gradients.new_memory()
                case core.Give(member=member, source=source, factor=factor):
                    self._become(member)
                    self._gradients.load_results(source, factor)
                    self._given[member] = [flat.clone() for flat in self._gradients.result]
                    self._keep()
                case core.Round():
                    self._make_round(action)
                case core.Void(round=round_):
                    self.version = round_ + 1
                case core.Check(version=version, value=value):
                    assert version == self.version
                    if self._committed.hash() != value:
                        self._note_difference()
        self._now, self.stopped = None, True
        self._committed.copy_to_model()

    def _become(self, member: MemberId) -> None:
        self._player = member
        memory = self._memories.pop(member, None) or self._gradients.new_memory()
        self._before = self._gradients.exchange(memory)

    def _keep(self) -> None:
        """Store the buffers of the present rank until its next turn."""
        self._memories[self._player] = self._gradients.exchange(self._before)

    def _make_round(self, made: core.Round) -> None:
        weighing, layout = made.weighing, self._gradients.layout
        named = set(weighing.contributors)
        parts = [
            self._given[m] if m in named and m in self._given else layout.zeros()
            for m in made.members
        ]
        self._given.clear()
        try:
            total = self._sum(made, parts)
        except ValueError as error:
            raise ReplayError(
                f"round {made.round}: {error}; backends shm, mpi and gloo can"
            ) from None
        for result, flat in zip(self._gradients.result, total, strict=True):
            result.copy_(flat)
        self._committed.accumulate(self._gradients.result, first=weighing.first)
        self._committed.apply(
            weighing.divisor, step=weighing.step, scheduler_steps=weighing.scheduler_steps
        )
        self.version = made.round + 1
        self.progress = made.progress
        self._counts[0] += 1
        self._counts[1] += len(weighing.contributors)

    def _sum(self, made: core.Round, parts: list[list[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Return the sum of each buffer, with the bits of the recorded method.

        Args:
            made: The recorded round, with the method of each buffer's sum.
            parts: The buffers of each rank, in the order of the members.

        Returns:
            One tensor per gradient buffer.
        """
        if len(parts) == 1:
            return parts[0]
        methods = made.methods or [NOBODY_GAVE] * len(parts[0])
        of_ranks = zip(*parts, strict=True)
        # After the gradients, a round may also have summed buffers of the model.
        pairs = zip(methods, of_ranks, strict=False)
        return [self._sums.sum(method, parts, made.machines) for method, parts in pairs]

    def _note_difference(self) -> None:
        if self._differs_at is None:
            self._differs_at = self.version
