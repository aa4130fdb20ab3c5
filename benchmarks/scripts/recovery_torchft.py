"""B8 with torchft: one process per replica group, DDP semantics by its manager, gloo.

It trains as torchft's own example does: quorum per step, allreduce of the gradients, commit by
vote. A replica that comes back gets the state from a living one.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import (  # type: ignore[import-not-found,unused-ignore]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

from benchmarks.progress import Progress, loss_of, make_model, make_optimizer, perhaps_die

TIMEOUT = timedelta(seconds=10)


def main() -> None:
    """Train forever as one replica group."""
    torch.set_num_threads(1)
    place = int(os.environ["REPLICA_GROUP_ID"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    model = make_model()
    inner = make_optimizer(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=timedelta(seconds=60),
        replica_id=f"replica-{place}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(milliseconds=50),
    )
    replicated = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    progress = Progress(f"{place}")
    while True:
        before = manager.current_step()
        optimizer.zero_grad()  # starts the quorum of this step
        loss_of(replicated, before).backward()
        optimizer.step()
        if manager.current_step() > before:
            progress.tell(manager.current_step(), manager.num_participants())
        perhaps_die(place, manager.current_step())


main()
