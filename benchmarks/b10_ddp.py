"""B10: Paceline beside torch DDP on gloo when no rank is slow, and beside what is possible.

Part a: the device is emulated, so that two cores carry the ranks. The link is a token bucket on
loopback in a network of its own, at three speeds, so that a reduction takes C = 0.25, 0.5 and 1
times the computing of a step. Where the cores cannot move the bytes that fast, the layers are made
longer until they can. Part b computes for real, part c next to nothing. Part d is about streamed
rounds: one rank is slow, or a random one late, and streaming must not cost there what it gains
elsewhere. Part e puts a pipeline beside streamed rounds, on links that are as slow as a step and
slower.

DDP gets the best of its settings at each speed. Both have torch's fused optimizer, and Paceline in
part a has the segments that a job has by itself on a device. Blocks of both take turns. A ratio is
that of the medians of a block and the block of DDP in front of it; beside it stands that of their
means. The limit is what the waits allow if a reduction begins as soon as the first of n pieces is
there, n as many as the model has layers: max(1 + C/n, 1/3 + 2/3/n + C) times the computing, and the
optimizer after it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from paceline.core.forecast.model import streamed_s
from paceline.worker.state.flat import SEGMENT_BYTES

from benchmarks import network
from benchmarks.harness import (
    Report,
    benchmark,
    interleave,
    middle,
    one_hash,
    percent,
    ratios,
    spread,
)
from benchmarks.lab import Lab, Phase, Plan, Ran
from benchmarks.rounds import Stretch, check_job, same_weights, stretches
from testing.temporary import temporary_folder

PARTS: Final = "abcde"
MODES: Final[Mapping[str, dict[str, Any]]] = {
    "Full": {"mode": "Full"},
    "Quorum(75%)": {"mode": "Quorum", "quorum": "75%"},
}
TRANSPORTS: Final = ("gloo", "mpi")
WITHIN: Final = (*TRANSPORTS, "shm")
"""Transports of parts b and c, which emulate no network: all ranks are on one machine."""
SHARES: Final = (0.25, 0.5, 1.0)
"""Values of C: time of a reduction as a share of the computing of a step."""
HEADROOM: Final = 1.2
"""Factor by which the cores must be faster than the fastest link, so that the link is the limit."""
BAR_EVEN: Final = 1.02
BAR_TINY: Final = 1.1
BAR_LIMIT: Final = 0.95
BAR_UNSTREAMED: Final = 0.98
BAR_VOID: Final = 1 / 20
SETTLE_S: Final = 0.3
"""Time at the beginning of a block that is not measured: the rounds after a change of mode."""
VOID_AFTER: Final = 50
"""Rounds of part d before anything is counted; the job learns in them what to expect."""
OVERLAPS: Final = ({"overlap": "Never"}, {"overlap": "Auto"})
LATENESS: Final = ("slow", "in front", "inside")
LATE_MS: Final = 300
PIPELINE_SHARES: Final = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class Load:
    """Work of the ranks in a step, and how long it is measured."""

    part: str
    ranks: int
    config: Mapping[str, Any]
    """Configuration of `benchmarks.even`."""
    pieces: int
    """Number of pieces n in the formula of the limit."""
    collective: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Collective settings of Paceline's job."""
    block_s: float
    """Least length of one block."""
    steps: int
    """Least number of steps in a block."""
    bar: float

    @property
    def layers_ms(self) -> int:
        """Sum of all forward and backward waits of a step, for the emulated model."""
        one = self.config["forward_ms"] + self.config["backward_ms"]
        return int(self.config["layers"] * one)


@dataclass(frozen=True)
class Measured:
    """Times of a step without Paceline, in ms."""

    compute: float
    optimizer: float
    reduce: float
    setting: dict[str, Any]
    """Fastest setting of DDP."""
    expected: float
    """Time of a DDP step with that setting."""

    @property
    def share(self) -> float:
        """C: the reduction as a share of the computing."""
        return self.reduce / self.compute

    def limit(self, pieces: int) -> float:
        """Return the least step time in ms if the reduction is streamed in `pieces` pieces."""
        return streamed_s(self.compute, self.reduce, pieces) + self.optimizer


