"""Measure what heads save in messages and cost in latency while ranks arrive in turn (R41).

The rounds run on a virtual clock. All ranks begin their step together and take `--step-ms`, each up
to `--jitter` percent more or less. Announcements go to the starter directly, or by way of heads.
Each line shows the number of messages that reach the starter until it decides, by how much heads
delay that moment, and how many fresh ranks the heads still hold back then, whose gradients are late
for that reason. Without heads, each rank that has arrived is one message. Figures are medians of
the rounds.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import median
from typing import Final, NamedTuple

from paceline.core import messages as m
from paceline.core.protocol.arrivals import Arrivals
from paceline.core.protocol.log import Log
from paceline.core.protocol.tree import Grid
from paceline.core.protocol.trigger import decide
from paceline.core.rank.gather import Collector, hear_all
from paceline_api.ids import MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode

from benchmarks.harness import Report, benchmark
from benchmarks.protocol import announcement, make_log

MS: Final = 10**6
RANKS: Final = (64, 256, 1024)
MODES: Final = {
    "Full": RoundSettings(mode=Mode.FULL),
    "Quorum 75 %": RoundSettings(mode=Mode.QUORUM, quorum_percent=75),
    "Quorum 75 %, no grace": RoundSettings(mode=Mode.QUORUM, quorum_percent=75, grace_ns=0),
    "Deadline": RoundSettings(mode=Mode.DEADLINE, quorum_percent=50),
}


class Cost(NamedTuple):
    """Figures of one round with heads, or their medians over several rounds."""

    messages: float
    added_ms: float
    held: float
    """Number of fresh ranks whose announcements would have reached the starter in time without
    heads."""


@dataclass
class Round:
    """One simulated round; the starter receives messages until it decides."""

    log: Log
    hop_ns: int
    arrivals: Arrivals
    went_ns: int | None = None
    messages: int = 0
    _events: list[tuple[int, int, Callable[[int], None]]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)

    def at(self, at_ns: int, what: Callable[[int], None]) -> None:
        """Schedule a call at a virtual time."""
        heapq.heappush(self._events, (at_ns, next(self._order), what))

    def run(self) -> int:
        """Run events until the starter decides, and return that virtual time in ns."""
        while self._events and self.went_ns is None:
            at_ns, _, what = heapq.heappop(self._events)
            what(at_ns)
        assert self.went_ns is not None, "nothing more comes, and nothing starts"
        return self.went_ns

    def decide(self, now_ns: int) -> None:
        """Let the starter decide now; if it waits, schedule its next look."""
        decision = decide(self.arrivals, now_ns=now_ns, has_request=False)
        if decision.trigger is not None:
            self.went_ns = now_ns
        elif decision.wake_ns is not None:
            self.at(decision.wake_ns, self.decide)

    def hear(self, word: m.Announce, now_ns: int) -> None:
        """Receive the announcement of one rank at the starter."""
        self.messages += 1
        self.arrivals.hear(word.kind, now_ns, word.share)
        self.decide(now_ns)

    def hear_head(self, word: m.Gathered, group: tuple[MemberId, ...], now_ns: int) -> None:
        """Receive the gathered announcements of a group at the starter."""
        self.messages += 1
        hear_all(self.arrivals, word, group, now_ns)
        self.decide(now_ns)

    def head_hears(
        self, head: Collector, group: tuple[MemberId, ...], word: m.Announce | None, now_ns: int
    ) -> None:
        """Receive an announcement at a head, which may forward what it has gathered.

        `word` is None if a timer only woke the head.
        """
        if word is not None:
            head.hear(now_ns, word)
        due_ns = head.due_ns()
        if due_ns is not None and due_ns <= now_ns:
            gathered = head.take(now_ns)
            self.at(now_ns + self.hop_ns, partial(self.hear_head, gathered, group))
        elif due_ns is not None:
            self.at(due_ns, partial(self.head_hears, head, group, None))


def one_round(log: Log, grid: Grid, arrive_ns: dict[MemberId, int], hop_ns: int) -> Cost:
    """Return what heads cost in one round, compared with direct announcements."""
    words = {x: announcement(log, x) for x in log.active}
    direct = Round(log, hop_ns, Arrivals(log, 0))
    for member, at_ns in arrive_ns.items():
        direct.at(at_ns + hop_ns, partial(direct.hear, words[member]))
    by_heads = Round(log, hop_ns, Arrivals(log, 0))
    own = grid.number[grid.starter(log.version)]
    heads = [Collector(log, number, group) for number, group in enumerate(grid.groups)]
    for member, at_ns in arrive_ns.items():
        number = grid.number[member]
        hears = partial(by_heads.head_hears, heads[number], grid.groups[number], words[member])
        starter_hears = partial(by_heads.hear, words[member])
        by_heads.at(at_ns + hop_ns, starter_hears if number == own else hears)
    went_ns = by_heads.run()
    held = [
        x
        for x, at_ns in arrive_ns.items()
        if at_ns + 2 * hop_ns <= went_ns and x not in by_heads.arrivals.last
    ]
    return Cost(by_heads.messages, (went_ns - direct.run()) / MS, len(held))


def measure(
    ranks: int,
    settings: RoundSettings,
    *,
    jitter: float = 0.1,
    step_ms: float = 1000.0,
    hop_ms: float = 0.2,
    rounds: int = 9,
) -> Cost:
    """Return the medians of several rounds, in a job whose earlier rounds were like these.

    Args:
        ranks: World size.
        settings: The mode and its parameters.
        jitter: Largest deviation of a step's length, as a fraction.
        step_ms: Mean length of a step.
        hop_ms: Time that a message takes.
        rounds: Number of rounds.

    Returns:
        Medians over the rounds.
    """
    log, rng = make_log(ranks), random.Random(1)
    grid = Grid(log.members, log.places)
    log.settings, log.started = settings, -1  # the first round of a job is Full in each mode
    spread_us = 2 * jitter * step_ms * 1000
    assert log.round_us.maxlen is not None
    assert log.offsets_us.maxlen is not None
    log.round_us.extend([int(step_ms * 1000)] * log.round_us.maxlen)
    log.offsets_us.extend(int(rng.uniform(0, spread_us)) for _ in range(log.offsets_us.maxlen))
    costs = []
    for round_ in range(rounds):
        log.version = round_
        log.heard = dict.fromkeys(log.active, round_)
        arrive_ns = {x: int(rng.uniform(1 - jitter, 1 + jitter) * step_ms * MS) for x in log.active}
        costs.append(one_round(log, grid, arrive_ns, int(hop_ms * MS)))
    return Cost(*map(median, zip(*costs, strict=True)))


@benchmark(
    "What heads save in messages and cost in latency",
    ("ranks", "mode", "messages to the starter", "GO later by ms", "fresh ranks held back"),
    {
        "--ranks": {"type": int, "nargs": "+", "default": RANKS},
        "--jitter": {"type": float, "default": 10.0, "help": "percent"},
        "--step-ms": {"type": float, "default": 1000.0},
        "--hop-ms": {"type": float, "default": 0.2},
    },
)
def run(out: Report) -> None:
    """Measure all modes with each number of ranks."""
    given = out.given
    for ranks in RANKS[:1] if out.smoke else given.ranks:
        for name, settings in MODES.items():
            times = {"jitter": given.jitter / 100, "step_ms": given.step_ms}
            cost = measure(ranks, settings, **times, hop_ms=given.hop_ms)
            out.rows.append((ranks, name, *cost))
