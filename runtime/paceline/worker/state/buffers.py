"""Selects the buffers of a model that belong to the job: those in its `state_dict`.

Each rank computes a buffer that is registered with `persistent=False` for itself, such as a mask or
a cache. It is neither averaged, sent to a joiner nor stored.
"""

from __future__ import annotations

import torch


def persistent_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the names and tensors of the model's persistent buffers, each tensor once."""
    buffers, visited = [], set[int]()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            local = name.rpartition(".")[2]
            if local not in module._non_persistent_buffers_set and id(buffer) not in visited:  # noqa: SLF001
                visited.add(id(buffer))
                buffers.append((name, buffer))
    return buffers


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if several elements lie in the same memory, as after `expand()`."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and stride == 0 for size, stride in pairs)


def first_difference(mine: dict[str, torch.Size], others: dict[str, torch.Size], whose: str) -> str:
    """Return the first buffer or frozen parameter in which two models differ.

    Args:
        mine: Shapes on this rank, by name.
        others: Shapes in the other model, by name.
        whose: What the other model is called in the text.

    Returns:
        A text with the name and both shapes; empty if there is no difference.
    """
    for name in sorted(mine.keys() | others.keys()):
        own, other = mine.get(name), others.get(name)
        if own == other:
            continue
        shapes = [
            f"shape {tuple(shape)}" if shape is not None else "none" for shape in (other, own)
        ]
        return f"{name}: {shapes[0]} in {whose}, {shapes[1]} on this rank"
    return ""
