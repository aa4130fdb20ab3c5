"""The examples with replica groups at a small size: they train to the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.processes.runs import forked_paceline

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
EPOCHS = "3"


@pytest.mark.exhaustive
@pytest.mark.parametrize("example", ["tensor-parallel", "two-stages"])
def test_an_example_with_replica_groups_trains(tmp_path: Path, example: str) -> None:
    job, folder = str(EXAMPLES / example / "job.yaml"), str(tmp_path / "run")
    words = ["run", job, "--run-dir", folder, "--quiet"]
    code, output = forked_paceline(tmp_path, *words, EPOCHS=EPOCHS, XDG_RUNTIME_DIR=str(tmp_path))
    assert code == 0, output
    assert output.count(f"{EPOCHS} epochs\n") == 1, f"one rank of one group says so:\n{output}"
    if "mode Full" in output:
        assert f"{EPOCHS} with each sample applied exactly once" in output
        accuracy = float(output.partition("] accuracy ")[2].split()[0])
        assert accuracy > 0.7, "half of the rows have more ones than zeros"