def emulated(ranks: int, smoke: bool) -> Load:
    """Return the load of part a: 16 layers of 4 MB, 4 ms forward and 8 ms backward each."""
    layers, elements = (4, 10_000) if smoke else (16, 1_000_000)
    config = {
        "model": "emulated",
        "layers": layers,
        "elements": elements,
        "forward_ms": 4,
        "backward_ms": 8,
        "watch_rounds": False,
    }
    block_s, steps = (0.4, 4) if smoke else (3.0, 8)
    as_on_a_gpu = {"segmentBytes": SEGMENT_BYTES}
    return Load("a", ranks, config, layers, block_s, steps, BAR_EVEN, collective=as_on_a_gpu)


def transformer(smoke: bool) -> Load:
    """Return the load of part b: a transformer on the cores."""
    layers, width, words = (2, 32, 16) if smoke else (10, 256, 64)
    config = {
        "model": "transformer",
        "layers": layers,
        "width": width,
        "sentences": 2,
        "words": words,
        "watch_rounds": False,
    }
    block_s, steps = (0.4, 4) if smoke else (4.0, 12)
    return Load("b", 2, config, layers, block_s, steps, BAR_EVEN)


def tiny(smoke: bool) -> Load:
    """Return the load of part c: next to nothing to compute and to send."""
    config = {"model": "tiny", "watch_rounds": False}
    block_s, steps = (0.4, 50) if smoke else (3.0, 300)
    return Load("c", 2, config, 1, block_s, steps, BAR_TINY)


@dataclass(frozen=True)
class Block:
    """Figures of one block of one system: ms per round of the rank with the slowest main thread."""

    middle: float
    """Median; it is robust against other users of the machine."""
    mean: float

    @classmethod
    def of(cls, ranks: Sequence[Sequence[tuple[int, int]]]) -> Block:
        """Compute the figures of a block.

        Args:
            ranks: For each rank, after each step: its number (or the version before it), and when
                it ended in ns.

        Returns:
            Median and mean of the slowest rank.
        """
        rounds = [
            [
                (end - begin) / 1e6 / (after - before)
                for (before, begin), (after, end) in pairwise(steps)
                if after > before
            ]
            for steps in ranks
        ]
        return cls(max(map(middle, rounds)), max(map(fmean, rounds)))


# ---- blocks --------------------------------------------------------------------------------------


