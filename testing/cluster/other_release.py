"""Go module that builds another release of Kubernetes than the pinned one.

Kubernetes requires the modules of its own repository as v0.0.0 from a folder beside it, and
publishes those of 1.N.P as 0.N.P. The list of these modules differs between releases and is read
from the release's go.mod.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from testing.cluster.prerequisites import MissingPrerequisiteError

RELEASE = re.compile(r"v1\.\d+\.\d+")
TIMEOUT_S = 600.0


def module(release: str, folder: Path) -> Path:
    """Return the folder of the module; create its go.mod unless it exists."""
    if not RELEASE.fullmatch(release):
        raise MissingPrerequisiteError(
            f"{release!r} is not a release of Kubernetes", "write it whole, like v1.35.4"
        )
    if not (folder / "go.mod").is_file():
        text = go_mod(release, _published(release))
        folder.mkdir(exist_ok=True)
        (folder / "go.mod").write_text(text)
    return folder


def go_mod(release: str, published: str) -> str:
    """Return the module's go.mod; `published` is the go.mod of the Kubernetes release."""
    lines = [line for line in published.splitlines() if line.startswith(("go ", "godebug "))]
    staged = re.findall(r"^\s*(\S+) => \./staging/", published, re.M)
    beside = release.replace("v1.", "v0.", 1)
    replaced = (f"replace {name} => {name} {beside}" for name in staged)
    required = f"require k8s.io/kubernetes {release}"
    return "\n".join(["module paceline.dev/testing/other", *lines, required, *replaced, ""])


def _published(release: str) -> str:
    done = subprocess.run(
        ["go", "mod", "download", "-json", f"k8s.io/kubernetes@{release}"],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise MissingPrerequisiteError(
            f"Kubernetes {release} could not be fetched:\n{(done.stdout + done.stderr)[-2000:]}",
            "name a release that exists; Go needs a module proxy or the network",
        )
    return Path(json.loads(done.stdout)["GoMod"]).read_text()
