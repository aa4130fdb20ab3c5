"""The comparison of two runs finds every difference, and no difference within its tolerance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from testing.scripts.compare import compare
from testing.scripts.plain import Rank, Result

HASHES = ["0" * 64, "a" * 64, "b" * 64]


def result(folder: Path, *printed: str, code: int = 0, **files: Any) -> Result:
    """Return a result with these outputs; a file is a text, or a value that torch saves."""
    folder.mkdir()
    for name, value in files.items():
        if isinstance(value, str):
            (folder / f"{name}.txt").write_text(value)
        else:
            torch.save(value, folder / f"{name}.pt")
    return Result(tuple(Rank(code, text, "") for text in printed), folder)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("loss 0x1.8000000000000p-1", "loss 0x1.8000000000001p-1"),
        ("step 10: loss 0.25, lr 1e-3", "step 10: loss 0.2500000001, lr 0.001"),
        ("[1.0, 2.5]", "[1.0, 2.5000001]"),
        ("nan", "NaN"),
        (f"weights {HASHES[0]}", f"weights {HASHES[1]}"),
    ],
)
def test_close_numbers_differ_only_without_a_tolerance(tmp_path: Path, a: str, b: str) -> None:
    one, other = result(tmp_path / "a", a), result(tmp_path / "b", b)
    assert compare(one, one) == []
    assert compare(one, other) == [f"stdout of rank 0, line 1: {a!r} and {b!r}"]
    assert compare(one, other, tolerance=1e-6) == []


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("loss 0.25", "loss 0.26"),
        ("loss 0x1.8p-1", "loss 0x1.9p-1"),
        ("loss 0.25", "loss nan"),
        ("loss 0.25", "lose 0.25"),
        ("step 10", "step 11"),
        ("one", "one\ntwo"),
    ],
)
def test_other_values_and_words_differ_within_a_tolerance_too(
    tmp_path: Path, a: str, b: str
) -> None:
    assert compare(result(tmp_path / "a", a), result(tmp_path / "b", b), tolerance=1e-6)


def test_ranks_that_were_equal_must_be_equal_in_the_other_run_too(tmp_path: Path) -> None:
    equal = result(tmp_path / "equal", HASHES[0], HASHES[0])
    also_equal = result(tmp_path / "also", HASHES[1], HASHES[1])
    apart = result(tmp_path / "apart", HASHES[1], HASHES[2])
    assert compare(equal, also_equal, tolerance=1e-6) == []
    assert compare(equal, apart, tolerance=1e-6) == [
        "equal weights: on ranks [[0, 0]] and [[0, 1]]"
    ]


def test_exit_codes_and_names_of_files_are_compared(tmp_path: Path) -> None:
    a = result(tmp_path / "a", "", log="x")
    b = result(tmp_path / "b", "", code=1, other="x")
    assert compare(a, b) == [
        "exit codes: [0] and [1]",
        "files: only ['log.txt'] and only ['other.txt']",
    ]


def test_saved_tensors_are_compared_by_bits_or_within_a_tolerance(tmp_path: Path) -> None:
    state = {"model": {"w": torch.tensor([1.0, 0.0])}, "epoch": 3, "lr": [0.1]}
    near = {"model": {"w": torch.tensor([1.0, -0.0])}, "epoch": 3, "lr": [0.1]}
    far = {"model": {"w": torch.tensor([1.5, 0.0])}, "epoch": 4, "lr": [0.1, 0.2]}
    one, other, third = (
        result(tmp_path / name, "", ckpt=value)
        for name, value in (("one", state), ("near", near), ("far", far))
    )
    assert compare(one, one) == []
    assert compare(one, other) == ["ckpt.pt['model']['w']: up to 0 apart"]
    assert compare(one, other, tolerance=1e-6) == []
    assert sorted(compare(one, third, tolerance=1e-6)) == [
        "ckpt.pt['epoch']: 3 and 4",
        "ckpt.pt['lr']: 1 and 2 values",
        "ckpt.pt['model']['w']: up to 0.5 apart",
    ]


def test_pickled_objects_are_compared_by_their_storages(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    one = result(tmp_path / "one", "", model=first)
    same = result(tmp_path / "same", "", model=first)
    other = result(tmp_path / "other", "", model=second)
    assert compare(one, same) == []
    assert compare(one, other) == ["model.pt: the storages differ"]
    assert compare(one, other, tolerance=1e-6) == []


def test_durations_and_the_name_of_the_folder_may_differ(tmp_path: Path) -> None:
    folders = []
    for name, seconds in (("a", "0.25"), ("b", "1.5")):
        state = f'{{"eval_runtime": {seconds}, "best": "{tmp_path / name}/checkpoint-4"}}'
        folders.append(result(tmp_path / name, state=state, paths={f"{tmp_path / name}/x": 1}))
    assert compare(*folders) == []


def test_tensors_in_safetensors_files_are_compared(tmp_path: Path) -> None:
    results = []
    for name, value in (("a", 1.0), ("b", 2.0)):
        results.append(result(tmp_path / name))
        save_file({"weight": torch.tensor([value])}, tmp_path / name / "model.safetensors")
    assert compare(*results) == ["model.safetensors['weight']: up to 1 apart"]
    assert compare(results[0], results[0]) == []
