"""The table: every rival at every P, in turn, over each network's gradients and over bulk sums.

Efficiency is the computing of the applied gradients divided by the time that P ranks had for it: 1
means that summing, waiting and updating were free. The computing is emulated (`rank.Device`), as
long as a device of 8 TFLOP/s would need for batches of 16, 32 and 64 images. Bytes are counted on
loopback, in a network of the benchmark's own where it may have one; what ranks hand to each other
in shared memory does not show there. Beside them stands what the algorithm has to carry.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import network
from benchmarks.harness import (
    Report,
    benchmark,
    interleave,
    middle,
    number,
    one_hash,
    percent,
    spread,
)
from benchmarks.rivals import rivals as known
from benchmarks.rivals.crew import Crew, CrewError, crew
from benchmarks.rivals.environments import NotBuiltError, default_cache, interpreter
from benchmarks.rivals.rank import RATE
from testing.temporary import temporary_folder

DEVICE_FLOPS: Final = 8e12
PASSES: Final = 3
"""Cost of a training step in forward passes: backward costs two."""
BATCHES: Final = (16, 32, 64)
BULK_BYTES: Final = tuple(4 << shift for shift in range(0, 27, 2))
"""Sizes of the bulk sums: 4 B ... 256 MB."""
BULK_BUDGET_S: Final = 0.4
STEPS_BUDGET_S: Final = 2.0
LEAST, MOST = 3, 60
"""Least and largest number of calls, or of steps, in one turn."""
ROOM: Final = 0.6
"""Share of the free memory that one rival's ranks may take."""
BUFFERS: Final = 7
"""Upper bound on a rank's memory, in gradients: those of a job, the emulated gradient, and what a
library keeps."""
PROCESS_BYTES: Final = 400 << 20
COLUMNS: Final = (
    *("network", "P", "batch", "rival", "step ms", "spread", "efficiency"),
    *("gradients/s", "over DDP", "sent MB/rank", "model MB/rank"),
)


@dataclass(frozen=True)
class Network:
    """One of the paper's networks, as a list of tensors."""

    name: str
    giga_macs: float
    """Multiply-accumulates of a forward pass per image, in 1e9."""
    tensors: list[int]
    """Numbers of elements of the trained tensors."""

    @property
    def bytes(self) -> int:
        """Size of all gradients in float32."""
        return 4 * sum(self.tensors)

    def compute_ms(self, batch: int) -> float:
        """Return the emulated computing of a training step."""
        return 1e3 * PASSES * 2 * self.giga_macs * 1e9 * batch / DEVICE_FLOPS


@dataclass
class Cell:
    """Figures of the turns of one cell."""

    step_ms: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)
    """Applied gradients per second."""
    sent: list[float] = field(default_factory=list)
    """Bytes over loopback, per rank and step."""


def networks() -> dict[str, Network]:
    """Return the networks by name, from models.json."""
    read = json.loads(Path(__file__).with_name("models.json").read_text())["models"]
    return {name: Network(name, **facts) for name, facts in read.items()}


