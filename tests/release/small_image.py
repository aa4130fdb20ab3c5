"""Make an image of two small packages on a tiny base: `python small_image.py FOLDER`.

Prints the digest of the archive. It is also a program so that another process can make the same
image.
"""

from __future__ import annotations

import io
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

from scripts import oci, provenance, release_images

PACKAGES = ("click", "pyyaml")
PYTHON = sysconfig.get_python_version()
MACHINE = release_images.ARCHITECTURES["x86_64"][1]


STATUS = b"""\
Package: libc6
Status: install ok installed
Architecture: amd64
Source: glibc (2.36-9)
Version: 2.36-9+deb12u10
Description: shared libraries
 Package: not-a-field

Package: removed
Status: deinstall ok config-files
Architecture: all
Version: 1

Package: libstdc++6
Status: install ok installed
Architecture: amd64
Version: 1:12.2.0-14
"""


def base_tar(target: Path, *, python: str = PYTHON, machine: int | None = None) -> Path:
    """Write a minimal Debian root for this machine's architecture, unless another is given."""
    header = Path(sys.executable).read_bytes()[:20]
    if machine is not None:
        header = header[:18] + machine.to_bytes(2, "little")
    wheel = "usr/share/python-wheels/pip-1-py3-none-any.whl"
    with tarfile.open(target, "w") as archive:
        for name, content in {
            "etc/hostname": b"mine",
            "etc/resolv.conf": b"nameserver 192.0.2.1",
            "etc/os-release": b"ID=small",
            "usr/lib/os-release": b'ID=debian\nVERSION_ID="12"\n',
            "var/lib/dpkg/status": STATUS,
            f"usr/bin/python{python}": header,
            wheel: small_wheel("pip"),
            "var/log/dpkg.log": b"today",
        }.items():
            oci.add(archive, f"./{name}", content, stamp=1)
        link = tarfile.TarInfo("./usr/bin/python3")
        link.type, link.linkname = tarfile.LNKTYPE, f"./usr/bin/python{python}"
        archive.addfile(link)
        folder = tarfile.TarInfo("./var/log/apt")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(folder)
    return target


def small_wheel(name: str) -> bytes:
    text = io.BytesIO()
    about = f"{name}-1.dist-info"
    files = {
        f"{name}/__init__.py": "def main():\n    print('small')\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{about}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{one},,\n" for one in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(text, "w") as archive:
        for one, content in files.items():
            archive.writestr(zipfile.ZipInfo(one), content)
    return text.getvalue()


def write(folder: Path) -> Path:
    """Write the archive and its parts into an empty folder, and return the archive's path."""
    base = release_images.read_base(base_tar(folder / "base.tar"))
    made = release_images.Made(
        version="1",
        stamp=1,
        revision="0" * 40,
        wheel=small_wheel("paceline"),
        base=base,
        base_layer=release_images.base_layer(base, folder / "base"),
    )
    stage = release_images.Stage({"Entrypoint": ["paceline"], "Labels": {}}, {"workspace": 0o1777})
    locked = {name: metadata.version(name) for name in PACKAGES}
    target = folder / "small.oci.tar"
    release_images.write(target, "operator", made, stage, locked, folder)
    return target


if __name__ == "__main__":
    sys.stdout.write(provenance.sha256(write(Path(sys.argv[1]))))
