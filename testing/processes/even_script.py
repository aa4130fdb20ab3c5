"""A script whose steps all take the same time, for tests that are not about speed."""

from __future__ import annotations

_SCRIPT = """
import time
import torch
import paceline as pl

pl.init()
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones({samples}, 4), torch.ones({samples}, 1))
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
loader = pl.DataLoader(data, batch_size=8, seed=0)
for epoch in loader.epochs(1):
    for x, y in loader:
        time.sleep(0.02 if pl.size() >= {together} else {alone_s})
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""


def even_steps(samples: int, *, together: int = 1, alone_s: float = 0.5) -> str:
    """Return a script of one epoch, with eight samples to a batch and 20 ms to a step.

    Args:
        samples: samples of the epoch.
        together: with fewer ranks than this, steps take `alone_s`, so that ranks that join still
            find the job on a slow machine.
        alone_s: seconds of such a step.

    Returns:
        the text of the script.
    """
    return _SCRIPT.format(samples=samples, together=together, alone_s=alone_s)
