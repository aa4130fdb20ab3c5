"""Metrics that the main thread writes into the rank's record: where the loop's time goes.

They are written inside calls that the loop makes anyway, with the times at which it entered and
left the call. A step lasts from the end of one step() to the end of the next. It consists of
computing, waiting for leases, and communication that was not hidden.
"""

from __future__ import annotations

from paceline_api.times import NS_PER_S

from paceline.core.anatomy.samples import StepPhase
from paceline.telemetry.records import RankRecord

NOTHING = [0] * len(StepPhase)


class LoopMetrics:
    """Metrics of the user's loop. Main thread only; all times are in nanoseconds."""

    def __init__(self, record: RankRecord) -> None:
        self._fresh = record.counter("paceline_steps_total", kind="fresh")
        self._late = record.counter("paceline_steps_total", kind="late")
        self._step_s = record.histogram("paceline_step_duration_seconds")
        self._compute_s = record.counter("paceline_compute_seconds_total")
        self._exposed_s = record.counter("paceline_exposed_seconds_total")
        self._data_wait_s = record.counter("paceline_data_wait_seconds_total")
        self._began_ns = 0
        self._waited_ns = 0
        """Time in this step that was spent waiting for leases or in `flushed`."""
        self._ring = record.steps
        self._phase = StepPhase.SCRIPT
        self._since_ns = 0
        """Start of the present phase, moved forward by the waits in it."""
        self._spent_ns = [0] * len(StepPhase)

    def began(self, now_ns: int) -> None:
        """Start the clock of a step: after begin(), after a step and after evaluating()."""
        self._began_ns, self._waited_ns = now_ns, 0
        self._phase, self._since_ns = StepPhase.SCRIPT, now_ns
        self._spent_ns[:] = NOTHING

    def entered(self, phase: StepPhase, now_ns: int) -> None:
        """End the present phase of the step and begin another one."""
        self._spent_ns[self._phase] += now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns

    def waited(self, begin_ns: int, end_ns: int) -> None:
        """Count a wait for a lease."""
        self._data_wait_s.add((end_ns - begin_ns) / NS_PER_S)
        self._waited_ns += end_ns - begin_ns
        self._since_ns += end_ns - begin_ns

    def flushed(self, begin_ns: int, end_ns: int) -> None:
        """Count a wait, outside of step(), for a gradient in flight."""
        self._exposed_s.add((end_ns - begin_ns) / NS_PER_S)
        self._waited_ns += end_ns - begin_ns
        self._since_ns += end_ns - begin_ns

    def stepped(
        self, begin_ns: int, end_ns: int, *, fresh: bool, version: int, samples: int
    ) -> None:
        """Count a step that has returned, and begin the next one.

        Args:
            begin_ns: When step() was called.
            end_ns: When it returned.
            fresh: True if the gradient was applied in its own round.
            version: Version of the weights that the model holds now.
            samples: Number of samples in the gradient.
        """
        self._spent_ns[self._phase] += begin_ns - self._since_ns
        self._ring.write(
            began_ns=self._began_ns,
            announced_ns=begin_ns,
            resumed_ns=end_ns,
            spent_ns=self._spent_ns,
            lease_ns=self._waited_ns,
            version=version,
            fresh=fresh,
            samples=samples,
        )
        (self._fresh if fresh else self._late).add()
        self._step_s.observe((end_ns - self._began_ns) / NS_PER_S)
        self._compute_s.add((begin_ns - self._began_ns - self._waited_ns) / NS_PER_S)
        self._exposed_s.add((end_ns - begin_ns) / NS_PER_S)
        self.began(end_ns)
