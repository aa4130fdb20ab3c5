"""The anatomy of a step: four knobs, and two findings as formulas (Li, Nicolae et al., MLHPC 2019).

    a   workers, processes of a worker, threads, batch: one changed at a time
    b   one rank is late in Full: in front of its step, of backward(), or of the last segment
    c   background work in the gap between two updates: evaluation, data, a checkpoint

The device is emulated as in B10's part a, so that two cores carry the ranks: 8 layers, 8 ms forward
and 16 ms backward each at batch 32. The link is emulated as well: a token bucket, as fast as all
workers together would be with a link each. The knob `threads` needs real computing on the cores,
because an emulated device ignores it. The parts of a step are those that the ranks record
themselves, as `paceline report` reads them; throughput follows from these steps.

In the formulas, the computing of a step is 1, and a third of it is forward. The sums of the
gradient take C, in n equal segments. Each segment is summed as soon as all ranks have it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Final

import msgspec
from paceline.core.anatomy.dissect import Part
from paceline.core.anatomy.job import analyse
from paceline.core.anatomy.samples import PodSamples, RankSamples
from paceline.core.forecast.model import streamed_s
from paceline.core.status import Fact

from benchmarks import network
from benchmarks.b10_ddp import SETTLE_S, Load, emulated, link_bits, transformer
from benchmarks.harness import Report, benchmark, middle, percent, spread
from benchmarks.lab import Lab, Phase, Plan, Ran
from benchmarks.rounds import check_job

PARTS: Final = "abc"
FORWARD: Final = 1 / 3
BATCH: Final = 32
"""Batch size at which the layers take their configured times."""
BATCHES: Final = (16, 32, 64)
THREADS: Final = (1, 2)
SHARE: Final = 0.5
"""C of two workers in part a."""
SHARES: Final = (0.5, 1.0, 1.5)
"""Values of C in part b: they hide nothing, a part, and most of a delay."""
GAP_SHARE: Final = 1.0
"""C in part c: the gap holds computing and sums that nothing hides."""
LATE: Final = ("", "step", "backward", "last segment")
WORKS: Final = (
    ("", 0.0),
    ("evaluation", 0.5),
    ("evaluation", 1.75),
    ("data", 1.25),
    ("data", 1.75),
    ("data in Python", 0.5),
)
"""Work of a thread of rank 0 in each step of part c: its kind, and its length relative to the
computing."""
EVERY: Final = 8
"""Rounds between two checkpoints, and the most that one checkpoint may take."""
UNTOUCHED: Final = range(EVERY // 2, EVERY)
"""Rounds after a checkpoint at which it is on the disk and disturbs nothing."""
WARM_S: Final = 1.0
PHASE_S: Final = 2.0
WITHIN: Final = 0.05
"""Tolerance of the bars between formula and machine, as a share of the delay."""


# ---- the formulas ----------------------------------------------------------------------------


def hides(c: float, n: int) -> float:
    """Return how much of a delay in front of the last segment the sums can hide at most.

    They have n - 1 segments left to sum meanwhile, and continue when the last one is there.

    Args:
        c: Time of the sums, relative to the computing.
        n: Number of segments.

    Returns:
        Time relative to the computing.
    """
    return max(0.0, (c - (1 - FORWARD)) * (1 - 1 / n))


def bound(c: float, n: int) -> float:
    """Return the part of the sums that is left when backward() ends.

    No delay inside backward() can hide more.

    Args:
        c: Time of the sums, relative to the computing.
        n: Number of segments.

    Returns:
        Time relative to the computing.
    """
    return max(0.0, c - (1 - FORWARD) * (1 - 1 / n))


def paid(what: str, much: float, c: float, n: int) -> float:
    """Return by how much a step grows through a delay or through background work.

    Args:
        what: What the last rank is late in front of, or work beside the step: evaluation has to end
            before step(), data before the next batch.
        much: Length of the delay or the work, relative to the computing.
        c: Time of the sums, relative to the computing.
        n: Number of segments.

    Returns:
        Time relative to the computing.
    """
    match what:
        case "last segment":
            return much - min(much, hides(c, n))
        case "evaluation":
            return max(0.0, much - 1 - hides(c, n))
        case "data" | "data in Python":
            return max(0.0, much - step(c, n))
        case _:
            return much


def step(c: float, n: int) -> float:
    """Return the length of a step without late ranks and without the update: B10's limit."""
    return streamed_s(1, c, n)


