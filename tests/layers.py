"""Helpers that choose which cases of a parametrized test run in `make test`.

The other cases run in `make test-all` only. docs/testing.md describes the layers. A test keeps at
least one case outside the exhaustive layer, unless another test of `make test` covers the same
promise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def exhaustive_except(keep: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return `values` as parameters; those that are not in `keep` carry the mark `exhaustive`.

    Args:
        keep: Values that `make test` runs too. Each must occur in `values`.
        values: All values of the parameter, in order.
    """
    listed = list(values)
    unknown = [each for each in keep if each not in listed]
    assert not unknown, f"not a value of the parameter: {unknown}"
    return [each if each in keep else exhaustive(each) for each in listed]


def exhaustive_unless(kept: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Return `values` as parameters; those for which `kept` is false get the mark `exhaustive`."""
    return [each if kept(each) else exhaustive(each) for each in values]


def exhaustive(*values: Any) -> Any:
    """Return one set of parameter values that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)
