"""The programs of a Kubernetes cluster: their versions, their paths and how they are built.

All are built from Go modules, since an image registry may be out of reach. Kubernetes, etcd and
CoreDNS come from pinned modules in k8s-build/. The others come from `go install` at a fixed
version, which Go checks against its checksum database. The programs are kept in a cache outside the
checkout, each with a digest of its build recipe, so only a program whose pin changed is built
again. KUBEBUILDER_ASSETS, the folder that other Kubernetes projects use, has precedence.

PACELINE_KUBERNETES selects another release of Kubernetes. It is built from a generated module
(cluster.other_release) without pinned checksums; the other programs stay as they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testing.cluster import other_release
from testing.cluster.prerequisites import MissingPrerequisiteError

PINNED = "v1.34.4"
KUBERNETES = os.environ.get("PACELINE_KUBERNETES") or PINNED
CACHE_VARIABLE = "PACELINE_CLUSTER_CACHE"
ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"
MODULE = Path(__file__).parent / "k8s-build"
BUILD_TIMEOUT_S = 3600.0


def _version_flags(release: str) -> str:
    """Return linker flags for the version; without them the server reports v0.0.0 to clients."""
    major, minor, _ = release.removeprefix("v").split(".")
    values = {"gitVersion": release, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    of_helm = {"k8sVersionMajor": major, "k8sVersionMinor": minor}
    packages = {
        "k8s.io/component-base/version": values,
        "k8s.io/client-go/pkg/version": values,
        "helm.sh/helm/v4/pkg/chart/common": of_helm,
        "helm.sh/helm/v4/internal/chart/v3/lint/rules": of_helm,
    }
    return " ".join(
        f"-X {package}.{name}={value}"
        for package, own in packages.items()
        for name, value in own.items()
    )


@dataclass(frozen=True)
class Program:
    """One executable: from a module in k8s-build/, or with a version from any public module."""

    package: str
    version: str = ""
    module: Path = MODULE

    @property
    def of_other_release(self) -> bool:
        """Return True if PACELINE_KUBERNETES replaces the pinned release of this program."""
        return self.package.startswith("k8s.io/kubernetes/") and KUBERNETES != PINNED

    def command(self, target: Path) -> list[str]:
        """Return the Go command that builds the program at `target`."""
        # Without inlining and debug information the compiler takes 40 % less time.
        build = [
            "go",
            "build",
            "-trimpath",
            "-buildvcs=false",
            "-gcflags=all=-l -dwarf=false",
            "-ldflags",
        ]
        if self.version:
            build[1] = "install"
            return [*build, "-s -w", f"{self.package}@{self.version}"]
        flags = _version_flags(KUBERNETES if self.of_other_release else PINNED)
        return [*build, f"-s -w {flags}", "-o", str(target), self.package]

    def digest(self, name: str) -> str:
        """Return the digest of the build recipe; the program is rebuilt when it changes."""
        recipe = hashlib.sha256(repr(self.command(Path(name))).encode())
        if not self.version and not self.of_other_release:
            for part in ("go.mod", "go.sum", "main.go"):
                if (self.module / part).is_file():
                    recipe.update((self.module / part).read_bytes())
        return recipe.hexdigest()


CONTROL_PLANE = {
    "etcd": Program("./etcd"),
    "kube-apiserver": Program("k8s.io/kubernetes/cmd/kube-apiserver"),
    "kube-scheduler": Program("k8s.io/kubernetes/cmd/kube-scheduler"),
    "kube-controller-manager": Program("k8s.io/kubernetes/cmd/kube-controller-manager"),
}
NODE = {
    "kubelet": Program("k8s.io/kubernetes/cmd/kubelet"),
    "kube-proxy": Program("k8s.io/kubernetes/cmd/kube-proxy"),
    "coredns": Program(".", module=MODULE / "coredns"),
}
TOOLS = {
    "kubectl": Program("k8s.io/kubernetes/cmd/kubectl"),
    # helm is built in Kubernetes' module, so the packages of both are compiled once. A newer helm
    # requires newer packages and takes six times as long.
    "helm": Program("helm.sh/helm/v4/cmd/helm"),
    "kubeconform": Program("github.com/yannh/kubeconform/cmd/kubeconform", "v0.8.0"),
    # Prometheus's parser and rules with a JSON interface; promtool takes three times as long.
    "prometheus-rules": Program(".", module=MODULE / "rules"),
}
PROGRAMS = CONTROL_PLANE | TOOLS | NODE


def cache_folder() -> Path:
    """Return the folder of the programs that are built for the pinned release."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    return Path(os.environ.get(CACHE_VARIABLE) or base) / "k8s" / PINNED


def folder_of(program: Program) -> Path:
    """Return the cache folder of a program, which differs for another release of Kubernetes."""
    here = cache_folder()
    return here.parent / KUBERNETES if program.of_other_release else here


def find(name: str) -> Path | None:
    """Return the program from KUBEBUILDER_ASSETS or the cache; None if missing or outdated."""
    given = Path(os.environ.get(ASSETS_VARIABLE) or "/nonexistent") / name
    if given.is_file():
        return given
    folder = folder_of(PROGRAMS[name])
    built, stamp = folder / name, folder / f"{name}.recipe"
    current = stamp.is_file() and stamp.read_text() == PROGRAMS[name].digest(name)
    return built if current and built.is_file() else None


def require(name: str) -> Path:
    """Return the program's path, or raise MissingPrerequisiteError if it is not built."""
    path = find(name)
    if path is None:
        raise MissingPrerequisiteError(
            f"{name} is not built", "run `make cluster-programs` (minutes the first time)"
        )
    return path


def build(names: list[str], say: Callable[[str], None]) -> None:
    """Build those of `names` that are missing; GOMAXPROCS bounds the cores that Go uses."""
    with _locked(cache_folder()):
        for name in names:
            if find(name) is None:
                _build_one(name, say)


def _build_one(name: str, say: Callable[[str], None]) -> None:
    if shutil.which("go") is None:
        raise MissingPrerequisiteError(
            f"{name} cannot be built: no Go", "install Go 1.24 or later, or set KUBEBUILDER_ASSETS"
        )
    program, started = PROGRAMS[name], time.monotonic()
    folder, module = folder_of(program), program.module
    folder.mkdir(exist_ok=True)
    say(f"building {name}")
    own = {"CGO_ENABLED": "0", "GOWORK": "off"}
    if program.of_other_release:
        module = other_release.module(KUBERNETES, folder / "module")
        own["GOFLAGS"] = "-mod=mod"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch) / name
        environment = os.environ | own | {"GOBIN": scratch}
        done = subprocess.run(
            program.command(target),
            cwd=module,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
        if done.returncode:
            raise MissingPrerequisiteError(
                f"{name} could not be built:\n{done.stderr[-4000:]}",
                "Go needs a module proxy or the network; see `go env GOPROXY`",
            )
        target.replace(folder / name)
    (folder / f"{name}.recipe").write_text(program.digest(name))
    say(f"built {name} in {time.monotonic() - started:.0f} s")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the build lock: two builds would compete for cores and write the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
