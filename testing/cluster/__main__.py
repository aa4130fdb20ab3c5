"""Command line of the test cluster: build its programs, start it and stop it by hand.

`programs` builds and installs what is missing. `programs-without-nodes` builds only what the tests
of the API server need. `programs-for-tests` is for `make test`, which has no real nodes, and
`programs-for-all-tests` for `make test-all`; outside CI, both only report what they cannot build.
`prometheus` extracts Prometheus from Debian's package, unless one is present. `images` builds
Paceline's own images, for a registry or to check that they build. `up` leaves a background process
that owns the cluster and tears it down when it ends. `down` ends that process. Both are idempotent.
The last line that `up` prints sets the environment for kubectl.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from testing.cluster import (
    image_build,
    instance,
    prerequisites,
    product_images,
    programs,
    prometheus,
    running,
)

UP_TIMEOUT_S = 180.0
DOWN_TIMEOUT_S = 60.0
WITHOUT_NODES = programs.CONTROL_PLANE | programs.TOOLS
ROOT = Path(__file__).parent.parent.parent


def say(line: str) -> None:
    """Write one progress line to stderr."""
    sys.stderr.write(f"cluster: {line}\n")


def kept_folder() -> Path:
    """Return the folder that holds the pid, log and kubeconfig of the cluster that `up` started."""
    return instance.base_folder() / "kept"


def owner() -> int | None:
    """Return the pid of the process that owns the cluster, or None if it is not running."""
    record = kept_folder() / "pid"
    if not record.is_file():
        return None
    pid = int(record.read_text())
    command = Path(f"/proc/{pid}/cmdline")
    ours = command.is_file() and b"testing.cluster\0keep\0" in command.read_bytes()
    return pid if ours else None


def build(names: Iterable[str] = programs.PROGRAMS) -> None:
    """Build programs and fetch Prometheus; as root also install packages and the image base."""
    programs.build(list(names), say)
    prometheus.fetch(say)
    if os.geteuid() != 0:
        say("not root: the API server will run, real nodes and image builds will not")
        return
    if fetched := prerequisites.install_packages():
        say(f"installed {' '.join(fetched)}")
    if not image_build.base_archive().is_file():
        say("making the base of images")
        image_build.make_base()


def build_without_nodes() -> None:
    """Build the control plane and the command-line tools, but no program of a node."""
    programs.build(list(WITHOUT_NODES), say)


def build_for_tests(names: Iterable[str]) -> None:
    """Build; outside CI only print what is missing, and its tests are skipped."""
    try:
        build(names)
    except prerequisites.MissingPrerequisiteError as error:
        if os.environ.get("CI") == "true":
            raise
        say(f"{error}\ntests that need it are skipped")


def keep() -> None:
    """Run the background process: own the cluster until SIGTERM or SIGINT."""
    folder, ended = kept_folder(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    (folder / "pid").write_text(str(os.getpid()))
    link = folder / "kubeconfig"
    try:
        with running.two_nodes() as cluster:
            link.symlink_to(cluster.kubeconfig)
            ended.wait()
    finally:
        link.unlink(missing_ok=True)
        (folder / "pid").unlink()


def up() -> None:
    """Start the cluster unless it runs, wait until it is ready and print exports for kubectl."""
    folder = kept_folder()
    folder.mkdir(parents=True, exist_ok=True)
    log, link = folder / "log", folder / "kubeconfig"
    if owner() is None:
        link.unlink(missing_ok=True)
        with log.open("wb") as output:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "testing.cluster", "keep"],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + UP_TIMEOUT_S
        while not link.exists():
            if keeper.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"error: the cluster did not come up\n{log.read_text()[-4000:]}")
            time.sleep(0.1)
    say("up; `make cluster-down` ends it")
    sys.stdout.write(f"export KUBECONFIG={link} PATH={programs.cache_folder()}:$PATH\n")


def down() -> None:
    """End the cluster that `up` started and wait until its owner has exited."""
    pid = owner()
    if pid is None:
        say("none is kept")
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_TIMEOUT_S
    while owner() == pid:
        if time.monotonic() > deadline:
            sys.exit(f"error: process {pid} has not ended; see {kept_folder() / 'log'}")
        time.sleep(0.1)
    say("down")


def images() -> None:
    """Build Paceline's own images."""
    product_images.build(say)


COMMANDS = {
    "programs": build,
    "programs-for-tests": lambda: build_for_tests(WITHOUT_NODES),
    "programs-for-all-tests": lambda: build_for_tests(programs.PROGRAMS),
    "programs-without-nodes": build_without_nodes,
    "images": images,
    "prometheus": lambda: prometheus.fetch(say),
    "up": up,
    "down": down,
    "keep": keep,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    try:
        COMMANDS[parser.parse_args().command]()
    except prerequisites.MissingPrerequisiteError as error:
        sys.exit(f"error: {error}")
