"""Every test of the training API starts and ends without a job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from paceline.train import context


@pytest.fixture(autouse=True)
def _no_job() -> Iterator[None]:
    context.install(None)
    yield
    context.install(None)
