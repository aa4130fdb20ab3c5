"""The rule for when groups of M ranks per copy of the model beat M times as many copies.

The rule is that of Pal et al., IEEE Micro 2019.
"""

from __future__ import annotations


def needed(*, model: int, scaling: float, epochs: float) -> float:
    """Return the speedup of a step above which N groups of M ranks beat M N replicas.

    Groups win if SU(M) > M x [SE(MN)/SE(N)] x [E(N)/E(MN)].

    Args:
        model: M, the number of ranks that share one copy of the model.
        scaling: SE(MN)/SE(N), where SE(n) is the time of a step on one replica over that on n
            replicas.
        epochs: E(N)/E(MN), where E(n) is the number of epochs that n replicas need.

    Returns:
        The smallest SU(M) with which groups are as fast as replicas.
    """
    return model * scaling * epochs


def gain(*, speedup: float, model: int, scaling: float, epochs: float) -> float:
    """Return the speed of N groups of M ranks relative to M N replicas; above 1 the groups win.

    Args:
        speedup: SU(M), the speedup of a step when M ranks share the model.
        model: M, as in `needed`.
        scaling: SE(MN)/SE(N), as in `needed`.
        epochs: E(N)/E(MN), as in `needed`.

    Returns:
        `speedup` over the speedup that is needed.
    """
    return speedup / needed(model=model, scaling=scaling, epochs=epochs)
