"""Draw histories: which faults occur in which jobs. Everything follows from a seed.

There are two tables. `MATRIX` has single faults, in every mode and number of ranks. `TOGETHER` has
faults that coincide with others, in fewer modes and sizes. `covering` chooses rows in which each
pair of values of two factors occurs, but for those of a fault with a mode or a number of ranks,
which the simulation covers (tests/sim). `soak_history` visits all cells of both tables before it
draws any of them again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, product
from signal import SIGKILL, SIGSTOP, SIGTERM
from typing import Any

from testing.processes.history import History

CHANNELS = ("gloo", "mpi", "shm", "hier:gloo", "hier:mpi")
ROUNDING = ("mpi", "hier:mpi")
"""Channels that sum in another type than the one that travels."""
RANKS = (2, 3, 4, 5, 8)
MODES: dict[str, dict[str, Any]] = {
    "Full": {},
    "Quorum": {},
    "Majority": {},
    "Majority drawn": {"mode": "Majority", "randomInitiator": True},
    "Solo": {},
    "Deadline": {"deadline": "30ms"},
    "Deadline auto": {"mode": "Deadline", "deadline": "auto"},
    "Shadow": {},
}
PACINGS = ("Round", "Samples")
SPEEDS = ("alike", "straggler")

FOR_EVER_MS = 0
"""Duration of a stop that only the freeze timeout ends."""
PIECES = 4
"""Pieces of ballast in at least half of the histories; their rounds are streamed."""
WRITES_BYTES = 20_000
"""Bytes that each step prints where the disk is slow: more than all buffers in between hold."""
Draw = Callable[[random.Random, int], dict[str, Any]]


def _steps(*steps: tuple[str, int, int, int], **changes: Any) -> dict[str, Any]:
    return {"steps": steps, **changes}


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


def _kill_in_a_change(draw: random.Random, ranks: int) -> dict[str, Any]:
    """Kill a rank as it connects for the second time, after another rank's death."""
    one, other = _two(draw, ranks)
    steps = ("kill", one, 0, _moment(draw)), ("self", other, 0, -1)
    dies = {str(other): ("open", 2, draw.uniform(0, 20))}
    return _steps(*steps, dies=dies, may_lose_all=ranks == 2)


def _inside(draw: random.Random, ranks: int, what: str) -> dict[str, Any]:
    """Let something happen between two segments of a rank's gradient, some steps in."""
    step = draw.randrange(3, 14)  # a straggler makes fewer steps than there are rounds
    inside = {str(draw.randrange(ranks)): (what, step, draw.randrange(PIECES))}
    return {"steps": (), "inside": inside, "pieces": PIECES}


def _nan(draw: random.Random, ranks: int) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {**_inside(draw, ranks, "nan"), "poisoned": True}
    rank, at = draw.randrange(ranks), draw.randrange(3, 40)
    return {"steps": (), "inject": f"nan:rank={rank},at=round:{at}", "poisoned": True}


def _short_stop(draw: random.Random, ranks: int) -> dict[str, Any]:
    """Stop a process, or only its main thread inside backward()."""
    milliseconds = draw.randrange(50, 900)
    if draw.random() < 0.5:
        return _inside(draw, ranks, str(milliseconds / 1000))
    return _steps(("stop", draw.randrange(ranks), milliseconds, _moment(draw)))


def _kill_in_a_reduction(draw: random.Random, ranks: int) -> dict[str, Any]:
    """Kill a rank in a reduction of one segment, or of one of many."""
    place, delay_ms = draw.randrange(ranks), draw.uniform(0, 4)
    if draw.random() < 0.5:
        return _dies("allreduce", draw.randrange(8, 40), delay_ms, place, pieces=2 * PIECES)
    ballast = {"ballast": 400_000, "pieces": 1}
    return _dies("allreduce", draw.randrange(8, 20), delay_ms, place, **ballast)


def _freeze_ms(ranks: int) -> int:
    return 2000 if ranks < 5 else 5000


def _freeze(draw: random.Random, ranks: int) -> dict[str, Any]:
    step = "stop", draw.randrange(ranks), FOR_EVER_MS, _moment(draw)
    return _steps(step, freeze_ms=_freeze_ms(ranks))


def _hang(draw: random.Random, ranks: int) -> dict[str, Any]:
    place = draw.randrange(ranks)
    step = "self", place, 0, -1
    hangs = {str(place): draw.randrange(8, 20)}
    return _steps(step, hangs=hangs, freeze_ms=_freeze_ms(ranks))


def _long_cut(draw: random.Random, ranks: int) -> dict[str, Any]:
    milliseconds = round(_freeze_ms(ranks) * draw.uniform(1.5, 2))
    step = "cut", draw.randrange(ranks), milliseconds, _moment(draw)
    return _steps(step, freeze_ms=_freeze_ms(ranks))


