"""B2: one reduction over Paceline's MPI links and in shared memory, beside those of others.

Every system has ranks of its own, which are asked in turn: runs that are compared are seconds
apart. A time runs from the moment at which all ranks have begun until the last one has the sum.
MPICH, Open MPI and Intel MPI have their best form: one world, shared memory between its ranks, one
thread where each has a core. Paceline's links, which survive a death, are TCP connections.
DeepSpeed's operator is the one that it has for inference. Open MPI, Intel MPI and DeepSpeed are in
environments of their own (`rivals.environments`), which are built when they are missing. One that
cannot be built or does not answer gets a row with the reason. Those three begin a call out of a
barrier of their own, awake. The others begin it out of a wait in the kernel, as a rank of a job
that receives GO does. So shm stands beside both kinds.

The limit is memory: P parts are read and P results written, at the rate at which the same ranks
copy together. The limit is meaningless where a payload fits the caches. `shm` sums where the
buffers lie, in memory that the ranks hand to each other, as in a job whose ranks share a machine or
a pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from paceline.core.collectives.schedules import ALGORITHMS

from benchmarks.harness import (
    Report,
    benchmark,
    interleave,
    middle,
    number,
    one_hash,
    percent,
    share,
    spread,
    with_spread,
)
from benchmarks.reducers import Crew, crews, right
from benchmarks.rivals import crew as rivals
from benchmarks.rivals import rivals as known
from benchmarks.rivals.environments import NotBuiltError, default_cache, interpreter
from testing.temporary import temporary_folder

KIB: Final = (4, 64, 1024, 16 * 1024)
CALLS: Final = {4: 20, 64: 20, 1024: 10, 16 * 1024: 3}
COPY_ELEMENTS: Final = 8 << 20
SHM: Final = "paceline shm"
OWN: Final = {
    **{f"mpi:{algorithm}": f"paceline mpi:{algorithm}" for algorithm in ALGORITHMS},
    "shm": SHM,
}
HERE: Final = ("MPI_Allreduce", "gloo")
"""Rivals that are installed in the environment of the checkout."""
AWAKE: Final = "Paceline's shm"
"""Paceline's shm, measured as the rivals in environments of their own are."""
NAMES: Final = (AWAKE, "Open MPI", "Intel MPI", "DeepSpeed's shared memory")
ELSEWHERE: Final = [rival for rival in known.ALL if rival.name in NAMES]


@benchmark(
    "B2: one reduction beside the rivals",
    ("P", "KiB", "system", "us", "p95", "spread", "limit us", "best rival / this"),
    {"--cache": {"type": Path, "default": None, "help": "folder of the rivals' environments"}},
)
def run(out: Report) -> None:
    """Run B2."""
    with temporary_folder() as scratch:
        for ranks in (2,) if out.smoke else (2, 4, 8):
            with (
                crews(("paceline", "rivals"), ranks) as (own, here),
                elsewhere(out, ranks, scratch) as others,
            ):
                measure(out, own, here, others)


@contextmanager
def elsewhere(out: Report, ranks: int, scratch: Path) -> Iterator[dict[str, rivals.Crew]]:
    """Start the rivals of other environments; yield those that could be started."""
    cache = out.given.cache or default_cache()
    with ExitStack() as stack:
        present: dict[str, rivals.Crew] = {}
        for at, rival in enumerate(ELSEWHERE):
            try:
                python = interpreter(rival.environment, cache, smoke=out.smoke)
                made = rivals.crew(rival, ranks, python, scratch / f"{ranks}-{at}")
                present[rival.name] = stack.enter_context(made)
            except (NotBuiltError, rivals.CrewError) as why:
                absent(out, ranks, rival.name, why)
        yield present


def absent(out: Report, ranks: int, name: str, why: Exception) -> None:
    """Add a row that says why a rival was not measured."""
    out.rows.append((ranks, "-", name, str(why).splitlines()[0], *["-"] * 4))


def measure(out: Report, own: Crew, here: Crew, others: dict[str, rivals.Crew]) -> None:
    """Measure all systems at one number of ranks in turn, and add their rows to the report."""
    ranks, silent, wrong = own.ranks, set[str](), set[str]()

    def checked(name: str, us: list[float], is_right: bool) -> list[float]:
        wrong.update([] if is_right else [name])
        return us

    def near(crew: Crew, how: str, kib: int, calls: int) -> list[float]:
        took = crew.reduce(how, kib << 8, calls)
        return checked(how, took.us, right(took, ranks))

    def far(name: str, kib: int, calls: int) -> list[float]:
        if name in silent:
            return []
        try:
            return checked(name, *others[name].reduce(kib << 8, calls))
        except rivals.CrewError as why:
            silent.add(name)
            absent(out, ranks, name, why)
            return []

    facts = {**own.ask("describe")[0], **here.ask("describe")[0]}
    copies: list[float] = []
    for kib in KIB[:2] if out.smoke else KIB:
        calls = 3 if out.smoke else CALLS[kib]
        sides = {name: partial(near, own, how, kib, calls) for how, name in OWN.items()}
        sides |= {name: partial(near, here, name, kib, calls) for name in HERE}
        sides |= {name: partial(far, name, kib, calls) for name in others}
        rounds = {name: us for name, us in interleave(out.rounds, sides).items() if all(us)}
        copies.append(sum(own.ask("bandwidth", COPY_ELEMENTS)))
        limit_us = 2 * ranks * (kib << 10) / middle(copies) * 1e6
        us = {name: middle(map(middle, taken)) for name, taken in rounds.items()}
        for name, taken in rounds.items():
            beside = [us[other] for other in group(name) if other in us]
            best = min(beside) / us[name] if beside else None
            p95 = share([one for calls_us in taken for one in calls_us], 0.95)
            cells = (us[name], p95, percent(spread(map(middle, taken))), limit_us)
            out.rows.append((ranks, kib, name, *cells, "-" if best is None else best))
            out.samples[f"P={ranks} {kib} KiB {name}: us per round"] = list(map(middle, taken))
            if name in (SHM, AWAKE) and kib >= 1024:
                where = f"P={ranks}, {kib} KiB"
                if best is not None:
                    out.at_least(f"{where}: best rival / {name}", best, 2.0)
                out.at_least(f"{where}: memory's limit / {name}", limit_us / us[name], 0.9)
        if kib <= 16 and not out.smoke:
            for rival in ("gloo", *(["MPI_Allreduce"] if ranks == 4 else [])):
                text = f"P={ranks}, {kib} KiB: {SHM} / {rival}"
                out.at_most(text, us[SHM] / us[rival], 2.0)
    out.checks[f"P={ranks}: every system has the sum on every rank"] = not wrong
    out.hashes[f"P={ranks}"] = one_hash(sorted(wrong))
    rate, range_ = with_spread([rate / 1e9 for rate in copies])
    out.notes.append(
        f"P={ranks}: copying {number(rate)} GB/s read and written, all ranks together (spread "
        f"{range_}); Paceline's loop: {facts['loop']}; {facts['mpi']}"
        + "".join(f"; wrong: {name}" for name in sorted(wrong))
    )


def group(name: str) -> tuple[str, ...]:
    """Return the rivals that begin a call in the same way: awake, or out of a wait."""
    return NAMES[1:] if name in NAMES else HERE
