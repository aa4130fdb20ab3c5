"""Waiting time that a partial mode saves: what a Full round would have cost minus the actual cost.

Pure arithmetic over what GO contains. In Full, a rank that has arrived for round r waits until the
last active rank has arrived. A partial mode lets it go at GO(r). From then on, as long as a rank
that was missing has not announced anything, time in which the first rank does not wait is time
saved. The saving ends with the missing rank's next announcement that a GO names (a little after its
batch, if it had to wait for the end of a reduction), or with the first rank's own next wait. If GO
does not show when the missing rank arrived (it is fresh again in the very next round, or it died),
nothing is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline_api.ids import MemberId
from paceline_api.times import NS_PER_US

from paceline.core.protocol.composition import Composition


class AvoidedWaiting:
    """Follows the rounds of one generation, on the clock of the rank that it runs on."""

    def __init__(self, me: MemberId) -> None:
        self._me = me
        self._go_ns = 0
        self._free: list[MemberId] = []
        """Ranks that were fresh at the last GO, and would have waited in Full."""
        self._active: Sequence[MemberId] = ()
        self._active_set: frozenset[MemberId] = frozenset()
        """`_active` as a set, made once for the many rounds in which it stays the same."""
        self._missing: frozenset[MemberId] = frozenset()
        """Ranks that were active at the last GO, but neither fresh nor idle: within a batch."""

    def reset(self) -> None:
        """Begin a new generation, in which no rank is missing yet."""
        self._free, self._missing = [], frozenset()

    def started(self, made: Composition, active: Sequence[MemberId], go_ns: int) -> tuple[int, int]:
        """Take the next GO, and return the time saved since the one before.

        Args:
            made: The round, with all shares.
            active: Active ranks before the round.
            go_ns: When GO arrived, on this rank's clock.

        Returns:
            The nanoseconds that this rank saved, and those that all ranks together saved.
        """
        arrivals = made.arrivals
        saved = 0, 0
        if self._missing:
            # A rank that is fresh or idle has announced twice since; GO has the later time only.
            away = self._missing.difference(arrivals.fresh, arrivals.idle)
            saved = self._saved(made, away, go_ns) if away else saved
        self._go_ns, self._free = go_ns, arrivals.fresh
        if len(arrivals.fresh) + len(arrivals.idle) == len(active):
            self._missing = frozenset()
        else:
            if active is not self._active:
                self._active, self._active_set = active, frozenset(active)
            benched = [b.member for b in made.go.benched]
            self._missing = self._active_set.difference(arrivals.fresh, arrivals.idle, benched)
        return saved

    def _saved(self, made: Composition, away: Collection[MemberId], go_ns: int) -> tuple[int, int]:
        """Compute the savings since the last GO. GO counts microseconds from the first arrival.

        Args:
            made: The round.
            away: Ranks that were missing at the last GO and are neither fresh nor idle in this
                round.
            go_ns: When GO arrived.

        Returns:
            The nanoseconds that this rank saved, and those that all ranks together saved.
        """
        wait_us = made.go.wait_us
        begin_us = wait_us - (go_ns - self._go_ns) / NS_PER_US
        away_us = dict.fromkeys(away, wait_us)
        for share in made.listed:  # late gradients are always listed
            if share.member in away_us:
                away_us[share.member] = share.offset_us
        last_us = max(away_us.values())
        # A rank that was missing itself would have waited only from its own arrival on.
        total_us: float = last_us * len(away_us) - sum(away_us.values())
        own_us: float = last_us - away_us.get(self._me, last_us)
        if last_us > begin_us and self._free:
            # The others would have waited from the last GO to the last arrival or their next wait.
            free, arrivals, me = frozenset(self._free), made.arrivals, self._me
            ends_us = last_us if me in free else begin_us
            total_us += (last_us - begin_us) * len(free)
            for members, came_us in (
                (arrivals.fresh, arrivals.fresh_us),
                (arrivals.idle, arrivals.idle_us),
            ):
                for member, us in zip(members, came_us, strict=True):
                    if us < last_us and member in free:
                        waits_us = us if us > begin_us else begin_us
                        total_us -= last_us - waits_us
                        if member == me:
                            ends_us = waits_us
            own_us += ends_us - begin_us
        return round(own_us * NS_PER_US), round(total_us * NS_PER_US)
