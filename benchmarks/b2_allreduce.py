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
from itertools import product
from pathlib import Path
from typing import Final

from paceline.core.collectives.schedules import ALGORITHMS

from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import Lab
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


def run(lab: Lab, given: Options) -> r.Report:  # noqa: ARG001
    """Run B2 and return its report."""
    out = r.Report(
        "b2_allreduce",
        "B2: one reduction beside the rivals",
        ("P", "KiB", "system", "us", "p95", "spread", "limit us", "best rival / this"),
        smoke=given.smoke,
    )
    with temporary_folder() as scratch:
        for ranks in (2,) if given.smoke else (2, 4, 8):
            Table(out, ranks, given, scratch).make()
    return out


class Table:
    """Rows of one number of ranks."""

    def __init__(self, out: r.Report, ranks: int, given: Options, scratch: Path) -> None:
        self._out, self._ranks, self._given = out, ranks, given
        self._scratch = scratch
        self._us: dict[tuple[int, str], list[list[float]]] = {}
        """Microseconds of the calls of each round, by KiB and system."""
        self._rates: list[float] = []
        """Bytes per second, read and written, when all ranks copy together; one per round."""
        self._sums: list[str] = []
        self._wrong: list[str] = []

    def make(self) -> None:
        """Measure all systems in turn and add their rows, checks and bars to the report."""
        with crews(("paceline", "rivals"), self._ranks) as (own, here), self._elsewhere() as others:
            facts = {**own.ask("describe")[0], **here.ask("describe")[0]}
            for _ in range(self._given.rounds):
                self._rates.append(sum(own.ask("bandwidth", COPY_ELEMENTS)))
                for kib in KIB[:2] if self._given.smoke else KIB:
                    self._take_turns(kib, own, here, others)
        self._tell(f"{facts['loop']}; {facts['mpi']}")
        if not self._given.smoke:
            self._judge()

    @contextmanager
    def _elsewhere(self) -> Iterator[dict[str, rivals.Crew]]:
        """Start the rivals of other environments; yield those that could be started."""
        cache = self._given.cache or default_cache()
        with ExitStack() as stack:
            present: dict[str, rivals.Crew] = {}
            for number, rival in enumerate(ELSEWHERE):
                try:
                    python = interpreter(rival.environment, cache, smoke=self._given.smoke)
                    folder = self._scratch / f"{self._ranks}-{number}"
                    made = rivals.crew(rival, self._ranks, python, folder)
                    present[rival.name] = stack.enter_context(made)
                except (NotBuiltError, rivals.CrewError) as why:
                    self._absent(rival.name, why)
            yield present

    def _absent(self, name: str, why: Exception) -> None:
        """Add a row that says why a rival was not measured."""
        self._out.rows.append((self._ranks, "-", name, str(why).splitlines()[0], *["-"] * 4))

    def _take_turns(self, kib: int, own: Crew, here: Crew, others: dict[str, rivals.Crew]) -> None:
        """Run one round of one size on all systems."""
        calls = 3 if self._given.smoke else CALLS[kib]
        for how in (*OWN, *HERE):
            took = (own if how in OWN else here).reduce(how, kib << 8, calls)
            self._note(kib, OWN.get(how, how), took.us, right(took, self._ranks))
        for name in list(others):
            try:
                self._note(kib, name, *others[name].reduce(kib << 8, calls))
            except rivals.CrewError as why:
                others.pop(name)
                self._absent(name, why)

    def _note(self, kib: int, name: str, took_us: list[float], is_right: bool) -> None:
        self._us.setdefault((kib, name), []).append(took_us)
        self._sums.append(f"{kib} {name} {is_right}")
        if not is_right:
            self._wrong.append(f"{name}, {kib} KiB")

    def _limit_us(self, kib: int) -> float:
        """Return the memory's limit on a reduction of this size."""
        return 2 * self._ranks * (kib << 10) / r.middle(self._rates) * 1e6

    def _middle_us(self, kib: int, name: str) -> float:
        return r.middle(r.middle(one) for one in self._us[kib, name])

    def _best_us(self, kib: int, name: str) -> float | None:
        """Return the time of the best rival that begins a call in the same way, or None."""
        beside = NAMES[1:] if name in NAMES else HERE
        return min(
            (self._middle_us(*key) for key in self._us if key in product([kib], beside)),
            default=None,
        )

    def _tell(self, facts: str) -> None:
        """Add the rows, checks, hashes and notes of this number of ranks to the report."""
        out, ranks = self._out, self._ranks
        for (kib, name), rounds in self._us.items():
            middles = [r.middle(one) for one in rounds]
            p95 = r.share([us for one in rounds for us in one], 0.95)
            middle_us, spread = r.middle(middles), r.percent(r.spread(middles))
            best_us = self._best_us(kib, name)
            ratio = best_us / middle_us if best_us else "-"
            out.rows.append((ranks, kib, name, middle_us, p95, spread, self._limit_us(kib), ratio))
            out.details[f"P={ranks} {kib} KiB {name}: us per round"] = middles
        out.checks[f"P={ranks}: every system has the sum on every rank"] = not self._wrong
        out.hashes[f"P={ranks}"] = r.one_hash(sorted(set(self._sums)))
        rate, spread = r.middle(self._rates) / 1e9, r.percent(r.spread(self._rates))
        out.notes.append(
            f"P={ranks}: copying {rate:.1f} GB/s read and written, all ranks together (spread "
            f"{spread}); Paceline's loop: {facts}" + "".join(f"; wrong: {w}" for w in self._wrong)
        )

    def _judge(self) -> None:
        """Add the bars of this number of ranks to the report."""
        for kib, name in self._us:
            if name in (SHM, AWAKE) and kib >= 1024:
                self._judge_large(kib, name)
        for kib in (kib for kib in KIB if kib <= 16):
            shm_us = self._middle_us(kib, SHM)
            rivals_us = {"gloo, which does not spin": self._middle_us(kib, "gloo")}
            if self._ranks == 4:
                rivals_us["MPI_Allreduce"] = self._middle_us(kib, "MPI_Allreduce")
            for rival, us in rivals_us.items():
                text = f"P={self._ranks}, {kib} KiB: {SHM} / {rival}"
                self._out.bars.append(r.Bar(text, shm_us / us, 2.0, at_least=False))

    def _judge_large(self, kib: int, name: str) -> None:
        what, took_us = f"P={self._ranks}, {kib} KiB", self._middle_us(kib, name)
        if best_us := self._best_us(kib, name):
            self._out.bars.append(r.Bar(f"{what}: best rival / {name}", best_us / took_us, 2.0))
        limit = self._limit_us(kib) / took_us
        self._out.bars.append(r.Bar(f"{what}: memory's limit / {name}", limit, 0.9))


if __name__ == "__main__":
    main(run, __doc__)