def _checkpoint(every_rounds: int) -> dict[str, Any]:
    return {"path": "checkpoints", "everyRounds": every_rounds, "keep": 2}


def _full_checkpoints(draw: random.Random, _: int) -> dict[str, Any]:
    step = "fill_disk", 0, draw.randrange(200, 1500), _moment(draw)
    return _steps(step, checkpoint=_checkpoint(5), small_disk=True)


def _kill_and_checkpoints(draw: random.Random, ranks: int) -> dict[str, Any]:
    """Kill a rank while checkpoints are so frequent that the writer is often in one."""
    kill = "kill", draw.randrange(ranks), 0, _moment(draw)
    return _steps(kill, checkpoint=_checkpoint(2))


def _slow_disk(draw: random.Random, ranks: int) -> dict[str, Any]:
    slot, milliseconds = draw.randrange(ranks), draw.randrange(500, 2000)
    steps = (("slow_disk", slot, milliseconds, _moment(draw)),)
    return _steps(*steps, slow_log=slot, writes_bytes=WRITES_BYTES)


def _at_the_end(draw: random.Random, ranks: int) -> dict[str, Any]:
    """Harm a replica and the coordinator before, during and after the release."""
    slot = draw.randrange(ranks)
    late: list[list[tuple[str, int, int]]] = [
        [("kill", slot, 0)],
        [("agent", slot, SIGSTOP), ("agent", slot, SIGKILL)],
        [("agent", slot, SIGKILL)],
        [("agent", slot, SIGTERM)],
        [("coordinator", 0, 0)],
        [("coordinator", 0, draw.randrange(100, 4000))],
        [("scale", ranks + 1, 0)],
    ]
    chosen = [step for steps in draw.sample(late, draw.randrange(1, 4)) for step in steps]
    moments = (draw.choice((0, draw.randrange(50), draw.randrange(800))) for _ in chosen)
    steps = tuple((*step, moment) for step, moment in zip(chosen, moments, strict=True))
    return {"at_the_end": steps, "linger_ms": draw.randrange(500, 2500), "rounds": 20}


