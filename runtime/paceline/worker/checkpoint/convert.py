"""Weights from one kind of file to another: `paceline checkpoint convert`, in a process of its own.

Five kinds are read and four are written. Only weights and buffers are converted, by the names of
the model's `state_dict`: an optimizer's state has no names that another program would know.

    paceline       a job's checkpoint folder (its newest version), or one version of it; read only
    safetensors    one file
    state-dict     one file of `torch.save`, read as data and never as a program
    transformers   a folder with model.safetensors, in parts with an index above 5 GB
    dcp            a folder of torch.distributed.checkpoint, one process
"""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from paceline_api.bounded import TooLargeError, read_file
from paceline_api.errors import EXIT_BAD_INPUT, EXIT_FAILURE, PacelineError, printable
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

from paceline.worker.checkpoint import format as disk

MODEL: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
DCP_METADATA: Final = ".metadata"
INDEX_BYTES_MAX: Final = 64 << 20
"""Upper bound on the size of an index of parts, in bytes."""
EXPANDED_BYTES_MAX: Final = 1 << 30
"""Upper bound on what all tensors together take more when expanded ones are written in full."""
DCP_KEY: Final = "model"
"""Key of the weights in a folder of torch.distributed.checkpoint: `dcp.load({"model": ...})`."""
WRAPPERS: Final = ("model", "state_dict", "model_state_dict")
"""Keys under which programs put the weights in a file of `torch.save`."""
KINDS: Final = ("safetensors", "state-dict", "transformers", "dcp")
SUFFIXES: Final = {
    ".safetensors": "safetensors",
    ".pt": "state-dict",
    ".pth": "state-dict",
    ".bin": "state-dict",
}

Weights = dict[str, torch.Tensor]


