"""The ranks that hold one copy of the model together, for torch's own tools (D20)."""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.train.context import current

AXIS = "model"


def group() -> DeviceMesh:
    """The `spec.parallelism.model` ranks of this pod that hold one copy of the model together, as a
    mesh of one axis, "model".

    For `parallelize_module` and `distribute_tensor`; `group().get_group()` is the process group for
    torch.distributed.pipelining and collectives, `group().get_local_rank()` the shard of this rank.
    Data parallelism over other groups is the job's: never put it into the mesh. Of one rank where
    each holds the whole model. All ranks of a group call it, after `init()`; where they have GPUs,
    after `torch.cuda.set_device`.
    """
    context = current("group()")
    if context.mesh is None:
        session = context.session
        # Whoever has called set_device has initialized it; asking for a device would do so.
        kind = "cuda" if torch.cuda.is_initialized() else "cpu"
        if not distributed.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            distributed.init_process_group(
                backend, store=session.store(), rank=session.shard, world_size=session.shards
            )
        context.mesh = init_device_mesh(kind, (session.shards,), mesh_dim_names=(AXIS,))
    return context.mesh