SINGLE: dict[str, Draw] = {
    "kill": lambda d, n: _steps(("kill", d.randrange(n), 0, _moment(d))),
    "kill in a reduction": _kill_in_a_reduction,
    "kill in a join": lambda d, n: _steps(
        ("scale", n + 1, 0, _moment(d)), ("kill", d.randrange(n), 0, _together(d))
    ),
    "kill in a change": _kill_in_a_change,
    "short stop": _short_stop,
    "freeze": _freeze,
    "hang in a reduction": _hang,
    "sigterm": lambda d, n: _steps(("sigterm", d.randrange(n), 0, _moment(d))),
    "join": lambda d, n: _steps(("scale", n + 1, 0, _moment(d))),
    # The second step waits for four new processes, which takes long on a busy machine.
    "scale up and down": lambda d, n: _steps(
        ("scale", n + 4, 0, _moment(d)), ("scale", n + 1, 0, _moment(d)), rounds=50
    ),
    "coordinator kill": lambda d, _: _steps(("coordinator_kill", 0, 0, _moment(d))),
    "short cut": lambda d, n: _steps(("cut", d.randrange(n), d.randrange(50, 1500), _moment(d))),
    "long cut": _long_cut,
    "nan": _nan,
    "slow disk": _slow_disk,
    "full disk while checkpointing": _full_checkpoints,
    "kill while checkpointing": _kill_and_checkpoints,
    "at the end": _at_the_end,
    "full disk": lambda _, __: {"steps": (), "full_logs": True, "writes_bytes": WRITES_BYTES // 20},
}


def _kills(draw: random.Random, ranks: int) -> dict[str, Any]:
    one, other = _two(draw, ranks)
    steps = ("kill", one, 0, _moment(draw)), ("kill", other, 0, _together(draw))
    return _steps(*steps, may_lose_all=ranks == 2)


def _sigterm_and_kill(draw: random.Random, ranks: int) -> dict[str, Any]:
    one, other = _two(draw, ranks)
    steps = ("sigterm", one, 0, _moment(draw)), ("kill", other, 0, _together(draw))
    return _steps(*steps, may_lose_all=ranks == 2)


def _kill_all(draw: random.Random, ranks: int) -> dict[str, Any]:
    """Kill all ranks, so that only the newest checkpoint keeps the weights, if there is one."""
    first, *others = draw.sample(range(ranks), ranks)
    steps = [("kill", first, 0, 300 + _moment(draw)), *(("kill", o, 0, -1) for o in others)]
    return _steps(*steps, checkpoint=_checkpoint(5), may_lose_all=True)


MEETING: dict[str, Draw] = {
    "kill at the start": lambda d, n: _dies("open", 1, d.uniform(0, 20), d.randrange(n)),
    "coordinator stop": lambda d, _: _steps(
        ("coordinator_stop", 0, d.randrange(200, 1500), _moment(d))
    ),
    "agent kill": lambda d, n: _steps(("kill_agent", d.randrange(n), 0, _moment(d))),
    "two kills": _kills,
    "kill and coordinator kill": lambda d, n: _steps(
        ("kill", d.randrange(n), 0, _moment(d)), ("coordinator_kill", 0, 0, _together(d))
    ),
    "sigterm and kill": _sigterm_and_kill,
    "all killed": _kill_all,
    "batch dropped in backward": lambda d, n: {**_inside(d, n, "discard"), "poisoned": True},
}
FAULTS = SINGLE | MEETING

Row = tuple[Any, ...]
Factors = tuple[tuple[Any, ...], ...]
MATRIX: Factors = (tuple(SINGLE), RANKS, tuple(MODES), CHANNELS, PACINGS, SPEEDS)
TOGETHER: Factors = (
    *(tuple(MEETING), (2, 3, 5), ("Full", "Quorum", "Solo")),
    *(CHANNELS, PACINGS, SPEEDS),
)
FAULT, RANK_COUNT, MODE = range(3)
"""Positions of factors."""
SIMULATED = ((FAULT, MODE), (FAULT, RANK_COUNT))
"""Factors whose pairs need no history of real processes: what a rank decides under a fault depends
on the mode and on who else is there, and the simulation runs the same decisions."""
COSTLY_RANKS = 8
"""Number of ranks that a row has only if it adds a pair: such a history takes nearly three times
the CPU time of one of three ranks."""
CELL = 4
"""Number of leading factors that make a cell of the full matrix; the others are drawn."""


def draw_history(row: Row, seed: int) -> History:
    """Draw the history of a row, which has one value of each factor of a table."""
    fault, ranks, mode, channel, pacing, speed = row
    draw = random.Random(f"{row} {seed}")
    slow_ms = {str(draw.randrange(ranks)): 60.0} if speed == "straggler" else {}
    collective = {"mode": mode, "pacing": pacing} | MODES[mode]
    if mode != "Shadow" and random.Random(f"pipeline {row} {seed}").randrange(3) == 0:
        collective |= {"pipeline": 1}
    # All sums of a history are small integers and halves, which bfloat16 represents exactly.
    if channel in ROUNDING and random.Random(f"wire {row} {seed}").randrange(2) == 0:
        collective |= {"wire": "BFloat16"}
    drawn: dict[str, Any] = {"slow_ms": slow_ms, "collective": collective}
    # In Full each round may be streamed; in other modes only rounds without a late rank.
    often: tuple[int, ...] = (1, PIECES, PIECES) if mode == "Full" else (1, PIECES)
    drawn["pieces"] = random.Random(f"pieces {row} {seed}").choice(often)
    drawn |= FAULTS[fault](draw, ranks)
    return History(channel, ranks, mode, fault, seed, **drawn)


def pairs(row: Row) -> set[tuple[int, Any, int, Any]]:
    """Return (factor, its value, another factor, its value) for all pairs of a row."""
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def covering(factors: Sequence[Sequence[Any]], seed: int) -> list[Row]:
    """Return rows that contain each pair of values of two factors: greedy, the same for a seed.

    Pairs of the factors in SIMULATED are not sought.
    """
    draw = random.Random(seed)
    missing = {
        (i, a, j, b)
        for i, j in combinations(range(len(factors)), 2)
        if (i, j) not in SIMULATED
        for a, b in product(factors[i], factors[j])
    }
    rows: list[Row] = []
    while missing:
        i, a, j, b = min(missing, key=repr)
        best: Row = ()
        gained = (-1, False)
        for _ in range(40):
            row = [draw.choice(values) for values in factors]
            row[i], row[j] = a, b
            gain = len(pairs(tuple(row)) & missing), row[RANK_COUNT] != COSTLY_RANKS
            if gain > gained:
                best, gained = tuple(row), gain
        missing -= pairs(best)
        rows.append(best)
    return rows


CELLS: list[Row] = [
    (which, *cell) for which in (MATRIX, TOGETHER) for cell in product(*which[:CELL])
]
random.Random("paceline soak").shuffle(CELLS)


def soak_row(seed: int) -> Row:
    """Return the cell of a seed; the factors outside the cell are drawn anew in each pass."""
    factors, *cell = CELLS[seed % len(CELLS)]
    draw = random.Random(seed)
    return (*cell, *(draw.choice(values) for values in factors[CELL:]))


def soak_history(seed: int) -> History:
    """Draw the history of a seed in a long search."""
    return draw_history(soak_row(seed), seed)
