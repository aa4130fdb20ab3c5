"""Intervals of heartbeats, figures and decisions, as a function of the job's size (R42).

Each of them costs the coordinator something per pod or per rank. Up to the size of a laptop they
come as often as people like to see news. Above it the interval grows with the size, so that the
cost per second stays the same. The tolerated silence follows from the interval of the heartbeats.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_api.times import NS_PER_MS, NS_PER_S

from paceline.core.messages import BeatEvery


@dataclass(frozen=True, slots=True)
class LoadBounds:
    """Bounds for a coordinator with a quarter of a core and 100 kB/s of network."""

    beat_least_ns: int = 200 * NS_PER_MS
    """Shortest interval between two beats of a pod."""
    beats_per_s: int = 256
    """Upper bound on beats per second from all pods together (R43)."""
    figures_per_s: int = 40
    """Upper bound on figures per second from all ranks together. They are larger messages."""
    beats_missed: int = 5
    """Number of beat intervals that silence is tolerated at least, whatever `freezeTimeout` says.
    Fewer beats may be late together because a machine or the network is busy for a moment."""
    small: int = 64
    """Number of ranks up to which decisions are made at once after each event."""
    pause_per_rank_ns: int = 20_000
    """Interval per rank between two looks at all ranks, above `small`. A look takes about a fifth
    of that."""

    def beat_ns(self, pods: int) -> int:
        """Return the interval between two beats of a pod, in nanoseconds."""
        return max(self.beat_least_ns, pods * NS_PER_S // self.beats_per_s)

    def to_agent(self, pods: int, ranks: int) -> BeatEvery:
        """Return the message that tells agents the interval of beats and of figures."""
        interval_ns = self.beat_ns(pods)
        figures = -(-ranks * NS_PER_S // (interval_ns * self.figures_per_s))
        return BeatEvery(interval_ns // NS_PER_MS, max(1, figures))

    def freeze_ns(self, pods: int, configured_ns: int) -> int:
        """Return the silence after which a rank is suspect, in nanoseconds.

        It is also the upper bound of every answer that a rank owes.

        Args:
            pods: Number of pods.
            configured_ns: `freezeTimeout` of the job.

        Returns:
            The configured time; at least `beats_missed` intervals where pods beat more slowly than
            every `beat_least_ns`.
        """
        interval_ns = self.beat_ns(pods)
        if interval_ns == self.beat_least_ns:
            return configured_ns
        return max(configured_ns, self.beats_missed * interval_ns)

    def report_ns(self, ranks: int) -> int:
        """Return the maximum age of a status, in nanoseconds.

        A status is built from all ranks, so each rank counts like a pod.

        Args:
            ranks: Number of ranks.

        Returns:
            0 for small jobs: each request gets a new status.
        """
        interval_ns = self.beat_ns(ranks)
        return 0 if interval_ns == self.beat_least_ns else interval_ns // 2

    def pause_ns(self, ranks: int) -> int:
        """Return the minimum pause between two rounds of decisions, in nanoseconds.

        With the pause, thousands of registrations or deaths at once make one change and not as
        many.

        Args:
            ranks: Number of known ranks.

        Returns:
            0 up to `small` ranks.
        """
        return 0 if ranks <= self.small else ranks * self.pause_per_rank_ns
