"""B2: one reduction over Paceline's MPI links and in shared memory, beside MPI_Allreduce and gloo.

Every system has ranks of its own, which are asked in turn: what is compared runs seconds apart. A
time runs from the moment at which all ranks have begun until the last one has the sum. MPICH has
its best form: one world, shared memory between its ranks, one thread where each has a core;
Paceline's links, which survive a death, are TCP connections. The limit is memory: P parts are read
and P results written, at the rate at which the same ranks copy together. It says nothing where a
payload fits the caches. `shm` sums where the buffers lie, in memory that the ranks hand to each
other, as in a job whose ranks share a machine or a pod.
"""

from __future__ import annotations

from paceline.core.collectives.schedules import ALGORITHMS

from benchmarks import report as r
from benchmarks.command import Options, main
from benchmarks.lab import Lab
from benchmarks.reducers import crews, right

KIB = (4, 64, 1024, 16 * 1024)
CALLS = {4: 20, 64: 20, 1024: 10, 16 * 1024: 3}
COPY_ELEMENTS = 8 << 20
RIVALS = ("MPI_Allreduce", "gloo")
OWN = {
    **{f"mpi:{algorithm}": f"paceline mpi:{algorithm}" for algorithm in ALGORITHMS},
    "shm": "paceline shm",
}


def run(lab: Lab, given: Options) -> r.Report:  # noqa: ARG001
    out = r.Report(
        "b2_allreduce",
        "B2: one reduction beside the rivals",
        ("P", "KiB", "system", "us", "p95", "spread", "limit us", "best rival / this"),
        smoke=given.smoke,
    )
    for ranks in (2,) if given.smoke else (2, 4):
        add_rows(out, ranks, given)
    return out


def add_rows(out: r.Report, ranks: int, given: Options) -> None:
    sizes = KIB[:2] if given.smoke else KIB
    found: dict[tuple[int, str], list[list[float]]] = {}
    rates: list[float] = []
    sums: list[str] = []
    wrong: list[str] = []
    with crews(("paceline", "rivals"), ranks) as (own, rivals):
        facts = {**own.ask("describe")[0], **rivals.ask("describe")[0]}
        for _ in range(given.rounds):
            rates.append(sum(own.ask("bandwidth", COPY_ELEMENTS)))
            for kib in sizes:
                calls = 3 if given.smoke else CALLS[kib]
                for how in (*OWN, *RIVALS):
                    crew = rivals if how in RIVALS else own
                    name = OWN.get(how, how)
                    took = crew.reduce(how, kib << 8, calls)
                    found.setdefault((kib, name), []).append(took.us)
                    sums.append(f"{kib} {name} {took.sums}")
                    if not right(took, ranks):
                        wrong.append(f"{name} {kib} KiB: {took.sums}")
    for (kib, name), rounds in found.items():
        limit_us = 2 * ranks * (kib << 10) / r.middle(rates) * 1e6
        middles = [r.middle(one) for one in rounds]
        best = min(r.middle(r.middle(one) for one in found[kib, rival]) for rival in RIVALS)
        every = [us for one in rounds for us in one]
        ratio = best / r.middle(middles)
        spread = r.percent(r.spread(middles))
        p95 = r.share(every, 0.95)
        out.rows.append((ranks, kib, name, r.middle(middles), p95, spread, limit_us, ratio))
        out.details[f"P={ranks} {kib} KiB {name}: us per round"] = middles
    out.checks[f"P={ranks}: every system has the sum on every rank"] = not wrong
    out.hashes[f"P={ranks}"] = r.one_hash(sums)
    out.notes.append(
        f"P={ranks}: copying {r.middle(rates) / 1e9:.1f} GB/s read and written, all ranks together "
        f"(spread {r.percent(r.spread(rates))}); Paceline's loop: {facts['loop']}; {facts['mpi']}"
        + "".join(f"; wrong: {one}" for one in wrong)
    )


if __name__ == "__main__":
    main(run, __doc__)
