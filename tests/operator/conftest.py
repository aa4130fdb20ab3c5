"""Fixtures: an API server with the TrainingJob definition, and an operator beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from testing.cluster.control_plane import ControlPlane
    from testing.fake_cluster.beside import Running


@pytest.fixture(scope="session")
def plane(api_server: ControlPlane) -> ControlPlane:
    from testing.fake_cluster.beside import install_crd

    install_crd(api_server)
    return api_server


@pytest.fixture
def running(plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Running]:
    from testing.fake_cluster.beside import operator_of

    with operator_of(plane, namespace, tmp_path / "operator.log") as running:
        yield running
