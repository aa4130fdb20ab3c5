"""B8: a rank is killed and comes back; seconds without progress, beside torchrun and torchft.

Three processes run steps of 30 ms, and one of them gets kill -9 after about forty-five steps. All
systems are started for real, one after the other in each round. Progress is a step that no process
had finished before. "stall" is the time from the kill to the next progress. "join pause" is the
longest later pause, while the lost process comes back, less the usual step. "whole again" is the
time from the kill until all processes took part. torchrun stops all workers, starts them again, and
goes back to its last snapshot (every ten steps). It never trains on without the lost one, so a job
of its elastic form shows what a joining node costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from benchmarks import systems
from benchmarks.harness import Report, benchmark, interleave, middle
from benchmarks.network import free_port
from benchmarks.rounds import NS
from benchmarks.systems import DIE_AT, Line, SystemRun
from testing.temporary import temporary_folder

STEP_MS = 30
WIDTH = 8192
RANKS = 3
AFTER_S = 1.0
"""Time for which training continues after all processes are back."""
BAR_STALL_S = 0.5
BAR_JOIN_S = 0.2


@dataclass
class Recoveries:
    """Figures of one system, one value per round."""

    stall_s: list[float] = field(default_factory=list)
    join_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)
    detected_s: list[float] = field(default_factory=list)
    """Time from the kill until the coordinator knew; Paceline only."""
    failures: list[str] = field(default_factory=list)
    """Error messages of the runs that timed out."""

    def attempt(self, run: Callable[..., None], *given: Any) -> None:
        """Run a system once; a timeout costs it this round and does not end the benchmark."""
        try:
            run(*given, recoveries=self)
        except TimeoutError as error:
            self.failures.append(str(error))


def firsts(lines: list[Line]) -> list[Line]:
    """Return the lines that report progress: each one is a step beyond all before it."""
    best, progress = 0, []
    for line in lines:
        if line.step > best:
            best = line.step
            progress.append(line)
    return progress


def gaps_s(lines: list[Line]) -> list[float]:
    """Return the seconds between consecutive lines."""
    return [(b.ns - a.ns) / NS for a, b in pairwise(lines)]


def after_death(run: SystemRun) -> Callable[[list[Line]], bool]:
    """Return a predicate: after the kill, all processes have taken part again for AFTER_S.

    Returns:
        Function for `SystemRun.wait`.
    """

    def enough(lines: list[Line]) -> bool:
        death = run.death()
        if death is None:
            return False
        later = [line for line in firsts(lines) if line.ns > death["ns"]]
        back = next((x.ns for x in _whole(later, run.ranks)), None)
        return back is not None and later[-1].ns > back + AFTER_S * NS

    return enough


def _whole(later: list[Line], ranks: int) -> list[Line]:
    """Return the lines in which all ranks take part again after the kill.

    They begin behind the first line with fewer ranks, if there is one.

    Returns:
        The lines, in order.
    """
    smaller = [i for i, line in enumerate(later) if line.taking_part < ranks]
    # A step that was in flight when the process died may still report all ranks.
    begin = smaller[0] if smaller else 0
    return [line for line in later[begin:] if line.taking_part >= ranks]


def judge(run: SystemRun, recoveries: Recoveries, *, restarts_all: bool) -> None:
    """Read the figures of a run with a kill and add them to those of its system.

    `restarts_all` is True for a system that restarts all workers, and so repeats steps.
    """
    death = run.death()
    assert death is not None
    lines = run.lines()
    progress = firsts(lines)
    before = [line for line in progress if line.ns <= death["ns"]]
    later = [line for line in progress if line.ns > death["ns"]]
    usual = middle(gaps_s(before[-25:]))
    # Skip the step that the survivors still finished with the victim's gradient.
    resumed = next(
        (
            b
            for a, b in zip([before[-1], *later], later, strict=False)
            if _is_new(a, b, death["ns"])
        ),
        later[0],
    )
    recoveries.step_s.append(usual)
    recoveries.stall_s.append((resumed.ns - death["ns"]) / NS)
    recoveries.whole_s.append((_whole(later, run.ranks)[0].ns - death["ns"]) / NS)
    told_again = [x for x in lines if x.ns > death["ns"] and x.step <= before[-1].step]
    recoveries.repeated.append(
        len({x.step for x in told_again if x.ns < resumed.ns}) * restarts_all
    )
    if not restarts_all:
        rest = [line for line in later if line.ns >= resumed.ns]
        recoveries.join_s.append(max(gaps_s(rest)) - usual)


def _is_new(before: Line, line: Line, death_ns: int) -> bool:
    """Return True if a line is a step without the victim.

    Such a step has fewer ranks than the one before, or ends well after the kill.

    Returns:
        True if training has resumed with this line.
    """
    return line.taking_part < before.taking_part or line.ns - death_ns > 2 * STEP_MS * 1e6


# ---- one run of each system ----------------------------------------------------------------------


def paceline(folder: Path, ranks: int, backend: str, recoveries: Recoveries) -> None:
    """Run Paceline once with a kill and add its figures."""
    run = SystemRun(folder, STEP_MS, WIDTH, ranks)
    try:
        systems.start_paceline(run, backend)
        run.wait(after_death(run), "recovery")
        status = systems.end_paceline(run)
    finally:
        run.end()
    judge(run, recoveries, restarts_all=False)
    death = run.death()
    assert death is not None
    known = [c["wall_s"] for c in status["changes"] if c["wall_s"] >= death["wall_s"] - 0.01]
    if known:
        recoveries.detected_s.append(max(0.0, known[0] - death["wall_s"]))


def torchrun(folder: Path, ranks: int, recoveries: Recoveries) -> None:
    """Run torchrun once with a kill and add its figures."""
    run = SystemRun(folder, STEP_MS, WIDTH, ranks)
    try:
        systems.start_torchrun(run)
        run.wait(after_death(run), "recovery")
    finally:
        run.end()
    judge(run, recoveries, restarts_all=True)


def torchrun_join(folder: Path, _: int, recoveries: Recoveries) -> None:
    """Let one node train and another one join, and add the pause that this costs."""
    run = SystemRun(folder, STEP_MS, WIDTH, 2)
    port = free_port()
    (folder / "death.json").write_text("{}")  # no process is to die
    try:
        systems.start_elastic(run, port)
        run.wait(lambda lines: bool(lines) and lines[-1].step >= DIE_AT, "training")
        systems.start_elastic(run, port)
        run.wait(lambda lines: len([x for x in firsts(lines) if x.taking_part == 2]) > 20, "join")
    finally:
        run.end()
    progress = firsts(run.lines())
    recoveries.join_s.append(max(gaps_s(progress)) - middle(gaps_s(progress)))


def torchft(folder: Path, ranks: int, python: str, recoveries: Recoveries) -> None:
    """Run torchft once with a kill and add its figures.

    This function restarts the dead replica at once, as its user's scheduler would have to.
    """
    run = SystemRun(folder, STEP_MS, WIDTH, ranks)
    port = free_port()
    try:
        systems.start_lighthouse(run, python, port)
        replicas = [systems.start_torchft(run, python, place, port) for place in range(ranks)]
        enough = after_death(run)
        restarted = False

        def look(lines: list[Line]) -> bool:
            nonlocal restarted
            if not restarted and replicas[1].poll() is not None:
                restarted = True
                systems.start_torchft(run, python, 1, port)
            return enough(lines)

        run.wait(look, "recovery")
    finally:
        run.end()
    judge(run, recoveries, restarts_all=False)


def row(name: str, recoveries: Recoveries) -> tuple[Any, ...]:
    """Return the table row of one system."""

    def cell(values: list[float]) -> str:
        if not values:
            return "-"
        return f"{middle(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    return (
        name,
        cell(recoveries.stall_s),
        cell(recoveries.whole_s),
        cell(recoveries.join_s),
        middle(recoveries.repeated) if recoveries.repeated else "-",
        cell(recoveries.detected_s),
        1000 * middle(recoveries.step_s) if recoveries.step_s else "-",
        len(recoveries.failures),
    )


def add_bars(out: Report, recoveries: dict[str, Recoveries]) -> None:
    """Add the bars for Paceline's stalls and joins, and the comparison with torchrun's stalls."""
    for name in ("Paceline, mpi", "Paceline, gloo"):
        mine = recoveries[name]
        beyond = [a - b for a, b in zip(mine.stall_s, mine.detected_s, strict=False)]
        worst = max(beyond, default=99.0)
        text = f"{name}: s from detection to progress, worst of the rounds"
        out.at_most(text, worst, BAR_STALL_S)
        out.at_most(f"{name}: join pause, s, median", middle(mine.join_s), BAR_JOIN_S)
        if stalls := recoveries["torchrun"].stall_s:
            over = [a / b for a, b in zip(stalls, mine.stall_s, strict=False)]
            out.notes.append(f"torchrun's stall over that of {name}: {middle(over):.0f}")


@benchmark(
    "B8: kill -9 of one of three processes, and its return; seconds, median (range)",
    (
        *("system", "stall", "whole again", "join pause", "steps done twice", "detected"),
        *("usual step ms", "runs that failed"),
    ),
    {"--torchft": {"default": "", "metavar": "PYTHON", "help": "that can import torchft"}},
)
def run(out: Report) -> None:
    """Run B8; everything is started for real."""
    ranks = 2 if out.smoke else RANKS
    sides: dict[str, Callable[..., None]] = {"Paceline, mpi": partial(paceline, backend="mpi")}
    if not out.smoke:
        sides["Paceline, gloo"] = partial(paceline, backend="gloo")
        sides["torchrun, node joins"] = torchrun_join
    sides["torchrun"] = torchrun
    if out.given.torchft:
        sides["torchft"] = partial(torchft, python=out.given.torchft)
    by_system = {name: Recoveries() for name in sides}
    with temporary_folder() as scratch:
        numbers = count()

        def turn(name: str) -> None:
            by_system[name].attempt(sides[name], scratch / str(next(numbers)), ranks)

        interleave(1 if out.smoke else out.rounds, {name: partial(turn, name) for name in sides})
    out.rows += [row(name, values) for name, values in by_system.items()]
    if not out.smoke:
        add_bars(out, by_system)
    out.notes.append("limit of a stall: one step, since the step under way is lost; of a join: 0")
    out.notes.append(
        f"{64 * WIDTH * 2 * 4 / 1e6:.1f} MB of weights and as much of momentum; a returning "
        "process starts Python and torch anew on the same cores, which is part of the join pause"
    )
    if "torchft" not in sides:
        out.notes.append("torchft was not measured: no --torchft PYTHON was given")
    for name in (name for name in sides if name.startswith("Paceline")):
        out.checks[f"{name} trained on after every kill"] = not by_system[name].failures
    out.samples |= {name: vars(values) for name, values in by_system.items()}
