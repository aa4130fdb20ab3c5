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
        heard = made.heard
        saved = 0, 0
        if self._missing:
            # Who is heard has said two things since, and GO tells the time of the last.
            away = self._missing.difference(heard.fresh, heard.idle)
            saved = self._saved(made, away, go_ns) if away else saved
        self._go_ns, self._free = go_ns, heard.fresh
        if len(heard.fresh) + len(heard.idle) == len(active):
            self._missing = frozenset()
        else:
            if active is not self._active:
                self._active, self._active_set = active, frozenset(active)
            benched = [b.member for b in made.go.benched]
            self._missing = self._active_set.difference(heard.fresh, heard.idle, benched)
        return saved

    def _saved(self, made: Composition, away: Collection[MemberId], go_ns: int) -> tuple[int, int]:
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
            free, heard, me = frozenset(self._free), made.heard, self._me
            ends_us = last_us if me in free else begin_us
            total_us += (last_us - begin_us) * len(free)
            for members, came_us in ((heard.fresh, heard.fresh_us), (heard.idle, heard.idle_us)):
                for member, us in zip(members, came_us, strict=True):
                    if us < last_us and member in free:
                        waits_us = us if us > begin_us else begin_us
                        total_us -= last_us - waits_us
                        if member == me:
                            ends_us = waits_us
            own_us += ends_us - begin_us
        return round(own_us * NS_PER_US), round(total_us * NS_PER_US)
