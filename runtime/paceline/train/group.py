"""Mesh of the ranks that hold one copy of the model together, for torch's own tools (D20)."""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.train.context import current

AXIS = "model"


def group() -> DeviceMesh:
    """Return the mesh of the ranks of this pod that hold one copy of the model together.

    It has one axis, "model", of `spec.parallelism.model` ranks. Use it with `parallelize_module`
    and `distribute_tensor`. `group().get_group()` is the process group for
    torch.distributed.pipelining and collectives; `group().get_local_rank()` is the shard of this
    rank. Data parallelism over other groups is the job's task: never put it into the mesh. All
    ranks of a group must call this function after `init()` and, where they have GPUs, after
    `torch.cuda.set_device`.

    Returns:
        The mesh; the same object at each call. It has one rank if each rank holds the whole model.
    """
    context = current("group()")
    if context.mesh is None:
        session = context.session
        # set_device has initialized CUDA. Asking for the current device here would initialize it.
        kind = "cuda" if torch.cuda.is_initialized() else "cpu"
        if not distributed.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            distributed.init_process_group(
                backend, store=session.store(), rank=session.shard, world_size=session.shards
            )
        context.mesh = init_device_mesh(kind, (session.shards,), mesh_dim_names=(AXIS,))
    return context.mesh
