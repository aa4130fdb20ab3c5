"""What a partial mode saves: the waiting that a Full round would have cost, minus what it did cost.

Pure arithmetic over what GO tells. In Full, a rank that has arrived for round r waits until the
last active rank has. A partial mode lets it go at GO(r). From then on, as long as a rank that was
missing has not made itself heard, time in which the first one does not wait is time saved. It ends
with the missing rank's next announcement that a GO names (a little after its batch, if it had to
wait for the end of a reduction), or with its own next waiting. Where GO does not tell when the
missing rank came (it is fresh again in the very next round; it died), nothing is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.core.protocol.composition import Composition
from paceline.core.protocol.ids import MemberId

NS_PER_US = 1000


class AvoidedWaiting:
    """Follows the rounds of one generation, on the clock of the rank that it runs on."""

    def __init__(self, me: MemberId) -> None:
        self._me = me
        self._go_ns = 0
        self._free: list[MemberId] = []
        """Fresh at the last GO: who would have waited in Full."""
        self._active: Sequence[MemberId] = ()
        self._active_set: frozenset[MemberId] = frozenset()
        """Of `_active`, made once for the many rounds in which it stays the same."""
        self._missing: frozenset[MemberId] = frozenset()
        """Active at the last GO, neither fresh nor idle: in the middle of a batch."""

    def reset(self) -> None:
        """A new generation: nobody is waited for any more."""
        self._free, self._missing = [], frozenset()

    def started(self, made: Composition, active: Sequence[MemberId], go_ns: int) -> tuple[int, int]:
        """Nanoseconds saved between the last GO and this one: own, and summed over the ranks.

        `active`: before the round.
        """
        fresh = made.fresh
        heard = fresh + made.idle
        saved = 0, 0
        if self._missing:
            # Who is heard has said two things since, and GO tells the time of the last.
            away = self._missing.difference(heard)
            saved = self._saved(made, heard, away, go_ns) if away else saved
        self._go_ns, self._free = go_ns, fresh
        if len(heard) == len(active):
            self._missing = frozenset()
        else:
            if active is not self._active:
                self._active, self._active_set = active, frozenset(active)
            self._missing = self._active_set.difference(heard, [b.member for b in made.go.benched])
        return saved

    def _saved(
        self, made: Composition, heard: list[MemberId], away: Collection[MemberId], go_ns: int
    ) -> tuple[int, int]:
        """In microseconds after the first arrival, as GO tells the times."""
        wait_us = made.go.wait_us
        begin_us = wait_us - (go_ns - self._go_ns) / NS_PER_US
        away_us = dict.fromkeys(away, wait_us)
        for share in made.listed:  # a late gradient is no ordinary share
            if share.member in away_us:
                away_us[share.member] = share.offset_us
        last_us = max(away_us.values())
        # A rank that was missing itself would have waited from its own arrival on.
        total_us: float = last_us * len(away_us) - sum(away_us.values())
        own_us: float = last_us - away_us.get(self._me, last_us)
        if last_us > begin_us and self._free:
            # The others would have from the last GO on, to the last arrival or their own next wait.
            free = frozenset(self._free)
            came_us = made.fresh_us + made.idle_us
            waits_us = [
                us
                for us, member in zip(came_us, heard, strict=True)
                if us < last_us and member in free
            ]
            total_us += (last_us - begin_us) * len(free)
            total_us -= last_us * len(waits_us) - sum(max(us, begin_us) for us in waits_us)
            if self._me in free:
                own_end_us = came_us[heard.index(self._me)] if self._me in heard else last_us
                own_us += max(begin_us, min(own_end_us, last_us)) - begin_us
        return round(own_us * NS_PER_US), round(total_us * NS_PER_US)
