"""The public names of `import paceline`, and which modules importing them loads."""

from __future__ import annotations

import subprocess
import sys

import paceline
import pytest


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name).__doc__, name
    assert set(paceline.__all__) == set(dir(paceline))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = paceline.nonsense


@pytest.mark.parametrize(
    "module", ["paceline", "paceline.core.protocol.sampling", "paceline.errors"]
)
def test_the_modules_of_the_coordinator_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "False"]
