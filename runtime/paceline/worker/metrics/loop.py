"""What the main thread writes into the rank's record: where the time of the user's loop goes.

Called inside the calls that the loop makes anyway, with the times at which it came and went. A step
is from the end of one step() to the end of the next: computing, waiting for leases, and what
communication was not hidden.
"""

from __future__ import annotations

from paceline.clock import NS_PER_S
from paceline.core.anatomy.samples import Phase
from paceline.telemetry.records import RankRecord

NOTHING = [0] * len(Phase)


class LoopMetrics:
    """Main thread only."""

    def __init__(self, record: RankRecord) -> None:
        self._fresh = record.counter("paceline_steps_total", kind="fresh")
        self._late = record.counter("paceline_steps_total", kind="late")
        self._step_s = record.histogram("paceline_step_duration_seconds")
        self._compute_s = record.counter("paceline_compute_seconds_total")
        self._exposed_s = record.counter("paceline_exposed_seconds_total")
        self._data_wait_s = record.counter("paceline_data_wait_seconds_total")
        self._began_ns = 0
        self._waited_ns = 0
        """In this step, for leases."""
        self._ring = record.steps
        self._phase = Phase.SCRIPT
        self._since_ns = 0
        """In this phase; later by what was waited in it."""
        self._spent_ns = [0] * len(Phase)

    def began(self, now_ns: int) -> None:
        """The loop computes from now on: after begin() and after evaluating()."""
        self._began_ns, self._waited_ns = now_ns, 0
        self._phase, self._since_ns = Phase.SCRIPT, now_ns
        self._spent_ns[:] = NOTHING

    def entered(self, phase: Phase, now_ns: int) -> None:
        """The loop goes on with this."""
        self._spent_ns[self._phase] += now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns

    def waited(self, begin_ns: int, end_ns: int) -> None:
        """For a lease."""
        self._data_wait_s.add((end_ns - begin_ns) / NS_PER_S)
        self._waited_ns += end_ns - begin_ns
        self._since_ns += end_ns - begin_ns

    def flushed(self, begin_ns: int, end_ns: int) -> None:
        """For what is under way, outside of step()."""
        self._exposed_s.add((end_ns - begin_ns) / NS_PER_S)
        self._waited_ns += end_ns - begin_ns
        self._since_ns += end_ns - begin_ns

    def stepped(
        self, begin_ns: int, end_ns: int, *, fresh: bool, version: int, samples: int
    ) -> None:
        """step() was called with a gradient of so many samples, and has returned, with weights of
        this version."""
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