# ---- records of the ranks ----------------------------------------------------------------------


@dataclass(frozen=True)
class Repetition:
    """Figures of one phase: means over the ranks, in seconds of a step."""

    samples_per_s: float
    step_s: float
    computing_s: float
    blocked_s: float
    exposed_s: float
    hidden_s: float
    gap_s: float
    sums_s: float
    """Time of the sums on the rank with the least, which waits for no other rank inside them."""
    segments: int
    streamed: float
    """Share of the rounds that were streamed."""
    late_s: float
    """Computing of the last rank."""

    @property
    def c(self) -> float:
        """C: the sums as a share of the computing."""
        return self.sums_s / self.computing_s


def cut(pods: Sequence[PodSamples], begun_ns: float, ended_ns: float) -> list[PodSamples]:
    """Return the steps and rounds that lie completely inside a time span."""

    def within(begin_ns: int, end_ns: int) -> bool:
        return begun_ns <= begin_ns and end_ns <= ended_ns

    def of(rank: RankSamples) -> RankSamples:
        return msgspec.structs.replace(
            rank,
            steps=tuple(s for s in rank.steps if within(s.began_ns, s.resumed_ns)),
            rounds=tuple(s for s in rank.rounds if within(s.go_ns, s.update_ended_ns)),
        )

    return [msgspec.structs.replace(pod, ranks=tuple(map(of, pod.ranks))) for pod in pods]


def counted(ran: Ran, at: int) -> tuple[float, float]:
    """Return begin and end in ns of a phase, without its first SETTLE_S."""
    return ran.phases[at]["begun"] + SETTLE_S * 1e9, ran.phases[at]["ended"]


def measured(ran: Ran, at: int, batch: int) -> Repetition:
    """Return the figures of a phase.

    Args:
        ran: Results of a job with samples.
        at: Index of the phase.
        batch: Samples of one step of one rank.

    Returns:
        Means over the ranks.
    """
    begun_ns, ended_ns = counted(ran, at)
    pods = cut(ran.pods(at), begun_ns, ended_ns)
    few = min(len(rank.steps) for pod in pods for rank in pod.ranks)
    assert few, f"only {few} steps in {ran.phases[at]['name']}; make it longer"
    job = analyse(pods)
    ranks = [rank.anatomy for rank in job.ranks]
    rounds = [sample for rank in job.ranks for sample in rank.samples.rounds]
    last = max(job.ranks, key=lambda rank: rank.worker).anatomy
    return Repetition(
        samples_per_s=batch * len(ranks) / job.step_s,  # in Full each step of each rank is applied
        step_s=job.step_s,
        computing_s=job.parts[Part.FORWARD] + job.parts[Part.BACKWARD],
        blocked_s=job.parts[Part.BLOCKED],
        exposed_s=job.parts[Part.REDUCTION],
        hidden_s=fmean(sum(rank.hidden.values()) for rank in ranks),
        gap_s=fmean(rank.gap_s for rank in ranks),
        sums_s=min(sum(rank.hidden.values()) + sum(rank.exposed.values()) for rank in ranks),
        segments=max(len(sample.segments) for sample in rounds),
        streamed=fmean(sample.streamed for sample in rounds),
        late_s=last.parts[Part.FORWARD] + last.parts[Part.BACKWARD],
    )


