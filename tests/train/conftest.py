"""Fixtures of the training API: every test starts and ends without a job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from paceline.train import context
from torch._C._distributed_c10d import HashStore


@pytest.fixture(autouse=True)
def _no_job() -> Iterator[None]:
    context.install(None)
    yield
    if context._context is not None:
        context._context.changes.close()
    context.install(None)
    if dist.is_initialized():  # pl.group() makes one
        dist.destroy_process_group()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """Make a process group of this rank alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