class ConvertError(PacelineError):
    """Raised if a file cannot be converted."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(printable(message), hint=printable(hint), exit_code=EXIT_BAD_INPUT)


# ---- reading -------------------------------------------------------------------------------------


def read(source: Path, *, trust_pickle: bool) -> tuple[str, Weights]:
    """Read weights of any kind.

    A CheckpointError is also raised, for a damaged checkpoint of a job.

    Args:
        source: File or folder.
        trust_pickle: Read a folder of torch.distributed.checkpoint, whose metadata is a program.

    Returns:
        The kind, and the weights on the host by name.

    Raises:
        ConvertError: There is no such file, or it is of no kind that is known, or it is damaged.
    """
    if source.is_dir():
        return _read_folder(source, trust_pickle=trust_pickle)
    if not source.is_file():
        what = "is neither a file nor a folder" if source.exists() else "does not exist"
        raise ConvertError(f"{source} {what}", hint="name a file or a folder of weights")
    if source.suffix == ".safetensors":
        return "safetensors", _tensors(source)
    return "state-dict", _state_dict(source, source)


def _read_folder(source: Path, *, trust_pickle: bool) -> tuple[str, Weights]:
    if (source / disk.MANIFEST).exists() or disk.shards_in(source):
        return "paceline", _of_job(source)
    if versions := disk.versions(source):
        return "paceline", _of_job(disk.folder_of(source, versions[-1]))
    if (source / INDEX).is_file():
        return "transformers", _parts(source)
    if (source / MODEL).is_file():
        return "transformers", _tensors(source / MODEL)
    if (source / DCP_METADATA).is_file():
        return "dcp", _dcp(source, trust_pickle=trust_pickle)
    raise ConvertError(
        f"{source} holds no weights that are known: no version of a job, no {MODEL}, no {INDEX}, "
        f"no {DCP_METADATA}",
        hint="name the folder of spec.checkpoint.path, or a file that ends in .safetensors or .pt",
    )


def _of_job(folder: Path) -> Weights:
    if shards := disk.shards_in(folder):
        raise ConvertError(
            f"{folder} is of groups of {len(shards)} ranks, each with its part of the tensors that "
            "were spread over the group; the checkpoint does not say how",
            hint="save the full state_dict in the script, such as by torch.distributed.checkpoint",
        )
    manifest = disk.read_manifest(folder)
    for file in manifest.files:
        if file.name == disk.MODEL and disk.file_of(folder / disk.MODEL) != file:
            raise ConvertError(
                f"the bytes of {folder / disk.MODEL} are not those that were saved",
                hint="take another version, or a copy of this one",
            )
    return _tensors(folder / disk.MODEL)


def _tensors(path: Path) -> Weights:
    try:
        return load_file(path, backend="pread")
    except (SafetensorError, OSError) as error:
        raise ConvertError(
            f"{path} is not a safetensors file: {error}", hint="see that it is whole"
        ) from None


def _parts(folder: Path) -> Weights:
    """Read the parts that an index names, all of them in the same folder."""
    hint = "see that the folder is whole"
    try:
        where = json.loads(read_file(folder / INDEX, INDEX_BYTES_MAX))["weight_map"]
        names = {name: str(part) for name, part in where.items()}
    except (
        *(OSError, TooLargeError, ValueError, KeyError, AttributeError, TypeError),
        RecursionError,  # brackets in brackets, as deep as the file is long
    ) as error:
        raise ConvertError(f"{folder / INDEX} is not an index: {error!r}", hint=hint) from None
    tensors: Weights = {}
    for part in sorted(set(names.values())):
        if Path(part).name != part or part == "..":
            raise ConvertError(f"{folder / INDEX} names {part!r}, outside of it", hint=hint)
        if not (folder / part).is_file():
            raise ConvertError(f"{folder} lacks {part!r}, which {INDEX} names", hint=hint)
        tensors |= _tensors(folder / part)
    if lacking := sorted(names.keys() - tensors.keys()):
        raise ConvertError(f"the parts in {folder} lack {lacking[0]}", hint=hint)
    return {name: tensors[name] for name in names}


def _state_dict(path: Path, source: Path) -> Weights:
    """Read a file of torch.save.

    Args:
        path: The file.
        source: What the user has named, for errors.

    Returns:
        Tensors on the host by name.

    Raises:
        ConvertError: The file is damaged, or holds something else.
    """
    hint = "save model.state_dict() with torch.save, without objects of your own"
    if any(part.file_size > part.compress_size for part in _members(path)):
        # A few bytes may unpack to more than there is memory for.
        raise ConvertError(f"{source} is compressed, which torch.save never does", hint=hint)
    try:
        # Never as a program: whoever wrote the file could have this process run it.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no common class for damaged files
        why = _foreign(path) or _first_sentence(error)
        raise ConvertError(f"{source} cannot be read as tensors alone: {why}", hint=hint) from None
    if (flat := _flat(content)) is not None:
        return flat
    if isinstance(content, Mapping):
        for key in WRAPPERS:
            if (flat := _flat(content.get(key))) is not None:
                return flat
        keys = ", ".join(map(str, list(content)[:8]))
        raise ConvertError(
            f"{source} holds {keys}, and none of {', '.join(WRAPPERS)} is a state_dict",
            hint="save the weights under one of these keys, or alone",
        )
    raise ConvertError(
        f"{source} holds a {type(content).__name__}", hint="save model.state_dict() with torch.save"
    )


def _members(path: Path) -> list[zipfile.ZipInfo]:
    """Return the files in a zip file, as torch.save writes one; [] for any other file."""
    try:
        with zipfile.ZipFile(path) as packed:
            return packed.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return []


def _foreign(path: Path) -> str:
    """Return which classes and functions a file of torch.save names beside tensors, or ""."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # the file is damaged, or of another kind
        return ""
    return f"it names {', '.join(sorted(names)[:4])}" if names else ""


