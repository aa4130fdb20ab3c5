"""Compare two runs of a script: what each rank printed, how it ended, and the files written.

Numbers are compared exactly or within a tolerance; all other text is compared exactly, but for the
name of the folder that the script writes to, and for durations. A hash of weights has no tolerance.
Under a tolerance it only has to be equal on the same ranks in both runs.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from safetensors.torch import load_file

from testing.scripts.plain import Result

NUMBER: Final = re.compile(
    r"""(?<![\w.])[-+]?(?:0x[0-9a-f]+\.[0-9a-f]+p[-+]?\d+|0x[01]p[-+]?\d+
    |\d+\.\d*(?:e[-+]?\d+)?|\d+(?:e[-+]?\d+)?|nan|inf)(?![\w.])""",
    re.X | re.I,
)
"""A number as `repr`, `float.hex` or `format` write it."""
HASH: Final = re.compile(r"\b[0-9a-f]{32,64}\b")
"""A hash of weights as hashlib writes it."""
CONTENTS: Final = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl"})
"""Suffixes of files that `torch.save` writes."""
DURATION: Final = re.compile(r"""("\w*_(?:runtime|per_second)": )[\d.e+-]+""")
"""A duration, or a number of steps per second, in a JSON file of transformers."""
OPAQUE: Final = frozenset({".distcp", ".metadata"})
"""Suffixes of a distributed checkpoint. How its tensors are laid out in files is not compared; a
script that writes one prints what it has loaded from it."""
DIFFERENCES_MAX: Final = 20


def compare(a: Result, b: Result, *, tolerance: float = 0.0) -> list[str]:
    """Return the differences between two runs of a script; empty if they are equal.

    Args:
        a: result that is right, as of torchrun.
        b: result that is compared with it.
        tolerance: largest difference of two numbers, relative to 1 or to the larger number, if that
            is above 1. With 0 numbers have the same bits, and texts the same characters.

    Returns:
        One line for each difference, at most 20.
    """
    differences: list[str] = []
    if a.codes != b.codes:
        differences.append(f"exit codes: {list(a.codes)} and {list(b.codes)}")
    if len(a.ranks) == len(b.ranks):
        for rank, (one, other) in enumerate(zip(a.ranks, b.ranks, strict=True)):
            differences += _texts(f"stdout of rank {rank}", one.stdout, other.stdout, tolerance)
        if tolerance and _hashes(a) != _hashes(b):
            differences.append(f"equal weights: on ranks {_hashes(a)} and {_hashes(b)}")
    differences += _files(a.out, b.out, tolerance)
    return differences[:DIFFERENCES_MAX]


def _hashes(result: Result) -> list[list[int]]:
    # For the n-th hash of each rank, the first rank that printed the same one.
    printed = [HASH.findall(rank.stdout) for rank in result.ranks]
    groups = []
    for n in range(max(map(len, printed), default=0)):
        nth = [hashes[n] if n < len(hashes) else "" for hashes in printed]
        groups.append([nth.index(one) for one in nth])
    return groups


def _texts(where: str, a: str, b: str, tolerance: float) -> Iterator[str]:
    if a == b:
        return
    lines, others = a.splitlines(), b.splitlines()
    if len(lines) != len(others):
        yield f"{where}: {len(lines)} lines and {len(others)} lines"
    for number, (one, other) in enumerate(zip(lines, others, strict=False), 1):
        if one != other and not (tolerance and _close_lines(one, other, tolerance)):
            yield f"{where}, line {number}: {one!r} and {other!r}"


def _close_lines(a: str, b: str, tolerance: float) -> bool:
    a, b = HASH.sub("HASH", a), HASH.sub("HASH", b)
    if NUMBER.sub("NUMBER", a) != NUMBER.sub("NUMBER", b):
        return False
    numbers = zip(NUMBER.findall(a), NUMBER.findall(b), strict=True)
    return all(_close(_value(one), _value(other), tolerance) for one, other in numbers)


def _value(text: str) -> float:
    return float.fromhex(text) if "0x" in text.lower() else float(text)


def _close(a: float, b: float, tolerance: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))


def _files(a: Path, b: Path, tolerance: float) -> Iterator[str]:
    ours, theirs = _names(a), _names(b)
    if ours != theirs:
        yield f"files: only {sorted(ours - theirs)} and only {sorted(theirs - ours)}"
    for name in sorted(ours & theirs):
        yield from _file(name, a / name, b / name, tolerance)


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _file(name: str, a: Path, b: Path, tolerance: float) -> Iterator[str]:
    if a.suffix in OPAQUE or a.name in OPAQUE:
        return
    if a.suffix == ".safetensors":
        yield from _values(name, load_file(a), load_file(b), tolerance)
        return
    if a.suffix not in CONTENTS:
        yield from _texts(name, _text(a, name), _text(b, name), tolerance)
        return
    one: Any
    other: Any
    try:
        one, other = (_placeless(torch.load(x, weights_only=True), x, name) for x in (a, b))
    except UnpicklingError:  # whole models, whose classes only the script has
        one, other = _records(a), _records(b)
        if not tolerance and one != other:
            yield f"{name}: the storages differ"
        elif one.keys() != other.keys():
            yield f"{name}: {len(one)} and {len(other)} storages"
        return
    yield from _values(name, one, other, tolerance)


def _folder(path: Path, name: str) -> str:
    """Return the folder of the script's files, below which `path` is called `name`."""
    return str(path).removesuffix(f"/{name}")


