"""Weights are converted between kinds of files without a change, or refused by name."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from paceline.worker.checkpoint import convert
from paceline.worker.checkpoint.convert import KINDS, ConvertError, alone
from paceline_api.errors import PacelineError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

from testing.processes.runs import forked_paceline
from tests.worker.test_checkpoint import ANSWER_S, Rank, Saver

NAMES = {
    "safetensors": "weights.safetensors",
    "state-dict": "weights.pt",
    "transformers": "model",
    "dcp": "shared",
}


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    made.register_buffer("count", torch.tensor(7))
    made.register_buffer("mask", torch.tensor([True, False]))
    made.register_buffer("scale", torch.tensor(1.5, dtype=torch.bfloat16))
    made.register_buffer("empty", torch.empty(0, 3, dtype=torch.float8_e4m3fn))
    return made


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return sorted(one) == sorted(two) and all(
        (a.dtype, a.shape) == (two[name].dtype, two[name].shape)
        and torch.equal(a.reshape(-1).view(torch.uint8), two[name].reshape(-1).view(torch.uint8))
        for name, a in one.items()
    )


def run(source: Path, target: Path, **how: Any) -> str:
    options = {"trust_pickle": True, "force": False, "asked": None} | how
    return convert.convert(source, target, options.pop("asked"), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_survive_a_round_trip_through_each_kind(tmp_path: Path, kind: str) -> None:
    weights = dict(model().state_dict())
    first = tmp_path / "first.pt"
    torch.save(weights, first)
    there = tmp_path / NAMES[kind]
    output = run(first, there, asked=kind)
    assert f"{len(weights)} tensors" in output
    assert convert.read(there, trust_pickle=True)[0] == kind
    back = tmp_path / "back.safetensors"
    run(there, back)
    assert same(load_file(back), weights)
    assert {path.name for path in tmp_path.iterdir()} == {
        "first.pt",
        there.name,
        "back.safetensors",
    }


def test_other_programs_read_what_was_written(tmp_path: Path) -> None:
    made = model()
    first = tmp_path / "first.pt"
    torch.save(made.state_dict(), first)
    for kind in KINDS:
        run(first, tmp_path / NAMES[kind], asked=kind)
    fresh = {"model": {n: torch.zeros_like(t) for n, t in made.state_dict().items()}}
    with alone():
        load(fresh, checkpoint_id=tmp_path / "shared", no_dist=True)
    assert same(fresh["model"], dict(made.state_dict()))
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert model().load_state_dict(state).missing_keys == []


def test_the_newest_version_of_a_job_is_converted_and_a_changed_byte_is_noticed(
    tmp_path: Path,
) -> None:
    rank, kept = Rank(), tmp_path / "kept"
    saver = Saver(kept, rank)
    for version in (1, 2):
        rank.train(1)
        saver.save(version)
    saver.writer.close(ANSWER_S)
    newest = load_file(kept / "v2/model.safetensors")
    run(kept, tmp_path / "new.pt")
    assert same(torch.load(tmp_path / "new.pt", weights_only=True), newest)
    run(kept / "v1", tmp_path / "old.pt")
    assert not same(torch.load(tmp_path / "old.pt", weights_only=True), newest)
    file = kept / "v2/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ConvertError, match="not those that were saved"):
        run(kept, tmp_path / "again.pt")


def test_a_model_in_several_parts_is_read_whole(tmp_path: Path) -> None:
    weights = dict(model().state_dict())
    (tmp_path / "model").mkdir()
    save_torch_state_dict(weights, tmp_path / "model", max_shard_size=80)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    run(tmp_path / "model", tmp_path / "whole.pt")
    assert same(torch.load(tmp_path / "whole.pt", weights_only=True), weights)


@pytest.mark.filterwarnings("ignore:.*sparse tensor invariants")
@pytest.mark.parametrize(
    ("tensor", "kinds", "says"),
    [
        (torch.ones(2, dtype=torch.complex128), ("safetensors", "transformers"), "complex128"),
        (torch.eye(3).to_sparse(), ("safetensors", "transformers", "dcp"), "sparse_coo"),
        (torch.empty(3, device="meta"), KINDS, "no numbers"),
        (torch.zeros(1).expand(1 << 40), ("safetensors", "transformers", "dcp"), "repeats"),
    ],
    ids=["complex128", "sparse", "meta", "expanded"],
)
def test_a_tensor_that_a_kind_has_no_place_for_is_refused_by_name(
    tmp_path: Path, tensor: torch.Tensor, kinds: tuple[str, ...], says: str
) -> None:
    torch.save({"a": torch.ones(1), "b.odd": tensor}, tmp_path / "odd.pt")
    for kind in kinds:
        with pytest.raises(ConvertError, match=rf"b\.odd .*{says}"):
            run(tmp_path / "odd.pt", tmp_path / "out", asked=kind)
        assert not (tmp_path / "out").exists()


def test_tied_weights_are_written_for_each_of_their_names(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": shared, "b": shared, "turned": shared.t()}, tmp_path / "tied.pt")
    for kind in ("safetensors", "transformers"):
        run(tmp_path / "tied.pt", tmp_path / NAMES[kind], asked=kind)
        tensors = convert.read(tmp_path / NAMES[kind], trust_pickle=False)[1]
        assert same(tensors, {"a": shared, "b": shared, "turned": shared.t().contiguous()})


@pytest.mark.parametrize("key", convert.WRAPPERS)
def test_weights_below_a_usual_key_are_found(tmp_path: Path, key: str) -> None:
    torch.save({key: {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "all.pt")
    run(tmp_path / "all.pt", tmp_path / "w.safetensors")
    assert same(load_file(tmp_path / "w.safetensors"), {"w": torch.ones(2)})


class Bomb:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_program_in_a_file_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    torch.save({"w": torch.ones(1), "x": Bomb(mark)}, tmp_path / "bad.pt")
    with pytest.raises(ConvertError, match=r"it names .*mkdir"):
        run(tmp_path / "bad.pt", tmp_path / "out.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Bomb(mark)))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/.metadata").write_bytes(pickle.dumps(Bomb(mark)))
    for name in ("bad.pt", "plain.pt", "shared"):
        with pytest.raises(ConvertError):
            run(tmp_path / name, tmp_path / "out.pt", trust_pickle=False)
    assert not mark.exists()
    assert not (tmp_path / "out.pt").exists()


def packed(path: Path) -> None:
    """Write a file that is 1000 times as large once it is unpacked."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(1 << 20))


