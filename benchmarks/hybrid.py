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
    percent,
    ratios,
    spread,
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
EPOCHS: Final = {1: 12, 2: 16, 4: 20, 8: 40}
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


@benchmark(
    "Groups of two ranks beside replicas, seconds to the same loss, emulated computing",
    (
        *("ranks", "copies of the model", "step ms", "steps", "epochs", "seconds", "spread"),
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
        found = interleave(1 if out.smoke else out.rounds, sides)
        base = [seconds for seconds, _, _ in found[f"{ranks} of 1"]]
        for model, (name, runs) in zip((1, 2), found.items(), strict=True):
            seconds, steps = [s for s, _, _ in runs], middle(float(n) for _, n, _ in runs)
            epochs = steps * config["batch"] * (ranks // model) / config["samples"]
            speed = ratios(base, seconds)
            out.rows.append(
                (
                    *(ranks, name, middle(ms for _, _, ms in runs), round(steps), epochs),
                    *(middle(seconds), percent(spread(seconds)), middle(speed)),
                    f"{min(speed):.2f} to {max(speed):.2f}",
                )
            )
            out.samples[f"{ranks} ranks, {name}"] = [
                {"seconds": s, "steps": n, "step ms": ms} for s, n, ms in runs
            ]
    out.notes.append(
        f"target: a mean loss below {TARGET} in {WINDOW} batches of one copy; batch "
        f"{config['batch']} per copy, learning rate {config['rate']} per copy; a copy on one rank "
        f"computes {2 * (config['forward_ms'] + config['backward_ms']):g} ms per batch, all emulated"
    )
