"""The packed function in a rank: started by its Python, with packages installed once per pod."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from paceline.function import start
from paceline.function.errors import FunctionError
from paceline.function.pack import pack
from paceline.function.packed import FOLDER, PROGRAM, Description

SLOW_S = 240


def put(run_dir: Path, files: Mapping[str, str]) -> None:
    (run_dir / FOLDER).mkdir()
    for name, text in files.items():
        (run_dir / FOLDER / name).write_text(text)


def started(run_dir: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline.function.start"],
        env=os.environ | {"PACELINE_RUN_DIR": str(run_dir)} | env,
        capture_output=True,
        text=True,
        timeout=SLOW_S,
        check=False,
    )


def hello(name: str) -> None:
    print("hello", name)  # noqa: T201


def uses_the_package() -> None:
    import paceline
    import small_package_of_a_test

    print(small_package_of_a_test.WORD, paceline.__version__)  # noqa: T201


@pytest.mark.processes
def test_start_runs_the_packed_function(tmp_path: Path) -> None:
    put(tmp_path, pack(hello, {"name": "world"}))
    done = started(tmp_path)
    assert (done.returncode, done.stdout) == (0, "hello world\n"), done.stderr


@pytest.mark.processes
def test_start_without_a_function_reports_an_error(tmp_path: Path) -> None:
    done = started(tmp_path)
    assert done.returncode == 1
    assert "holds no function" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_function_of_a_newer_python_is_refused_with_the_line() -> None:
    with pytest.raises(FunctionError) as caught:
        start.check_python(Description("f", (3, 19)), "x = 1\nmatchless x in 3:\n", (3, 11))
    assert caught.value.message == (
        "function f was written for Python 3.19, and the Python 3.11 of this rank does not read "
        "its line 2: matchless x in 3:"
    )
    assert caught.value.hint == "use an image with Python 3.19, or write it for 3.11"


def wheel(folder: Path) -> Path:
    """Build a wheel of a package with one constant, and return its path."""
    name = "small_package_of_a_test"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "WORD = 'installed'\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.timeout(SLOW_S)
def test_ranks_of_one_pod_install_packages_once(tmp_path: Path) -> None:
    put(tmp_path, pack(uses_the_package, packages=[str(wheel(tmp_path))]))
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: started(tmp_path, PIP_NO_INDEX="1"), range(3)))
    for one in done:
        assert one.returncode == 0, one.stderr
        assert one.stdout.startswith("installed 0.")
    made = tmp_path / start.ENVIRONMENT / start.DONE
    before = made.stat().st_mtime_ns
    assert started(tmp_path).returncode == 0
    assert made.stat().st_mtime_ns == before, "a rank that is started again installs nothing"


@pytest.mark.processes
@pytest.mark.timeout(SLOW_S)
def test_a_package_that_cannot_be_installed_is_reported(tmp_path: Path) -> None:
    put(tmp_path, pack(hello, {"name": "x"}, packages=["no-such-package-of-a-test"]))
    done = started(tmp_path, PIP_NO_INDEX="1")
    assert done.returncode == 1
    assert "pip could not install no-such-package-of-a-test" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_packed_function_has_two_files() -> None:
    files = pack(hello, {"name": "x"}, packages=["a", "b>1"])
    assert json.loads(files["function.json"])["packages"] == ["a", "b>1"]
    assert set(files) == {PROGRAM, "function.json"}