# ---- jobs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A lab in a network of its own, and the sizes of this run."""

    lab: Lab
    link: network.Link | None
    smoke: bool
    repetitions: int

    @property
    def load(self) -> Load:
        """Emulated load of two workers with one process each."""
        load = emulated(2, self.smoke)
        if self.smoke:
            sizes = {"elements": 1 << 14}
        else:
            sizes = {"layers": 8, "elements": 500_000, "forward_ms": 8, "backward_ms": 16}
        return replace(load, config={**load.config, **sizes, "batch": BATCH})

    @property
    def computing_ms(self) -> int:
        """Computing of a step in ms."""
        return self.load.layers_ms

    @property
    def rounds(self) -> int:
        """Number of repetitions."""
        return 1 if self.smoke else self.repetitions

    def set_link(self, workers: int, share: float) -> None:
        """Set the shared bucket to the speed of all workers together with a link each.

        On such a link, two workers have the given C.
        """
        if self.link is not None:
            self.link.limit(round(workers * link_bits(self.load, share) / 2))

    def job(
        self,
        load: Load,
        phases: Sequence[Phase],
        *,
        workers: int = 2,
        procs: int = 1,
        spec: Mapping[str, Any] | None = None,
    ) -> Ran:
        """Run a job; one worker alone sums in shared memory, several over the link."""
        ranks = workers * procs
        segment_bytes = 4 * load.config.get("elements", 0)
        return self.lab.run(
            Plan(
                "anatomy.py",
                ranks,
                [Phase("first", WARM_S, knobs=phases[0].knobs), *phases],
                {**load.config, "ranks": ranks},
                collective={
                    "backend": "mpi" if workers > 1 else "shm",
                    "mode": "Full",
                    **({"segmentBytes": segment_bytes} if segment_bytes else {}),
                },
                spec={"replicas": workers, "procsPerReplica": procs, **(spec or {})},
                samples=True,
            )
        )


@dataclass
class Row:
    """Figures of one setting, one value per repetition."""

    part: str
    what: str
    repetitions: list[Repetition]
    put_in_s: float = 0.0
    added_s: float | None = None
    """Time by which the step is longer than the base row's step."""
    formula_s: float | None = None

    def middle(self, name: str) -> float:
        """Return the median of a figure over the repetitions."""
        return middle(getattr(repetition, name) for repetition in self.repetitions)

    def add_to(self, out: Report) -> None:
        """Add this row, and the details of its repetitions, to the report."""

        def ms(seconds: float | None) -> float | str:
            return "-" if seconds is None else 1000 * seconds

        parts = ("computing_s", "blocked_s", "exposed_s", "hidden_s", "gap_s")
        out.rows.append(
            (
                *(self.part, self.what, f"{self.middle('c'):.2f}", self.middle("samples_per_s")),
                *(ms(self.middle("step_s")), percent(spread(x.step_s for x in self.repetitions))),
                *(ms(self.middle(name)) for name in parts),
                *(ms(self.put_in_s or None), ms(self.added_s), ms(self.formula_s)),
            )
        )
        out.samples[f"{self.part}: {self.what}"] = [
            asdict(repetition) for repetition in self.repetitions
        ]


# ---- part a: the knobs -------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Job of part a, and the knob that is changed while it runs."""

    workers: int
    procs: int
    knob: str = "batch"
    values: tuple[int, ...] = (BATCH,)


def setups(smoke: bool) -> tuple[Setup, ...]:
    """Return the jobs of part a."""
    threads = Setup(1, 1, "threads", THREADS)
    if smoke:
        return Setup(2, 1, "batch", BATCHES[:2]), threads
    return (
        *(Setup(1, 1), Setup(2, 1, "batch", BATCHES), Setup(4, 1)),
        *(Setup(1, 2), Setup(2, 2)),
        *(threads, Setup(1, 2, "threads", THREADS)),
    )


def short(load: Load) -> Load:
    """Return the load with two layers.

    With more threads than cores, a step takes many times as long.

    Returns:
        The shorter load.
    """
    return replace(load, config={**load.config, "layers": 2})