def _first_sentence(error: BaseException) -> str:
    """Return what is wrong, without advice to run what is in a file as a program."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or of another kind"
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0]


def _flat(content: object) -> Weights | None:
    """Return a mapping of names to tensors; None if the object is something else."""
    if not isinstance(content, Mapping) or not content:
        return None
    if not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in content.items()):
        return None
    return dict(content)


def _dcp(folder: Path, *, trust_pickle: bool) -> Weights:
    if not trust_pickle:
        raise ConvertError(
            f"{folder} is of torch.distributed.checkpoint, whose {DCP_METADATA} is a pickle: a "
            "program that would run here",
            hint="add --trust-pickle if you trust whoever wrote it",
        )
    # Not at the top: it takes longer to import than most conversions take.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    cause: BaseException
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        flat = Path(scratch) / "all.pt"
        try:
            with alone():
                dcp_to_torch_save(folder, flat)
        except CheckpointException as error:  # no Exception, and holds the errors of its ranks
            cause = next((failure for failure, _ in error.failures.values()), error)
        except Exception as error:
            cause = error
        else:
            return _state_dict(flat, folder)
    raise ConvertError(
        f"{folder} cannot be read: {type(cause).__name__}: {_first_sentence(cause)}",
        hint="see that the folder is whole",
    )


# ---- writing -------------------------------------------------------------------------------------


def write(target: Path, kind: str, weights: Weights) -> None:
    """Write weights; the target appears whole, or not at all.

    Args:
        target: File or folder, which does not exist.
        kind: One of KINDS.
        weights: Tensors on the host by name. A ConvertError says if the kind has no place for one.
    """
    _check(weights, kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        draft = Path(scratch) / "weights"
        _WRITERS[kind](draft, weights)
        draft.replace(target)


def _check(weights: Weights, kind: str) -> None:
    """Refuse tensors that a kind of file has no place for, each by its name.

    Args:
        weights: Tensors by name.
        kind: One of KINDS.

    Raises:
        ConvertError: There is such a tensor.
    """
    known: dict[torch.dtype, bool] = {}
    expanded = 0
    for name, tensor in weights.items():
        if tensor.is_meta:
            raise ConvertError(
                f"{name} is on the device meta and has no numbers",
                hint="save the weights after they were loaded",
            )
        if kind == "state-dict":
            continue
        if tensor.layout is not torch.strided:
            raise ConvertError(
                f"{name} is {tensor.layout}, and kind {kind} has dense tensors only",
                hint="convert to state-dict, or save tensor.to_dense()",
            )
        expanded += max(0, tensor.nbytes - tensor.untyped_storage().nbytes())
        if expanded > EXPANDED_BYTES_MAX:
            raise ConvertError(
                f"{name} of shape {tuple(tensor.shape)} repeats a few numbers, which kind {kind} "
                "would write each time",
                hint="convert to state-dict, or save it without expand()",
            )
        if kind != "dcp" and not known.setdefault(tensor.dtype, _has_place(tensor.dtype)):
            raise ConvertError(
                f"{name} is {tensor.dtype}, which safetensors does not know",
                hint="convert to state-dict or dcp, or save it as another type",
            )


def _has_place(dtype: torch.dtype) -> bool:
    """Return True if the format of safetensors has a type of numbers."""
    try:
        save({"x": torch.empty(0, dtype=dtype)})
    except Exception:  # of which kind depends on the type
        return False
    return True


def _write_safetensors(draft: Path, weights: Weights) -> None:
    save_file(_apart(weights), draft, metadata={"format": "pt"})


def _apart(weights: Weights) -> Weights:
    """Return tensors with memory of their own: the format has no tied weights and no views."""
    return {name: tensor.contiguous().clone() for name, tensor in weights.items()}


def _write_state_dict(draft: Path, weights: Weights) -> None:
    torch.save(weights, draft)


def _write_transformers(draft: Path, weights: Weights) -> None:
    try:
        from huggingface_hub import save_torch_state_dict
    except ImportError:
        raise ConvertError(
            "kind transformers needs the package huggingface_hub, which comes with transformers",
            hint="pip install huggingface_hub, or convert to safetensors",
        ) from None
    draft.mkdir()
    save_torch_state_dict(_apart(weights), draft)


def _write_dcp(draft: Path, weights: Weights) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as save_folder

    with alone():
        save_folder({DCP_KEY: weights}, checkpoint_id=draft, no_dist=True)


@contextmanager
def alone() -> Iterator[None]:
    """Use torch.distributed.checkpoint in one process, without its warning that it is one.

    It logs errors with their traceback before it raises them, so logs are off meanwhile.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
            yield
    finally:
        logging.disable(before)


