"""The data of the tests of frameworks."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

BATCHES = 8


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Two samples for each batch."""

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(index)])}
