"""Paceline's own images, built from the Dockerfile of this checkout (`make images`).

If docker's engine runs, docker builds them, as a user would. Otherwise buildah builds them over a
base of Debian's packages, for a machine that reaches no registry. TORCH=cpu selects torch's build
without CUDA; TORCH_SHA256 is the digest of that file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from scripts import version
from testing.cluster import running
from testing.cluster.host_python import CHECKOUT

DIGITS = CHECKOUT / "examples" / "digits"
BUILD_TIMEOUT_S = 3600.0
# Image -> arguments of Python for a check that nothing is missing in it. The last one is the image
# of a job, built from the worker's.
IMAGES = {
    "operator": ("-c", "import kopf, paceline_operator.main, paceline.coordinator.__main__"),
    "worker": ("-c", "import torch, zmq, prometheus_client, paceline; from mpi4py import MPI"),
    "digits": ("train.py", "--epochs=1"),
}


def tag_of(name: str) -> str:
    """Return the tag of an image at the current version."""
    return f"paceline/{name}:{version.current()}"


def build(say: Callable[[str], None]) -> None:
    """Build all images, run a check in each, and report the build time and the size."""
    arguments = {"TORCH": os.environ.get("TORCH") or "cuda"}
    if digest := os.environ.get("TORCH_SHA256"):
        arguments["TORCH_SHA256"] = digest
    if _docker_works():
        for name, check in IMAGES.items():
            start = time.monotonic()
            target, context, given = _recipe(name, arguments)
            extra = [f"--build-arg={key}={value}" for key, value in given.items()]
            extra += [f"--target={target}"] if target else []
            _docker("build", f"--tag={tag_of(name)}", *extra, str(context))
            _docker("run", "--rm", "--entrypoint=python3", tag_of(name), *check)
            size = int(_docker("image", "inspect", "--format={{.Size}}", tag_of(name)))
            say(_line(name, time.monotonic() - start, size))
        return
    with running.image_builder() as builder:
        arguments["BASE"] = builder.base()
        for name, check in IMAGES.items():
            start = time.monotonic()
            target, context, given = _recipe(name, arguments)
            recipe = context / "Dockerfile"
            builder.bud(
                tag_of(name), context=context, dockerfile=recipe, target=target, arguments=given
            )
            builder.run(tag_of(name), "python3", *check)
            say(_line(name, time.monotonic() - start, builder.size(tag_of(name))))


def _recipe(name: str, arguments: dict[str, str]) -> tuple[str, Path, dict[str, str]]:
    """Return the target, context and build arguments of an image."""
    if name == "digits":
        return "", DIGITS, {"WORKER": tag_of("worker")}
    wanted = arguments if name == "worker" else {k: v for k, v in arguments.items() if k == "BASE"}
    return name, CHECKOUT, wanted


def _line(name: str, seconds: float, size: int) -> str:
    return f"{tag_of(name)}: {seconds:.0f} s, {size / 1e6:.0f} MB"


def _docker_works() -> bool:
    """Return True if docker's engine answers; a client alone is of no use."""
    if shutil.which("docker") is None:
        return False
    done = subprocess.run(["docker", "info"], capture_output=True, timeout=30)
    return done.returncode == 0


def _docker(*words: str) -> str:
    return subprocess.run(
        ["docker", *words], check=True, stdout=subprocess.PIPE, text=True, timeout=BUILD_TIMEOUT_S
    ).stdout
