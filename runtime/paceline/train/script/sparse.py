"""Sparse gradients, as `Embedding(sparse=True)` has them, in the dense buffers of a job.

Each rank's gradient has other rows. So a job adds all rows, and for each row a number that is not
zero where some rank has it: the average has the rows of all ranks, as under DDP.
"""

from __future__ import annotations

import torch


def to_flat(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient as one dense vector.

    Args:
        gradient: Sparse tensor (COO) of n rows in its sparse dimensions.

    Returns:
        Its elements, and behind them n numbers that are 1 for the rows that it has.
    """
    gradient = gradient.coalesce()
    rows = torch.ones(gradient.indices().shape[1], dtype=gradient.dtype, device=gradient.device)
    shape = gradient.shape[: gradient.sparse_dim()]
    has = torch.sparse_coo_tensor(gradient.indices(), rows, shape, check_invariants=False)
    return torch.cat([gradient.to_dense().view(-1), has.to_dense().view(-1)])


def from_flat(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient from the average of what `to_flat` returns on each rank.

    Args:
        flat: The average.
        like: Sparse tensor with the shape, type and device of the result.
    """
    shape, size = like.shape, like.numel()
    has = flat[size:].view(shape[: like.sparse_dim()])
    indices = has.nonzero().T
    values = flat[:size].view(shape)[tuple(indices)]
    gradient = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    return gradient.to(like.device, like.dtype).coalesce()
