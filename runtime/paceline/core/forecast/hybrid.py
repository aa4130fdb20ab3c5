"""When M ranks to a copy of the model beat M times as many copies (Pal et al., IEEE Micro 2019)."""

from __future__ import annotations


def needed(*, model: int, scaling: float, epochs: float) -> float:
    """The speedup of a step from which N groups of M ranks beat M N replicas: groups win if
    SU(M) > M x [SE(MN)/SE(N)] x [E(N)/E(MN)]. `scaling`: SE(MN)/SE(N), where SE is a step alone
    over a step of so many; `epochs`: E(N)/E(MN), epochs that so many need."""
    return model * scaling * epochs


def gain(*, speedup: float, model: int, scaling: float, epochs: float) -> float:
    """Speed of N groups of M ranks over M N replicas; above 1 the groups win. `speedup`: of a step,
    SU(M), by M ranks that share the model; the others as for `needed`."""
    return speedup / needed(model=model, scaling=scaling, epochs=epochs)