def part_a(out: Report, place: Place) -> None:
    """Measure workers, processes, batch sizes and threads."""
    rows: dict[str, Row] = {}
    for _ in range(place.rounds):
        for setup in setups(place.smoke):
            real = setup.knob == "threads"
            load = short(transformer(place.smoke)) if real else place.load
            place.set_link(setup.workers, SHARE)
            turns = [
                Phase(f"{setup.knob} {value}", PHASE_S, knobs={setup.knob: value})
                for value in setup.values
            ]
            ran = place.job(load, turns, workers=setup.workers, procs=setup.procs)
            size = f"{setup.workers} x {setup.procs}"
            check_job(out, ran, f"part a, {size}, {'threads' if real else 'batch'}", counted=False)
            for at, value in enumerate(setup.values, 1):
                batch = load.config["sentences"] if real else value
                what = f"{size}, {setup.knob} {value}"
                row = rows.setdefault(what, Row("a", what, []))
                row.repetitions.append(measured(ran, at, batch))
    for row in rows.values():
        row.add_to(out)
    out.notes.append(
        "part a: workers x processes of each. A worker alone sums in shared memory; 2 x 2 is one "
        "machine to the runtime, so it sums in one level, over links that two processes share"
    )
    out.notes.append("part a, threads: a transformer on the cores, all else is emulated")


# ---- part b: late ranks ------------------------------------------------------------------------


def part_b(out: Report, place: Place) -> None:
    """Measure late ranks and compare them with the formulas."""
    late_ms = place.computing_ms
    for share in SHARES[1:2] if place.smoke else SHARES:
        place.set_link(2, share)
        phases = [
            Phase(where or "nobody", PHASE_S, knobs={"late": where, "late_ms": late_ms})
            for _ in range(place.rounds)
            for where in LATE
        ]
        ran = place.job(place.load, phases)
        check_job(out, ran, f"part b, C={share:g}", counted=False)
        blocks = [measured(ran, at, BATCH) for at in range(1, len(phases) + 1)]
        by_place = {where: blocks[at :: len(LATE)] for at, where in enumerate(LATE)}
        base = Row("b", f"C={share:g}, nobody is late", by_place[""])
        base.add_to(out)
        c, n = base.middle("c"), by_place[""][0].segments
        computing_s = base.middle("computing_s")
        much = late_ms / 1000 / computing_s
        for where in LATE[1:]:
            rows = by_place[where]
            added = middle(a.step_s - b.step_s for a, b in zip(rows, by_place[""], strict=True))
            Row(
                *("b", f"C={share:g}, late in front of its {where}", rows),
                put_in_s=late_ms / 1000,
                added_s=added,
                formula_s=computing_s * paid(where, much, c, n),
            ).add_to(out)
            text = f"part b, C={share:g}, in front of its {where}: share of the delay that is"
            hidden = 1 - added / (late_ms / 1000)
            if where == "last segment":
                most = min(1.0, bound(c, n) / much) + WITHIN
                out.at_most(f"{text} hidden", hidden, most)
            else:
                out.at_least(f"{text} paid", 1 - hidden, 1 - WITHIN)
            slept = f"part b, C={share:g}, {where}: the last rank was late in every step"
            out.checks[slept] = all(x.late_s >= late_ms / 1000 for x in rows)
        out.notes.append(
            f"part b, C={share:g}: {n} segments, {percent(base.middle('streamed'))} of the "
            f"rounds streamed; hidden at most {1000 * computing_s * bound(c, n):.0f} ms"
        )


# ---- part c: the gaps ----------------------------------------------------------------------------


