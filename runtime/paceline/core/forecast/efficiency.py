"""The share of a larger batch that is progress.

It follows from the gradient noise scale (McCandlish et al., 2018).
"""

from __future__ import annotations


def noise_scale(
    *, batch: float, square: float, larger: float, larger_square: float
) -> float | None:
    """Return the gradient noise scale, from mean squared gradient norms at two batch sizes.

    Args:
        batch: Samples in a gradient of the smaller size.
        square: Mean squared norm of gradients over `batch` samples.
        larger: Samples in a gradient of the larger size; more than `batch`.
        larger_square: Mean squared norm of gradients over `larger` samples.

    Returns:
        The samples per update at which half of each sample is progress, at least 1. None if the two
        means show no signal above their noise.
    """
    signal = (larger * larger_square - batch * square) / (larger - batch)
    noise = (square - larger_square) / (1 / batch - 1 / larger)
    return max(1.0, noise / signal) if signal > 0 else None


def efficiency(samples: float, scale: float | None) -> float:
    """Return the share of `samples` per update that is progress; 1 without a noise scale."""
    return 1.0 if scale is None else scale / (scale + samples)


def epochs(samples: float, scale: float) -> float:
    """Return the epochs to a given loss, as a multiple of those with the smallest batch."""
    return 1.0 + samples / scale
