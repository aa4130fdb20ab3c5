"""Mode Full equals synchronous training by hand, bit for bit, and Quorum(P) equals Full (I10).

This holds whether rounds are streamed or not (R27), and a model in bfloat16 equals plain torch with
float32 masters. Ranks evaluate in the middle and at the end of each epoch, each for a different
time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.processes.history import ForkServer
from tests.layers import exhaustive_except
from tests.local.reference import MEMBERS

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("reference_script.py")
CHANNELS = [
    AUTO := ("auto", MEMBERS),
    GLOO := ("gloo", ""),
    SHM := ("shm", MEMBERS),
    RING := ("mpi", "ring"),
    DOUBLING := ("mpi", "recursive_doubling"),
    HALVING := ("mpi", "halving_doubling"),
]
SIZES = (2, 3, 5)
IN_MAKE_TEST = ((AUTO, 3), (GLOO, 5), (SHM, 2), (RING, 3), (HALVING, 4))
"""Pairs of channel and number of ranks: each transport once, each size once."""
ONE_SEGMENT = {"hidden": 33, "segment_bytes": 1 << 20, "pause_s": 0.0}
SEVERAL_SEGMENTS = {"hidden": 6000, "segment_bytes": 1 << 16, "pause_s": 0.005}
PLAIN = {
    "accumulate": 1,
    "clip_norm": None,
    "scheduler": False,
    "pipeline": 0,
    "evaluates": True,
    "dtype": "float32",
    "wire": "Float32",
}
RICH = {**PLAIN, "accumulate": 2, "clip_norm": 0.5, "scheduler": True}
HALF = {**RICH, "dtype": "bfloat16"}
ROUNDED = {**RICH, "wire": "BFloat16"}
KINDS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("SGD", PLAIN, ONE_SEGMENT),
    ("SGD", RICH, SEVERAL_SEGMENTS),
    ("AdamW", RICH, ONE_SEGMENT),
)
HALF_KINDS = (("AdamW", HALF, ONE_SEGMENT), ("SGD", HALF, SEVERAL_SEGMENTS))
# Combine each channel with each number of ranks and each kind, and each number with each kind.
JOBS = [
    (channel, ranks, KINDS[(i + j) % len(KINDS)])
    for i, channel in enumerate(CHANNELS)
    for j, ranks in enumerate(SIZES)
]
JOBS += [
    (RING, 3, ("SGD", ROUNDED, SEVERAL_SEGMENTS)),
    (DOUBLING, 5, ("AdamW", ROUNDED, ONE_SEGMENT)),
    (HALVING, 4, ("AdamW", {**ROUNDED, "dtype": "bfloat16"}, ONE_SEGMENT)),
]
JOBS += [(GLOO, 3, HALF_KINDS[0]), (RING, 2, HALF_KINDS[1]), (SHM, 3, HALF_KINDS[1])]


def job(backend: str, config: dict[str, Any], mode: str, overlap: str) -> dict[str, Any]:
    ranks = config["ranks"]
    collective: dict[str, Any] = {"backend": backend, "mode": mode, "pacing": "Round"}
    collective |= {"overlap": overlap, "pipeline": config["pipeline"]}
    collective |= {"segmentBytes": config["segment_bytes"], "wire": config["wire"]}
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
    fork_server: ForkServer,
    backend: str,
    config: dict[str, Any],
    at: Path,
    *,
    mode: str = "Full",
    overlap: str = "Auto",
) -> str:
    """Return the digest of the final weights, which are equal on all ranks.

    With several segments, check that some rounds are streamed where that is allowed.
    """
    at.mkdir()
    nothing = {"steps": [], "at_the_end": [], "inject": "", "slow_log": "", "small_disk": False}
    order = {"job": job(backend, config, mode, overlap), **nothing}
    result = fork_server.call("testing.processes.history_run:history", order, at)
    assert result["complete"], result
    streams = overlap == "Auto" and config["pause_s"] > 0 and not config["pipeline"]
    assert (result["log"]["streamed"] > 0) is streams, result["log"]
    digests = [x.partition("WEIGHTS ")[2] for x in result["printed"] if "WEIGHTS " in x]
    assert len(digests) == config["ranks"]
    assert len(set(digests)) == 1
    return str(digests[0])


@pytest.mark.parametrize(
    ("channel", "ranks", "kind"),
    [
        pytest.param(
            *(channel, ranks, kind),
            id="-".join((*channel, str(ranks), kind[0], kind[1]["dtype"], kind[1]["wire"])),
            marks=[] if (channel, ranks) in IN_MAKE_TEST else [pytest.mark.exhaustive],
        )
        for channel, ranks, kind in JOBS
    ],
)
def test_full_mode_equals_the_reference_bit_for_bit(
    fork_server: ForkServer,
    channel: tuple[str, str],
    ranks: int,
    kind: tuple[str, dict[str, Any], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Vary channel, number of ranks, optimizer and model.

    All channels are covered, including `auto`, which takes shm on one machine; SGD with momentum
    and AdamW; models and wires in float32 and bfloat16; plain training and training with
    accumulation, clipping and a scheduler; one segment and several. The last step of an epoch is
    smaller, and its last batch is smaller still.
    """
    (backend, algorithm), (optimizer, more, segments) = channel, kind
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
    (tmp_path / "by-hand").mkdir()
    wanted = fork_server.call("tests.local.reference:train", config, tmp_path / "by-hand")
    assert weights_of(fork_server, backend, config, tmp_path / "full") == wanted, config