def part_c(out: Report, place: Place) -> None:
    """Measure background work in the gap between two updates."""
    place.set_link(2, GAP_SHARE)
    phases = [
        Phase(
            *(f"{what} {much}", PHASE_S),
            knobs={"work": what, "work_ms": round(much * place.computing_ms)},
        )
        for _ in range(place.rounds)
        for what, much in WORKS
    ]
    ran = place.job(place.load, phases)
    check_job(out, ran, "part c", counted=False)
    blocks = [measured(ran, at, BATCH) for at in range(1, len(phases) + 1)]
    base = Row("c", "nothing beside it", blocks[:: len(WORKS)])
    base.add_to(out)
    c, n, computing_s = base.middle("c"), base.repetitions[0].segments, base.middle("computing_s")
    for at, (what, much) in list(enumerate(WORKS))[1:]:
        rows = blocks[at :: len(WORKS)]
        put_in_s = round(much * place.computing_ms) / 1000
        Row(
            *("c", f"{what}, {much:g} of the computing", rows),
            put_in_s=put_in_s,
            added_s=middle(
                a.step_s - b.step_s for a, b in zip(rows, base.repetitions, strict=True)
            ),
            formula_s=computing_s * paid(what, put_in_s / computing_s, c, n),
        ).add_to(out)
    out.checks["part c: rank 0 had work beside its steps"] = ran.probes[0]["worked"] > 0
    idle_s = base.middle("gap_s") - base.middle("exposed_s") - base.middle("hidden_s")
    out.notes.append(
        f"part c: of a gap of {1000 * base.middle('gap_s'):.0f} ms between two updates the loop "
        f"waits for its device for {1000 * computing_s:.0f}, and the link is idle for "
        f"{1000 * idle_s:.0f}"
    )
    checkpoint_row(out, place)


def checkpoint_row(out: Report, place: Place) -> None:
    """Measure a checkpoint in one job and add its row to the report.

    The steps during a checkpoint are compared with those by which it is on the disk.
    """
    saving = {"checkpoint": {"path": "saved", "everyRounds": EVERY, "keep": 1}}
    seconds = 2 * EVERY * (1 + GAP_SHARE) * place.computing_ms / 1000
    phases = [Phase("saving", SETTLE_S + seconds)] * place.rounds
    ran = place.job(place.load, phases, spec=saving)
    check_job(out, ran, "part c, a checkpoint", counted=False)
    by_age: dict[int, list[float]] = {}
    for at in range(1, len(phases) + 1):
        for pod in cut(ran.pods(at), *counted(ran, at)):
            for sample in (s for rank in pod.ranks for s in rank.steps):
                took_s = (sample.resumed_ns - sample.began_ns) / 1e9
                by_age.setdefault(sample.version % EVERY, []).append(took_s)
    usual_s = middle(s for at in UNTOUCHED for s in by_age.get(at, []))
    added_s = sum(fmean(took) - usual_s for at, took in by_age.items() if at not in UNTOUCHED)
    facts = json.loads((ran.folder / "status.json").read_text())["ranks"][0]["facts"]
    written = max(1.0, facts.get(Fact.SAVED, 0.0))
    copy_s = facts.get(Fact.SAVE_EXPOSED_S, 0.0) / written
    disk_s = facts.get(Fact.SAVE_HIDDEN_S, 0.0) / written
    Row(
        *("c", f"a checkpoint every {EVERY} rounds (for each)", [measured(ran, 1, BATCH)]),
        put_in_s=copy_s + disk_s,
        added_s=added_s,
        formula_s=copy_s,
    ).add_to(out)
    out.checks["part c: checkpoints were written, and none failed"] = bool(
        facts.get(Fact.SAVED, 0.0)
    ) and not facts.get(Fact.SAVE_FAILED, 0.0)
    out.notes.append(
        f"part c, a checkpoint by its own figures: {copy_s:.3f} s of copying, {disk_s:.3f} s of "
        "writing in the background"
    )


@benchmark(
    "The anatomy of a step in Full, emulated device and link; ms per step",
    (
        *("part", "what", "C", "samples/s", "step ms", "spread"),
        *("computing", "blocked", "exposed", "hidden", "gap"),
        *("put in", "added", "formula"),
    ),
    {"--parts": {"default": PARTS, "metavar": "LETTERS", "help": f"of {PARTS[0]} to {PARTS[-1]}"}},
)
def run(out: Report) -> None:
    """Run the study in a lab of its own, inside the emulated network."""
    lacking = network.missing()
    with ExitStack() as stack:
        link = None if lacking else stack.enter_context(network.own_network())
        place = Place(stack.enter_context(Lab(out.stretch)), link, out.smoke, out.rounds)
        if lacking:
            out.notes.append(f"the link is loopback as it is: this machine lacks {lacking}")
        for name, part in {"a": part_a, "b": part_b, "c": part_c}.items():
            if name in out.given.parts:
                part(out, place)