def _text(path: Path, name: str) -> str:
    return DURATION.sub(r"\g<1>DURATION", path.read_text()).replace(_folder(path, name), "OUT")


def _placeless(value: Any, path: Path, name: str) -> Any:
    """Return a value that was loaded from a file, without the name of the script's folder."""
    if isinstance(value, str):
        return value.replace(_folder(path, name), "OUT")
    if isinstance(value, dict):
        return {_placeless(k, path, name): _placeless(v, path, name) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_placeless(each, path, name) for each in value)
    return value


def _records(path: Path) -> dict[str, bytes]:
    """Return the storages in a file of `torch.save` by their names, without loading objects."""
    with zipfile.ZipFile(path) as file:
        names = [name for name in file.namelist() if "/data/" in name]
        return {name.partition("/data/")[2]: file.read(name) for name in names}


def _values(where: str, a: Any, b: Any, tolerance: float) -> Iterator[str]:
    """Compare two values that were loaded from files."""
    if type(a) is not type(b):
        yield f"{where}: {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, torch.Tensor):
        yield from _tensors(where, a, b, tolerance)
    elif isinstance(a, Mapping):
        if list(a) != list(b):
            yield f"{where}: keys {list(a)} and {list(b)}"
        for key in a.keys() & b.keys():
            yield from _values(f"{where}[{key!r}]", a[key], b[key], tolerance)
    elif isinstance(a, Sequence) and not isinstance(a, str | bytes):
        if len(a) != len(b):
            yield f"{where}: {len(a)} and {len(b)} values"
        for number, (one, other) in enumerate(zip(a, b, strict=False)):
            yield from _values(f"{where}[{number}]", one, other, tolerance)
    elif isinstance(a, str):
        yield from _texts(where, a, b, tolerance)
    elif isinstance(a, float):
        if not _close(a, b, tolerance):
            yield f"{where}: {a!r} and {b!r}"
    elif a != b:
        yield f"{where}: {a!r} and {b!r}"


def _tensors(where: str, a: torch.Tensor, b: torch.Tensor, tolerance: float) -> Iterator[str]:
    if a.shape != b.shape or a.dtype != b.dtype:
        yield f"{where}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    elif not a.is_floating_point() or not tolerance:
        # Bits, so that 0.0 differs from -0.0 and a NaN equals itself.
        if a.contiguous().view(-1).view(torch.uint8).tolist() != (
            b.contiguous().view(-1).view(torch.uint8).tolist()
        ):
            yield f"{where}: {_apart(a, b)}"
    elif not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
        yield f"{where}: {_apart(a, b)}"


def _apart(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"up to {(a.double() - b.double()).abs().max().item():.3g} apart"
