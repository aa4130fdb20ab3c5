"""Draws histories: which faults, in which jobs. Everything follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

from local.history import History

BACKENDS = ("gloo", "mpi")
RANKS = (2, 3, 5)
MODES = ("Full", "Quorum", "Solo")
PACINGS = ("Round", "Samples")
SPEEDS = ("alike", "straggler")

FREEZE_MS = 0
"""For ever: ended by the freeze time-out, which `History.job` sets to 2 s."""
Draw = Callable[[random.Random, int], dict[str, Any]]


def _steps(*steps: tuple[str, int, int, int]) -> dict[str, Any]:
    return {"steps": steps}


def _dies(method: str, call: int, delay_ms: float, place: int, **changes: Any) -> dict[str, Any]:
    dies = {str(place): (method, call, delay_ms)}
    return {"steps": (("self", place, 0, -1),), "dies": dies, **changes}


def _moment(draw: random.Random) -> int:
    return draw.randrange(150)


def _together(draw: random.Random) -> int:
    return -draw.randrange(1, 400)


def _two(draw: random.Random, ranks: int) -> tuple[int, int]:
    one, other = draw.sample(range(ranks), 2)
    return one, other


FAULTS: dict[str, Draw] = {
    "kill": lambda d, n: _steps(("kill", d.randrange(n), 0, _moment(d))),
    "kill in a reduction": lambda d, n: _dies(
        "allreduce", d.randrange(8, 20), d.uniform(0, 4), d.randrange(n), ballast=400_000, rounds=40
    ),
    "kill in wiring": lambda d, n: _dies("open", 1, d.uniform(0, 20), d.randrange(n)),
    "short stop": lambda d, n: _steps(("stop", d.randrange(n), d.randrange(50, 900), _moment(d))),
    "freeze": lambda d, n: _steps(("stop", d.randrange(n), FREEZE_MS, _moment(d))),
    "sigterm": lambda d, n: _steps(("sigterm", d.randrange(n), 0, _moment(d))),
    "join": lambda d, n: _steps(("scale", n + 1, 0, _moment(d))),
    "scale up and down": lambda d, n: _steps(
        ("scale", n + 2, 0, _moment(d)), ("scale", n, 0, _moment(d))
    ),
    "coordinator kill": lambda d, _: _steps(("coordinator_kill", 0, 0, _moment(d))),
    "coordinator stop": lambda d, _: _steps(
        ("coordinator_stop", 0, d.randrange(200, 1500), _moment(d))
    ),
    "agent kill": lambda d, n: _steps(("kill_agent", d.randrange(n), 0, _moment(d))),
    "two kills": lambda d, n: _kills(d, n),
    "kill and coordinator kill": lambda d, n: _steps(
        ("kill", d.randrange(n), 0, _moment(d)), ("coordinator_kill", 0, 0, _together(d))
    ),
    "kill in a join": lambda d, n: _steps(
        ("scale", n + 1, 0, _moment(d)), ("kill", d.randrange(n), 0, _together(d))
    ),
    "sigterm and kill": lambda d, n: _sigterm_and_kill(d, n),
}


def _kills(draw: random.Random, ranks: int) -> dict[str, Any]:
    one, other = _two(draw, ranks)
    steps = ("kill", one, 0, _moment(draw)), ("kill", other, 0, _together(draw))
    return _steps(*steps) | {"may_lose_all": ranks == 2}


def _sigterm_and_kill(draw: random.Random, ranks: int) -> dict[str, Any]:
    one, other = _two(draw, ranks)
    steps = ("sigterm", one, 0, _moment(draw)), ("kill", other, 0, _together(draw))
    return _steps(*steps) | {"may_lose_all": ranks == 2}


Row = tuple[Any, ...]
FACTORS: tuple[Sequence[Any], ...] = (tuple(FAULTS), RANKS, MODES, BACKENDS, PACINGS, SPEEDS)


def draw_history(row: Row, seed: int) -> History:
    """`row`: one value of each of FACTORS."""
    fault, ranks, mode, backend, pacing, speed = row
    draw = random.Random(f"{row} {seed}")
    slow_ms = {str(draw.randrange(ranks)): 60.0} if speed == "straggler" else {}
    drawn = {"slow_ms": slow_ms, "collective": {"pacing": pacing}, **FAULTS[fault](draw, ranks)}
    return History(backend, ranks, mode, fault, seed, **drawn)


def covering(factors: Sequence[Sequence[Any]], seed: int) -> list[Row]:
    """Rows in which each pair of values of two factors occurs: greedy, the same for a seed."""
    draw = random.Random(seed)
    spots = list(combinations(range(len(factors)), 2))
    missing = {
        (i, a, j, b) for i, j in spots for a, b in product(factors[i], factors[j]) if a is not b
    }
    rows: list[Row] = []
    while missing:
        i, a, j, b = min(missing, key=repr)
        best: Row = ()
        gained = -1
        for _ in range(40):
            row = [draw.choice(values) for values in factors]
            row[i], row[j] = a, b
            gain = sum((p, row[p], q, row[q]) in missing for p, q in spots)
            if gain > gained:
                best, gained = tuple(row), gain
        missing -= {(p, best[p], q, best[q]) for p, q in spots}
        rows.append(best)
    return rows


def random_history(seed: int) -> History:
    draw = random.Random(seed)
    return draw_history(tuple(draw.choice(values) for values in FACTORS), seed)