def test_an_epoch_not_divisible_by_the_ranks_equals_the_reference(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Use 714 samples, which are 45 batches of 16.

    Ranks reach the end of an epoch, and so their evaluation, in different rounds. `auto` used to
    take what was fastest in that run, and ranks continued without those that evaluated: three of
    four runs had other bits.
    """
    config = {"ranks": 4, "optimizer": "SGD", "batch": 16, "samples": 714, "epochs": 3}
    config |= {"algorithm": MEMBERS, **PLAIN, **ONE_SEGMENT}
    (tmp_path / "by-hand").mkdir()
    wanted = fork_server.call("tests.local.reference:train", config, tmp_path / "by-hand")
    assert weights_of(fork_server, "auto", config, tmp_path / "full") == wanted


@pytest.mark.parametrize("backend", exhaustive_except(["shm"], ["gloo", "mpi", "shm"]))
def test_a_quorum_of_all_ranks_equals_full_streamed_or_not(
    fork_server: ForkServer, backend: str, tmp_path: Path
) -> None:
    config = {
        "ranks": 3,
        "optimizer": "AdamW",
        "batch": 4,
        "samples": 93,
        "epochs": 3,
        "algorithm": "ring" if backend == "mpi" else "",
        **RICH,
        **SEVERAL_SEGMENTS,
        "evaluates": False,  # in Quorum the others would continue meanwhile
    }
    full = weights_of(fork_server, backend, config, tmp_path / "full")
    assert weights_of(fork_server, backend, config, tmp_path / "not", overlap="Never") == full
    assert weights_of(fork_server, backend, config, tmp_path / "quorum", mode="Quorum") == full


@pytest.mark.parametrize("ranks", exhaustive_except([3], [1, 2, 3]))
@pytest.mark.parametrize(
    "kind",
    exhaustive_except(KINDS[2:], KINDS),
    ids=[f"{k[0]}-{len(k[1])}-{k[2]['hidden']}" for k in KINDS],
)
def test_a_pipeline_equals_training_with_gradients_one_update_old(
    fork_server: ForkServer,
    kind: tuple[str, dict[str, Any], dict[str, Any]],
    ranks: int,
    tmp_path: Path,
) -> None:
    """Compare with the reference; Quorum of all ranks gives the same bits, too (R36)."""
    optimizer, more, segments = kind
    config = {
        "ranks": ranks,
        "optimizer": optimizer,
        "batch": 4,
        "samples": 4 * 2 * ranks * 4 - 3,
        "epochs": 3,
        "algorithm": "ring",
        **more,
        **segments,
        "pipeline": 1,
    }
    (tmp_path / "by-hand").mkdir()
    wanted = fork_server.call("tests.local.reference:train", config, tmp_path / "by-hand")
    assert weights_of(fork_server, "mpi", config, tmp_path / "full") == wanted
    if ranks == 3:
        config |= {"evaluates": False}  # in Quorum the others would continue meanwhile
        assert weights_of(fork_server, "mpi", config, tmp_path / "quorum", mode="Quorum") == wanted
