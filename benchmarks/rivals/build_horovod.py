"""Compile Horovod for torch over MPICH, in the environment whose interpreter runs this.

Its last release is from 2023 and sets C++14; torch's headers require C++17.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from typing import Final

from testing.temporary import temporary_folder

RELEASE: Final = "horovod==0.28.1"
LISTS: Final = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
PATCHES: Final = (
    ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # Without debug symbols, the library has 1.4 MB instead of 50.
    ('"-O2" "-O3" CMAKE_CXX', '"-O2 -g" "-O3" CMAKE_CXX'),
)
SETTINGS: Final = {
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_GLOO": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "MAKEFLAGS": f"-j{os.cpu_count()}",
}


def pip(*words: str) -> None:
    """Run pip in this environment without dependencies and without build isolation."""
    command = [sys.executable, "-m", "pip", *words, "--no-deps", "--no-build-isolation"]
    subprocess.run(command, env={**SETTINGS, **os.environ}, check=True)


def main() -> None:
    """Download the sources, patch them, and install them."""
    with temporary_folder() as scratch:
        pip("download", RELEASE, "--no-binary", ":all:", "--dest", str(scratch))
        (archive,) = scratch.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        source = scratch / archive.name.removesuffix(".tar.gz")
        for name in LISTS:
            text = (source / name).read_text()
            for old, new in PATCHES:
                text = text.replace(old, new)
            (source / name).write_text(text)
        pip("install", str(source))


if __name__ == "__main__":
    main()
