"""Everything that is fetched is pinned by its digest: base images, build tools, packages."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from scripts import pins, release

ROOT: Final = release.ROOT
DIGEST: Final = "0123456789abcdef" * 4
OURS: Final = "paceline/"
"""Prefix of the images that this project makes; users refer to them by version."""
RECIPES: Final = ("scripts/bootstrap", "scripts/torch-cpu", "Makefile")
PINNED: Final = ("--require-hashes", "--no-index", "--no-build-isolation")
"""Installer options that accept only files with a known hash, or only files that are here already.
"""


def tracked(name: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", f"*{name}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in listed.stdout.splitlines()]


def commands(path: Path) -> Iterator[str]:
    """Yield the lines as a shell reads them, without comments."""
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def dockerfiles() -> list[Path]:
    files = tracked("Dockerfile")
    assert ROOT / "Dockerfile" in files
    return files


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", dockerfiles(), ids=shown)
def test_base_images_are_pinned_by_digest(path: Path) -> None:
    given, stages = dict[str, str](), set[str]()
    for line in commands(path):
        if match := re.fullmatch(r"ARG (\w+)(?:=(\S+))?", line):
            given[match[1]] = match[2] or ""
        elif match := re.fullmatch(r"FROM (\S+)(?: AS (\S+))?", line):
            image = re.sub(r"\$\{(\w+)\}", lambda name: given[name[1]], match[1])
            named = re.search(r"@sha256:[0-9a-f]{64}$", image)
            # An ARG without a default has no image here: the caller must name one.
            assert not image or image in stages or image.startswith(OURS) or named, image
            stages.add(match[2] or "")


@pytest.mark.parametrize("path", [*(ROOT / name for name in RECIPES), *dockerfiles()], ids=shown)
def test_installers_accept_only_files_with_a_known_digest(path: Path) -> None:
    installs = [
        command
        for line in commands(path)
        for command in re.split(r"&&|;", re.sub(r'"[^"]*"', "", line))
        if re.search(r"\bpip\b.*\b(install|sync)\b", command)
    ]
    assert installs or path.name not in ("bootstrap", "Dockerfile")
    for command in installs:
        assert any(word in command for word in PINNED), command


@pytest.mark.parametrize(
    "name", ["scripts/uv.txt", "scripts/build.txt", "examples/digits/requirements.txt"]
)
def test_each_requirement_is_one_version_with_its_hashes(name: str) -> None:
    wanted = list(commands(ROOT / name))
    assert wanted
    for line in wanted:
        assert re.match(r"[a-z0-9-]+==\S+ ", line), line
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", line), line


@pytest.mark.long
def test_requirements_match_uv_lock() -> None:
    assert (ROOT / "scripts/build.txt").read_text() == pins.build()
    assert (ROOT / "examples/digits/requirements.txt").read_text() == pins.digits()
    locked = tomllib.loads(pins.LOCK.read_text())["package"]
    [hatchling] = [each for each in locked if each["name"] == "hatchling"]
    assert f"hatchling=={hatchling['version']} " in pins.build()
    assert hatchling["wheels"][0]["hash"] in pins.build()


def torch_cpu(digest: str) -> subprocess.CompletedProcess[str]:
    uv = ROOT / ".tools/bin/uv"
    return subprocess.run(
        ["scripts/torch-cpu", uv if uv.exists() else "uv", "--no-dev", "--extra", "runtime"],
        cwd=ROOT,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TORCH_SHA256": digest},
        capture_output=True,
        text=True,
    )


@pytest.mark.processes
@pytest.mark.parametrize("digest", ["", "abc", DIGEST[1:], DIGEST.upper(), f"{DIGEST[:-1]}g"])
def test_the_cpu_build_of_torch_needs_its_digest(digest: str) -> None:
    result = torch_cpu(digest)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: TORCH=cpu needs TORCH_SHA256")
    assert "\nhint: " in result.stderr


@pytest.mark.processes
def test_the_cpu_build_of_torch_has_hashes_and_no_cuda(tmp_path: Path) -> None:
    result = torch_cpu(DIGEST)
    assert result.returncode == 0, result.stderr
    listed = tmp_path / "listed"
    listed.write_text(result.stdout)
    lines = list(commands(listed))
    assert all("--hash=sha256:" in line for line in lines)
    names = {line.partition("==")[0] for line in lines}
    assert {"torch", "numpy", "sympy", "safetensors"} <= names
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]
    [torch] = [line for line in lines if line.startswith("torch==")]
    assert re.fullmatch(rf"torch==[0-9.]+\+cpu --hash=sha256:{DIGEST}", torch)