class Turns:
    """Runs blocks of both systems, one at a time."""

    def __init__(self, lab: Lab, scratch: Path) -> None:
        self._lab, self._scratch = lab, scratch
        self._runs = 0

    def ddp(self, load: Load, task: str, **named: Any) -> list[dict[str, Any]]:
        """Run the DDP script with a task and return what each rank wrote."""
        self._runs += 1
        folder = self._scratch / str(self._runs)
        folder.mkdir()
        order = {**load.config, "script": "even_ddp.py", "ranks": load.ranks, "task": task, **named}
        results: list[dict[str, Any]] = self._lab.call(
            "benchmarks.plain_ranks:run", order, folder, limit_s=600.0
        )
        return results

    def reduce_ms(self, load: Load) -> float:
        """Return the time of one plain reduction of the model's gradients."""
        return float(self.ddp(load, "reduce", reductions=3)[0]["reduce_ms"])

    def measure(self, load: Load) -> Measured:
        """Measure a step's parts, and find the fastest setting of DDP."""
        steps = max(4, load.steps // 2)
        results = self.ddp(load, "tune", reductions=steps, steps=steps)
        settings = [
            (max(rank["settings"][at][1] for rank in results), setting)
            for at, (setting, _) in enumerate(results[0]["settings"])
        ]
        expected, setting = min(settings, key=lambda one: one[0])
        return Measured(
            max(rank["compute_ms"] for rank in results),
            max(rank["optimizer_ms"] for rank in results),
            # The rank that begins last waits for no other rank.
            min(rank["reduce_ms"] for rank in results),
            setting,
            expected,
        )

    def ddp_block(self, load: Load, known: Measured) -> Block:
        """Run a block of DDP with its fastest setting."""
        steps = max(load.steps, round(1000 * load.block_s / known.expected))
        results = self.ddp(load, "block", setting=known.setting, steps=steps)
        return Block.of([list(enumerate(rank["ends"])) for rank in results])

    def paceline_blocks(
        self,
        load: Load,
        known: Measured,
        transport: str,
        modes: Mapping[str, dict[str, Any]],
        *,
        warm: Phase | None = None,
    ) -> tuple[dict[str, Block], Ran]:
        """Run one job of Paceline whose mode is switched while it runs.

        Args:
            load: Work of the ranks.
            known: Times of a step without Paceline, from which the block length follows.
            transport: Value of `collective.backend`.
            modes: Collective settings by name of the block.
            warm: First phase, which is not measured; None uses the first mode for at most 3 s.

        Returns:
            Blocks by name, and the results of the job.
        """
        # A step of Paceline may be much longer than one of DDP, and the job's first are slow.
        seconds = SETTLE_S + max(load.block_s, 1.5 * load.steps * known.expected / 1000)
        first = warm or Phase("first", min(3.0, seconds), modes[next(iter(modes))])
        ran = self._lab.run(
            Plan(
                "even_paceline.py",
                load.ranks,
                [first, *(Phase(name, seconds, how) for name, how in modes.items())],
                {**load.config, "ranks": load.ranks},
                collective={"backend": transport, "mode": "Full", **load.collective},
                one_pod=True,
            )
        )
        return {phase["name"]: rounds_of(ran, phase) for phase in ran.phases[1:]}, ran


def rounds_of(ran: Ran, phase: Mapping[str, Any]) -> Block:
    """Return the figures of a phase, without its first SETTLE_S."""
    begun, ended = phase["begun"] + SETTLE_S * 1e9, phase["ended"]
    inside = [
        [(version, at) for version, _, at, _ in probe["steps"] if begun <= at <= ended]
        for probe in ran.probes
    ]
    few = min(len(steps) for steps in inside)
    assert few >= 3, f"only {few} steps in {phase['name']}; make it longer"
    return Block.of(inside)


@dataclass
class Compared:
    """Blocks of one load at one link speed."""

    known: Measured
    ddp: list[Block] = field(default_factory=list)
    own: dict[str, list[tuple[Block, Block]]] = field(default_factory=dict)
    """Pairs by system: a block of Paceline, and the block of DDP in front of it."""
    hashes: list[str] = field(default_factory=list)
    equal: bool = True


def compare(
    turns: Turns, load: Load, known: Measured, rounds: int, transports: tuple[str, ...]
) -> Compared:
    """Run blocks of DDP and of Paceline in turn, over all transports and modes."""
    compared = Compared(known)
    for _ in range(rounds):
        for transport in transports:
            beside = turns.ddp_block(load, known)
            compared.ddp.append(beside)
            blocks, ran = turns.paceline_blocks(load, known, transport, MODES)
            compared.equal = compared.equal and same_weights(ran)
            compared.hashes.append(ran.probes[0]["hash"])
            for mode, block in blocks.items():
                ratio = block.middle / beside.middle
                print(  # part a takes most of an hour
                    f"part {load.part}, P={load.ranks}, C={known.share:.2f}, {transport}, {mode}: "
                    f"{block.middle:.4g} ms, {ratio:.3f} x DDP's {beside.middle:.4g}",
                    file=sys.stderr,
                    flush=True,
                )
                compared.own.setdefault(f"{transport}, {mode}", []).append((block, beside))
    return compared


def add_rows(
    out: Report, load: Load, compared: Compared, *, link: str = "-", wanted: float = 0.0
) -> None:
    """Add the rows, bars and checks of one load to the report.

    `wanted` is the C that the link was set for; the table shows the measured one.
    """
    known = compared.known
    limit = known.limit(load.pieces)
    start = (load.part, load.ranks, link, f"{known.share:.2f}")
    where = f"part {load.part}, P={load.ranks}" + (f", C={wanted:g}" if wanted else "")
    add_row(out, (*start, "DDP"), compared.ddp, compared.ddp, limit)
    out.samples[f"{where}, DDP"] = list(map(asdict, compared.ddp))
    for name, pairs in compared.own.items():
        own, ddp = map(list, zip(*pairs, strict=True))
        ms, over = add_row(out, (*start, name), own, ddp, limit)
        out.samples[f"{where}, {name}"] = list(map(asdict, own))
        out.at_most(f"{where}, {name}: step over DDP's", over, load.bar)
        if load.part == "a":
            out.at_least(f"{where}, {name}: of what is possible", limit / ms, BAR_LIMIT)
    out.notes.append(
        f"{where}: computing {known.compute:.4g} ms, optimizer {known.optimizer:.3g}, a plain "
        f"reduction {known.reduce:.4g}; DDP with {settings(known.setting)}"
    )
    out.checks[f"{where}: equal weights on all ranks"] = compared.equal
    out.hashes[where] = one_hash(compared.hashes)
    out.samples[where] = asdict(known)


def add_row(
    out: Report, start: tuple[Any, ...], own: list[Block], base: list[Block], limit: float
) -> tuple[float, float]:
    """Add the row of one system.

    Args:
        out: The report.
        start: First cells of the row.
        own: Blocks of the system.
        base: Block of the baseline in front of each of them.
        limit: Least possible step in ms.

    Returns:
        Median step in ms, and median ratio to the baseline.
    """
    values = [block.middle for block in own]
    over = ratios(values, [block.middle for block in base])
    means = ratios([block.mean for block in own], [block.mean for block in base])
    ms = middle(values)
    cells = (ms, percent(spread(values)), middle(over), f"{min(over):.2f} to {max(over):.2f}")
    out.rows.append((*start, *cells, middle(means), limit, limit / ms))
    return ms, middle(over)


def settings(setting: Mapping[str, Any]) -> str:
    """Return DDP's settings as text."""
    return ", ".join(f"{key}={value}" for key, value in setting.items())


# ---- parts ---------------------------------------------------------------------------------------


def link_bits(load: Load, share: float) -> int:
    """Return the link speed in bits/s at which a reduction takes `share` of the computing.

    A ring moves 2 (P-1)/P of the bytes per rank, and all ranks send through one bucket.

    Returns:
        Bits per second.
    """
    moved = 2 * (load.ranks - 1) * 4 * load.config["elements"] * load.config["layers"]
    bits_per_s: float = 8 * moved / (share * load.layers_ms / 1000)
    return round(bits_per_s)


def stretched(load: Load, turns: Turns, share: float = min(SHARES)) -> tuple[Load, int]:
    """Lengthen the layers until the cores can follow the fastest link.

    Returns:
        The longer load, and the factor.
    """
    free_ms = turns.reduce_ms(load)
    times = max(1, math.ceil(HEADROOM * free_ms / (share * load.layers_ms)))
    longer = {key: times * load.config[key] for key in ("forward_ms", "backward_ms")}
    return replace(load, config={**load.config, **longer}), times


def part_a(out: Report, turns: Turns, link: network.Link) -> None:
    """Measure the emulated device on links of three speeds."""
    for ranks in (2,) if out.smoke else (2, 4):
        load = emulated(ranks, out.smoke)
        link.unlimit()
        load, times = (load, 1) if out.smoke else stretched(load, turns)
        if times > 1:
            out.notes.append(
                f"part a, P={ranks}: layers {times} times longer than 4 and 8 ms, so that the "
                "cores can move the bytes"
            )
        for share in SHARES[-1:] if out.smoke else SHARES:
            bits = link_bits(load, share)
            link.limit(bits)
            compared = compare(
                *(turns, load, turns.measure(load), repetitions(out)),
                TRANSPORTS[:1] if out.smoke else TRANSPORTS,
            )
            add_rows(out, load, compared, link=f"{bits / 1e9:.3g} Gbit/s", wanted=share)
    link.unlimit()


def part_bc(out: Report, turns: Turns, load: Load) -> None:
    """Measure a load that computes, without an emulated link."""
    compared = compare(
        *(turns, load, turns.measure(load), repetitions(out)),
        WITHIN[1:] if out.smoke else WITHIN,
    )
    add_rows(out, load, compared)


def part_d(out: Report, turns: Turns, link: network.Link) -> None:
    """Measure streamed and unstreamed rounds in Quorum while a rank is slow or late."""
    ranks, share = 2 if out.smoke else 4, SHARES[1]
    load = emulated(ranks, out.smoke)
    load, times = (load, 1) if out.smoke else stretched(load, turns, share)
    if times > 1:
        out.notes.append(f"part d: layers and lateness {times} times longer than 4, 8 and 300 ms")
    link.limit(link_bits(load, share))
    known = turns.measure(load)
    late_ms = LATE_MS // 10 if out.smoke else LATE_MS
    for late in LATENESS:
        config = {**load.config, "watch_rounds": True, "late": late, "late_ms": late_ms * times}
        watched = replace(load, config=config, block_s=8 * load.block_s)
        learning_s = 0.4 if out.smoke else VOID_AFTER * (known.expected + late_ms * times) / 1000
        warm = Phase("first", learning_s, {**MODES["Quorum(75%)"], **OVERLAPS[-1]})
        for transport in TRANSPORTS[:1] if out.smoke else TRANSPORTS:
            phases = [
                {**MODES["Quorum(75%)"], **how} for _ in range(repetitions(out)) for how in OVERLAPS
            ]
            names = [f"{i} {how['overlap']}" for i, how in enumerate(phases)]
            modes = dict(zip(names, phases, strict=True))
            _, ran = turns.paceline_blocks(watched, known, transport, modes, warm=warm)
            add_late_rows(out, ran, late, transport, ranks)
    link.unlimit()


def part_e(out: Report, turns: Turns, link: network.Link) -> None:
    """Measure a pipeline and streamed rounds in Full; jobs of both take turns."""
    load = emulated(2, out.smoke)
    load, times = (load, 1) if out.smoke else stretched(load, turns)
    if times > 1:
        out.notes.append(f"part e: layers {times} times longer than 4 and 8 ms")
    for share in PIPELINE_SHARES[:1] if out.smoke else PIPELINE_SHARES:
        bits = link_bits(load, share)
        link.limit(bits)
        known = turns.measure(load)
        equal: list[bool] = []

        def block(pipeline: int, known: Measured = known, equal: list[bool] = equal) -> Block:
            piped = replace(load, collective={**load.collective, "pipeline": pipeline})
            blocks, ran = turns.paceline_blocks(piped, known, "mpi", {"Full": MODES["Full"]})
            equal.append(same_weights(ran))
            return blocks["Full"]

        sides = {str(pipeline): partial(block, pipeline) for pipeline in (0, 1)}
        by_pipeline = interleave(repetitions(out), sides)
        # At best, a step takes the longer of computing and reduction.
        piped_ms = known.compute * max(1.0, known.share) + known.optimizer
        limits = {"0": known.limit(load.pieces), "1": piped_ms}
        for pipeline, own in by_pipeline.items():
            start = ("e", load.ranks, f"{bits / 1e9:.3g} Gbit/s", f"{known.share:.2f}")
            name = f"mpi, Full, pipeline {pipeline} (over pipeline 0)"
            add_row(out, (*start, name), own, by_pipeline["0"], limits[pipeline])
        out.checks[f"part e, C={share:g}: equal weights on all ranks"] = all(equal)
    link.unlimit()


def add_late_rows(out: Report, ran: Ran, late: str, transport: str, ranks: int) -> None:
    """Add the rows, bars and checks of one job of part d to the report."""
    where = f"part d, P={ranks}, {transport}, {late}"
    groups: dict[str, list[Stretch]] = {}
    for stretch in stretches(ran, warm=1):
        groups.setdefault(stretch.name.split()[-1], []).append(stretch)
    for overlap, blocks in groups.items():
        rates = [block.rounds_per_s for block in blocks]
        start = ("d", ranks, late, "-", f"{transport}, overlap {overlap}")
        out.rows.append((*start, 1000 / middle(rates), percent(spread(rates)), *["-"] * 5))
    streamed, unstreamed = groups["Auto"], groups["Never"]
    for what in ("rounds_per_s", "gradients_per_s"):
        own, base = ([getattr(block, what) for block in g] for g in (streamed, unstreamed))
        text = f"{where}: streamed over unstreamed, {what.replace('_per_', '/')}"
        out.at_least(text, middle(ratios(own, base)), BAR_UNSTREAMED)
    commits = [c for block in streamed for c in block.commits]
    void = sum(c["trigger"] == "void" for c in commits) / max(1, len(commits))
    out.at_most(f"{where}: share of void rounds", void, BAR_VOID)
    check_job(out, ran, where, counted=False)


def repetitions(out: Report) -> int:
    """Return the number of repetitions of each block."""
    return 1 if out.smoke else out.rounds


@benchmark(
    "B10: beside torch DDP on gloo, nobody slow; ms per step",
    (
        *("part", "P", "link", "C", "system", "step ms", "spread"),
        *("over DDP", "its range", "means", "limit ms", "limit / step"),
    ),
    {"--parts": {"default": PARTS, "metavar": "LETTERS", "help": f"of {PARTS[0]} to {PARTS[-1]}"}},
)
def run(out: Report) -> None:
    """Run B10 in a lab of its own, inside the emulated network."""
    lacking = network.missing()
    emulating: dict[str, Callable[[Report, Turns, network.Link], None]] = {
        "a": part_a,
        "d": part_d,
        "e": part_e,
    }
    with ExitStack() as stack:
        link = None if lacking else stack.enter_context(network.own_network())
        lab, scratch = (
            stack.enter_context(Lab(out.stretch)),
            stack.enter_context(temporary_folder()),
        )
        turns = Turns(lab, scratch)
        for part in sorted(set(PARTS) & set(out.given.parts)):
            if part not in emulating:
                part_bc(out, turns, {"b": transformer, "c": tiny}[part](out.smoke))
            elif link is None:
                out.notes.append(f"part {part} was not measured: this machine lacks {lacking}")
            else:
                emulating[part](out, turns, link)
