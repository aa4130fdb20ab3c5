"""Mode Full equals synchronous training by hand, bit for bit, and Quorum(P) equals Full (I10)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from local.history import ForkServer

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("reference_script.py")
CHANNELS = [
    ("gloo", ""),
    *(("mpi", algorithm) for algorithm in ("ring", "recursive_doubling", "halving_doubling")),
]
ONE_SEGMENT = {"hidden": 33, "segment_bytes": 1 << 20}
SEVERAL_SEGMENTS = {"hidden": 6000, "segment_bytes": 1 << 16}
PLAIN = {"accumulate": 1, "clip_norm": None, "scheduler": False}
RICH = {"accumulate": 2, "clip_norm": 0.5, "scheduler": True}


def job(backend: str, config: dict[str, Any], mode: str) -> dict[str, Any]:
    ranks = config["ranks"]
    collective: dict[str, Any] = {"backend": backend, "mode": mode, "pacing": "Round"}
    collective["segmentBytes"] = config["segment_bytes"]
    if mode == "Quorum":
        collective |= {"quorum": ranks}
    trainer = {
        "name": "trainer",
        "image": "none",
        "command": [sys.executable, str(SCRIPT)],
        "env": [{"name": "CONFIG", "value": json.dumps(config)}],
    }
    return {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "reference"},
        "spec": {
            "replicas": ranks,
            "collective": collective,
            "template": {"spec": {"containers": [trainer]}},
        },
    }


def weights_of(
    fork_server: ForkServer, backend: str, config: dict[str, Any], mode: str, at: Path
) -> str:
    """The final weights, which are equal on all ranks."""
    at.mkdir()
    nothing = {"steps": [], "at_the_end": [], "inject": "", "slow_log": "", "small_disk": False}
    order = {"job": job(backend, config, mode), **nothing}
    result = fork_server.call("local.history_run:history", order, at)
    assert result["complete"], result
    found = [x.partition("WEIGHTS ")[2] for x in result["printed"] if "WEIGHTS " in x]
    assert len(found) == config["ranks"]
    assert len(set(found)) == 1
    return str(found[0])


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(("backend", "algorithm"), CHANNELS)
def test_full_equals_the_reference(
    fork_server: ForkServer, backend: str, algorithm: str, ranks: int, tmp_path: Path
) -> None:
    """SGD with momentum and AdamW; plain, and with accumulation, clipping and a scheduler; in one
    segment and in several. The last step of an epoch is smaller, with a last batch that is smaller
    still."""
    kinds: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("SGD", PLAIN, ONE_SEGMENT),
        ("SGD", RICH, SEVERAL_SEGMENTS),
        ("AdamW", RICH, ONE_SEGMENT),
    )
    for number, (optimizer, more, segments) in enumerate(kinds):
        config = {
            "ranks": ranks,
            "optimizer": optimizer,
            "batch": 4,
            "samples": 4 * 2 * ranks * 4 - 3,
            "epochs": 3,
            "algorithm": algorithm,
            **more,
            **segments,
        }
        at = tmp_path / str(number)
        at.mkdir()
        wanted = fork_server.call("local.reference:train", config, at)
        assert weights_of(fork_server, backend, config, "Full", at / "full") == wanted, config


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_quorum_of_all_equals_full(fork_server: ForkServer, backend: str, tmp_path: Path) -> None:
    config = {
        "ranks": 3,
        "optimizer": "AdamW",
        "batch": 4,
        "samples": 93,
        "epochs": 3,
        "algorithm": "ring" if backend == "mpi" else "",
        **RICH,
        **SEVERAL_SEGMENTS,
    }
    full = weights_of(fork_server, backend, config, "Full", tmp_path / "full")
    assert weights_of(fork_server, backend, config, "Quorum", tmp_path / "quorum") == full
