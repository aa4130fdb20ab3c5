"""How often: pods beat, figures come, decisions are made (R42).

Each of them costs the coordinator something per pod or per rank. Up to a size that a laptop has
they come as often as people like to see news; above it the more rarely the more there are, so that
a second costs the same for any number. How much silence is borne follows from the beats.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.messages import BeatEvery

NS_PER_MS = 10**6


@dataclass(frozen=True, slots=True)
class Pace:
    """The bounds, for a coordinator on a quarter of a core and 100 kB/s."""

    beat_least_ns: int = 200 * NS_PER_MS
    beats_per_s: int = 256
    """Of all pods (R43)."""
    figures_per_s: int = 40
    """Of all ranks; larger messages."""
    beats_missed: int = 5
    """Silence of so many intervals is borne at least, whatever `freezeTimeout` says: fewer beats
    may be late together because a machine or the network is busy for a moment."""
    small: int = 64
    """Ranks up to which decisions are made at once after each event."""
    pause_per_rank_ns: int = 20_000
    """Above: from one look at all ranks to the next. A look takes about a fifth of that."""

    def beat_ns(self, pods: int) -> int:
        return max(self.beat_least_ns, pods * 10**9 // self.beats_per_s)

    def to_agent(self, pods: int, ranks: int) -> BeatEvery:
        interval_ns = self.beat_ns(pods)
        figures = -(-ranks * 10**9 // (interval_ns * self.figures_per_s))
        return BeatEvery(interval_ns // NS_PER_MS, max(1, figures))

    def freeze_ns(self, pods: int, configured_ns: int) -> int:
        """Silence after which a rank is suspect, and the bound of every answer that it owes."""
        interval_ns = self.beat_ns(pods)
        if interval_ns == self.beat_least_ns:
            return configured_ns
        return max(configured_ns, self.beats_missed * interval_ns)

    def report_ns(self, ranks: int) -> int:
        """How old a status may be; it is made of all ranks, each as if it were a pod."""
        interval_ns = self.beat_ns(ranks)
        return 0 if interval_ns == self.beat_least_ns else interval_ns // 2

    def pause_ns(self, ranks: int) -> int:
        """Thousands of registrations or deaths at once are one change, not as many."""
        return 0 if ranks <= self.small else ranks * self.pause_per_rank_ns
