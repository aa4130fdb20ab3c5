"""Least squares for two coefficients that cannot be negative."""

from __future__ import annotations

from collections.abc import Sequence


def fit_two(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit y = a x1 + b x2 with a, b >= 0 by least squares of the errors relative to y.

    Args:
        points: (x1, x2, y) of each measurement. Points with y <= 0 are ignored.

    Returns:
        (a, b). If the points cannot separate a from b, b explains everything. Without points both
        are 0.
    """
    scaled = [(x1 / y, x2 / y) for x1, x2, y in points if y > 0]
    s11 = sum(x1 * x1 for x1, _ in scaled)
    s12 = sum(x1 * x2 for x1, x2 in scaled)
    s22 = sum(x2 * x2 for _, x2 in scaled)
    r1, r2 = sum(x1 for x1, _ in scaled), sum(x2 for _, x2 in scaled)
    candidates = [(0.0, r2 / s22 if s22 else 0.0), (r1 / s11 if s11 else 0.0, 0.0)]
    determinant = s11 * s22 - s12 * s12
    if determinant > 1e-9 * s11 * s22:
        a, b = (r1 * s22 - r2 * s12) / determinant, (r2 * s11 - r1 * s12) / determinant
        if a > 0 and b > 0:
            return a, b

    def squares(each: tuple[float, float]) -> float:
        return sum((1 - each[0] * x1 - each[1] * x2) ** 2 for x1, x2 in scaled)

    return min(candidates, key=squares)
