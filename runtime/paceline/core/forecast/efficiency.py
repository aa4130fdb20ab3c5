"""How much of a larger batch is progress: the gradient noise scale of McCandlish et al. (2018)."""

from __future__ import annotations


def noise_scale(
    *, batch: float, square: float, larger: float, larger_square: float
) -> float | None:
    """Samples per update, at least 1, at which half of each is progress. `square`: mean squared
    norm of gradients over `batch` samples, `larger_square` the same over `larger` ones. None where
    there is no signal above the noise of the two means."""
    signal = (larger * larger_square - batch * square) / (larger - batch)
    noise = (square - larger_square) / (1 / batch - 1 / larger)
    return max(1.0, noise / signal) if signal > 0 else None


def efficiency(samples: float, scale: float | None) -> float:
    """Share of `samples` per update that is progress; 1 if the noise scale is not known."""
    return 1.0 if scale is None else scale / (scale + samples)


def epochs(samples: float, scale: float) -> float:
    """To the same loss, in multiples of those that the smallest batches take."""
    return 1.0 + samples / scale
