"""Figures that the scripts of this folder print: numbers with all their bits, hashes of weights."""

import hashlib

import torch
from torch import nn


def exact(value):
    """Return a number as text that keeps every bit of it."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value).hex()


def digest(*holders):
    """Return one hash of the weights and buffers of modules, and of single tensors."""
    total = hashlib.sha256()
    for holder in holders:
        tensors = holder.state_dict().values() if isinstance(holder, nn.Module) else [holder]
        for tensor in tensors:
            flat = tensor.detach().cpu().contiguous().view(-1)
            total.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
            total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
