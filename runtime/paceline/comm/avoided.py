"""What a partial mode saves: the waiting that a Full round would have cost, minus what it did cost.

Pure arithmetic over what GO tells. In Full, a rank that has arrived for round r waits until the
last active rank has. A partial mode lets it go at GO(r). From then on, as long as a rank that was
missing has not made itself heard, time in which the first one does not wait is time saved. It ends
with the missing rank's next announcement that a GO names (a little after its batch, if it had to
wait for the end of a reduction), or with its own next waiting. Where GO does not tell when the
missing rank came (it is fresh again in the very next round; it died), nothing is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.ids import MemberId
from paceline.core.records import Go

NS_PER_US = 1000


class AvoidedWaiting:
    """Follows the rounds of one generation, on the clock of the rank that it runs on."""

    def __init__(self, me: MemberId) -> None:
        self._me = me
        self._go_ns = 0
        self._last: Go | None = None
        self._missing: frozenset[MemberId] = frozenset()
        """Active at the last GO, neither fresh nor idle: in the middle of a batch."""

    def reset(self) -> None:
        """A new generation: nobody is waited for any more."""
        self._last, self._missing = None, frozenset()

    def started(self, go: Go, active: Sequence[MemberId], go_ns: int) -> tuple[int, int]:
        """Nanoseconds saved between the last GO and this one: own, and summed over the ranks.

        `active`: before `go`.
        """
        saved = self._saved(go, self._last, go_ns) if self._last and self._missing else (0, 0)
        self._go_ns, self._last = go_ns, go
        heard = {s.member for s in go.shares if s.fresh or s.idle}
        if len(heard) == len(active):
            self._missing = frozenset()
        else:
            heard.update(b.member for b in go.benched)
            self._missing = frozenset([m for m in active if m not in heard])
        return saved

    def _saved(self, go: Go, last: Go, go_ns: int) -> tuple[int, int]:
        begin_ns, first_ns = self._go_ns, go_ns - go.wait_us * NS_PER_US
        # Who was missing and is fresh again has said two things, and GO tells the time of the last.
        away = dict.fromkeys(self._missing, go_ns)
        waits: dict[MemberId, int] = {}
        for share in go.shares:
            member = share.member
            if share.fresh or share.idle:
                waits[member] = first_ns + share.offset_us * NS_PER_US
                if member in away:
                    del away[member]
            elif member in away:
                away[member] = first_ns + share.offset_us * NS_PER_US
        if not away:
            return 0, 0
        last_ns = max(away.values())
        own_ns = total_ns = 0
        # A rank that was missing itself would have waited from its own arrival on.
        free = [(s.member, begin_ns) for s in last.shares if s.fresh]
        for member, free_ns in (*free, *away.items()):
            waits_ns = waits.get(member, last_ns)
            saved_ns = (waits_ns if waits_ns < last_ns else last_ns) - free_ns
            if saved_ns > 0:
                total_ns += saved_ns
                if member == self._me:
                    own_ns += saved_ns
        return own_ns, total_ns