@dataclass(frozen=True)
class Size:
    """Part of the table that is made."""

    ranks: tuple[int, ...]
    networks: tuple[str, ...]
    batches: tuple[int, ...]
    bulk_bytes: tuple[int, ...]

    @classmethod
    def of(cls, out: Report) -> Size:
        """Return the part that the options ask for; exits if a network is unknown."""
        given = out.given
        if out.smoke:
            return cls((2,), ("MobileNet",), (16,), (4096,))
        if given.quick:
            form = cls((2,), ("MobileNet", "ResNet-50"), (32,), BULK_BYTES[::3])
        else:
            form = cls((2, 4, 8), tuple(networks()), BATCHES, BULK_BYTES)
        if unknown := set(given.networks) - set(networks()):
            sys.exit(f"error: --networks {min(unknown)}: known are {', '.join(networks())}")
        return cls(
            given.ranks or form.ranks,
            given.networks or form.networks,
            given.batches or form.batches,
            form.bulk_bytes,
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@benchmark(
    "Rivals: training steps with emulated computing",
    COLUMNS,
    {
        "--quick": {"action": "store_true", "help": "the small form"},
        "--only": {"action": "append", "default": [], "metavar": "NAME", "help": "part of a name"},
        "--ranks": {"type": _numbers, "default": (), "metavar": "A,B"},
        "--networks": {"type": _names, "default": (), "metavar": "A,B"},
        "--batches": {"type": _numbers, "default": (), "metavar": "A,B"},
        "--cache": {"type": Path, "default": None, "help": "folder of the rivals' environments"},
    },
)
def run(out: Report) -> None:
    """Run all rivals."""
    # Let SIGTERM unwind the stack, so that all processes end with this one.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with ExitStack() as stack:
        scratch = stack.enter_context(temporary_folder())
        size = Size.of(out)
        present = _built(out)
        lacking = network.missing()
        if lacking:
            out.notes.append(f"sent MB counts everything on loopback, as there is no {lacking}")
        else:
            stack.enter_context(network.own_network())
        Table(out, size, 1 if out.smoke else out.rounds, present, scratch).make()


def _built(out: Report) -> list[tuple[known.Rival, Path | None]]:
    """Return the rivals whose environments exist or can be built, with their interpreters.

    The others become rows that say why not.

    Returns:
        Pairs of rival and interpreter.
    """
    cache = out.given.cache or default_cache()
    present: list[tuple[known.Rival, Path | None]] = []
    for rival in known.ALL:
        only = out.given.only
        if only and not any(part.lower() in rival.name.lower() for part in only):
            continue
        try:
            present.append((rival, interpreter(rival.environment, cache, smoke=out.smoke)))
        except NotBuiltError as reason:
            _absent(out, rival.name, "-", "-", str(reason))
    return present


def _absent(out: Report, name: str, where: object, ranks: object, why: str) -> None:
    """Add a row that says why a rival was not measured."""
    out.rows.append((where, ranks, "-", name, why, *["-"] * 6))


class Table:
    """Runs the turns and makes the rows."""

    def __init__(
        self,
        out: Report,
        size: Size,
        rounds: int,
        present: Sequence[tuple[known.Rival, Path | None]],
        scratch: Path,
    ) -> None:
        self._out, self._size, self._rounds = out, size, rounds
        self._present, self._scratch = present, scratch
        self._turns = 0
        self._right = True
        self._failed: set[tuple[str, str, int]] = set()
        self._sums: list[str] = []

    def make(self) -> None:
        """Measure all parts and add their rows, checks and hashes to the report."""
        for ranks in self._size.ranks:
            self._bulk(ranks)
            for name in self._size.networks:
                self._train(networks()[name], ranks)
        self._out.checks["every sum, and every count of applied gradients, is right"] = self._right
        self._out.hashes["sums"] = one_hash(sorted(set(self._sums)))

    def _take_turns(
        self,
        what: str,
        ranks: int,
        fit: Callable[[known.Rival], bool],
        turn: Callable[[Crew], None],
    ) -> None:
        """Start a crew of each rival one after the other and run a turn with it.

        Each round begins with another rival.
        """

        def one(rival: known.Rival, python: Path | None) -> None:
            if (rival.name, what, ranks) in self._failed:
                return
            self._turns += 1
            self._say(f"{what}, P={ranks}: {rival.name}")
            folder = self._scratch / str(self._turns)
            try:
                with crew(rival, ranks, python, folder) as made:
                    self._out.samples.setdefault("facts", {})[rival.name] = made.facts
                    turn(made)
            except CrewError as failed:
                self._say(str(failed))
                self._failed.add((rival.name, what, ranks))
                _absent(self._out, rival.name, what, ranks, str(failed).splitlines()[0])
            shutil.rmtree(folder, ignore_errors=True)

        sides = {r.name: partial(one, r, python) for r, python in self._present if fit(r)}
        interleave(self._rounds if sides else 0, sides)

    @staticmethod
    def _say(text: str) -> None:
        print(f"{time.strftime('%T')} {text}", file=sys.stderr, flush=True)

    # ---- bulk ------------------------------------------------------------------------------------

    def _bulk(self, ranks: int) -> None:
        """Measure the bulk sums at one number of ranks."""
        by_size: dict[int, dict[str, list[float]]] = {n: {} for n in self._size.bulk_bytes}

        def turn(made: Crew) -> None:
            for size in self._size.bulk_bytes:
                calls = _times(BULK_BUDGET_S * 1e6, self._sum_us(made, size, 1))
                took_us = self._sum_us(made, size, calls)
                by_size[size].setdefault(made.rival.name, []).append(took_us)

        self._take_turns("bulk", ranks, lambda rival: rival.bulk, turn)
        for size, rivals in by_size.items():
            best = min((middle(us) for us in rivals.values()), default=0.0)
            self._out.samples[f"bulk, P={ranks}, {size} B: us"] = {
                name: {"middle": middle(us), "over the best": middle(us) / best, "turns": us}
                for name, us in rivals.items()
            }
        names = list(next(iter(by_size.values())))
        lines = [
            f"{name}: " + ", ".join(f"{number(middle(by_size[n][name]))}" for n in by_size)
            for name in names
            if all(name in rivals for rivals in by_size.values())
        ]
        if lines:
            sizes = ", ".join(f"{n:,}" for n in by_size)
            self._out.notes.append(
                f"bulk, P={ranks}, us of one sum of {sizes} B: " + "; ".join(lines)
            )

    def _sum_us(self, made: Crew, size: int, calls: int) -> float:
        """Return the time of a bulk sum.

        It runs from the moment at which all ranks have begun until the last one has the sum.

        Returns:
            Median microseconds.
        """
        took_us, right = made.reduce(size // 4, calls)
        self._right = self._right and right
        self._sums.append(f"bulk {made.ranks} {size} {right}")
        return middle(took_us)

    # ---- training --------------------------------------------------------------------------------

    def _train(self, net: Network, ranks: int) -> None:
        """Measure training with one network at one number of ranks."""
        need = ranks * (BUFFERS * net.bytes + PROCESS_BYTES)
        if need > ROOM * _free_bytes():
            why = f"not run: the ranks may need {need / 1e9:.0f} GB of memory"
            _absent(self._out, "all", net.name, ranks, why)
            return
        cells: dict[tuple[int, str], Cell] = {}

        def turn(made: Crew) -> None:
            for batch in self._size.batches:
                self._turn(net, batch, made, cells.setdefault((batch, made.rival.name), Cell()))

        self._take_turns(net.name, ranks, lambda rival: rival.trains, turn)
        rivals = {rival.name: rival for rival, _ in self._present}
        for (batch, name), cell in sorted(cells.items(), key=lambda item: item[0][0]):
            if not cell.step_ms:
                continue
            per_s = middle(cell.per_s)
            peer = cells.get((batch, "DDP + gloo"))
            over = per_s / middle(peer.per_s) if peer and peer.per_s else "-"
            self._out.rows.append(
                (
                    *(net.name, ranks, batch, name),
                    middle(cell.step_ms),
                    percent(spread(cell.step_ms)),
                    per_s * net.compute_ms(batch) / 1e3 / ranks,
                    per_s,
                    over,
                    middle(cell.sent) / 1e6,
                    rivals[name].carries(ranks) * net.bytes / 1e6,
                )
            )
            self._out.samples[f"{net.name}, P={ranks}, batch {batch}, {name}"] = vars(cell)

    def _turn(self, net: Network, batch: int, made: Crew, cell: Cell) -> None:
        """Run one turn of training and add its figures to a cell."""
        order = {"do": "train", "tensors": net.tensors, "compute_ms": net.compute_ms(batch)}
        begun = time.monotonic()
        made.ask({**order, "steps": LEAST})
        steps = _times(STEPS_BUDGET_S, (time.monotonic() - begun) / LEAST)
        before = _loopback_bytes()
        answers = made.ask({**order, "steps": steps})
        sent = _loopback_bytes() - before
        seconds = (max(a["ended"] for a in answers) - min(a["begun"] for a in answers)) / 1e9
        applied = answers[0]["applied"][0]
        counts = {round(count, 3) for one in answers for count in one["applied"]}
        right = len(counts) == 1 and (made.rival.partial or applied == steps * made.ranks)
        if not right:
            self._say(f"WRONG: {made.rival.name}: {counts} of {steps * made.ranks}, rate {RATE}")
        self._right = self._right and right
        self._sums.append(f"{net.name} {made.ranks} {right}")
        cell.step_ms.append(1e3 * seconds / steps)
        cell.per_s.append(applied / seconds)
        cell.sent.append(sent / steps / made.ranks)


def _times(budget: float, each: float) -> int:
    """Return how many calls of `each` fit into the budget, between LEAST and MOST."""
    return max(LEAST, min(MOST, int(budget / max(each, 1e-9))))


def _free_bytes() -> int:
    text = Path("/proc/meminfo").read_text()
    (kib,) = re.findall(r"MemAvailable:\s+(\d+) kB", text)
    return int(kib) * 1024


def _loopback_bytes() -> int:
    """Return the bytes sent over loopback in the network that this thread is in."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    return 0
