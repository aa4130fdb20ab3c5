"""Fixtures of the training API: every test starts and ends without a job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from paceline.train import context
from paceline.train.ddp import REDUCING
from torch._C._distributed_c10d import HashStore


@pytest.fixture(autouse=True)
def _no_job() -> Iterator[None]:
    context.install(None)
    reductions = {name: getattr(dist, name) for name in REDUCING if hasattr(dist, name)}
    yield
    if context._context is not None:
        context._context.changes.close()
    for name, function in reductions.items():  # a job replaces them by refusals permanently
        setattr(dist, name, function)
    context.install(None)
    if dist.is_initialized():  # pl.group() makes one
        dist.destroy_process_group()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """Make the process group that `init_process_group()` makes in a job."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
