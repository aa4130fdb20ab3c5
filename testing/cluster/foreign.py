"""Definitions of other projects' kinds, which the chart writes: from their pinned Go modules."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

from testing.cluster.prerequisites import MissingPrerequisiteError
from testing.temporary import temporary_folder

MODULES: Final = {
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": (
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
    "github.com/cert-manager/cert-manager@v1.18.2": (
        "deploy/crds/crd-certificates.yaml",
        "deploy/crds/crd-issuers.yaml",
    ),
}
"""Files with definitions, by module. Go checks the module against its checksum database."""
DOWNLOAD_S: Final = 300.0
"""Timeout of the download of a module of a few megabytes, in seconds."""


def definitions() -> list[dict[str, Any]]:
    """Return the definitions, which Go keeps in its module cache.

    MissingPrerequisiteError is raised if there is no Go, or if a module cannot be fetched.
    """
    return [
        _definition(_folder(module) / file) for module, files in MODULES.items() for file in files
    ]


def _definition(file: Path) -> dict[str, Any]:
    """Return one definition, without the labels and annotations that Helm would fill in."""
    lines = file.read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if "{{" not in line)
    definition: dict[str, Any] = yaml.load(text, yaml.CSafeLoader)
    return {**definition, "metadata": {"name": definition["metadata"]["name"]}}


def _folder(module: str) -> Path:
    if shutil.which("go") is None:
        raise MissingPrerequisiteError(f"no Go to fetch {module}", "install Go 1.24 or later")
    with temporary_folder() as outside:  # of any module
        done = subprocess.run(
            ["go", "mod", "download", "-json", module],
            cwd=outside,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S,
        )
    if done.returncode:
        raise MissingPrerequisiteError(
            f"{module} could not be fetched:\n{(done.stdout + done.stderr)[-2000:]}",
            "Go needs a module proxy or the network; see `go env GOPROXY`",
        )
    return Path(json.loads(done.stdout)["Dir"])
