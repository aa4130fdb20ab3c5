"""Groups of two ranks per copy of the model beside as many replicas of one rank (Pal et al.).

Both sides train the task of examples/two-stages until the loss stays below a target, with the same
batch for each copy of the model. The computing is emulated, so that two cores carry the ranks: a
rank sleeps as long as its share of the model would compute. What a group exchanges, what replicas
reduce, and what the model learns is real. With R ranks there are R replicas or R/2 groups, so a
group needs fewer samples per update, and replicas do more of them at the same time: which of the
two is faster depends on R, and the R from which on groups are is the crossover.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, Final

from benchmarks.harness import (
    Report,
    benchmark,
    interleave,
    middle,
    ratios,
    with_spread,
)
from benchmarks.lab import Plan, Ran
from benchmarks.rounds import NS, check_job

RANKS: Final = (2, 4, 8)
CONFIG: Final[dict[str, Any]] = {
    "samples": 1024,
    "batch": 32,
    "parts": 4,
    "forward_ms": 8,
    "backward_ms": 16,
    "rate": 0.1,
}
EPOCHS: Final = {1: 9, 2: 10, 4: 13, 8: 25}
"""Epochs that are enough for the target, by number of copies of the model."""
TARGET: Final = 0.2
WINDOW: Final = 16
"""Batches of one copy of the model whose mean loss is compared with the target."""
WARM: Final = 10
"""Steps that do not count for the length of a step."""
LIMIT_S: Final = 600.0
COMPUTING: Final = ("forward_ms", "backward_ms")


def plan(ranks: int, model: int, config: dict[str, Any]) -> Plan:
    """Return the job: `ranks` ranks, `model` of which hold one copy of the model."""
    copies = ranks // model
    spec: dict[str, Any] = {"replicas": copies, "procsPerReplica": model}
    if model > 1:
        spec["parallelism"] = {"model": model}
    return Plan(
        "hybrid.py",
        ranks,
        [],
        {"epochs": EPOCHS[copies], **config, "model": model, "copies": copies},
        collective={"mode": "Full", "backend": "auto"},
        spec=spec,
        own_end_s=LIMIT_S,
    )


def reached(ran: Ran) -> tuple[float, int, float]:
    """Return how long a job needed to its target, or to its end if it never got there.

    Args:
        ran: Results of the job.

    Returns:
        Seconds of training, steps, and the median length of a step in ms.
    """
    losses = next(p["losses"] for p in ran.probes if p["losses"][0][1] is not None)
    times_ns = [at for at, _ in losses]
    step_ms = middle((b - a) / 1e6 for a, b in pairwise(times_ns[WARM:]))
    values = [loss for _, loss in losses]
    steps = next(
        (n for n in range(WINDOW, len(values)) if sum(values[n - WINDOW : n]) / WINDOW < TARGET),
        len(values),
    )
    return (times_ns[steps - 1] - times_ns[0]) / NS + step_ms / 1000, steps, step_ms


def add_rows(out: Report, ranks: int) -> None:
    """Add the rows of one number of ranks from its samples.

    Sides are compared by their steps times the median step, which is robust against other users of
    the machine. The seconds as they passed stand beside it.
    """
    base: list[float] = []
    for model in (1, 2):
        copies = ranks // model
        runs = out.samples[f"{ranks} ranks, {copies} of {model}"]
        needed_s = [run["steps"] * run["step ms"] / 1000 for run in runs]
        base = base or needed_s
        speed, steps = ratios(base, needed_s), middle(run["steps"] for run in runs)
        epochs = steps * CONFIG["batch"] * copies / CONFIG["samples"]
        passed_s = middle(run["seconds"] for run in runs)
        out.rows.append(
            (
                *(ranks, f"{copies} of {model}", middle(run["step ms"] for run in runs)),
                *(round(steps), epochs, *with_spread(needed_s), passed_s, middle(speed)),
                f"{min(speed):.2f} to {max(speed):.2f}",
            )
        )


@benchmark(
    "Groups of two ranks beside replicas, seconds to the same loss, emulated computing",
    (
        *("ranks", "copies of the model, of ranks each", "step ms", "steps", "epochs"),
        *("steps x median step, s", "spread", "seconds that passed"),
        *("speed over replicas", "its range"),
    ),
    {"--ranks": {"type": int, "nargs": "+", "default": RANKS}},
)
def run(out: Report) -> None:
    """Run both sides with each number of ranks."""
    config = {**CONFIG, **{name: out.stretch * CONFIG[name] for name in COMPUTING}}
    if out.smoke:
        config |= {"samples": 256, "epochs": 2, "forward_ms": 1, "backward_ms": 1}
    for ranks in (2,) if out.smoke else out.given.ranks:

        def side(model: int, ranks: int = ranks) -> tuple[float, int, float]:
            ran = out.lab.run(plan(ranks, model, config))
            where = f"{ranks} ranks, {model} per copy"
            # The two stages of a group hold different weights.
            check_job(out, ran, where, counted=False, shards=model)
            return reached(ran)

        sides = {f"{ranks // m} of {m}": partial(side, m) for m in (1, 2)}
        results = interleave(1 if out.smoke else out.rounds, sides)
        for name, runs in results.items():
            out.samples[f"{ranks} ranks, {name}"] = [
                {"seconds": s, "steps": n, "step ms": ms} for s, n, ms in runs
            ]
        add_rows(out, ranks)
    out.notes.append(
        f"target: a mean loss below {TARGET} in {WINDOW} batches of one copy; batch "
        f"{config['batch']} per copy, learning rate {config['rate']} per copy; a copy on one rank "
        f"computes {2 * sum(config[name] for name in COMPUTING):g} ms per batch, all emulated"
    )
