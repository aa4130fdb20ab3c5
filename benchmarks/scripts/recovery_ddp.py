"""B8 with torchrun: DDP on gloo with its own snapshots, as in PyTorch's elastic tutorial."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.progress import (
    CONFIG,
    FOLDER,
    Progress,
    loss_of,
    make_model,
    make_optimizer,
    perhaps_die,
)

SNAPSHOT = FOLDER / "snapshot.pt"


def main() -> None:
    """Train forever, from the last snapshot if there is one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    optimizer = make_optimizer(model)
    step = 0
    if SNAPSHOT.exists():
        saved = torch.load(SNAPSHOT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    replicated = DistributedDataParallel(model)
    progress = Progress(str(rank))
    while True:
        optimizer.zero_grad()
        loss_of(replicated, step).backward()
        optimizer.step()
        step += 1
        progress.tell(step, size)
        if rank == 0 and step % CONFIG["snapshot_every"] == 0:
            draft = SNAPSHOT.with_suffix(".draft")
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, draft)
            os.replace(draft, SNAPSHOT)  # noqa: PTH105
        perhaps_die(rank, step)


main()
