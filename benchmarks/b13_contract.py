"""B13: the same script under torchrun and under `paceline run`, and what a join costs the others.

Part a: DDP on gloo with its fastest setting, the script in jobs over each transport, and a script
of the explicit API. All of them are started once and take turns in blocks of steps, two ranks each.
A ratio is that of the medians of a block and DDP's block in the same round. The CPU time of a step,
summed over the ranks, stands beside it: other users of the machine change it less. The notes say
which threads spend it, and how often they wait. The limit is a step without communication.

Part b: a model of 100 million parameters, three ranks; one is killed and a replacement joins. The
stall is the longest step of the others, less a usual one. The limit is a plain transfer of the
state over the loopback, measured in the same run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import IO, Any, Final

from benchmarks.harness import Report, benchmark, interleave, middle, percent, ratios, spread
from benchmarks.jobs import PACELINE, SCRIPTS, end_all, manifest, python_path, run_job, start
from testing.temporary import temporary_folder

RANKS: Final = 2
TRANSPORTS: Final = ("gloo", "mpi", "shm")
BUCKETS_MB: Final = (5, 25)
BAR_DDP: Final = 1.02
BAR_EXPLICIT: Final = 1.0
BAR_STALL_S: Final = 0.1
START_S: Final = 180.0
BLOCK_S: Final = 120.0
ENDS_S: Final = 60.0
WARM: Final = 5
"""Steps before the first block of a setting."""
LEAST_MS: Final = 0.02
"""CPU time of a step below which a thread is not listed."""
JOINERS: Final = 3
"""Ranks of part b."""


@dataclass(frozen=True)
class Load:
    """A transformer of `benchmarks.even`, and the steps of a block."""

    name: str
    config: Mapping[str, Any]
    steps: int


def loads(smoke: bool) -> list[Load]:
    """Return the two sizes."""
    small = {"model": "transformer", "layers": 4, "width": 80, "sentences": 2, "words": 32}
    large = {"model": "transformer", "layers": 10, "width": 256, "sentences": 2, "words": 64}
    if smoke:
        return [Load("0.4 M", {**small, "layers": 2, "width": 32}, 3)]
    return [Load("0.4 M", small, 40), Load("8.2 M", large, 12)]


@dataclass(frozen=True)
class Block:
    """One block of one side, in ms per step: of the slowest rank, and CPU time of all."""

    step: float
    cpu: float
    threads: Mapping[str, Sequence[float]]
    """Maps the name of a thread to its CPU time and its number of waits, per step and rank."""


class Side:
    """The ranks of one side, which wait for orders."""

    def __init__(self, lines: list[IO[str]]) -> None:
        self._lines = lines

    def order(self, **order: Any) -> list[dict[str, Any]]:
        """Give all ranks an order and return their answers."""
        for line in self._lines:
            line.write(json.dumps(order) + "\n")
            line.flush()
        return [json.loads(line.readline()) for line in self._lines]

    def use(self, setting: Mapping[str, Any]) -> None:
        """Begin anew with a setting of DDP, and warm up."""
        self.order(do="use", setting=dict(setting))
        self.block(WARM)

    def block(self, steps: int, *, alone: bool = False) -> Block:
        """Make steps and return the times of one."""
        answers = self.order(do="steps", steps=steps, alone=alone)
        medians = [middle((b - a) / 1e6 for a, b in pairwise(rank["ends"])) for rank in answers]
        threads: dict[str, list[float]] = {}
        for rank in answers:
            for name, costs in rank["threads"].items():
                own = threads.setdefault(name, [0.0, 0.0])
                own[:] = (a + b / len(answers) for a, b in zip(own, costs, strict=True))
        return Block(max(medians), sum(rank["cpu_ms"] for rank in answers), threads)

    def end(self) -> None:
        """Let the ranks end."""
        for line in self._lines:
            line.write('{"do": "end"}\n')
            line.flush()


def command(name: str, config: dict[str, Any], folder: Path) -> list[str]:
    """Return the command that starts a side: "DDP", "explicit, ..." or a transport."""
    script = str(SCRIPTS / "contract.py")
    if name == "DDP":
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        return [sys.executable, *run, script]
    transport = name.rsplit(" ", 1)[-1]
    # Ranks on a loaded machine must not look frozen.
    collective = {"backend": transport, "mode": "Full", "freezeTimeout": "300s"}
    if not name.startswith("explicit"):
        given = [f"--set=spec.collective.{key}={value}" for key, value in collective.items()]
        return [str(PACELINE), "run", f"--replicas={RANKS}", "--quiet", *given, script]
    env = {"BENCHMARK": json.dumps(config)}
    job = manifest([sys.executable, script], env=env, replicas=RANKS, collective=collective)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(job))
    return [str(PACELINE), "run", str(path), "--quiet"]


def open_sides(stack: ExitStack, load: Load, names: Sequence[str]) -> dict[str, Side]:
    """Start all sides; they end with the stack."""
    folder = stack.enter_context(temporary_folder())
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(str(folder / "s"))
    server.listen(RANKS * len(names))
    server.settimeout(START_S)
    started: list[subprocess.Popen[bytes]] = []
    stack.callback(lambda: end_all(started, ENDS_S))
    for name in names:
        api = "paceline" if name.startswith("explicit") else "ddp"
        config = {**load.config, "socket": str(folder / "s"), "side": name, "api": api}
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": python_path(),
            "BENCHMARK": json.dumps(config),
        }
        own = folder / name
        own.mkdir()
        started.append(start(command(name, config, folder), own, env))
    lines: dict[str, dict[int, IO[str]]] = {name: {} for name in names}
    for _ in range(RANKS * len(names)):
        connection, _ = server.accept()
        connection.settimeout(BLOCK_S)
        line = stack.enter_context(connection.makefile("rw"))
        known = json.loads(line.readline())
        lines[known["side"]][known["rank"]] = line
    sides = {name: Side([own[rank] for rank in sorted(own)]) for name, own in lines.items()}
    for side in sides.values():
        stack.callback(side.end)
    return sides


def fastest(side: Side, steps: int) -> dict[str, Any]:
    """Return the fastest setting of DDP: the best of two blocks of each."""
    tried = []
    for bucket_mb, view in product(BUCKETS_MB, (False, True)):
        setting = {"bucket_cap_mb": bucket_mb, "gradient_as_bucket_view": view}
        side.use(setting)
        tried.append((min(side.block(steps).step for _ in range(2)), setting))
    return min(tried, key=lambda one: one[0])[1]


def part_a(out: Report) -> None:
    """Compare steps of all sides."""
    transports = TRANSPORTS[-1:] if out.smoke else TRANSPORTS
    names = ["DDP", *(f"script, {x}" for x in transports), "explicit, shm"]
    for load in loads(out.smoke):
        with ExitStack() as stack:
            sides = open_sides(stack, load, names)
            setting = fastest(sides["DDP"], load.steps)
            for side in sides.values():
                side.use(setting)
            turns = {name: partial(side.block, load.steps) for name, side in sides.items()}
            turns["alone"] = partial(sides["DDP"].block, load.steps, alone=True)
            blocks = interleave(out.rounds, turns)
        add_rows(out, load, setting, blocks)


def add_rows(
    out: Report, load: Load, setting: Mapping[str, Any], measured: Mapping[str, list[Block]]
) -> None:
    """Add the rows and bars of one size."""
    ddp, limit = measured["DDP"], middle(block.step for block in measured["alone"])
    over: dict[str, float] = {}
    for name, blocks in measured.items():
        out.samples[f"{load.name}, {name}"] = [(block.step, block.cpu) for block in blocks]
        out.notes.append(f"{load.name}, {name}: {spent(blocks)}")
        if name == "alone":
            continue
        steps, cpu = [block.step for block in blocks], [block.cpu for block in blocks]
        each = ratios(steps, [block.step for block in ddp])
        over[name] = middle(each)
        least = min(steps) / min(block.step for block in ddp)
        cpus = middle(ratios(cpu, [block.cpu for block in ddp]))
        step = middle(steps)
        spans = f"{over[name]:.3f} ({min(each):.3f} - {max(each):.3f})"
        row = (load.name, name, step, percent(spread(steps)), spans, f"{least:.3f}")
        out.rows.append((*row, f"{cpus:.3f}", limit, f"{limit / step:.3f}"))
        if name.startswith("script"):
            out.at_most(f"{load.name}, {name}: over DDP", over[name], BAR_DDP)
    text = f"{load.name}, script over explicit API, shm"
    pairs = zip(measured["script, shm"], measured["explicit, shm"], strict=True)
    out.at_most(text, middle(a.step / b.step for a, b in pairs), BAR_EXPLICIT)
    out.notes.append(f"{load.name}: fastest setting of DDP, used by the scripts as well: {setting}")


def spent(blocks: Sequence[Block]) -> str:
    """Return the threads that cost most, each with its CPU time and its waits in a step."""
    names = {name for block in blocks for name in block.threads}
    none = (0.0, 0.0)
    costs = {
        name: [middle(block.threads.get(name, none)[i] for block in blocks) for i in range(2)]
        for name in names
    }
    most = sorted(costs.items(), key=lambda pair: -pair[1][0])
    return ", ".join(
        f"{name} {cpu:.2f} ms, {waits:.1f} waits" for name, (cpu, waits) in most if cpu >= LEAST_MS
    )


# ---- a join ------------------------------------------------------------------------------------


def transfer_s(size: int) -> float:
    """Return the seconds of a plain transfer of `size` bytes over the loopback."""
    program = (
        "import socket, sys, time\n"
        "size, port = map(int, sys.argv[1:])\n"
        "line = socket.create_connection(('127.0.0.1', port))\n"
        "line.sendall(bytearray(size))\n"
        "line.recv(1)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        argv = [sys.executable, "-c", program, str(size), str(port)]
        with subprocess.Popen(argv) as sender:
            line, _ = server.accept()
            into = memoryview(bytearray(size))
            with line:
                received = line.recv_into(into)
                begun = time.monotonic()
                while received < size:
                    received += line.recv_into(into[received:])
                spent = time.monotonic() - begun
                line.sendall(b"x")
            assert sender.wait(ENDS_S) == 0
    return spent


def part_b(out: Report) -> None:
    """Kill a rank of a large model, and measure how long the others wait for its replacement."""
    parameters, steps = (100_000, 40) if out.smoke else (100_000_000, out.given.steps)
    size = 4 * parameters
    with temporary_folder() as folder:
        script = str(SCRIPTS / "joined.py")
        words = [script, str(folder), str(parameters), str(steps)]
        container = [str(PACELINE), "launch", *words]
        collective = {"backend": "shm", "mode": "Full", "freezeTimeout": "300s"}
        job = manifest(container, replicas=JOINERS, collective=collective)
        plain = [transfer_s(size) for _ in range(3)]
        run_job(job, folder, "--inject", "kill:rank=1,at=round:6", limit_s=900.0)
        files = [list(map(int, p.read_text().split())) for p in folder.glob("steps-*")]
        ended = [one for one in files if len(one) == steps]
        short = [one for one in files if 0 < len(one) < steps]  # killed, and its replacement
        gaps = [max(step_gaps(one, short)) for one in ended]
        usual = middle(x for one in ended for x in step_gaps(one, []))
        sums = {path.read_text() for path in folder.glob("sum-*")}
    stall = max(gaps, default=0.0) - usual
    out.rows.append(
        (f"{parameters / 1e6:g} M", "join, shm", 1000 * usual, "-", "-", "-", "-", "-", "-")
    )
    out.samples["join"] = {"stall_s": stall, "transfer_s": plain, "usual_s": usual, "gaps_s": gaps}
    out.checks["all ranks ended with equal weights"] = len(ended) > 1 and len(sums) == 1
    if not out.smoke:  # which is over before a new process has imported torch
        out.checks["a replacement took part"] = len(short) == 2
    out.at_most(
        f"join at {parameters / 1e6:g} M parameters: stall s (a transfer and {BAR_STALL_S:g} s)",
        stall,
        min(plain) + BAR_STALL_S,
    )


def step_gaps(ends: Sequence[int], short: Sequence[Sequence[int]]) -> list[float]:
    """Return the seconds between steps; with `short` those around the replacement's first step.

    Args:
        ends: When each step of a rank ended, in ns.
        short: The same of the replacement and of the rank that was killed.
    """
    pairs = [(b - a, b) for a, b in pairwise(ends)]
    if short:  # the step in which the replacement took part first, and its neighbors
        first = max(one[0] for one in short)
        pairs = sorted(pairs, key=lambda pair: abs(pair[1] - first))[:3]
    return [gap / 1e9 for gap, _ in pairs]


@benchmark(
    "B13: a script for torchrun beside DDP on gloo; ms per step",
    (
        *("parameters", "system", "step ms", "spread", "over DDP", "least over least"),
        *("CPU over DDP", "limit ms", "limit / step"),
    ),
    {
        "--parts": {"default": "ab", "metavar": "LETTERS", "help": "of a and b"},
        "--steps": {"type": int, "default": 60, "help": "steps of part b"},
    },
)
def run(out: Report) -> None:
    """Run both parts."""
    if "a" in out.given.parts:
        part_a(out)
    if "b" in out.given.parts:
        part_b(out)
