"""When M ranks to a copy of the model beat M times as many copies (Pal et al., IEEE Micro 2019)."""

from __future__ import annotations


def gain(*, speedup: float, model: int, scaling: float, epochs: float) -> float:
    """Speed of N groups of M ranks over M N replicas. `speedup`: of a step, SU(M), by M ranks that
    share the model; `scaling`: SE(MN)/SE(N), where SE is a step alone over a step of so many;
    `epochs`: E(N)/E(MN), epochs that so many need. Above 1 the groups win, so they do if
    SU(M) > M x [SE(MN)/SE(N)] x [E(N)/E(MN)]."""
    return speedup / (model * scaling * epochs)
