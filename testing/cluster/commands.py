"""Run kubectl and helm as a user would, built at the cluster's version."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from testing.cluster import programs

TIMEOUT_S = 120.0


class CommandError(Exception):
    """Raised when a command exits with an error; the message includes its stderr."""


def kubectl(kubeconfig: Path, *words: str, stdin: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """Run kubectl and return its stdout; `stdin` is the input of `-f -`."""
    return _run("kubectl", kubeconfig, words, stdin, timeout_s)


def helm(kubeconfig: Path, *words: str, timeout_s: float = TIMEOUT_S) -> str:
    """Run helm and return its stdout; helm keeps its caches beside the kubeconfig."""
    return _run("helm", kubeconfig, words, "", timeout_s)


def _run(name: str, kubeconfig: Path, words: tuple[str, ...], stdin: str, timeout_s: float) -> str:
    home = kubeconfig.parent / "home"
    done = subprocess.run(
        [programs.require(name), *words],
        env=os.environ | {"KUBECONFIG": str(kubeconfig), "HOME": str(home)},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        raise CommandError(f"{name} {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
