"""Replacement of a slow replica on one machine, as the operator does it in a cluster.

The coordinator reports who is slow and which step of `spec.straggler.respond` is in force. On one
machine Replace means a new process. The replica drains, so that no work of it is lost, and the
runner starts it again like any missing replica. One replica is replaced at a time, with a cooldown
in between. All replicas share the machine, so there is no slow node to avoid.
"""

from __future__ import annotations

from paceline_api.ids import pod_of
from paceline_api.settings import StragglerSettings
from paceline_api.slow import cooldown_s
from paceline_api.status import Status, StragglerStatus
from paceline_api.times import NS_PER_S
from paceline_api.types.enums import StragglerResponse


class Replacer:
    """Chooses the replicas to replace, each at most once, a cooldown apart."""

    def __init__(self, settings: StragglerSettings) -> None:
        self._cooldown_ns = round(cooldown_s(settings) * NS_PER_S)
        self._free_ns = 0
        self._done: set[tuple[int, int]] = set()

    def choose(self, status: Status, now_ns: int) -> StragglerStatus | None:
        """Return the rank whose replica is to be replaced now; None if there is none.

        Args:
            status: The newest status.
            now_ns: The present time in ns.

        Returns:
            The straggler's entry in the status. It counts as replaced from now on.
        """
        if status.stopping or status.outcome is not None or now_ns < self._free_ns:
            return None
        for slow in status.stragglers:
            pod = pod_of(slow.member)
            if slow.action == StragglerResponse.REPLACE and pod not in self._done:
                self._done.add(pod)
                self._free_ns = now_ns + self._cooldown_ns
                return slow
        return None
