"""B1 as a plain DDP script: hyperplane regression, in each step one random rank is late.

late_ddp.py FOLDER WORK_MS STEPS DELAY_MS...

For each delay the model begins with its first weights and makes STEPS steps. FOLDER gets one file
for each rank, with the nanoseconds at which its steps ended, its loss and the sum of its weights,
by delay.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

BATCH = 256
DIMENSIONS = 1024


def main() -> None:
    """Train once for each delay, and write what was measured."""
    folder, work_s = Path(sys.argv[1]), float(sys.argv[2]) / 1000
    steps, delays_ms = int(sys.argv[3]), [float(word) for word in sys.argv[4:]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plane = torch.randn(DIMENSIONS, 1) / DIMENSIONS**0.5
    own = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(8 * BATCH, DIMENSIONS, generator=own)
    y = x @ plane + 0.1 * torch.randn(len(x), 1, generator=own)
    # One model for all delays: the steps of a script with several of them wait for all ranks.
    model = DistributedDataParallel(torch.nn.Linear(DIMENSIONS, 1))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    results = []
    for delay_ms in delays_ms:
        late = random.Random(delay_ms)  # the same ranks are late in every mode
        model.load_state_dict(first)
        ends = []
        dist.barrier()
        for step in range(steps):
            begun = time.perf_counter()
            pause_s = work_s + (delay_ms / 1000 if late.randrange(size) == rank else 0.0)
            part = slice(step % 8 * BATCH, (step % 8 + 1) * BATCH)
            optimizer.zero_grad()
            loss = mse_loss(model(x[part]), y[part])
            time.sleep(max(0.0, pause_s - (time.perf_counter() - begun)))
            loss.backward()
            optimizer.step()
            ends.append(time.monotonic_ns())
        with torch.no_grad():
            after = mse_loss(model(x), y).reshape(1)
        dist.all_reduce(after)
        total = sum(p.double().sum().item() for p in model.parameters())
        results.append({"ends": ends, "loss": after.item() / size, "sum": total})
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))


main()