def cut(path: Path, kind: str) -> None:
    """Write weights of a kind, and cut each of the files in the middle."""
    convert.write(path, kind, {"w": torch.ones(100)})
    for file in [path] if path.is_file() else path.iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda _: None, "does not exist"),
        (lambda p: p.mkdir(), "holds no weights that are known"),
        (lambda p: p.write_text("x"), "cannot be read as tensors alone"),
        (os.mkfifo, "neither a file nor a folder"),
        (packed, "is compressed"),
        (lambda p: cut(p, "state-dict"), "source cannot be read as tensors alone"),
        (lambda p: cut(p, "transformers"), "not a safetensors file"),
        (lambda p: cut(p, "dcp"), "source cannot be read: "),
        (lambda p: torch.save([1, 2], p), "holds a list"),
        (lambda p: torch.save({"epoch": 1, "net": {}}, p), "holds epoch, net"),
        (lambda p: (p.mkdir(), (p / "model.safetensors").write_text("x")), "not a safetensors"),
        (lambda p: (p.mkdir(), (p / convert.INDEX).write_text("[1]")), "is not an index"),
        (
            lambda p: (p.mkdir(), (p / convert.INDEX).write_text('{"weight_map": {"a": "../b"}}')),
            "outside of it",
        ),
        (lambda p: (p.mkdir(), (p / convert.INDEX).write_text("[" * 9999)), "is not an index"),
        (
            lambda p: (p.mkdir(), (p / convert.INDEX).write_text('{"weight_map": {"a": "b"}}')),
            "lacks 'b'",
        ),
        (
            lambda p: (p.mkdir(), (p / convert.INDEX).write_text('{"weight_map": {}}')),
            "holds no tensor",
        ),
        (
            lambda p: (
                p.mkdir(),
                save_file({"b": torch.ones(1)}, p / "part"),
                (p / convert.INDEX).write_text('{"weight_map": {"a": "part"}}'),
            ),
            "lack a",
        ),
        (lambda p: (p / "v3" / "shard-0").mkdir(parents=True), "groups of 1 ranks"),
    ],
)
def test_a_source_that_is_no_weights_is_refused_by_name(
    tmp_path: Path, make: Any, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    make(source)
    with pytest.raises(PacelineError, match=says) as raised:
        run(source, tmp_path / "out.pt")
    assert raised.value.hint
    assert capfd.readouterr() == ("", ""), "torch logs a traceback"
    assert not (tmp_path / "out.pt").exists()


def test_a_target_is_replaced_only_on_request_and_kept_if_that_fails(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "new.pt")
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("x")
    with pytest.raises(ConvertError, match="target exists"):
        run(tmp_path / "new.pt", target, asked="dcp")
    with pytest.raises(ConvertError, match="no suffix"):
        run(tmp_path / "new.pt", tmp_path / "unknown")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "save_file", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "new.pt", target, asked="safetensors", force=True)
    assert (target / "old").read_text() == "x"
    run(tmp_path / "new.pt", target, asked="transformers", force=True)
    assert {path.name for path in target.iterdir()} == {"model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"new.pt", "target"}


@pytest.mark.parametrize("target", ["kept", "kept/v1", "kept/v1/../../kept"])
def test_a_target_that_would_delete_the_source_is_refused(tmp_path: Path, target: str) -> None:
    source = tmp_path / "kept/v1"
    source.mkdir(parents=True)
    save_file({"w": torch.ones(1)}, source / "model.safetensors")
    with pytest.raises(ConvertError, match="would delete"):
        run(source, tmp_path / target, asked="transformers", force=True)
    assert (source / "model.safetensors").exists()


@pytest.mark.processes
def test_the_verb_converts_and_refuses_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "new.pt")
    words = ("new.pt", "new.safetensors")
    code, printed = forked_paceline(tmp_path, "checkpoint", "convert", *words)
    assert code == 0, printed
    assert printed.startswith("new.pt (state-dict) -> new.safetensors (safetensors): 1 tensors")
    assert convert.main([str(tmp_path / word) for word in words]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {tmp_path}/new.safetensors exists\nhint: ")
