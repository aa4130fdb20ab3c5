"""The engine of a rank whose script steps its own optimizers (docs/design/scripts.md)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from paceline_api.jobfile import JobFile
from paceline_api.status import place_of
from paceline_api.types.enums import Mode

from paceline.clock import now_ns
from paceline.core.protocol.places import Spot, SpotAction
from paceline.core.protocol.records import BACKWARD, DataPlan, Operation
from paceline.core.rank import events as ev
from paceline.environment import RankSettings
from paceline.errors import DismissedError, PacelineError
from paceline.transport.base import HOST, TransportError
from paceline.transport.variables import restore_variables
from paceline.worker import short_sockets
from paceline.worker.comm_thread import CommThread
from paceline.worker.engine import WATCH_S, Engine
from paceline.worker.operations import (
    Operations,
    Result,
    ScriptState,
    ScriptThread,
    parts_of,
)

log = logging.getLogger("paceline.rank")

TRIES_MAX: Final = 300
"""How often an operation is made until all slots take part. With TRY_S this is five minutes: enough
for a new pod, if not for a queue."""
TRY_S: Final = 1.0
"""Pause between two of these tries, in seconds."""
Parts = tuple[tuple[str, int], ...]


class LeftBehindError(PacelineError):
    """Raised where the others have gone past the script of this rank, which has to start again."""


class ScriptEngine(Engine):
    """Takes part in a job with the operations of a script. Main thread, unless stated otherwise."""

    def __init__(self, settings: RankSettings | None) -> None:
        self.operations = Operations()
        self.opens_here: Callable[[], bool] = lambda: True
        """Returns `Operation.opens` of the next call."""
        self.on_load: Callable[[ScriptState], None] = lambda _: None
        """Loads a state into the script."""
        self.on_joined: Callable[[], None] = lambda: None
        """Called when this rank joins in an operation, with the state loaded."""
        self.was_active = False
        """True once this rank has taken part in an operation."""
        self.given_up = 0
        """Number of missing slots that no operation waits for any more."""
        self._missing = 0
        """Number of slots that were missing in the last operation."""
        self.needs_all = False
        """True if the script gathers a part of each slot within a pass, so that its steps wait for
        missing slots as calls at points do. The same on all ranks."""
        super().__init__(settings)

    @property
    def _thread(self) -> ScriptThread:
        assert isinstance(self._comm, ScriptThread)
        return self._comm

    def _thread_class(self) -> type[CommThread]:
        return ScriptThread

    @property
    def slots(self) -> int:
        """Number of slots of the job, which the script knows as WORLD_SIZE (S1)."""
        return self._spec.replicas * self._spec.procs if self._spec else 1

    def start(self) -> None:
        """Join the job, and block until the first generation has formed (S3).

        On a rank that joins later it returns as soon as the script may follow the others.

        Raises:
            PacelineError: The transport cannot sum in host memory.
        """
        self._thread.begin_with(self.operations, self._transport)
        try:
            self._transport.begin((HOST,))
        except TransportError as error:
            raise PacelineError(str(error)) from error
        plan = DataPlan(slots=self.slots)
        self._call(ev.Begin("", plan, 1, data=self._transport.address))
        self._loop.began(now_ns())
        if self._script is not None:
            self._script.start()

    def backward_comes(
        self,
        parts: Parts,
        owner: object,
        *,
        model: int,
        samples: int,
        opens: bool,
        where: str,
    ) -> bool:
        """Announce the averaging of a backward pass, whose first bucket is ready.

        Each bucket is then given to `hand_over`, the last one too, before `operate` is called with
        all of them. Until then the ranks may already sum those that are ready (R28).

        Args:
            parts: Types and sizes of all buckets.
            model: Number of the model.
            owner: Who announces it. While one backward pass is announced, another owner's is not.
            samples: Number of samples in the gradient.
            opens: True if a script that joins can begin at this operation.
            where: File and line of the script, for errors.

        Returns:
            False if nothing is announced, so nothing is to be handed over.
        """
        with self.operations.lock:
            spot, act = self.operations.path.here, self.operations.path.operation()
        if act is not SpotAction.TAKE_PART:
            return False
        operation = Operation(BACKWARD, *spot, opens, parts, model)
        coming = ev.Coming((), samples, 1, operation, where)
        if not self._thread.bucket_sums.begin(coming, owner):
            return False
        self._comm.post(coming)
        return True

    @property
    def spot(self) -> Spot:
        """Operation that the script makes next."""
        return self.operations.path.here

    def hand_over(self, bucket: torch.Tensor) -> None:
        """Hand over the next bucket of the backward pass that was announced."""
        self._thread.bucket_sums.hand_over(bucket)

    def operate(
        self,
        name: str,
        buffers: list[torch.Tensor],
        *,
        parts: Parts | None = None,
        model: int = 0,
        settles: bool = False,
        samples: int = 0,
        opens: bool = True,
        where: str = "",
    ) -> Result:
        """Sum buffers over the ranks, and block until they are summed everywhere.

        Args:
            name: The operation with its arguments; the same on all ranks.
            buffers: Flat tensors of a floating-point type.
            parts: Types and sizes in which they are summed; None for those of the buffers.
            model: Number of the model whose gradients are averaged.
            settles: `Operation.settles` of a backward pass.
            samples: Number of samples in a gradient; 0 for a call.
            opens: True if a script that joins can begin at this operation.
            where: File and line of the script, for errors.

        Returns:
            The sums, or the averages of a backward pass. Their memory is used again after the
            next operation.

        Raises:
            LeftBehindError: The others have completed the operation without this rank, or another
                one at this spot.
        """
        operations = self.operations
        parts = parts_of(buffers) if parts is None else parts
        while True:
            with operations.lock:
                spot, act = operations.path.here, operations.path.operation()
                if act is SpotAction.REPEAT:
                    result = operations.path.kept[spot]
                    if result.name != name:
                        raise LeftBehindError(
                            f"it calls {name} where the others called {result.name}"
                        )
                    operations.path.made()
                    return result
            if act is SpotAction.ALONE:
                operations.path.made()
                return Result([each.clone() for each in buffers], 1, 0)
            if act is SpotAction.LOST:
                at = f" at {where}" if where else ""
                raise LeftBehindError(f"the others are past its {name}{at}, and kept no result")
            if act is SpotAction.ASK:
                self.ask(spot.__eq__)
                continue
            if act is SpotAction.LOAD:
                self.load()
                self.on_joined()
            operation = Operation(name, *spot, opens, parts, model, settles)
            if (done := self._take_part(operation, buffers, samples, where)) is not None:
                return done

    def operate_with_all(
        self, name: str, buffers: list[torch.Tensor], *, opens: bool = True, where: str = ""
    ) -> Result:
        """Make a call, again until the slots that are replaced have come (S3).

        All ranks see the same results, and a rank that joins repeats them, so all make the same
        number of tries. Calls within a pass wait only in a script that gathers a part of each slot
        there. A slot can be waited for only where a rank that joins can begin.

        Args:
            name: As for `operate`, like all others.
            buffers: Flat tensors of a floating-point type.
            opens: True if a script that joins can begin at this operation.
            where: File and line of the script, for errors.

        Returns:
            The sums.
        """
        waits = opens and (self.is_at_point or self.needs_all)
        for tries in range(TRIES_MAX):
            result = self.operate(name, buffers, opens=opens, where=where)
            if not waits or result.missing <= self.given_up:
                return result
            if not self.follows:  # a rank that follows repeats the tries of the others
                if not tries:
                    log.warning("%s: waiting for %d ranks that are replaced", name, result.missing)
                self.pause(TRY_S)
        log.warning("%s: going on without %d ranks", name, result.missing)
        self.given_up = result.missing
        return result

    def wait_for_missing(self, where: str) -> None:
        """Wait for missing slots before a step at which a rank can join, if the script needs all.

        Args:
            where: File and line of the script, for errors.
        """
        if self.needs_all and self._missing > self.given_up:
            self.operate_with_all("wait for ranks", [torch.zeros(1)], where=where)

    @property
    def waits(self) -> list[Any]:
        """Return what decides for which slots this rank waits, for a rank that joins."""
        return [self.needs_all, self.given_up, self._missing]

    def set_waits(self, waits: Sequence[Any]) -> None:
        """Wait for the slots that the donor waits for."""
        self.needs_all, self.given_up, self._missing = waits

    def _take_part(
        self, operation: Operation, buffers: list[torch.Tensor], samples: int, where: str
    ) -> Result | None:
        operations = self.operations
        with operations.lock:
            operations.source, operations.latest, operations.result = buffers, None, None
        begun_ns = now_ns()
        step = ev.Step((), samples, 1, operation=operation, where=where)
        self._thread.bucket_sums.close(step)
        resume = self._call(step)
        with operations.lock:
            result, operations.source = operations.result, []
            if result is not None:
                operations.path.made()
                self.was_active, self._missing = True, result.missing
        if result is None and resume.stopped:
            raise DismissedError(0)
        if samples:
            self._loop.stepped(
                *(begun_ns, now_ns()),
                fresh=not resume.late,
                version=resume.version,
                samples=samples,
            )
        return result

    def ask(self, loads: Callable[[Spot], bool]) -> None:
        """Ask for the state, and block until it has been received (S3).

        Args:
            loads: Returns True if the caller loads the state of a donor that waits at a spot before
                it does anything else. Then it is received in the tensors of the script.
        """
        self.operations.loads = loads
        try:
            self._call(ev.Need())
        finally:
            self.operations.loads = None

    def load(self) -> None:
        """Load the donor's state into the script, which goes on where the donor was.

        If the script of the donor has ended, the caller says where this one goes on.
        """
        with self.operations.lock:
            received, self.operations.received = self.operations.received, None
            self.operations.path.load()
        assert received is not None
        self.on_load(received)

    @property
    def mode(self) -> Mode:
        """Mode of the job's rounds; Full without a job."""
        return self._state.log.settings.mode if self._spec else Mode.FULL

    @property
    def pipeline(self) -> int:
        """Rounds that a rank computes ahead; 0 without a job."""
        return self._state.log.settings.pipeline if self._spec else 0

    @property
    def spec(self) -> JobFile | None:
        """The job; None without one."""
        return self._spec

    @property
    def is_alone(self) -> bool:
        """Return True if the script goes through a pass that is over: its calls are its own."""
        return self.operations.path.skips

    @property
    def is_partial(self) -> bool:
        """Return True if steps may be made without ranks that are late (S17)."""
        return not self._state.log.is_synchronous

    @property
    def follows(self) -> bool:
        """Return True until the script is where the others are."""
        return self.operations.path.follows

    @property
    def is_at_point(self) -> bool:
        """Return True if the script is between two passes over its loader."""
        return self.operations.path.here.is_at_point

    def pause(self, seconds: float) -> None:
        """Wait before a call is made again; ends early when the job is over."""
        with self._lock:
            self._watch()
            self._lock.wait_for(lambda: self._end is not None, seconds)

    def lowest_slot(self) -> int:
        """Return the lowest slot that takes part in operations now."""
        log = self._state.log
        has_state = [m for m in log.with_state if m in log.places] or list(log.active)
        return place_of(min(has_state), self._spec.procs if self._spec else 1)

    def _adopt(self) -> None:
        """Do nothing: the sums are complete when the main thread goes on."""

    def end(self, *, outside: bool = False) -> bool:
        """Block until the job is over, after the script has ended.

        Until then this rank can still send its state to others (S14).

        Args:
            outside: True if the script has ended since it can never join the others (S10).

        Returns:
            True if the job is complete; False if it is over without this rank.
        """
        if self._script is not None:
            self._script.close()
        self._comm.post(ev.Finish(outside=outside))
        with self._lock:
            while self._end is None:
                self._watch()
                self._lock.wait(WATCH_S)
        sys.setswitchinterval(self._switch_interval_s)
        restore_variables()
        if self._settings is not None:
            short_sockets.restore(str(self._settings.scratch))
        return self._end.finished
