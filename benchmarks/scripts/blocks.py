"""B7: rank i alone holds the data of block i of the coefficients, and the last rank is slow.

Each phase has other coefficients to find (knob `problem`), so every mode starts with every block
unlearned. A gradient that is lost, or weighted too low, shows as a block that stays unlearned. Each
rank writes the error of its own block at the end of each phase, when it observes that end: distance
to the coefficients, as a share of the distance when the phase began.
"""

from __future__ import annotations

import time

import paceline as pl
import torch

from benchmarks.probe import CONFIG, Probe

BLOCK = 16
POINTS = 64


def coefficients(problem: int, ranks: int) -> torch.Tensor:
    """Return the coefficients of a problem, of shape (ranks, BLOCK)."""
    return torch.randn(ranks, BLOCK, generator=torch.Generator().manual_seed(problem))


def main() -> None:
    """Train until the job stops."""
    torch.set_num_threads(1)
    probe = Probe()
    pl.init()
    ranks, me = CONFIG["ranks"], int(CONFIG["members"].index(_member()))
    dice = torch.Generator().manual_seed(1000 + me)
    x, _ = torch.linalg.qr(torch.randn(POINTS, BLOCK, generator=dice))
    blocks = torch.nn.Parameter(torch.zeros(ranks, BLOCK))
    model = torch.nn.ParameterList([blocks])
    optimizer = pl.DistributedOptimizer(torch.optim.SGD([blocks], lr=CONFIG["lr"] * ranks), model)
    blocks.sum().mul(0.0).backward()
    optimizer.step()
    problem = -1
    errors: dict[int, float] = {}
    target = start = torch.zeros(BLOCK)
    pause_s = CONFIG["slow_ms" if me == ranks - 1 else "step_ms"] / 1000
    while not optimizer.stopped:
        wanted = int(probe.knob("problem", 0))
        if wanted != problem:
            errors[problem] = error(blocks[me], start, target)
            problem, target = wanted, coefficients(wanted, ranks)[me]
            start = blocks[me].detach().clone()
        time.sleep(pause_s)
        # The columns are orthonormal: one step of rate 1 by this rank alone learns its block.
        loss = 0.5 * (x @ (blocks[me] - target)).square().sum()
        loss.backward()
        probe.step(optimizer)
    pl.finish()
    errors[problem] = error(blocks[me], start, target)
    probe.write(rank=me, hash=optimizer.committed.strong_hash(), errors=errors)


def _member() -> str:
    from benchmarks.probe import MEMBER

    return MEMBER


def error(block: torch.Tensor, start: torch.Tensor, target: torch.Tensor) -> float:
    """Return the distance to the target as a share of the distance at the start."""
    begun = float((start - target).norm())
    return float((block.detach() - target).norm()) / max(begun, 1e-9)


main()