_WRITERS: Final[Mapping[str, Callable[[Path, Weights], None]]] = {
    "safetensors": _write_safetensors,
    "state-dict": _write_state_dict,
    "transformers": _write_transformers,
    "dcp": _write_dcp,
}


def kind_of(target: Path, asked: str | None) -> str:
    """Return the kind to write: the one that was asked for, else that of the target's suffix.

    Args:
        target: File or folder.
        asked: One of KINDS; None to go by the suffix.

    Returns:
        One of KINDS.

    Raises:
        ConvertError: The suffix tells no kind.
    """
    kind = asked or SUFFIXES.get(target.suffix)
    if kind is None:
        raise ConvertError(
            f"{target} has no suffix that tells a kind of file",
            hint=f"end it in {', '.join(SUFFIXES)}, or add --to transformers or --to dcp",
        )
    return kind


def convert(
    source: Path, target: Path, asked: str | None, *, trust_pickle: bool, force: bool
) -> str:
    """Convert weights.

    Args:
        source: File or folder to read.
        target: File or folder to write.
        asked: Kind to write; None to go by the target's suffix.
        trust_pickle: Read a folder of torch.distributed.checkpoint.
        force: Replace a target that exists.

    Returns:
        What was done, for people.

    Raises:
        ConvertError: It cannot be done.
    """
    kind = kind_of(target, asked)
    exists = target.exists() or target.is_symlink()
    if exists and not force:
        raise ConvertError(f"{target} exists", hint="choose another name, or add --force")
    if exists and target.resolve() in (source.resolve(), *source.resolve().parents):
        # Else a folder with all checkpoints of a job would make room for the weights of one.
        raise ConvertError(
            f"--force would delete {source}, which is read: {target} is the same or contains it",
            hint="write to another place",
        )
    read_kind, weights = read(source, trust_pickle=trust_pickle)
    if not weights:
        raise ConvertError(f"{source} holds no tensor", hint="see that it is whole")
    if exists:
        aside = target.with_name(f".replaced-{target.name}")
        target.replace(aside)
        try:
            write(target, kind, weights)
        except BaseException:
            aside.replace(target)
            raise
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        else:
            aside.unlink()
    else:
        write(target, kind, weights)
    count = sum(tensor.numel() for tensor in weights.values())
    return f"{source} ({read_kind}) -> {target} ({kind}): {len(weights)} tensors, {count:,} numbers"


def main(words: list[str] | None = None) -> int:
    """Convert as the words say; print what was done or what is wrong, and return the exit code."""
    parser = argparse.ArgumentParser(prog="paceline checkpoint convert")
    add: Any = parser.add_argument
    add("source", type=Path)
    add("target", type=Path)
    add("--to", choices=KINDS)
    add("--trust-pickle", action="store_true")
    add("--force", action="store_true")
    given = parser.parse_args(words)
    try:
        summary = convert(
            given.source,
            given.target,
            given.to,
            trust_pickle=given.trust_pickle,
            force=given.force,
        )
    except PacelineError as error:
        sys.stderr.write(f"{error.render()}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\n")
        return EXIT_FAILURE
    sys.stdout.write(f"{summary}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
